"""Ours: what is a message worth, and how much of it does a compressor keep? (claims Z)

Every training has its dense run and the control that sends nothing. The claims were committed
before the runs; the seeds are new, because other ones had been looked at.
"""

from __future__ import annotations

from commsweep.config import Run, override
from commsweep.launching.grid import seeds
from commsweep.registry import preset

from .recipe import MASK_2, TERN, code, kept_share, pair

FIRST = 20  # of the seeds
STEPS_400 = {"data.train_blocks": 6400}
STEPS_1600 = {"data.train_blocks": 25600}
EDEN = {"kind": "eden", "bits": 2}


def _controls(base: Run, side: str = "bwd") -> list[Run]:
    """Dense, nothing, and a running mean."""
    kind = f"{side}.compressor.kind"
    return [base, override(base, {kind: "zero"}), override(base, {kind: "mean"})]


def _backward(base: Run) -> list[Run]:
    """Gradients by TopK, in two bits three ways, as signs; TopK and signs with error feedback."""
    top, sign = pair(base, None, kept_share(0.1)), pair(base, None, {"kind": "sign"})
    remembered = {"bwd.feedback.kind": "ef"}
    return [
        top,
        pair(base, None, kept_share(0.5)),
        pair(base, None, code(2)),
        pair(base, None, code(2, "stochastic")),
        pair(base, None, EDEN),
        sign,
        override(top, remembered),
        override(sign, remembered),
    ]


def _forward(base: Run) -> list[Run]:
    """Activations: nothing, a running mean, TopK, two bits."""
    return [*_controls(base, "fwd")[1:], pair(base, kept_share(0.1)), pair(base, code(2))]


def floor_text() -> list[Run]:
    """A nano GPT-2, its head tied and untied, 400 steps, three seeds; TopK by its ratio."""
    base = override(preset("sotu_nano"), STEPS_400)
    untied = override(base, {"model.tied": False})
    arms = [pair(base, None, kept_share(0.7)), pair(base, None, TERN), *_forward(base)]
    tied = [*_controls(base), *_backward(base), *arms]
    return seeds([*tied, *_controls(untied)[:2], *_backward(untied)], 3, FIRST)


def floor_gru() -> list[Run]:
    """Two GRU layers: plain, as residuals, as residuals behind a norm; 400 steps, three seeds."""
    runs: list[Run] = []
    for name in ("gru", "gru-residual", "gru-prenorm"):
        changes = STEPS_400 | {"model.name": name, "model.stages": 2}
        base = override(preset("sotu_nano"), changes)
        arms = _backward(base)
        two_arms = [arms[0], arms[3]]  # of the one between: TopK 10 % and two unbiased bits
        runs += [*_controls(base)[:2], *(two_arms if name == "gru-residual" else arms)]
    return seeds(runs, 3, FIRST)


def floor_length() -> list[Run]:
    """The nano GPT-2 for 1,600 steps, and the recipe by its parts; three seeds."""
    base = override(preset("sotu_nano"), STEPS_1600)
    forward = pair(base, kept_share(0.2, 4))
    return seeds(
        [
            *_controls(base)[:2],
            pair(base, None, kept_share(0.1)),
            pair(base, None, code(2, "stochastic")),
            pair(base, kept_share(0.2, 4), MASK_2),
            forward,
            pair(base, kept_share(0.2, 4), {"kind": "forward_mask"}),
        ],
        3,
        FIRST,
    )


def floor_digits() -> list[Run]:
    """The small ResNet on digits, both directions, five seeds; minutes."""
    base = preset("digits")
    runs = [*_controls(base), *_backward(base), *_forward(base)]
    return seeds(runs, 5, FIRST)


def _at_rates(arms: list[tuple[Run, tuple[float, ...]]]) -> list[Run]:
    """Each arm at its learning rates: a last seed that chooses the rate, and three that judge."""
    runs = []
    for arm, rates in arms:
        runs += [override(arm, {"optim.lr": rate}) for rate in rates]
    return seeds(runs, 1, FIRST + 3) + seeds(runs, 3, FIRST)


def floor_rates() -> list[Run]:
    """Dense, nothing, TopK 10 % with error feedback: learning rates to both edges, 400 steps."""
    base = override(preset("sotu_nano"), STEPS_400)
    remembered = override(pair(base, None, kept_share(0.1)), {"bwd.feedback.kind": "ef"})
    return _at_rates(
        [
            (base, (0.005, 0.01, 0.02, 0.04)),
            (pair(base, None, {"kind": "zero"}), (0.0025, 0.005, 0.01, 0.02)),
            (remembered, (0.00016, 0.00031, 0.000625, 0.00125, 0.0025)),
        ]
    )


def floor_sgd() -> list[Run]:
    """The nano GPT-2 with SGD: dense, nothing and TopK 10 % at four learning rates, 400 steps."""
    base = override(preset("sotu_nano"), STEPS_400 | {"optim.kind": "sgd"})
    arms = [base, pair(base, None, {"kind": "zero"}), pair(base, None, kept_share(0.1))]
    return _at_rates([(arm, (0.02, 0.05, 0.1, 0.25)) for arm in arms])


def floor_images() -> list[Run]:
    """The control that sends nothing back, which `cifar_bias_jpeg` lacks, beside its arms."""
    base = preset("cifar_small_jpeg")
    arms = [
        base,
        pair(base, None, {"kind": "zero"}),
        pair(base, None, kept_share(0.1)),
        pair(base, None, code(2, "stochastic")),
        pair(base, None, code(2)),
    ]
    return seeds(arms, 3)


def floor_optimizers() -> list[Run]:
    """Is the harm AdamW's? The nano GPT-2 with AdamW at dense's best rate and with Muon, gradients
    and activations apart, 400 steps, five new seeds. Activations' control sends nothing back
    either.
    """
    runs: list[Run] = []
    for optimizer in ({"optim.lr": 0.01}, {"optim.kind": "muon"}):
        base = override(preset("sotu_nano"), STEPS_400 | optimizer)
        nothing = {"kind": "zero"}
        arms = [kept_share(0.1), code(2, "stochastic"), EDEN]
        runs += [base, pair(base, None, nothing), pair(base, nothing, nothing)]
        for arm in arms:
            runs += [pair(base, None, arm), pair(base, arm)]
        for side, run in (("bwd", pair(base, None, arms[0])), ("fwd", pair(base, arms[0]))):
            runs.append(override(run, {f"{side}.feedback.kind": "ef"}))
    return seeds(runs, 5, 60)


def floor_finetune() -> list[Run]:
    """SmolLM2-135M fine-tuned for 40 steps, gradients and activations apart, three seeds; and the
    untouched model, which is the training at rate 0. Two hours and a half of a core.
    """
    half = {"data.batch_size": 2, "data.train_blocks": 80}
    base = override(preset("wikitext_small"), half)
    nothing, top = {"kind": "zero"}, kept_share(0.1)
    arms = [top, code(2, "stochastic"), EDEN]
    runs = [base, pair(base, None, nothing)]
    for arm in arms:
        runs += [pair(base, None, arm), pair(base, arm)]
    runs.append(override(pair(base, None, top), {"bwd.feedback.kind": "ef"}))
    runs.append(override(pair(base, top), {"fwd.feedback.kind": "ef"}))
    runs.append(pair(base, nothing, nothing))
    untouched = override(base, {"optim.lr": 0.0})
    return seeds([untouched], 1, 70) + seeds(runs, 3, 70)


def floor_warm() -> list[Run]:
    """Does a dense start save it? The nano GPT-2 with AdamW at dense's best rate and with Muon:
    gradients are compressed, or not sent, from step 200 of 400 on; three new seeds.
    """
    runs: list[Run] = []
    for optimizer in ({"optim.lr": 0.01}, {"optim.kind": "muon"}):
        base = override(preset("sotu_nano"), STEPS_400 | optimizer)
        top = pair(base, None, kept_share(0.1))
        late = [
            pair(base, None, {"kind": "zero"}),
            top,
            override(top, {"bwd.feedback.kind": "ef"}),
            pair(base, None, code(2, "stochastic")),
            pair(base, None, EDEN),
        ]
        runs += [base, late[0]]
        runs += [override(run, {"bwd.start_step": 200}) for run in late]
    return seeds(runs, 3, 65)


SWEEPS = {
    "floor_text": floor_text,
    "floor_gru": floor_gru,
    "floor_length": floor_length,
    "floor_digits": floor_digits,
    "floor_rates": floor_rates,
    "floor_sgd": floor_sgd,
    "floor_images": floor_images,
    "floor_optimizers": floor_optimizers,
    "floor_finetune": floor_finetune,
    "floor_warm": floor_warm,
}
