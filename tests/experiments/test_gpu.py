"""What a GPU needs, proved without one: no wait for the device on the hot path (fake CUDA tensors, which have no values
to wait for), sample numbers on the host, memories written in place, room given back, devices counted."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from commsweep.experiments import checkpoint
from commsweep.experiments.boundary.channel import Counts
from commsweep.experiments.compressors import build, tah
from commsweep.experiments.config import Execution, override
from commsweep.experiments.errors import UserError
from commsweep.experiments.feedback.memory import Keys, Memory
from commsweep.experiments.processes.trainer import connect
from commsweep.experiments.training.run import build as build_run
from tests.helpers import COMPRESSORS, name, same_bits, tiny


def drawn(spec) -> bool:
    """Whether its messages are drawn: a generator of a GPU needs a driver, so these cannot be tried here."""
    return (spec["kind"] in ("randomk", "randtopk", "lowrank", "tern", "qsgd", "natural")
            and spec.get("ratio") != 1.0) or "stochastic" in str(spec)


MODULES = ("bottleneck", "subspace")  # parts of the model, not of a message
PLAIN = [one for one in COMPRESSORS if one["kind"] not in MODULES and not drawn(one)]


@pytest.fixture
def faked():
    """Fake tensors; constants that were kept for their device are forgotten before and after."""
    tah._hadamard.cache_clear()
    with FakeTensorMode():
        yield
    tah._hadamard.cache_clear()


@pytest.mark.parametrize("spec", PLAIN, ids=name)
@pytest.mark.parametrize("shape", [(2, 8, 16, 16), (2, 8, 16)], ids=["image", "sequence"])
def test_nothing_on_the_hot_path_waits_for_the_device(spec, shape, faked):
    """What arrives and its bytes, without a value being looked at: `.item()` or `nonzero` would raise here."""
    compressor = build(spec)
    y = compressor.apply(torch.randn(shape, device="cuda"), 3)
    nbytes = compressor.bytes_sent(y)
    assert y.device.type == "cuda" and y.shape == shape
    assert isinstance(nbytes, int) or nbytes.device.type == "cuda"


def test_a_wait_would_be_seen(faked):
    """The test above can fail: a sparse payload has as many values as there are."""
    with pytest.raises(Exception, match="nonzero"):
        build({"kind": "threshold", "value": 0.5})._encode(torch.randn(4, 64, device="cuda"), 0)
    with pytest.raises(Exception, match=r"item|_local_scalar_dense"):
        float(torch.randn(3, device="cuda").sum())


def test_bookkeeping_of_a_crossing_waits_for_nothing(faked):
    counts, x = Counts(), torch.randn(4, 64, device="cuda")
    counts.saw(x)
    counts.saw(2 * x)
    assert counts.first_bad.device.type == "cuda" and counts.calls == 2


def test_numbers_of_samples_stay_on_the_host():
    task = build_run(tiny(), Execution("cpu")).task
    x, y, samples = task.transfer_batch_to_device(
        (torch.randn(2, 3), torch.zeros(2), torch.tensor([4, 1])), torch.device("meta"), 0)
    assert x.device.type == y.device.type == "meta" and samples.device.type == "cpu"


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_samples_are_written_in_place(channels_last, dtype):
    """No copy of the memory: the same storage and layout, and torch's setting of determinism as it was."""
    memory = Memory(9, torch.Size([4, 3, 2]), dtype, by_sample=True, channels_last=channels_last)
    before, layout = memory.state.data_ptr(), memory.state.stride()
    wanted, samples = torch.zeros(9, 4, 3, 2, dtype=dtype), torch.tensor([7, 0, 4])
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for lying in (torch.contiguous_format, torch.channels_last):
            rows = torch.randn(3, 4, 3, 2).contiguous(memory_format=lying)
            memory.write(Keys(samples, torch.device("cpu")), rows)
            wanted[samples] = rows.to(dtype)
            assert same_bits(memory.state, wanted)
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert memory.state.data_ptr() == before and memory.state.stride() == layout


def test_checkpoints_are_taken_no_more_often_than_20_times_their_own_duration(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    pace = checkpoint.Pace(30.0)
    due = []
    for seconds in (29, 1, 0):
        now[0] += seconds
        due.append(pace.due())
    with pace.taken():
        now[0] += 4.0
    for seconds in (30, 49, 1):
        now[0] += seconds
        due.append(pace.due())
    assert checkpoint.Pace(0.0).due() and not checkpoint.Pace(float("inf")).due()
    assert due == [False, True, True, False, False, True]  # 80 s after one of 4 s, not 30


def test_workers_are_counted_where_there_is_a_driver_wherever_its_folder_is(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert Execution("auto").workers(per_gpu=2) == 6
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cores = Execution("cpu").workers()
    assert Execution("auto").workers() == cores

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert Execution("auto").workers() == cores


def test_more_stages_than_gpus_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for key, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match="4 processes on this machine for 1 GPU, and NCCL takes one each"):
        connect(override(tiny(), {"microbatches": 4}), Execution("cuda"), 1)
