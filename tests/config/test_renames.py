"""A renamed setting leaves ids, stores and recorded rows as they are."""

from __future__ import annotations

import json

import pytest

from commsweep.config import override, record, run_id
from commsweep.config.override import parse
from commsweep.config.renames import RENAMED, current_name, current_names, first_names
from commsweep.config.run import canonical
from commsweep.registry import preset, presets, sweep, sweeps
from commsweep.store import Store

EVERY = {
    "grad.learners": 4,
    "grad.exchange": "allgather",
    "grad.compressor.kind": "topk",
    "grad.compressor.index_coding": "rice",
    "grad.compress_vectors": True,
    "grad.outer.interval": 4,
    "grad.outer.overlap": 1,
    "grad.outer.local_share": 0.5,
}


def test_the_text_that_is_hashed_has_the_first_names():
    run = override(preset("digits"), EVERY)
    hashed = json.loads(canonical(run))["grad"]
    assert hashed["vectors"] is True and "compress_vectors" not in hashed
    assert hashed["outer"]["keep"] == 0.5 and hashed["outer"]["merge"] == "mix"
    assert hashed["compressor"]["places"] == "rice"
    assert current_names(json.loads(canonical(run))) == record(run)
    assert parse(json.loads(canonical(run))) == run


@pytest.mark.parametrize("section", RENAMED)
def test_every_rename_names_a_setting_of_today_and_goes_both_ways(section):
    for name, former in RENAMED[section].items():
        place = section.replace("*", "warmup")
        place = "fwd.compressor" if place == "compressor" else place
        assert current_name(f"{place}.{former}") == current_name(f"{place}.{name}")
        assert current_name(f"{place}.{former}") == f"{place}.{name}"
        assert current_name(f"model.options.{former}") == f"model.options.{former}"


def test_names_of_shipped_runs_are_read_from_their_first_ones():
    runs = [*presets().values(), *(run for name in sweeps() for run in sweep(name))]
    for run in {run_id(run): run for run in runs}.values():
        assert current_names(first_names(record(run))) == record(run)


def test_a_row_of_first_names_is_read_under_todays(tmp_path):
    run = override(preset("digits"), EVERY)
    store = Store(tmp_path)
    folder = store.folder(run_id(run))
    folder.path.mkdir(parents=True)
    row = {"schema": 5, "id": run_id(run), "status": "finished", "seconds": {}}
    row["metrics"] = {"test_on_acc": 0.5}
    (folder.path / "done.json").write_text(json.dumps(row | {"run": json.loads(canonical(run))}))
    (folder.path / "run.json").write_text(json.dumps({"run": json.loads(canonical(run))}))
    assert folder.row()["run"] == record(run) and folder.run() == run


def test_a_former_name_is_understood_and_says_so(capsys):
    run = override(preset("digits"), {"grad.learners": 2, "grad.outer.keep": 0.25})
    assert run.grad.outer.local_share == 0.25
    assert "grad.outer.keep is named grad.outer.local_share now" in capsys.readouterr().err
