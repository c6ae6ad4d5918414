"""The bytes of a packed: exact, counted, and safe to read whatever they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commsweep.compressors import build, message
from commsweep.compressors.adacomp import AdaComp
from commsweep.compressors.base import Payload
from commsweep.compressors.kernels import cpu, packing
from commsweep.compressors.sparse import ForwardMask
from commsweep.config.compressors.joint import AdaCompSpec
from commsweep.config.compressors.sparse import ForwardMaskSpec
from commsweep.errors import UserError
from tests.compressors.test_compressors import inputs
from tests.helpers import COMPRESSORS, name, same_bits

HERE = message.Address(message.digest("a run"), step=7, microbatch=2)
each = pytest.mark.parametrize("spec", COMPRESSORS, ids=name)


def through(compressor, x, seed=3):
    """(what arrives after a trip as bytes, the packed)."""
    payload = compressor.encode(x, seed)
    packed = message.pack([payload], HERE)
    assert packed.numel() == payload.nbytes + message.framing([payload])
    assert packed.numel() <= message.most_bytes(compressor, x.shape, x.dtype)
    # a buffer may be longer than its packed
    reader = message.Reader(torch.nn.functional.pad(packed, (0, 5)), HERE)
    read = reader.take(compressor, x.shape)
    reader.finish()
    return compressor.decode(read), packed


@each
def test_what_arrives_as_bytes_is_what_the_simulation_uses(spec):
    compressor = build(spec)
    for x in inputs().values():
        if x.dtype == torch.float32:
            arrived, _ = through(compressor, x)
            direct = compressor.roundtrip(x, seed=3)
            assert same_bits(arrived, direct)
            assert arrived.stride() == direct.stride() or x.dim() != 4, (
                "another memory layout changes convolutions"
            )


@pytest.mark.sampled(4)
@each
def test_the_compiled_packing_equals_torchs(spec, monkeypatch):
    compressor = build(spec)
    for x in inputs().values():
        fast = compressor.encode(x, seed=3)
        with monkeypatch.context() as patch:
            patch.setattr(packing.cpu, "numba", None)
            if spec["kind"] in ("qsgd",) and spec.get("coding", "elias") == "elias":
                continue  # its Elias codes have one implementation
            slow = compressor.encode(x, seed=3)
            assert same_bits(compressor.decode(fast), compressor.decode(slow))
        assert fast.parts.keys() == slow.parts.keys()
        for part in fast.parts:
            assert torch.equal(
                fast.parts[part].contiguous().view(-1).view(torch.uint8),
                slow.parts[part].contiguous().view(-1).view(torch.uint8),
            ), part


@pytest.mark.parametrize("shape", [(3, 70), (2, 1500), (1, 5000), (9, 1)])
@pytest.mark.parametrize("bits", range(1, 9))
def test_quantized_blocks_equal_the_formula(shape, bits):
    """Shapes whose groups, blocks and bytes end in different places."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(bits))
    for kind in ("uniform", "fixed"):
        compressor = build({"kind": kind, "bits": bits, "scale": "sample"})
        assert same_bits(
            through(compressor, x)[0],
            compressor._join(
                compressor._values(
                    compressor._codes(x.clone(), compressor._scales(x), 0), compressor._scales(x)
                ),
                x,
            ),
        )


def test_kept_places_are_those_of_the_mask():
    x = torch.randn(4, 6, 5, 7).to(memory_format=torch.channels_last)
    for spec in COMPRESSORS:
        compressor = build(spec)
        if hasattr(compressor, "masked"):
            assert torch.equal(compressor.mask(compressor.encode(x, 5)), compressor.masked(x, 5)[1])


def adacomp():
    return AdaComp(AdaCompSpec(conv=8, fc=20))


def masked():
    kept = torch.rand(3, 41, generator=torch.Generator().manual_seed(1)) > 0.5
    return ForwardMask(ForwardMaskSpec()).given(kept)


def test_learners_messages_and_shared_masks_travel_too():
    x = torch.randn(1, 7, 13)
    assert same_bits(through(adacomp(), x)[0], adacomp().apply(x))
    x = torch.randn(3, 41)
    assert same_bits(through(masked(), x)[0], masked().apply(x))


EVERY = [*(lambda spec=spec: build(spec) for spec in COMPRESSORS), adacomp, masked]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("made", EVERY, ids=[*map(name, COMPRESSORS), "adacomp", "masked"])
@settings(max_examples=12)
@given(data=st.data())
def test_no_bytes_crash_the_reader(made, data):
    """Flipped, cut, swapped or random bytes: a clear refusal, or a packed of the right shape."""
    compressor = made()
    x = torch.randn(3, 41, generator=torch.Generator().manual_seed(0))
    packed = message.pack([compressor.encode(x, 1)], HERE).numpy().copy()
    if data.draw(st.booleans()):  # damage what comes after a good header
        for _ in range(data.draw(st.integers(1, 6))):
            packed[data.draw(st.integers(message.HEADER, len(packed) - 1))] = data.draw(
                st.integers(0, 255)
            )
    elif data.draw(st.booleans()):
        at = data.draw(st.integers(message.HEADER, len(packed)))
        packed[at:] = torch.randint(0, 256, (len(packed) - at,)).numpy()
    else:
        packed = packed[: data.draw(st.integers(0, len(packed)))]
    # whoever made it made a checksum, too
    if len(packed) >= message.HEADER and data.draw(st.booleans()):
        packed[message._SUM] = message._checksum(torch.from_numpy(packed)).view(torch.uint8).numpy()
    try:
        reader = message.Reader(torch.from_numpy(packed), HERE)
        y = compressor.decode(reader.take(compressor, x.shape))
        reader.finish()
    except UserError:
        return
    assert y.shape == x.shape and y.dtype == x.dtype


@pytest.mark.sampled(3)
@pytest.mark.parametrize("made", EVERY, ids=[*map(name, COMPRESSORS), "adacomp", "masked"])
def test_no_single_bit_flips_unseen(made):
    """Of values, places, types, lengths and header alike; the last bytes, which fill no word,
    included.
    """
    compressor = made()
    packed = message.pack(
        [compressor.encode(torch.randn(3, 41, generator=torch.Generator().manual_seed(0)), 1)], HERE
    )
    for place in range(len(packed)):
        bad = packed.clone()
        bad[place] ^= 1 << place % 8
        with pytest.raises(UserError):
            message.Reader(bad, HERE)
    message.Reader(packed, HERE)
    # a longer buffer
    message.Reader(torch.cat([packed, torch.randint(0, 256, (99,), dtype=torch.uint8)]), HERE)


@given(st.binary(min_size=0, max_size=300))
def test_the_checksum_is_the_same_in_torch_and_compiled(data):
    words = torch.frombuffer(bytearray(data + bytes(4 - len(data) % 4)), dtype=torch.uint8).view(
        torch.int32
    )
    total = (
        sum(int(w) % 2**32 * ((i * 2654435761 % 2**32) | 1) for i, w in enumerate(words.tolist()))
        % 2**64
    )
    with pytest.MonkeyPatch.context() as patch:
        compiled = int(packing.checksum(words))
        patch.setattr(cpu, "numba", None)
        assert (
            compiled == int(packing.checksum(words)) == (total if total < 2**63 else total - 2**64)
        )


@given(st.binary(max_size=200))
def test_random_bytes_are_no_message(noise):
    with pytest.raises(UserError):
        message.Reader(torch.frombuffer(bytearray(noise or b"\0"), dtype=torch.uint8), HERE)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (message.Address(message.digest("another run"), 7, 2), "another configuration"),
        (
            message.Address(HERE.digest, 8, 2),
            "step 8, microbatch 2, where step 7, microbatch 2 was due",
        ),
        (message.Address(HERE.digest, 7, 1), "microbatch 1"),
    ],
)
def test_a_message_of_elsewhere_is_named(other, says):
    packed = message.pack([build({"kind": "sign"}).encode(torch.randn(2, 9))], other)
    with pytest.raises(UserError, match=says):
        message.Reader(packed, HERE)


def test_an_older_version_is_named():
    packed = message.pack([build({"kind": "sign"}).encode(torch.randn(2, 9))], HERE)
    packed[2] = 99
    with pytest.raises(UserError, match="version 99; this commsweep speaks 2"):
        message.Reader(packed, HERE)


@pytest.mark.parametrize("change", ["cut", "fewer", "more"])
def test_a_truncated_or_padded_message_is_refused(change):
    compressor = build({"kind": "topk", "ratio": 0.2})
    payload = compressor.encode(torch.randn(2, 50))
    packed = message.pack([payload, payload] if change == "more" else [payload], HERE)
    with pytest.raises(
        UserError, match={"cut": "damaged", "fewer": "fewer payloads", "more": "more in it"}[change]
    ):
        reader = message.Reader(packed[:-1] if change == "cut" else packed, HERE)
        reader.take(compressor, payload.shape)
        if change == "fewer":
            reader.take(compressor, payload.shape)
        reader.finish()


def test_places_outside_a_row_are_refused_and_never_followed():
    compressor = build({"kind": "topk", "ratio": 0.1})
    payload = compressor.encode(torch.randn(2, 100))  # 7 bits name places up to 127
    for places in (
        torch.full_like(payload.parts["places"], 255),
        torch.zeros_like(payload.parts["places"]),
    ):
        bad = Payload(
            payload.parts | {"places": places}, payload.shape, payload.dtype, payload.device
        )
        for call in (compressor.decode, compressor.mask):
            with pytest.raises(UserError, match="do not ascend within their row of 100"):
                call(bad)


def test_a_part_of_one_element_with_an_odd_stride_travels():
    """Torch calls it contiguous, and refuses to look at its bytes."""
    odd = torch.randn(4, 9)[:1, ::3][:, :1]
    assert odd.stride(-1) != 1
    payload = Payload({"values": odd}, odd.shape, odd.dtype, odd.device)
    packed = message.pack([payload], HERE)
    assert torch.equal(
        message.Reader(packed, HERE).take(build({"kind": "none"}), odd.shape).parts["values"], odd
    )
