"""Weights as messages: a receiver has the sender's bits, or says what is missing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from commsweep.errors import UserError
from commsweep.integrations.weights import (
    Broadcast,
    Folder,
    WeightReceiver,
    WeightSender,
    entropy,
)
from tests.helpers import spawned

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def changed(tensors: dict, share: float, generator: torch.Generator) -> dict:
    """Return tensors of which about this share of the entries is another value."""
    after = {}
    for name, tensor in tensors.items():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        noise = torch.randn(tensor.shape, generator=generator)
        after[name] = torch.where(chosen, (tensor + noise).to(tensor.dtype), tensor)
    return after


def same(a: dict, b: dict) -> bool:
    """Return whether two models have the same bits."""
    return a.keys() == b.keys() and all(
        torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        for name in a
    )


@given(
    st.lists(st.tuples(st.sampled_from(TYPES), st.integers(0, 70)), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.01, 0.3, 0.7, 0.99, 1.0]),
    st.integers(0, 99),
)
def test_a_receiver_has_the_senders_bits(kinds, share, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"w{at}": torch.randn(size, generator=generator).to(kind)
        for at, (kind, size) in enumerate(kinds)
    }
    receiver, weights = WeightReceiver(), dict(tensors)
    sender = WeightSender(weights, full_every=3)
    for step in range(5):
        message = sender.encode(step)
        assert message.full == (step in (0, 3)) and len(message.data) == message.nbytes
        assert receiver.apply(message.data) == step and same(receiver.tensors, weights)
        weights.update(changed(weights, share, generator))


def test_what_is_not_a_number_and_signed_zeros_arrive():
    weights = {"w": torch.tensor([0.0, 1.0, float("nan"), float("inf")])}
    sender, receiver = WeightSender(weights), WeightReceiver()
    receiver.apply(sender.encode(0).data)
    weights["w"] = torch.tensor([-0.0, 1.0, float("inf"), float("nan")])
    message = sender.encode(1)
    receiver.apply(message.data)
    assert same(receiver.tensors, weights) and message.changed == 0.75


@pytest.mark.parametrize("share", [0.001, 0.02, 0.3, 0.6, 0.95])
def test_an_update_is_near_its_entropy(share):
    generator = torch.Generator().manual_seed(0)
    before = {name: torch.randn(300, 500, generator=generator).bfloat16() for name in "abc"}
    after = changed(before, share, generator)
    weights = dict(before)
    sender = WeightSender(weights)
    sender.encode(0)
    weights.update(after)
    message = sender.encode(1)
    assert entropy(before, after) < message.nbytes < 1.05 * entropy(before, after) + 1400
    assert message.dense == 2 * 3 * 300 * 500


def test_masters_travel_as_bfloat16_and_tied_weights_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    other = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    other[1].weight = other[0].weight
    message = WeightSender(model, dtype=torch.bfloat16).encode(0)
    assert message.dense == 2 * 64
    WeightReceiver(model=other).apply(message.data)
    assert other[0].weight.dtype == torch.float32
    assert torch.equal(other[1].weight, model[1].weight.bfloat16().float())


def test_a_change_below_the_type_costs_nothing_but_a_frame():
    weights = {"w": torch.ones(1000)}
    sender = WeightSender(weights, dtype=torch.bfloat16)
    sender.encode(0)
    weights["w"] = weights["w"] + 1e-6
    message = sender.encode(1)
    assert message.changed == 0 and message.nbytes < 200


def messages(count: int, full_every: int = 64) -> tuple[list[bytes], list[dict]]:
    """Return messages of steps and the weights of each."""
    generator = torch.Generator().manual_seed(1)
    weights = {"w": torch.randn(50, generator=generator)}
    sender, data, states = WeightSender(weights, full_every=full_every), [], []
    for step in range(count):
        data.append(sender.encode(step).data)
        states.append(dict(weights))
        weights.update(changed(weights, 0.2, generator))
    return data, states


def test_a_lost_message_is_one_error_and_a_snapshot_mends_it():
    data, states = messages(6, full_every=4)
    receiver = WeightReceiver()
    receiver.apply(data[0])
    with pytest.raises(
        UserError, match="update of step 2 follows step 1, and this receiver has step 0"
    ):
        receiver.apply(data[2])
    assert same(receiver.tensors, states[0]) and receiver.step == 0
    receiver.apply(data[4])
    assert receiver.apply(data[5]) == 5 and same(receiver.tensors, states[5])
    with pytest.raises(UserError, match="has nothing: a message was lost"):
        WeightReceiver().apply(data[1])


def test_a_damaged_message_is_named_wherever_it_is_damaged():
    data, states = messages(2)
    receiver = WeightReceiver()
    receiver.apply(data[0])
    for place in range(0, len(data[1]), 3):
        damaged = bytearray(data[1])
        damaged[place] ^= 16
        with pytest.raises(UserError, match="damaged|no message of weights"):
            receiver.apply(bytes(damaged))
    for length in (0, 10, len(data[1]) - 1):
        with pytest.raises(UserError, match="damaged|no message of weights"):
            receiver.apply(data[1][:length])
    assert same(receiver.tensors, states[0])


def test_mistakes_are_one_line():
    weights = {"w": torch.zeros(3)}
    sender = WeightSender(weights)
    sender.encode(3)
    with pytest.raises(UserError, match="step 3 was published already"):
        sender.encode(3)
    weights["v"] = torch.zeros(3)
    with pytest.raises(UserError, match="weight 'v' was not published before"):
        sender.encode(4)
    with pytest.raises(UserError, match=r"weight 'w' is of torch.complex64"):
        WeightSender({"w": torch.zeros(3, dtype=torch.complex64)}).encode(0)
    with pytest.raises(UserError, match=r"the model has no weight 'w' of shape \[3\]"):
        WeightReceiver(model=nn.Linear(2, 2)).apply(
            WeightSender({"w": torch.zeros(3)}).encode(0).data
        )


def test_receivers_of_a_folder_may_come_late_and_lose_files(tmp_path):
    generator = torch.Generator().manual_seed(1)
    weights = {"w": torch.randn(50, generator=generator)}
    sender = WeightSender(weights, Folder(tmp_path), full_every=4)
    early = WeightReceiver(Folder(tmp_path))
    assert early.update() is None
    for step in range(6):
        sender.publish(step)
        if step == 1:
            assert early.update() == 1
        if step == 2:
            (tmp_path / f"0000-{2:012}.update").unlink()
        if step == 3:
            with pytest.raises(UserError, match="no full snapshot after step 1"):
                early.update()
            assert early.step == 1
        if step >= 4:
            assert early.update() == step and same(early.tensors, weights)
        state = dict(weights)
        weights.update(changed(weights, 0.2, generator))
    late = WeightReceiver(Folder(tmp_path))
    assert late.update() == 5 and same(late.tensors, state)


def test_a_folder_keeps_what_a_late_receiver_needs(tmp_path):
    generator = torch.Generator().manual_seed(1)
    weights = {"w": torch.randn(50, generator=generator)}
    sender = WeightSender(weights, Folder(tmp_path), full_every=3)
    slow = WeightReceiver(Folder(tmp_path))
    for step in range(11):
        sender.publish(step)
        state = dict(weights)
        if step == 1:
            assert slow.update() == 1
        weights.update(changed(weights, 0.2, generator))
    late = WeightReceiver(Folder(tmp_path))
    assert late.update() == 10 and same(late.tensors, state)
    assert slow.update() == 10 and same(slow.tensors, state)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        f"0000-{step:012}.{'full' if step % 3 == 0 else 'update'}" for step in range(6, 11)
    ]


def _process(rank, port, said):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(rank)
    weights = {"w": torch.randn(60, generator=generator)}
    sender = WeightSender(weights, Broadcast())
    receiver = WeightReceiver(Broadcast())
    for step in range(3):
        if rank == 0:
            sender.publish(step)
            weights.update(changed(weights, 0.1, generator)) if step < 2 else None
        else:
            assert receiver.update() == step
    mine = weights if rank == 0 else receiver.tensors
    said.put((rank, mine["w"].tolist()))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_processes_receive_by_broadcast():
    told = dict(spawned(_process, 2, answers=2))
    assert told[0] == told[1]


def publish(sender: WeightSender, weights: dict, steps: range, generator) -> None:
    for step in steps:
        weights.update(changed(weights, 0.2, generator))
        sender.publish(step)


@pytest.mark.parametrize("follows", [10, 3, None])
def test_a_trainer_that_goes_on_from_an_older_checkpoint_is_followed(tmp_path, follows):
    """Receivers follow its new run, backwards too, and late ones; nothing of the dead run stays."""
    generator = torch.Generator().manual_seed(1)
    weights = {"w": torch.randn(50, generator=generator)}
    dead = WeightSender(weights, Folder(tmp_path), full_every=64)
    publish(dead, weights, range(4), generator)
    receiver = WeightReceiver(Folder(tmp_path))
    assert follows != 3 or receiver.update() == 3
    publish(dead, weights, range(4, 11), generator)
    assert follows != 10 or receiver.update() == 10
    anew = WeightSender(weights, Folder(tmp_path), full_every=64)
    publish(anew, weights, range(8, 9), generator)
    assert receiver.update() == 8 and same(receiver.tensors, weights)
    publish(anew, weights, range(9, 14), generator)
    assert receiver.update() == 13 and same(receiver.tensors, weights)
    late = WeightReceiver(Folder(tmp_path))
    assert late.update() == 13 and same(late.tensors, weights)
    assert {path.name[:4] for path in tmp_path.iterdir()} == {"0001"}
    with pytest.raises(UserError, match="another sender has begun there since"):
        dead.publish(20)


def test_a_damaged_update_is_made_up_for_by_a_later_snapshot(tmp_path):
    generator = torch.Generator().manual_seed(1)
    weights = {"w": torch.randn(50, generator=generator)}
    sender, receiver = (
        WeightSender(weights, Folder(tmp_path), full_every=4),
        WeightReceiver(Folder(tmp_path)),
    )
    publish(sender, weights, range(2), generator)
    assert receiver.update() == 1
    publish(sender, weights, range(2, 4), generator)
    damaged = tmp_path / f"0000-{2:012}.update"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="damaged"):
        receiver.update()
    publish(sender, weights, range(4, 6), generator)
    assert receiver.update() == 5 and same(receiver.tensors, weights)


def test_messages_that_are_removed_while_they_are_read_are_no_end(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    weights = {"w": torch.randn(50, generator=generator)}
    sender = WeightSender(weights, Folder(tmp_path, keep=1), full_every=3)
    receiver = WeightReceiver(Folder(tmp_path))
    publish(sender, weights, range(2), generator)
    receiver.update()
    publish(sender, weights, range(2, 3), generator)
    way = Folder._path_from

    def late(folder: Folder, position):
        files = way(folder, position)
        if sender._step == 2:  # the sender goes on once between a look and its reading
            publish(sender, weights, range(3, 8), generator)
        return files

    monkeypatch.setattr(Folder, "_path_from", late)
    assert receiver.update() == 7 and same(receiver.tensors, weights)


SQUARE = torch.arange(16.0).reshape(4, 4)


@pytest.mark.parametrize(
    "view",
    [SQUARE.T, SQUARE.view(torch.int32), SQUARE[0].expand(4, 4), SQUARE[:, ::2], SQUARE[:2]],
    ids=["transposed", "other type", "repeated row", "columns", "rows"],
)
def test_weights_that_share_memory_without_being_equal_views_all_arrive(view):
    class Both(nn.Module):
        def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
            super().__init__()
            self.register_buffer("a", a)
            self.register_buffer("b", b)

    other = Both(torch.zeros(4, 4), torch.zeros_like(view))
    alike = torch.zeros(4, 4)
    stored = alike.view(view.dtype).as_strided(view.shape, view.stride(), view.storage_offset())
    for model in (other, Both(alike, stored)):
        WeightReceiver(model=model).apply(WeightSender(Both(SQUARE, view)).encode(0).data)
        assert torch.equal(model.a, SQUARE) and torch.equal(model.b, view)


def test_ties_of_one_side_only_are_set_or_refused():
    def pair(tied: bool) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        if tied:
            model[1].weight = model[0].weight
        return model

    sender, untied = pair(True), pair(False)
    receiver, publisher = WeightReceiver(model=untied), WeightSender(sender)
    for step in range(2):
        receiver.apply(publisher.encode(step).data)
        assert torch.equal(untied[0].weight, sender[0].weight)
        assert torch.equal(untied[1].weight, sender[0].weight)
        nn.init.normal_(sender[0].weight)
    with pytest.raises(UserError, match="shares memory with '1.weight', and the sender's does not"):
        WeightReceiver(model=pair(True)).apply(WeightSender(pair(False)).encode(0).data)


def test_a_type_that_changes_is_refused_and_a_load_that_fails_is_made_up_for():
    weights = {"w": torch.ones(4)}
    sender = WeightSender(weights)
    data = sender.encode(0).data
    model = nn.Module()
    model.register_buffer("w", torch.zeros(3))
    receiver = WeightReceiver(model=model)
    with pytest.raises(UserError, match="no weight 'w'"):
        receiver.apply(data)
    model.w = torch.zeros(4)
    receiver.apply(data)
    weights["w"] = torch.full((4,), 2.0)
    update = sender.encode(1).data
    model.w = torch.zeros(3)
    with pytest.raises(UserError, match="no weight 'w'"):
        receiver.apply(update)
    model.w = torch.zeros(4)
    assert receiver.apply(update) == 1 and model.w.tolist() == [2.0] * 4
    weights["w"] = torch.ones(4, dtype=torch.int32)
    with pytest.raises(
        UserError, match=r"published as torch.float32 \[4\], and is now torch.int32"
    ):
        sender.encode(2)


def test_messages_that_come_twice_or_late_are_refused_and_change_nothing():
    data, states = messages(6, full_every=4)
    receiver = WeightReceiver()
    for step in (0, 1, 2):
        receiver.apply(data[step])
    for step in (1, 2, 0):
        with pytest.raises(UserError, match="came twice|comes after"):
            receiver.apply(data[step])
        assert receiver.step == 2 and same(receiver.tensors, states[2])
    receiver.apply(data[3])
    assert same(receiver.tensors, states[3])
