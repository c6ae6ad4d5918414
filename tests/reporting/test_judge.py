"""Rows that other tools recorded: what is read, what is guessed, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp, ttest_ind

from commsweep.cli.main import main
from commsweep.errors import UserError
from commsweep.reporting import foreign_rows
from commsweep.reporting.judge import columns, judge

SETTINGS = {"dense": 0.0, "topk": -0.8, "eden": 0.0}


def grid(seeds=6):
    """Return rows of three settings by seed: topk is worse by 0.8, eden is not."""
    rng = np.random.default_rng(0)
    rows = []
    for seed in range(seeds):
        start = 90 + rng.normal(0, 0.4)
        for name, effect in SETTINGS.items():
            score = start + effect + rng.normal(0, 0.1)
            rows.append({"codec": name, "seed": seed, "val_acc": score, "wall": rng.random()})
    return pd.DataFrame(rows)


def as_csv(folder, frame):
    frame.to_csv(folder / "runs.csv", index=False)
    return folder / "runs.csv"


def as_semicolons(folder, frame):
    frame.to_csv(folder / "runs.tsv", index=False, sep="\t")
    return folder / "runs.tsv"


def as_wandb_table(folder, frame):
    """The table that W&B's page exports."""
    names = [f"brisk-sun-{at}" for at in range(len(frame))]
    frame = frame.assign(Name=names, State="finished", Created="2026", Runtime=range(len(frame)))
    frame = frame[["Name", "State", "Created", "Runtime", "codec", "seed", "val_acc"]]
    frame.to_csv(folder / "wandb_export.csv", index=False)
    return folder / "wandb_export.csv"


def as_parquet(folder, frame):
    frame.to_parquet(folder / "runs.parquet")
    return folder / "runs.parquet"


def as_lines(folder, frame):
    """Nested records, an object a line."""
    lines = []
    for row in frame.to_dict("records"):
        record = {"config": {"codec": row["codec"], "seed": row["seed"]}, "val_acc": row["val_acc"]}
        lines.append(json.dumps(record))
    (folder / "runs.jsonl").write_text("\n".join(lines))
    return folder / "runs.jsonl"


def as_list(folder, frame):
    (folder / "runs.json").write_text(frame.to_json(orient="records"))
    return folder / "runs.json"


def as_steps(folder, frame):
    """Rows of Lightning's CSV logger: training and validation in turn, the last one counts."""
    rows = []
    for row in frame.to_dict("records"):
        for epoch in range(3):
            told = {"codec": row["codec"], "seed": row["seed"], "epoch": epoch}
            rows.append(told | {"step": 10 * epoch, "train_loss": 1.0})
            rows.append(told | {"step": 10 * epoch + 9, "val_acc": row["val_acc"] - 2 + epoch})
    pd.DataFrame(rows).to_csv(folder / "metrics.csv", index=False)
    return folder / "metrics.csv"


def as_tensorboard(folder, frame):
    from torch.utils.tensorboard import SummaryWriter

    for row in frame.to_dict("records"):
        with SummaryWriter(str(folder / f"{row['codec']}/seed_{row['seed']}")) as writer:
            writer.add_scalar("val/acc", row["val_acc"] - 3, 0)
            writer.add_scalar("val/acc", row["val_acc"], 10)
    return folder


def as_hparams(folder, frame):
    """Event files whose folders carry Lightning's hparams.yaml."""
    from torch.utils.tensorboard import SummaryWriter

    for at, row in enumerate(frame.to_dict("records")):
        place = folder / f"version_{at}"
        with SummaryWriter(str(place)) as writer:
            writer.add_scalar("val/acc", row["val_acc"], 10)
        (place / "hparams.yaml").write_text(f"codec: {row['codec']}\nseed: {row['seed']}\n")
    return folder


def as_mlflow(folder, frame):
    for at, row in enumerate(frame.to_dict("records")):
        place = folder / f"mlruns/0/run{at}"
        (place / "params").mkdir(parents=True)
        (place / "metrics").mkdir()
        (place / "meta.yaml").write_text(f"run_name: swift-{at}\nstatus: 3\n")
        (place / "params/codec").write_text(row["codec"])
        (place / "params/seed").write_text(str(row["seed"]))
        (place / "metrics/val_acc").write_text(f"1700 1.0 0\n1701 {row['val_acc']} 1\n")
    (folder / "mlruns/0/meta.yaml").write_text("name: Default\n")
    return folder / "mlruns"


def as_wandb(folder, frame):
    """Offline runs that W&B itself wrote."""
    wandb = pytest.importorskip("wandb")
    settings = wandb.Settings(mode="offline", silent=True, console="off")
    for row in frame.to_dict("records"):
        config = {"codec": row["codec"], "seed": row["seed"]}
        run = wandb.init(dir=folder, config=config, settings=settings, reinit="finish_previous")
        run.log({"val_acc": row["val_acc"] - 1})
        run.log({"val_acc": row["val_acc"]})
        run.finish()
    return folder


TOOLS = [as_csv, as_semicolons, as_wandb_table, as_parquet, as_lines, as_list, as_steps]
TOOLS += [as_tensorboard, as_hparams, as_mlflow]


@pytest.mark.parametrize("tool", [*TOOLS, pytest.param(as_wandb, marks=pytest.mark.slow)])
def test_every_tool_gives_the_same_scores_and_verdicts(tmp_path, tool):
    frame = grid(4 if tool is as_wandb else 6)
    rows = foreign_rows.read(tool(tmp_path, frame))
    found = columns(rows)
    assert not found.lower and found.seed.endswith("seed")
    assert [name.split(".")[-1] for name in found.settings] in (["codec"], ["run"])
    judged = judge(rows, found)
    assert judged.baseline == "dense"
    for name in SETTINGS:
        expected = frame[frame.codec == name].set_index("seed").val_acc.to_dict()
        assert judged.scores[name] == pytest.approx(expected, rel=1e-6)
    verdicts = {claim.name.split()[0]: claim.verdict for claim in judged.claims}
    assert verdicts["topk"] == "contradicted" and verdicts["eden"] == "undecided"


def test_effects_are_paired_differences_and_p_values_are_holms(tmp_path):
    frame = grid()
    rows = foreign_rows.read(as_csv(tmp_path, frame))
    judged = judge(rows, columns(rows), claims=["topk < dense - 0.5", "eden = dense +- 5"])
    wide = frame.pivot(index="seed", columns="codec", values="val_acc")
    differences = wide.topk - wide.dense
    effect = judged.claims[0].effects[0]
    assert effect.values == pytest.approx(list(differences))
    assert effect.p == pytest.approx(ttest_1samp(differences, -0.5).pvalue)
    assert {claim.effects[0].level for claim in judged.claims} == {0.025, 0.05}
    assert [claim.verdict for claim in judged.claims] == ["supported", "supported"]


def test_earlier_looks_make_a_verdict_harder(tmp_path):
    rows = foreign_rows.read(as_csv(tmp_path, grid()))
    found = columns(rows)
    once = judge(rows, found, claims=["topk < dense"]).claims[0].effects[0]
    again = judge(rows, found, claims=["topk < dense"], earlier=[3]).claims[0].effects[0]
    assert (once.level, again.level) == (0.05, 0.025)


def test_settings_without_common_seeds_are_compared_by_welch(tmp_path):
    """A public board's arithmetic: 0.00126 more with other seeds, t about 3.6."""
    a = [3.2791, 3.2802, 3.2785, 3.2796, 3.2789]
    b = [3.2776, 3.2781, 3.2779, 3.2784, 3.2772, 3.2786]
    lines = [{"arm": "a", "seed": 10 + at, "loss": value} for at, value in enumerate(a)]
    lines += [{"arm": "b", "seed": 90 + at, "loss": value} for at, value in enumerate(b)]
    rows = foreign_rows.read(as_csv(tmp_path, pd.DataFrame(lines)))
    judged = judge(rows, columns(rows), claims=["a > b"])
    (effect,) = judged.claims[0].effects
    expected = ttest_ind(a, b, equal_var=False)
    assert effect.p == pytest.approx(expected.pvalue)
    assert effect.interval == pytest.approx(tuple(expected.confidence_interval()))
    assert sum(effect.values) / len(effect.values) == pytest.approx(np.mean(a) - np.mean(b))
    assert "n=5 and 6, unpaired (Welch)" in effect.text()
    by_order = judge(rows, columns(rows, seed="order", settings=["arm"]), claims=["a > b"])
    assert by_order.claims[0].effects[0].unmatched is not None  # a running number pairs by chance


def test_trainings_without_a_number_are_counted_not_compared(tmp_path):
    frame = grid()
    frame.loc[frame.index[1], "val_acc"] = float("nan")
    frame["status"] = ["failed" if at == 5 else "finished" for at in range(len(frame))]
    rows = foreign_rows.read(as_csv(tmp_path, frame))
    judged = judge(rows, columns(rows))
    assert judged.lost == {"dense": 0, "topk": 1, "eden": 1}
    assert {name: len(seeds) for name, seeds in judged.scores.items()} == {
        "dense": 6,
        "topk": 5,
        "eden": 5,
    }


def test_settings_are_what_varies_and_comes_back_with_other_seeds(tmp_path):
    frame = grid().assign(lr=0.1, note=range(18), bytes=lambda rows: rows.codec.str.len() * 100)
    rows = foreign_rows.read(as_csv(tmp_path, frame))
    assert columns(rows).settings == ("codec",)


def test_two_trainings_are_never_taken_for_steps_of_one(tmp_path):
    """Rows of other settings that no column tells apart end in a line, whatever a step says."""
    frame = grid().drop(columns="wall").assign(epoch=10)
    rows = foreign_rows.read(as_csv(tmp_path, pd.concat([frame, frame.assign(val_acc=1.0)])))
    with pytest.raises(UserError, match="rows 1 and 19 both are of setting 'dense', seed 0"):
        judge(rows, columns(rows))


def test_a_seed_goes_before_other_counters(tmp_path):
    frame = grid().assign(trial_number=range(18))
    rows = foreign_rows.read(as_csv(tmp_path, frame[["trial_number", *grid().columns]]))
    assert columns(rows).seed == "seed"


def test_two_outcomes_are_said(tmp_path):
    rng = np.random.default_rng(1)
    lines = []
    for seed in range(12):
        lines.append({"arm": "a", "seed": seed, "loss": 2 + rng.normal(0, 0.01)})
        fails = 3.0 if seed % 3 == 0 else 0.0
        lines.append({"arm": "b", "seed": seed, "loss": 2 + fails + rng.normal(0, 0.01)})
    rows = foreign_rows.read(as_csv(tmp_path, pd.DataFrame(lines)))
    judged = judge(rows, columns(rows), against="a")
    assert judged.columns.lower
    assert judged.claims[0].verdict == "two outcomes"


def test_the_command_writes_table_figure_and_verdicts(tmp_path, capsys):
    file = as_csv(tmp_path, grid())
    assert main(["judge", str(file), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "against   dense" in printed and "topk against dense: -0." in printed
    assert "worse (p < 0.001" in printed
    assert max(len(line) for line in printed.splitlines() if " n=" in line[:34]) <= 80
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"settings.md", "settings.tex", "settings.csv", "claims.md", "scores.png"} <= written
    assert main(["judge", str(file), "--out", str(tmp_path / "out"), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "out/claims.json").read_text())
    assert record["settings"] == ["codec"] and len(record["claims"]) == 2


BAD = {
    "no file": (None, [], "no such file"),
    "no table": ("not a table", [], "must end in .csv"),
    "empty": ("codec,seed,acc\n", [], "has no rows"),
    "nothing": ("", [], "has no rows"),
    "one column": ("method\na\nb\n", [], "columns: method"),
    "one cell": (
        "codec,seed,acc\na,1,2\na,2,29.6x\nb,1,3\nb,2,3\n",
        [],
        "acc: row 2 holds '29.6x', which is no number",
    ),
    "no score": ("codec,seed,size\na,1,2\nb,1,3\n", [], "no column sounds like a score"),
    "no seed": ("codec,acc\na,1\nb,2\n", [], "no column looks like a seed"),
    "typing": ("codec,seed,acc\na,1,2\nb,1,3\n", ["--score", "ac"], "did you mean 'acc'"),
    "words": ("codec,seed,acc\na,1,2\nb,1,3\n", ["--score", "codec"], "not a column of numbers"),
    "twice": ("codec,seed,acc\na,1,2\na,1,3\n", [], "rows 1 and 2 both are of setting"),
    "claim": ("codec,seed,acc\na,1,2\nb,1,3\n", ["--claim", "a<b"], "with spaces around the sign"),
    "arm": ("codec,seed,acc\na,1,2\na,2,2\nb,1,3\nb,2,3\n", ["--against", "c"], "no such setting"),
    "equal": (
        "c,seed,acc\na,1,2\na,2,2\nb,1,3\nb,2,3\n",
        ["--claim", "a = b"],
        "equal within what",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_in_a_line(tmp_path, monkeypatch, capsys, case):
    text, options, sentence = BAD[case]
    monkeypatch.chdir(tmp_path)
    file = Path("rows.dat" if case == "no table" else "rows.csv")
    if text is not None:
        file.write_text(text)
    assert main(["judge", str(file), *options]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1
    assert not Path("judge").exists()


def test_a_repeated_training_is_named_by_its_rows_whatever_the_index(tmp_path, capsys):
    columns = {"codec": ["a", "a", "b"], "seed": [None, None, 1], "acc": [1.0, 2.0, 3.0]}
    frame = pd.DataFrame(columns, index=["x", "y", "z"])
    frame.to_parquet(tmp_path / "rows.parquet")
    assert main(["judge", str(tmp_path / "rows.parquet"), "--out", str(tmp_path / "out")]) == 2
    assert "rows 1 and 2 both are of setting 'a'" in capsys.readouterr().err


def read_text(tmp_path, text, name="runs.csv", encoding="utf-8"):
    (tmp_path / name).write_bytes(text.encode(encoding))
    return foreign_rows.read(tmp_path / name).frame


ROWS = "seed,method,loss\n0,{a},0.40\n1,{a},0.41\n0,base,0.5\n1,base,0.51\n"


def test_no_text_of_a_cell_is_a_comment(tmp_path):
    for name in ("pr#321", '"run #1"', "#2"):
        frame = read_text(tmp_path, ROWS.format(a=name))
        assert list(frame.method) == [name.strip('"')] * 2 + ["base"] * 2
        assert list(frame.loss) == [0.40, 0.41, 0.5, 0.51] and frame.seed.dtype == "int64"
    commented = "# of the 3rd of May, by hand, twice, thrice\n" + ROWS.format(a="x")
    assert len(read_text(tmp_path, commented)) == 4
    numbered = read_text(tmp_path, "#,method,loss\n0,a,0.4\n1,a,0.5\n")
    assert list(numbered) == ["#", "method", "loss"] and len(numbered) == 2


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("seed;method;loss\n0;a;0,40\n1;b ;1234,5\n", "utf-8"),
        ("seed,method,loss\n0, a ,0.40\n1,b,1234.5\n", "utf-8-sig"),
        ("seed\tmethod\tloss\n0\ta\t0.40\n1\tb\t1234.5\n", "utf-16"),
        ('seed,method,loss\n0,a,0.40\n1,b,"1,234.5"\n', "utf-8"),
        ("seed,method,loss\n0,a,0.40 nats\n1,b,1234.5 nats\n", "utf-8"),
        ("seed|method|loss\n0|a|0.40 %\n1|b|1234.5%\n", "utf-8"),
    ],
)
def test_tables_are_read_as_people_have_them(tmp_path, text, encoding):
    frame = read_text(tmp_path, text, encoding=encoding)
    assert list(frame.loss) == [0.4, 1234.5] and list(frame.method) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed,loss,loss\n0,1,2\n", "2 columns are named 'loss'"),
        ("seed,loss\n0,1\n1,2\n2,0,5\n", "row 4 has 3 fields, the header 2"),
        ("seed;loss\n0;1,234\n1;2,345\n", "'1,234' may be 1.234 or 1234"),
        ("seed,loss\n0,1\x002\n", "line 2: a NUL byte"),
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        read_text(tmp_path, text)


def test_diverged_and_failed_trainings_are_told_apart_and_unknown_statuses_are_said(
    tmp_path, capsys
):
    text = "seed,method,loss,status\n"
    text += "0,a,nan,keep\n1,a,0.4,keep\n2,a,0.41,crash\n3,a,,ok\n4,a,0.42,discard\n"
    text += "".join(f"{seed},b,Infinity,keep\n" for seed in range(5))
    (tmp_path / "runs.csv").write_text(text)
    assert main(["judge", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "1 diverged, 1 crash, 1 without a score" in out and "5 diverged" in out
    assert "7 'keep', 1 'discard': not known, counted as ended" in out
    assert "'b' diverged in all 5 runs" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--score", "order"], "--score order: no such column"),
        (["--setting", "order"], "--setting order: no such column"),
        (["--claim", "x < x"], "compares 'x' with itself"),
        (["--look", "0"], "--look"),
        (["--look", "999999999"], "--look"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path, capsys, options, message):
    (tmp_path / "runs.csv").write_text(ROWS.format(a="x"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        try:
            code = main(["judge", "runs.csv", *options])
        except SystemExit as ending:
            code = ending.code
    assert code == 2 and message in capsys.readouterr().err


def test_a_claim_against_a_number_is_a_one_sample_test(tmp_path, capsys):
    """Ten seeds with mean 3.27847 pass a rule at 3.28, as published for a record of a speedrun."""
    scores = 3.27847 + 0.0013 * np.random.default_rng(1).standard_normal(10)
    scores += 3.27847 - scores.mean()
    frame = pd.DataFrame({"seed": range(10), "method": ["a", "b"] * 5, "loss": scores})
    (tmp_path / "runs.csv").write_text(frame.assign(method="muon").to_csv(index=False))
    out = tmp_path / "out"
    command = ["judge", str(tmp_path / "runs.csv"), "--setting", "method", "--out", str(out)]
    assert main([*command, "--claim", "muon < 3.28"]) == 0
    (claim,) = json.loads((out / "claims.json").read_text())["claims"]
    (effect,) = claim["effects"]
    assert claim["verdict"] == "supported" and len(effect["values"]) == 10
    expected = ttest_1samp(scores, 3.28)
    assert effect["p"] == pytest.approx(expected.pvalue, rel=1e-6)
    assert main([*command, "--claim", "muon < 3.27"]) == 0
    (claim,) = json.loads((out / "claims.json").read_text())["claims"]
    assert claim["verdict"] == "contradicted"


def test_words_that_were_logged_as_metrics_are_settings_and_nan_is_divergence():
    runs = [
        foreign_rows._Run(f"r{seed}", {"seed": seed}, {"method": name, "loss": loss})
        for seed, name, loss in ((0, "a", 0.4), (1, "a", "NaN"), (0, "b", 0.5), (1, "b", 0.6))
    ]
    rows = foreign_rows._rows(runs, "four runs")
    assert "method" in rows.settings and rows.metrics == ["loss"]
    judged = judge(rows, columns(rows))
    assert set(judged.scores) == {"a", "b"} and judged.why["a"]["diverged"] == 1
