"""The GPU's kernels against the CPU's, bit for bit; where there is no GPU, through Triton's
interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commsweep import seeds
from commsweep.boundary.channel import Channel, Step
from commsweep.compressors import build, draws, thresholds
from commsweep.compressors.bits import pack
from commsweep.compressors.kernels import cpu, gpu, packing
from commsweep.config.links import Link
from commsweep.feedback import boundaries
from commsweep.feedback.memory import Keys
from tests.helpers import same_bits

pytestmark = pytest.mark.skipif(gpu.triton is None, reason="needs Triton")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOWLY = settings(max_examples=8)  # the interpreter takes its time
rows = st.integers(1, 4)
awkward = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 1e-42, 3e38, float("inf"), -float("inf"), float("nan")]
)


def made(data, n_rows: int, n: int, steps: int = 0) -> torch.Tensor:
    """Random rows: with few different values (ties), or some that are not numbers."""
    x = torch.randn(
        n_rows, n, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    )
    if data.draw(st.booleans()):
        x = (x * 3).round() / 3
    if data.draw(st.booleans()):
        for _ in range(3):
            x[data.draw(st.integers(0, n_rows - 1)), data.draw(st.integers(0, n - 1))] = data.draw(
                awkward
            )
    return x


def there(x: torch.Tensor) -> torch.Tensor:
    return x.to(HERE, copy=True)


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "shared out"]
)
def parted(request, monkeypatch):
    """Rows of more than 64 entries shared out among programs, as few very long ones are."""
    if request.param:
        monkeypatch.setattr(gpu, "PART", 64)


@SLOWLY
@given(rows, st.integers(1, 700), st.booleans(), st.data())
def test_topk_keeps_what_the_cpu_keeps(parted, n_rows, n, strict, data):
    x, k = made(data, n_rows, n), data.draw(st.integers(1, n))
    y, mask = gpu.topk_rows(there(x), k, strict, True)
    wanted, places = cpu.topk_rows(x, k, strict, True)
    assert same_bits(y.cpu(), wanted) and torch.equal(mask.cpu(), places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 1000, 20_000])
def test_rows_longer_than_a_block(dtype, k):
    x = torch.randn(2, 20_001).to(dtype)
    x[0, 5000:15000] = 0.25  # a threshold that thousands tie with, over several blocks
    y, mask = gpu.topk_rows(there(x), k, False, True)
    wanted, places = cpu.topk_rows(x.float(), k, False, True)
    assert same_bits(y.cpu(), wanted.to(dtype)) and torch.equal(mask.cpu(), places)


@SLOWLY
@given(rows, st.integers(2, 300) | st.sampled_from([8, 64, 1000]), st.booleans(), st.data())
def test_selected_values_and_places_are_the_cpus(parted, n_rows, n, as_mask, data):
    x, k = made(data, n_rows, n), data.draw(st.integers(1, n - 1))
    values, places = gpu.select(there(x), k, as_mask)
    wanted, where = packing.select(x, k, as_mask)
    assert same_bits(values.cpu(), wanted) and torch.equal(places.cpu(), where)
    if as_mask and n % 8 == 0:
        values, packed = gpu.message(there(x), k)
        assert same_bits(values.cpu(), wanted) and torch.equal(packed.cpu(), pack(where, 1))


@SLOWLY
@given(rows, st.integers(1, 300), st.sampled_from([gpu.EF, gpu.EF21]), st.data())
def test_feedback_in_the_selection_is_feedback_around_it(parted, n_rows, n, kind, data):
    x, memory, k = made(data, n_rows, n), made(data, n_rows, n), data.draw(st.integers(1, n))
    after = there(memory)
    y = gpu.topk_remembered(there(x), after, k, kind)
    u = memory + x if kind == gpu.EF else x - memory
    wanted, _ = cpu.topk_rows(u, k, False, False)
    left = u - wanted if kind == gpu.EF else memory + wanted
    for mine, theirs in ((y, wanted), (after, left)):
        mine = mine.cpu()
        assert torch.equal(mine.isnan(), theirs.isnan()) and same_bits(
            mine.nan_to_num(0.0), theirs.nan_to_num(0.0)
        )


@SLOWLY
@given(rows, st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_entries_above_a_threshold_are_the_cpus(n_rows, n, dtype, data):
    x, edge = made(data, n_rows, n).to(dtype), torch.rand(n_rows, 1)
    y, mask = gpu.above(there(x), there(edge))
    wanted, places = thresholds._above(x, edge, True)
    assert same_bits(y.cpu(), wanted) and torch.equal(mask.cpu(), places)


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "shared out"]
)
def long(request, monkeypatch):
    """Groups of more than 16 entries shared out among programs, as long ones are."""
    if request.param:
        monkeypatch.setattr(gpu, "_FEW", 16)
        monkeypatch.setattr(gpu, "_PARTS", 8)


@SLOWLY
@given(
    st.integers(1, 9),
    st.sampled_from([2, 8, 32, 100, 1024]),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from(["uniform", "fixed"]),
    st.booleans(),
    # Triton's interpreter cuts a bfloat16 off, where a GPU rounds it.
    st.sampled_from([torch.float32, torch.float16]),
    st.data(),
)
def test_grouped_codes_are_the_cpus(long, n_groups, group, bits, kind, drawn, dtype, data):
    if kind == "fixed" and drawn and bits == 1:
        bits = 2
    x = made(data, n_groups, group).to(dtype)
    compressor = build(
        {
            "kind": kind,
            "bits": bits,
            "scale": "group",
            "group": group,
            "rounding": "stochastic" if drawn else "nearest",
        }
    )
    wanted = compressor.apply(x, 7)
    start = seeds.start(7) if drawn else None
    y = gpu.grouped(there(x), bits, kind == "fixed", start).cpu()
    assert torch.equal(y.isnan(), wanted.isnan()) and same_bits(
        y.nan_to_num(0.0), wanted.nan_to_num(0.0)
    )
    if gpu.whole_bytes(group, bits):
        codes, scales = gpu.quantize(there(x), bits, kind == "fixed", start)
        told = compressor._encode(x, 7).parts
        assert same_bits(scales.cpu().nan_to_num(0.0), told["scales"].nan_to_num(0.0))
        good = wanted.isfinite().all(1)  # what is no number has no code that means anything
        assert torch.equal(codes.cpu().view(len(x), -1)[good], told["codes"].view(len(x), -1)[good])


@SLOWLY
@given(st.integers(0, 500), st.integers(1, 31), st.integers(0, 2**31))
def test_codes_are_packed_as_the_cpu_packs_them(count, bits, seed):
    codes = torch.randint(0, 2**bits, (count,), generator=torch.Generator().manual_seed(seed))
    packed = gpu.pack_codes(there(codes), bits)
    assert torch.equal(packed.cpu(), pack(codes, bits))
    assert torch.equal(gpu.unpack_codes(packed, bits, count).cpu(), codes)


@SLOWLY
@given(st.integers(0, 3000), st.integers(0, 2**63 - 1))
def test_draws_are_the_cpus(n, seed):
    made = gpu.draw_uniform(torch.empty(n, device=HERE), seeds.start(seed))
    assert torch.equal(made.cpu(), draws.uniform(torch.Size([n]), seed, torch.device("cpu")))


@SLOWLY
@given(st.integers(1, 2000), st.sampled_from([5, 50, 64, 500]), st.data())
def test_a_step_of_adacomp_is_the_cpus(n, size, data):
    e, d = made(data, 1, n)[0], made(data, 1, n)[0]
    mine = there(e)
    y, sent, empty = gpu.adacomp(mine, there(d), 1.0, size)
    wanted, count, silent = cpu.adacomp(e, d, 1.0, size)
    assert (int(sent), bool(empty)) == (count, silent)
    for a, b in ((y, wanted), (mine, e)):
        a = a.cpu()
        assert torch.equal(a.isnan(), b.isnan()) and same_bits(a.nan_to_num(0.0), b.nan_to_num(0.0))


def test_the_cpu_is_never_served_by_them():
    """Nor a tensor that stands for one on a GPU."""
    assert not gpu.usable(torch.randn(3))


@pytest.mark.parametrize("kind", ["ef", "ef21"])
@pytest.mark.parametrize("last", [False, True])
def test_a_channel_with_the_kernel_is_the_channel_without_it(kind, last, monkeypatch):
    """Messages, memories and bytes of several steps; the first one's residue is zero."""
    sample, lying = torch.Size([3, 4, 5]), torch.channels_last if last else torch.contiguous_format
    link = Link.model_validate(
        {"compressor": {"kind": "topk", "ratio": 0.2}, "feedback": {"kind": kind}}
    )

    def channel():
        step = Step(training=True, keys=Keys(torch.arange(4), HERE))
        return Channel(
            link, boundaries.build(link.feedback, sample, 4, 9, last), step, (0, 1), sample
        ).to(HERE)

    plain, fused = channel(), channel()
    called = []
    select = gpu.topk_remembered
    monkeypatch.setattr(gpu, "topk_remembered", lambda *args: called.append(1) or select(*args))
    for step in range(3):
        x = (
            torch.randn(4, *sample, generator=torch.Generator().manual_seed(step))
            .to(HERE)
            .contiguous(memory_format=lying)
        )
        monkeypatch.setattr(gpu, "usable", lambda x: False)
        wanted, _ = plain.cross(x)
        monkeypatch.setattr(gpu, "usable", lambda x: True)
        y, _ = fused.cross(x)
        assert same_bits(y, wanted) and y.stride() == wanted.stride()
        assert same_bits(fused.feedback.memory.state, plain.feedback.memory.state)
        assert y.data_ptr() != fused.feedback.memory.state.data_ptr()
    assert len(called) == 3 and fused.counts.total() == plain.counts.total()


COMPILED = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from commsweep.compressors.kernels import gpu

whole, number, sizes = "*i32", "*fp32", {"n": "i32", "bins": "i32"}
row = dict.fromkeys(("x", "y", "values", "columns", "memory"), whole) | {"mask": "*u8", "n": "i32", "k": "i32"}
flags = dict.fromkeys(("STRICT", "Y", "MASK", "VALUES", "COLUMNS", "PACKED"), True)
group = {"x": number, "out": number, "codes": "*u8", "scales": number, "groups": "i32", "n": "i32", "levels": "fp32",
         "start": "i64", "half": "i32"}
bins, wide = {"SIZE": 50, "ROWS": 32, "WIDE": 64}, {"ROWS": 64, "WIDE": 32}
asked = [
    *((gpu._select, row, flags | {"STRICT": kind == 0, "KIND": kind, "SHIFT": 0, "BLOCK": 8192}) for kind in range(3)),
    (gpu._select, row | dict.fromkeys(("x", "y", "values"), "*i16"), flags | {"KIND": 0, "SHIFT": 16, "BLOCK": 512}),
    *((gpu._tally, dict.fromkeys(("x", "memory", "counts", "state"), whole) | {"n": "i32", "blocks": "i32"},
       {"LOW": low, "BITS": bits, "PART": 16384, "KIND": 0, "SHIFT": 0, "BLOCK": 8192}) for low, bits in gpu.LEVELS[4]),
    *((gpu._settle, dict.fromkeys(("counts", "state", "scratch"), whole) | {"k": "i32", "blocks": "i32"},
       {"FIRST": bits == 7, "BITS": bits, "SOME": 32}) for bits in (7, 6, 5)),
    (gpu._positions, row | {"state": whole, "scratch": whole, "blocks": "i32"},
     flags | {"LOW": 0, "WIDE": 64, "PART": 16384, "STRICT": False, "KIND": 1, "SHIFT": 0, "BLOCK": 8192}),
    (gpu._grouped, group | {"x": "*bf16", "out": "*bf16"},
     wide | {"SYMMETRIC": False, "DRAWN": False, "PACKED": False, "BITS": 4}),
    *((gpu._grouped, group, wide | {"SYMMETRIC": one, "DRAWN": two, "PACKED": one, "BITS": 4})
      for one in (True, False) for two in (True, False)),
    (gpu._ranges, {"x": number, "ranges": number, "groups": "i32", "n": "i32", "blocks": "i32"},
     {"PART": 8192, "BLOCK": 4096}),
    *((gpu._coded, group | {"ranges": number, "blocks": "i32"}, {"SYMMETRIC": one, "DRAWN": two, "PACKED": one, "BITS": 4,
        "WIDE": 16, "PART": 8192, "BLOCK": 4096}) for one in (True, False) for two in (True, False)),
    (gpu._above, dict.fromkeys(("x", "edge", "y"), number) | {"mask": "*u8", "total": "i32", "n": "i32"},
     {"BLOCK": 1024}),
    (gpu._draws, {"out": number, "n": "i32", "start": "i64", "half": "i32"}, {"BLOCK": 1024}),
    (gpu._pack, {"codes": "*i64", "out": "*u8", "n": "i32", "total": "i32"}, {"BITS": 3, "TURNS": 4, "BLOCK": 1024}),
    (gpu._unpack, {"packed": "*u8", "out": "*i64", "count": "i32", "total": "i32"},
     {"BITS": 3, "TURNS": 2, "BLOCK": 1024}),
    (gpu._adacomp_tops, dict.fromkeys(("e", "d", "top"), number) | sizes, bins),
    (gpu._adacomp_send, dict.fromkeys(("e", "d", "top", "scale", "out"), number) | sizes | {
        "sent": "*i32", "ahead": "fp32"}, bins)]
for kernel, types, constants in asked:
    source = ASTSource(kernel, {**types, **dict.fromkeys(constants, "constexpr")},
                       {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, **gpu.FUSED})
    assert made.asm["cubin"] and "fma." not in made.asm["ptx"], kernel
print(len(asked))
"""


@pytest.mark.slow
def test_kernels_compile_for_an_h100_with_no_product_fused_with_a_sum():
    """The interpreter takes what the compiler would not; the compiler needs no GPU."""
    alone = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=alone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 29
