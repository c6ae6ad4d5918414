"""Ladders: losses by length, rates chosen by a held-out seed, inference after recalibration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from commsweep.config import run_id
from commsweep.data import load as datasets
from commsweep.launching.launch import register
from commsweep.registry import content, preset
from commsweep.reporting import report_parts, results
from commsweep.reporting.claim import CONTRADICTED, SUPPORTED
from commsweep.store import Store
from tests.helpers import outcome, scatter

ladders = content("analysis.ladders")
sweeps = content("sweeps.ladders")
STEPS = {1600: 100, 6400: 400, 25600: 1600}


def filled(tmp_path, name, score):
    """Rows made up by score(run), a loss: tests of arithmetic, never shown as results."""
    store, runs = Store(tmp_path), sweeps.SWEEPS[name]()
    for run in runs:
        loss = score(run) + scatter(run)
        folder = store.folder(run_id(run))
        folder.begin(run, {})
        metrics = {"test_on_loss": loss, "test_off_loss": loss, "test_on_ppl": math.exp(loss)}
        sent = {"ratio": 1.0, "fwd_per_step": 1.0, "bwd_per_step": 1.0}
        folder.finish(outcome(run, metrics=metrics, bytes=sent))
    register(name, runs, store)
    return results.load(store.root, name)


def length(run):
    return math.log2(STEPS[run.data.train_blocks] / 100)


def growing(run):
    """Biased gradients lose 0.2 nats more with each doubling, unbiased ones 0.01, all else 0.02."""
    noise = 0.002 * ((run.seed * 7) % 5 - 2)
    if run.fwd.compressor.kind == "none" and run.bwd.compressor.kind == "none":
        return 2.4 - 0.1 * length(run)
    kind, rounding = run.bwd.compressor.kind, getattr(run.bwd.compressor, "rounding", "")
    steep = 0.2 if kind == "topk" or rounding == "nearest" else 0.01
    return 2.45 - 0.1 * length(run) + steep * length(run) + noise


def test_slopes_and_shares_are_those_of_the_rows(tmp_path):
    frame = filled(tmp_path, "text_length", growing)
    found = ladders.ladder(frame)
    assert found.labels() == [100, 400, 1600] and found.counted == "steps"
    for arm in found.lost:
        slopes = list(found.slopes(arm).values())
        biased = arm in ladders.BIASED
        assert np.mean(slopes) == pytest.approx(0.2 if biased else 0.01, abs=0.001)
        assert len(slopes) == 5
    verdicts = {claim.name: claim.verdict for claim in report_parts.all_claims(frame, ["ladders"])}
    assert verdicts == {"S1": SUPPORTED, "S2": SUPPORTED, "S3": SUPPORTED}
    (table,) = ladders.tables(frame)
    assert table.header[1:4] == ["100 steps", "400 steps", "1,600 steps"]
    line = next(row for row in table.rows if row[0] == "gradients: TernGrad")
    # 0.05 + 0.01 * 4 nats of the 3.03 - 2.0 that dense learned
    assert line[3].startswith("0.09 ±") and line[3].endswith("(9 %)")
    assert line[-1].startswith("0.11 [")
    assert ladders.lasting(frame, frame) is not None


def test_a_bent_line_is_not_drawn_on(tmp_path):
    def bent(run):
        return growing(run) + (0.5 if length(run) == 2 else 0.0) * (
            run.bwd.compressor.kind == "tern"
        )

    found = ladders.ladder(filled(tmp_path, "text_length", bent))
    assert found.next_rung("gradients: TernGrad") == "refused: bent"
    assert found.next_rung("gradients: TopK 10 %")[0].isdigit()


def test_a_ladder_of_one_rung_is_none(tmp_path):
    frame = filled(tmp_path, "text_length", growing)
    short = frame[frame["data.train_blocks"] == 1600]
    assert ladders.ladder(short) is None and ladders.rows(short).empty
    two = ladders.ladder(frame[frame["data.train_blocks"] > 1600])
    assert two.next_rung("gradients: TernGrad") == "refused: two rungs"


def rated(run):
    """TopK is best at half the rate, where it loses 0.3; the held-out seed says so."""
    best = 0.0025 if run.bwd.compressor.kind == "topk" else 0.005
    lost = 0.3 if run.bwd.compressor.kind == "topk" else 0.02
    if run.bwd.compressor.kind == "none":
        lost = 0.0
    return 2.0 + lost + 0.1 * abs(math.log2(run.optim.lr / best)) + 0.001 * (run.seed % 3)


def test_every_setting_is_compared_at_its_own_best_rate(tmp_path):
    frame = filled(tmp_path, "text_rates", rated)
    (claim,) = report_parts.all_claims(frame, ["ladders"])
    assert claim.name == "S6" and claim.verdict == SUPPORTED
    means = {effect.what.split(" by ")[1]: np.mean(effect.values) for effect in claim.effects}
    assert means["gradients: TopK 10 %, both at their own best rate"] == pytest.approx(0.3)
    assert all(sweeps.HELD_OUT not in effect.by for effect in claim.effects)
    (table,) = ladders.tables(frame)
    chosen = {row[0]: [cell.endswith("*") for cell in row[1:]].index(True) for row in table.rows}
    assert chosen["dense"] == 2 and chosen["gradients: TopK 10 %"] == 1


def test_width_has_a_claim_of_its_own(tmp_path):
    def wide(run):
        grown = 0.2 * math.log2(run.model.width / 32) if run.bwd.compressor.kind == "topk" else 0.0
        return 2.0 + grown + 0.001 * run.seed * (run.bwd.compressor.kind != "none")

    (claim,) = report_parts.all_claims(filled(tmp_path, "text_width", wide), ["ladders"])
    found = {effect.what.split(" by ")[1].split(" with")[0]: effect for effect in claim.effects}
    assert claim.name == "S7"
    assert found["gradients: TopK 10 %"].verdict == CONTRADICTED
    assert found[ladders.RECIPE].verdict == SUPPORTED


def test_the_entropy_of_letters_is_that_of_the_corpus():
    data = datasets.build(preset("sotu_nano"), None, None, torch.device("cpu"))
    counts = torch.bincount(data.train.x.flatten(), minlength=256).double() + 1
    share = counts / counts.sum()
    nats = -share.log()[data.test.x[:, 1:].flatten()].mean().item()
    assert results.LETTERS["sotu"] == pytest.approx(nats, abs=0.005)


def test_the_sweeps_are_ladders():
    for name, column in (("text_length", 3), ("text_width", 3), ("image_length", 3)):
        runs = sweeps.SWEEPS[name]()
        rungs = {
            (run.model.width, getattr(run.data, "train_blocks", None), run.epochs) for run in runs
        }
        assert len(rungs) == column and len(runs) % column == 0
    assert all(run.recalibrate == 50 for run in sweeps.SWEEPS["image_recalibrated"]())
