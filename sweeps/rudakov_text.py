"""arXiv 2401.07788, the language-model section, and what it lacks: all methods at equal bytes.

The same grids serve a nano GPT-2 on the embedded corpus in minutes and GPT-2 small on a GPU.
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.config.training import GPT2_SIZES, TextSet
from commsweep.launching.grid import in_bfloat16, product, seeds, union
from commsweep.registry import preset

LEVELS = (0.5, 0.3, 0.2, 0.1, 0.05, 0.02)
KINDS = "fwd.compressor.kind+bwd.compressor.kind"
RATIOS = "fwd.compressor.ratio+bwd.compressor.ratio"
FLOAT = 4  # bytes of a value


def shared(base: Run, levels: tuple[float, ...] = LEVELS, kind: str = "topk") -> list[Run]:
    """TopK over whole sequences; the gradient is kept where the activation was."""
    return product(
        base,
        {
            "fwd.compressor.kind": (kind,),
            "bwd.compressor.kind": ("forward_mask",),
            "fwd.compressor.ratio": levels,
        },
    )


def separate(base: Run, levels: tuple[float, ...] = LEVELS, kind: str = "topk") -> list[Run]:
    """TopK over whole sequences; the gradient has a TopK of its own."""
    return product(base, {KINDS: (kind,), RATIOS: levels})


def matched(base: Run, width: int, share: float = 1 / 8) -> list[Run]:
    """Every method with its parameters set so that both ways together cost `share` of the dense
    bytes, within 8 %.

    `width`: features of a token. A test holds the bytes of executed runs against `share`.
    """
    budget = FLOAT * width * share  # bytes of a token one way
    assert isinstance(base.data, TextSet)
    tokens = base.data.block_size * base.data.batch_size
    row = (base.data.block_size * width - 1).bit_length() / 8  # bytes of an index into a sequence
    column = (width - 1).bit_length() / 8  # ... into a token

    def arm(fwd: dict, bwd: dict | None = None) -> Run:
        return override(
            base,
            {
                f"{side}.compressor.{key}": value
                for side, spec in (("fwd", fwd), ("bwd", bwd or fwd))
                for key, value in spec.items()
            },
        )

    mask, dense = {"kind": "forward_mask"}, {"kind": "none"}

    def entries(both: float, values: int, index: float) -> float:
        """Entries of a token that fit: each `values` bytes and its place, an index or a bit of
        every entry.
        """
        return max(both / (values + index), (both - width / 8) / values)

    # values go both ways, the places once
    one_mask = int(entries(2 * budget, 2 * FLOAT, column)) / width
    own_mask = int(entries(budget, FLOAT, column)) / width
    tile = 32
    # TAH: share s of high bits so that (3 + s) bits, a 2-byte scale and a flag a tile, and a flag a
    # token fill it.
    tah = (8 * budget - 1 - width / tile * 17) / width - 3
    rank = max(1, int(budget / FLOAT / (1 + width / tokens)))
    arms = [
        arm({"kind": "topk", "ratio": round(entries(2 * budget, 2 * FLOAT, row) / width, 4)}, mask),
        arm({"kind": "topk", "ratio": one_mask, "scope": "last"}, mask),
        arm({"kind": "topk", "ratio": own_mask, "scope": "last"}),
        arm({"kind": "randtopk", "ratio": one_mask, "scope": "last"}, mask),
        arm({"kind": "fixed", "bits": 4, "scale": "sample"}),
        arm({"kind": "fixed", "bits": 3, "scale": "group", "group": 32}),
        arm({"kind": "lowrank", "rank": rank}),
        arm({"kind": "bottleneck", "width": int(budget / FLOAT)}, dense),
        arm({"kind": "subspace", "width": int(budget / FLOAT)}, dense),
    ]
    if 0 <= tah <= 1:
        arms.append(arm({"kind": "tah", "tile": tile, "high_share": round(tah - 0.005, 2)}))
    return arms


def demo_text() -> list[Run]:
    """TopK by level and mask, and ten methods at an eighth of the bytes, on the embedded corpus
    (`make demo-text`).
    """
    base = preset("sotu_nano")
    grid = union(
        [base], shared(base), separate(base, LEVELS[:4]), matched(base, GPT2_SIZES["gpt2-nano"][1])
    )
    close = [base, *shared(base, (0.3, 0.2))]  # the differences of claim C7 are small
    return seeds(grid, 3) + seeds(close, 2, first=3)


def smoke_text() -> list[Run]:
    """The demo's methods on the tests' twin, one seed: seconds."""
    base = preset("synthetic_text")
    return union(
        [base],
        shared(base, (0.3, 0.1)),
        separate(base, (0.1,)),
        matched(base, GPT2_SIZES["gpt2-nano"][1]),
    )


def gpt2_paper() -> list[Run]:
    """The authors' fine-tuning of GPT-2 on WikiText-2 with shared and with separate masks, 3
    seeds.
    """
    paper = preset("gpt2_paper")
    dense = override(paper, {KINDS.split("+")[0]: "none", KINDS.split("+")[1]: "none"})
    return seeds(
        union([dense], shared(dense, kind="topk_strict"), separate(dense, kind="topk_strict")), 3
    )


def gpt2_paper_bf16() -> list[Run]:
    """`gpt2_paper` in bfloat16."""
    return in_bfloat16(gpt2_paper())


def gpt2_aqsgd() -> list[Run]:
    """AQ-SGD's protocol beside the same codes without memory and the uncompressed run, 3 seeds."""
    paper = preset("gpt2_aqsgd")
    plain = override(paper, {"fwd.feedback.kind": "none"})
    dense = override(
        plain,
        {
            "fwd.compressor.kind": "none",
            "bwd.compressor.kind": "none",
            "fwd.start_epoch": 0,
            "bwd.start_epoch": 0,
        },
    )
    return seeds([dense, plain, paper], 3)


def gpt2_matched() -> list[Run]:
    """All methods at an eighth of the bytes, GPT-2 small from scratch, 3 seeds."""
    base = preset("gpt2_scratch")
    return seeds(union([base], matched(base, GPT2_SIZES["gpt2"][1])), 3)


def wikitext_small() -> list[Run]:
    """C7 and C8 on a pretrained model: SmolLM2-135M on WikiText-2, 3 seeds (of the order of the
    blocks: dropout is off); two hours and a half of a core.
    """
    base = preset("wikitext_small")
    return seeds(union([base], shared(base, (0.3, 0.2, 0.1)), separate(base, (0.2, 0.1))), 3)


def finetune() -> list[Run]:
    """SmolLM2-135M for some tens of steps, uncompressed and with four methods (`make
    demo-finetune`).
    """
    base = preset("smollm2")
    return union(
        [base],
        shared(base, (0.1,)),
        separate(base, (0.1,)),
        product(
            base,
            {
                KINDS: ("fixed",),
                "fwd.compressor.scale+bwd.compressor.scale": ("last",),
                "fwd.compressor.bits+bwd.compressor.bits": (4,),
            },
        ),
    )


SWEEPS = {
    "demo-text": demo_text,
    "smoke-text": smoke_text,
    "gpt2_paper": gpt2_paper,
    "gpt2_paper_bf16": gpt2_paper_bf16,
    "gpt2_aqsgd": gpt2_aqsgd,
    "gpt2_matched": gpt2_matched,
    "wikitext_small": wikitext_small,
    "finetune": finetune,
}
