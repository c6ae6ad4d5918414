"""Memories larger than memory: bounded residence, writes behind the step, copies for
checkpoints.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from commsweep.config import Execution
from commsweep.feedback import memory
from commsweep.feedback.memory import Keys, MappedMemory
from commsweep.store import Store
from commsweep.training.run import execute
from tests.helpers import linked

CPU = torch.device("cpu")
SAMPLE = torch.Size([4, 8])


def keys(*samples):
    return Keys(torch.tensor(samples), CPU)


def rows(value, n=1):
    return torch.full((n, *SAMPLE), float(value))


@pytest.mark.slow
def test_a_mapped_memory_far_larger_than_what_stays_resident(tmp_path):
    """2 GiB of rows, 600 MiB of them written and read in a process that may grow by 250 MiB."""
    code = f"""
import torch
from pathlib import Path
from commsweep.feedback.memory import Keys, MappedMemory
def resident():
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
made = MappedMemory(2048, torch.Size([512, 1024]), torch.bfloat16, Path({str(tmp_path / "m.buffer")!r}))
x = torch.ones(8, 512, 1024)
before = resident()
for step in range(75):
    keys = Keys(torch.arange(8) * 200 + step, torch.device("cpu"))
    made.read(keys)
    made.write(keys, x * step)
assert made.read(Keys(torch.tensor([207]), torch.device("cpu")))[0, 0, 0] == 7
print(resident() - before)
"""
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert float(out) < 250
    assert (tmp_path / "m.buffer").stat().st_size == 2 << 30
    # rows never written take no room
    assert (tmp_path / "m.buffer").stat().st_blocks * 512 < 1 << 30


def test_a_write_does_not_wait_for_the_disk_and_a_read_of_those_rows_does(tmp_path, monkeypatch):
    made = MappedMemory(6, SAMPLE, torch.float32, tmp_path / "m.buffer")
    disk, original = threading.Event(), made._write

    def slow(*args):
        assert disk.wait(10)
        original(*args)

    monkeypatch.setattr(made, "_write", slow)
    made.write(keys(0, 1), rows(1, 2))  # returns although nothing can be written yet
    assert torch.equal(made.read(keys(4, 5)), rows(0, 2))  # other rows are read meanwhile
    threading.Timer(0.2, disk.set).start()
    assert torch.equal(made.read(keys(1)), rows(1))
    assert disk.is_set()


def test_only_so_many_batches_wait_in_memory(tmp_path, monkeypatch):
    made = MappedMemory(100, SAMPLE, torch.float32, tmp_path / "m.buffer")
    disk, original = threading.Event(), made._write
    monkeypatch.setattr(made, "_write", lambda *args: (disk.wait(10), original(*args)))
    for sample in range(memory.AHEAD):
        made.write(keys(sample), rows(sample))
    threading.Timer(0.2, disk.set).start()
    made.write(keys(99), rows(99))  # has to wait for the disk
    assert disk.is_set()
    assert torch.equal(made.state[[3, 99]], torch.cat([rows(3), rows(99)]))


def test_what_is_written_is_a_copy(tmp_path):
    made = MappedMemory(2, SAMPLE, torch.float32, tmp_path / "m.buffer")
    x = rows(1)
    made.write(keys(0), x)
    x.fill_(9)
    assert torch.equal(made.read(keys(0)), rows(1))


def test_a_fault_of_the_writer_is_not_lost(tmp_path, monkeypatch):
    made = MappedMemory(2, SAMPLE, torch.float32, tmp_path / "m.buffer")

    def broken(*_):
        raise OSError("no space")

    monkeypatch.setattr(made, "_write", broken)
    made.write(keys(0), rows(1))
    with pytest.raises(OSError, match="no space"):
        made.read(keys(0))


def test_a_checkpoint_names_a_copy_that_later_steps_do_not_touch(tmp_path):
    file = tmp_path / "m.buffer"
    made = MappedMemory(3, SAMPLE, torch.bfloat16, file)
    made.write(keys(0, 2), rows(1, 2).bfloat16())
    made.snapshot("10")
    saved = made.get_extra_state()
    made.write(keys(0), rows(7))
    made.snapshot("20")
    made.drop_copies([20])
    assert sorted(p.name[:11] for p in tmp_path.iterdir()) == ["m.buffer", "m.buffer.20"]
    made.write(keys(1), rows(5))
    assert torch.equal(made.state[:, 0, 0].float(), torch.tensor([7.0, 5.0, 1.0]))
    made.set_extra_state(made.get_extra_state())
    assert torch.equal(made.state[:, 0, 0].float(), torch.tensor([7.0, 0.0, 1.0]))
    assert saved["copy"].startswith("m.buffer.10.")


def test_copies_work_where_the_file_system_has_no_fast_copy(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "not supported")

    monkeypatch.setattr(memory.os, "copy_file_range", refuse)
    made = MappedMemory(3, SAMPLE, torch.float32, tmp_path / "m.buffer")
    made.write(keys(1), rows(4))
    made.snapshot("1")
    made.write(keys(1), rows(5))
    made.set_extra_state(made.get_extra_state())
    assert torch.equal(made.state, torch.cat([rows(0), rows(4), rows(0)]))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_of_200_steps_with_buffers_far_larger_than_what_it_may_use(tmp_path):
    """AQ-SGD over 800 blocks of 1024: 300 MiB of buffers cost the process less than 30 MiB more
    than no memory.

    Freed blocks go back at once here. What glibc's heap keeps of them else, 40 to 60 MiB, is of its
    history.
    """
    code = """
import sys
from pathlib import Path
from commsweep.config import override
from commsweep.config import Execution
from commsweep.registry import preset
from commsweep.training.run import execute
from commsweep.store import Store
run = override(preset("sotu_nano"), {"data.block_size": 1024, "data.batch_size": 8, "data.train_blocks": 800,
    "data.eval_blocks": 8, "epochs": 2, "eval_every": 2, "fwd.compressor.kind": "fixed", "fwd.compressor.bits": 4}
    | ({"fwd.feedback.kind": "aqsgd", "fwd.feedback.buffer": "bfloat16"} if sys.argv[1] == "aqsgd" else {}))
row = execute(run, Store(sys.argv[2]), Execution("cpu", buffers="mmap", checkpoint_every=0))
assert row["status"] == "finished" and row["steps"] == 200, row["error"]
print(row["memory_bytes"]["sample"], open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
"""
    peak, exact = {}, os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    for kind in ("plain", "aqsgd"):
        out = subprocess.run(
            [sys.executable, "-c", code, kind, str(tmp_path / kind)],
            capture_output=True,
            text=True,
            check=True,
            env=exact,
        ).stdout.split()
        buffers, peak[kind] = int(out[-2]), int(out[-1]) / 1024
    assert buffers == 3 * 800 * 1024 * 64 * 2
    assert peak["aqsgd"] - peak["plain"] < 30


def test_rows_that_were_read_ahead_are_those_written_last(tmp_path, monkeypatch):
    """Whatever was written between, or after they were read; other rows, parts of them and repeats
    come as ever.
    """
    made = MappedMemory(9, SAMPLE, torch.float32, tmp_path / "m.buffer")
    plain = torch.zeros(9, *SAMPLE)
    generator = torch.Generator().manual_seed(0)
    for step in range(200):
        order = torch.randperm(9, generator=generator)
        if step % 3:
            made.ahead(order[:4])
        if step % 2:
            written = torch.randperm(9, generator=generator)[: 1 + step % 5]
            made.write(Keys(written, CPU), rows(step, len(written)))
            plain[written] = float(step)
        for part in (order[:4], order[1:3], order[2:6]):
            got = made.read(Keys(part, CPU))
            assert torch.equal(got, plain[part])
            got.fill_(-1.0)  # a copy: nothing that is read ahead changes


def test_rows_are_read_behind_the_step_before(tmp_path, monkeypatch):
    made, seen = MappedMemory(6, SAMPLE, torch.float32, tmp_path / "m.buffer"), []
    original = made._taken
    monkeypatch.setattr(
        made, "_taken", lambda samples: seen.append(threading.current_thread()) or original(samples)
    )
    made.ahead(torch.tensor([3, 1]))
    made.read(keys(1, 3))
    made.read(keys(1, 2))
    main = threading.main_thread()
    assert [thread is main for thread in seen] == [False, True]


def test_a_training_reads_ahead_and_is_the_training_in_memory(tmp_path, monkeypatch):
    run = linked({"kind": "topk", "ratio": 0.1}, None, {"kind": "aqsgd"}, microbatches=2)
    told, original = [], MappedMemory.ahead
    monkeypatch.setattr(
        MappedMemory, "ahead", lambda self, samples: told.append(samples) or original(self, samples)
    )
    made = [
        execute(run, Store(tmp_path / where), Execution("cpu", buffers=where))
        for where in ("memory", "mmap")
    ]
    assert (
        made[0]["metrics"] == made[1]["metrics"] and made[0]["boundaries"] == made[1]["boundaries"]
    )
    batches = made[1]["steps"] // run.epochs
    assert len(told) == (batches - 1) * run.epochs * len(made[1]["boundaries"])
