"""Pipelines that do not run empty: the weights that passes use, how many microbatches are under
way, and what the timeline says of them. Whole trainings: test_pipelining.py, test_mesh.py.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from commsweep.cli.main import main
from commsweep.config.execution import Wiring
from commsweep.config.training import Delay
from commsweep.errors import UserError
from commsweep.processes import stages
from commsweep.processes.weight_versions import Versions, memory_bytes
from commsweep.timing.timeline.pipelines import (
    SCHEDULES,
    TORCH,
    Network,
    Times,
    continuous,
    step_seconds,
)
from tests.helpers import tiny
from tests.training.test_delay import STEPS, batch, by_hand, network, optimizer


def trained(spec: Delay, kind: str, resumes: bool = False):
    """The weights after STEPS steps of one stage that is as late as it may be: `spec.steps` steps
    have been passed forward whose backward has not come.
    """
    net = network()
    made = optimizer(kind, list(net.parameters()))
    versions = Versions(spec, dict.fromkeys(net.parameters(), spec.steps))
    under_way = []

    def end():
        step, loss = under_way.pop(0)
        made.zero_grad()
        loss.backward()
        versions.before_update(step)
        made.step()

    for step in range(STEPS):
        if resumes and step == STEPS // 2:
            while under_way:
                end()
            versions.show_present()
            saved = copy.deepcopy((net.state_dict(), made.state_dict(), versions.state_dict()))
            net = network()
            made = optimizer(kind, list(net.parameters()))
            net.load_state_dict(saved[0])
            made.load_state_dict(saved[1])
            versions = Versions(spec, dict.fromkeys(net.parameters(), spec.steps))
            versions.load_state_dict(saved[2])
        if len(under_way) > spec.steps:
            end()
        versions.use(step)
        x, y = batch(step)
        with versions.stored():
            under_way.append((step, nn.functional.mse_loss(net(x), y)))
    while under_way:
        end()
    versions.show_present()
    return [p.detach() for p in net.parameters()], versions


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("spec", [Delay(), Delay(steps=3), Delay(lookahead=0.9)], ids=str)
def test_a_backward_sees_the_weights_of_its_forward(spec, kind):
    wanted = by_hand([spec.steps] * 6, spec.lookahead, kind, 1)
    for resumes in (False, True):
        found, versions = trained(spec, kind, resumes)
        for one, other in zip(found, wanted, strict=True):
            if spec.lookahead:
                torch.testing.assert_close(one, other)
            else:
                assert torch.equal(one, other)
        # the present weights, and those of one step for each of delay
        kept = {weight.data_ptr() for past in versions._past for weight in past.values()}
        assert len(kept) <= 6 * (spec.steps + (spec.lookahead > 0))
        assert not kept & {p.data_ptr() for p in versions.parameters}


def test_one_step_of_delay_keeps_two_copies():
    _, versions = trained(Delay(), "sgd")
    assert [len(past) for past in versions._past] == [1] * 6
    weights = sum(4 * p.numel() for p in versions.parameters)
    assert memory_bytes(Delay(), dict.fromkeys(versions.parameters, 1)) == weights


@given(
    st.sampled_from(["uniform", "stages"]),
    st.integers(1, 4),
    st.integers(2, 9),
    st.integers(1, 24),
)
def test_microbatches_under_way(kind, steps, count, microbatches):
    """No more than the delay allows, at least as many as 1F1B where it allows them, and no more
    than 1F1B or a whole step.
    """
    spec = Delay(kind=kind, steps=steps)
    made = [spec.under_way(stage, count, microbatches) for stage in range(count)]
    for stage, held in enumerate(made):
        allowed = spec.of_stage(stage, count) * microbatches + 1
        assert min(allowed, count - stage) <= held <= min(allowed, max(microbatches, count - stage))
    assert made[-1] == 1 and made == sorted(made, reverse=True)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stage_count, microbatches", [(2, 2), (4, 4), (4, 16)])
def test_a_predicted_pipeline_that_never_runs_empty_is_as_fast_as_a_stage(
    schedule, stage_count, microbatches
):
    times = Times([0.01] * stage_count, [0.02] * stage_count, [0.005] * stage_count)
    spec = Delay()
    orders = continuous(
        [spec.under_way(stage, stage_count, microbatches) for stage in range(stage_count)],
        microbatches,
    )
    late = step_seconds(orders, times, Network(), TORCH["continuous"])
    on_time = step_seconds(
        SCHEDULES[schedule](stage_count, microbatches), times, Network(), TORCH[schedule]
    )
    assert late == pytest.approx(microbatches * 0.03 + 0.005)
    assert on_time == pytest.approx((microbatches + stage_count - 1) * 0.03 + 0.005)


def test_predicted_latency_is_hidden_while_enough_is_under_way():
    times = Times([0.01] * 4, [0.02] * 4)
    windows = [Delay().under_way(stage, 4, 16) for stage in range(4)]  # five a link
    orders = continuous(windows, 16)
    seconds = [
        step_seconds(orders, times, Network(latency=latency), TORCH["continuous"])
        for latency in (0.0, 0.02, 0.2)
    ]
    assert seconds[0] == pytest.approx(seconds[1]) == pytest.approx(16 * 0.03)
    # a microbatch comes back after two latencies, its forward and its backward: five of them
    assert seconds[2] == pytest.approx(16 * (0.03 + 0.4) / 5, rel=0.05)


def test_what_all_stages_share_holds_a_late_pipeline_up():
    times = Times([0.01] * 4, [0.02] * 4, [0.0] * 4)
    orders = continuous([4, 3, 2, 1], 4)
    free = step_seconds(orders, times, Network(), TORCH["continuous"])
    for shared in (
        Times(**vars(times) | {"meets": True}),
        Times(**vars(times) | {"tied": 1e3}),
    ):
        held = step_seconds(orders, shared, Network(), TORCH["continuous"])
        assert free < held < step_seconds(SCHEDULES["gpipe"](4, 4), times, Network())


def test_the_order_of_passes_is_said(tmp_path, capsys):
    late = tiny(delay__steps=1)
    with pytest.raises(UserError, match="--schedule gpipe runs empty .* use --schedule 1f1b"):
        stages.check_schedule(late, Wiring())
    for run in (late, tiny(), tiny(delay__steps=0)):
        stages.check_schedule(run, Wiring(schedule="1f1b"))
    stages.check_schedule(tiny(delay__steps=0), Wiring())
    store = ["--store", str(tmp_path)]
    assert main(["pipeline", "synthetic", "delay.steps=1", "--schedule", "gpipe", *store]) == 2
    assert "delay.steps=1 is of passes that go on" in capsys.readouterr().err
