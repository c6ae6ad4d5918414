"""What torch's engine forbids, in minimal cases, and what one stage does with its neighbours'
messages.
"""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from commsweep.boundary.channel import Step
from commsweep.compressors import build
from commsweep.config import Execution, run_id
from commsweep.config.compressors.sparse import TopKSpec
from commsweep.config.execution import Cable, Wiring
from commsweep.config.links import Link
from commsweep.errors import UserError
from commsweep.processes import launcher, pipeline, stages, supervisor
from commsweep.processes.engine import Stage
from commsweep.processes.timing import summary
from commsweep.processes.trainer import connect
from commsweep.registry import content
from commsweep.store import Store
from tests.helpers import outcome, tiny

links = content("analysis.links")


@pytest.fixture
def pretended():
    """A group of two of which this process is the first; what it receives is whatever lies in
    memory.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def first_stage(**metadata) -> ScheduleGPipe:
    stage = PipelineStage(
        nn.Linear(3, 4),
        0,
        2,
        torch.device("cpu"),
        input_args=torch.zeros(2, 3),
        output_args=torch.zeros(2, 4, requires_grad=True),
        **metadata,
    )
    return ScheduleGPipe(stage, 1, loss_fn=lambda out, y: out.sum())


def test_the_engine_takes_no_gradient_of_another_size_than_its_activation(pretended):
    """So a gradient packed with other settings than its activation cannot be the engine's
    tensor.
    """
    first_stage().step(torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="Failed to run stage backward") as refused:
        first_stage(output_grads=torch.zeros(5)).step(torch.randn(2, 3))
    assert "Mismatch in shape" in str(refused.value.__cause__)


def test_the_engines_buffers_keep_the_shape_of_the_first_step(pretended):
    """So a message whose length depends on the data or the epoch cannot be the engine's tensor."""
    schedule = first_stage()
    schedule.step(torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="Failed to run stage backward") as refused:
        # another activation, [5, 4]; the gradient's buffer is still [2, 4]
        schedule.step(torch.randn(5, 3))
    assert "Mismatch in shape" in str(refused.value.__cause__)


def test_another_number_of_processes_than_stages_is_one_clear_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UserError, match="3 processes were started for 4 stages; start one a stage"):
        connect(tiny(), Execution(device="cpu"), 1)


def test_stages_of_images_are_cuts():
    assert stages.with_stages(tiny(), 4) == {}
    with pytest.raises(UserError, match="makes 4 stages; name the cuts"):
        stages.with_stages(tiny(), 2)


@pytest.mark.parametrize(
    "cuts", [(), ("maxpool",), ("layer1", "layer3"), ("maxpool", "layer2", "avgpool")]
)
@pytest.mark.parametrize("name", ["resnet_small", "mlp"])
def test_the_stages_one_after_the_other_are_the_network(name, cuts):
    from commsweep import models
    from commsweep.data import load as data

    if name == "mlp":
        cuts = tuple(cut for cut in cuts if cut.startswith("layer"))
    run = tiny(model__name=name, model__cuts=cuts)
    loaded = data.build(run, None, None, torch.device("cpu"))
    model, modules = models.build(run, loaded, None)
    x = whole = loaded.train.x[:4]
    for stage in range(len(cuts) + 1):
        x = stages.body(run, model, list(modules), stage).eval()(x)
    assert torch.equal(x, model.eval()(whole))


# Who is to blame.


def told(place, stage, line, at=None):
    (place.path / f"stage{stage}.error").write_text(
        json.dumps({"time": at or time.time(), "line": line})
    )


def blamed(tmp_path, codes, **lines):
    place = pipeline.folder_of(Store(tmp_path), tiny(), Wiring())
    place.make()
    for turn, (stage, line) in enumerate(lines.items()):
        told(place, stage[1:], line, at=turn + 1)
    return supervisor.blame(place, [(rank, code) for rank, code in enumerate(codes) if code])


def test_a_killed_stage_is_to_blame_not_those_that_miss_it(tmp_path):
    line = blamed(
        tmp_path, [1, -9, 1], s0="the link to a neighbour broke", s2="the link to a neighbour broke"
    )
    assert line.startswith(
        "stage 1 was ended by SIGKILL; all others were ended. Start again to continue"
    )


def test_a_stage_that_was_told_to_end_is_to_blame(tmp_path):
    assert "stage 2 was ended by SIGTERM" in blamed(
        tmp_path, [1, 0, -15], s0="the link to a neighbour broke"
    )


def test_a_reason_goes_before_a_lost_neighbour_and_the_earlier_before_the_later(tmp_path):
    assert (
        blamed(tmp_path, [1, 1], s0="the link to a neighbour broke", s1="no such data")
        == "stage 1: no such data"
    )
    assert blamed(tmp_path / "b", [1, 1], s1="first", s0="second") == "stage 1: first"


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1"),
            "the link to a neighbour broke",
        ),
        (
            RuntimeError("[pair.cc] op.preamble.length <= op.preamble.nbytes. 90 vs 10"),
            "a message was longer",
        ),
        (
            RuntimeError("Timed out waiting 5000ms for recv operation to complete"),
            "a neighbour was silent",
        ),
        (ValueError("something else\nand more"), "ValueError: something else"),
    ],
)
def test_faults_become_one_line(fault, line):
    assert supervisor.explain(fault).startswith(line) and "\n" not in supervisor.explain(fault)


def test_a_foreign_message_is_named_through_the_engines_wrapping():
    try:
        try:
            raise UserError("a message from another configuration")
        except UserError as inner:
            raise RuntimeError("[Stage 1] failed to run forward") from inner
    except RuntimeError as outer:
        assert supervisor.explain(outer) == "a message from another configuration"


def test_a_step_is_the_median_interval_and_its_tasks_are_the_medians():
    began = [0.0, 5.0, 6.0, 7.0, 9.0, 10.0]  # the first two steps do not count
    spans = [("F", 0, at + 0.1, at + 0.2 + 0.1 * (at == 7), 0.05) for at in began]
    made = summary([{"began": began, "spans": spans, "passages": [("sent", "fwd", 0, 6.5)]}])
    assert made["step_seconds"] == 1.0 and made["steps"] == 3
    assert made["tasks"][0]["F"] == {"seconds": pytest.approx(0.1), "cpu": 0.05}
    assert [round(start, 6) for _, _, start, _ in made["gantt"][0]] == [0.1]
    assert summary([{"began": began[:3], "spans": spans, "passages": []}]) == {}


def test_links_of_their_own_are_part_of_a_wiring_and_their_absence_is_not(tmp_path):
    store, own = Store(tmp_path), Wiring(links=[{"bandwidth": 1e6}, {"latency": 0.1}, {}])
    before = '{"schedule":"gpipe","bandwidth":1e6,"latency":0.0,"steps":0,"threads":1}'
    assert json.loads(Wiring(bandwidth=1e6).model_dump_json()) == json.loads(before)
    # ids are of the text
    assert list(json.loads(Wiring().model_dump_json())) == list(json.loads(before))
    assert (
        pipeline.folder_of(store, tiny(), own).path
        != pipeline.folder_of(store, tiny(), Wiring()).path
    )
    assert (
        own.cables(4) == list(own.links)
        and Wiring(latency=0.1).cables(3) == [Cable(latency=0.1)] * 2
    )
    with pytest.raises(UserError, match="3 links for 2 boundaries"):
        own.cables(3)
    with pytest.raises(ValueError, match="give one of both"):
        Wiring(bandwidth=1e6, links=[{}])


def test_a_measurement_has_a_folder_of_its_own(tmp_path):
    store = Store(tmp_path)
    folders = {pipeline.folder_of(store, tiny(), Wiring(bandwidth=rate)).path for rate in (0, 1e7)}
    assert len(folders) == 2 and all(path.parent == tmp_path / "pipelines" for path in folders)
    place = pipeline.folder_of(store, tiny(), Wiring())
    place.make()
    launcher.begin(place, tiny(), Wiring(), {})
    row = outcome(tiny()) | {"id": place.path.name, "run_id": run_id(tiny())}
    place.finish(row)
    assert store.pipelines() == [row] and store.ids() == [] and not store.rows()
    assert os.listdir(tmp_path / "pipelines") == [place.path.name]


def test_a_message_longer_than_its_receiver_expects_is_not_sent():
    """Gloo would end the receiver's process; the sender knows the bound as well."""
    stage = object.__new__(Stage)
    stage.__dict__.update(
        _exact=True, _chunk=0, step=Step(training=True), framing={"fwd": 0}, outbox={}
    )
    payload = build({"kind": "none"}).encode(torch.ones(2, 50))
    made = SimpleNamespace(
        post=lambda x, **_: ([payload], None),
        most_bytes=lambda *_: 100,
        link=Link(compressor=TopKSpec()),
    )
    side = SimpleNamespace(boundary=SimpleNamespace(name="layer1"), digest=b"12345678")
    with pytest.raises(
        RuntimeError, match="438 bytes at boundary layer1, where topk makes 100 at most"
    ):
        stage._post(("fwd", 0), side, made, torch.ones(2, 50))
    assert not stage.outbox


def test_every_message_of_a_step_is_seen_from_send_to_use():
    seen = [
        [["sent", "fwd", 0, 1.0], ["came", "bwd", 0, 4.0]],
        [["came", "fwd", 0, 2.0], ["sent", "bwd", 0, 3.0]],
    ]
    assert sorted(links.passages(seen)) == [(0, 1, 1.0, 2.0), (1, 0, 3.0, 4.0)]
