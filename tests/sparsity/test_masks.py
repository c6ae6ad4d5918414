"""Masks in training: zeros stay zero, targets are met, updates choose what they say, and a resume
is bit-exact.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from commsweep.component import Component
from commsweep.config import Execution, override, record, run_id
from commsweep.config.sparsity import Sparsity
from commsweep.errors import UserError
from commsweep.registry import preset
from commsweep.sparsity.densities import live
from commsweep.sparsity.masks import chosen
from commsweep.store import Store
from commsweep.training.run import build, execute, trainer
from tests.helpers import linked, same_bits, tiny, tiny_text, trained

HOW = Execution("cpu")
MOVES = {
    "sparsity.phases.warmup.until": 0.4,
    "sparsity.phases.warmup.sparsity": 0.8,
    "sparsity.phases.warmup.shape": "linear",
    "sparsity.phases.ultra.until": 0.8,
    "sparsity.phases.ultra.sparsity": 0.9,
    "sparsity.phases.ultra.attention": "local_strided",
    "sparsity.phases.all": None,
    "sparsity.phases.restore.until": 1,
    "sparsity.phases.restore.sparsity": 0.2,
    "sparsity.width": 8,
    "sparsity.interval": 2,
    "sparsity.growth": "mixed",
}
FIXED = {"sparsity.phases.all.sparsity": 0.8, "sparsity.interval": 2}


class MessageStatistics(Component):
    """Looks at every step's end."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def after_step(self, moment):
        task = self.task[0]
        own, optimizer = task.components["sparsity"], task.optimizers().optimizer
        target = live(own.shapes, own.spec, own.schedule.target(moment.step))
        for mask, wanted in zip(own.masks, target, strict=True):
            assert mask.live == wanted == int((~mask.dead).sum())
            weight = mask.weight
            assert not weight[mask.dead].any() and (
                weight.grad is None or not weight.grad[mask.dead].any()
            )
            if own.spec.pruned_moments == "reset":
                for one in optimizer.state.get(weight, {}).values():
                    assert one.dim() == 0 or not one[mask.dead].any()
        self.seen += 1

    def before_exchange(self, moment):
        self.was = [mask.dead.clone() for mask in self.task[0].components["sparsity"].masks]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sparsity.growth": "gradient", "optim.kind": "sgd", "optim.lr": 0.1},
        {"sparsity.growth": "random"},
        {"sparsity.modules": "all"},
        {"sparsity.score": "mest"},
        {"sparsity.score": "sensitivity"},
        {"sparsity.score": "reciprocal"},
        {"sparsity.pruned_moments": "kept"},
        {"sparsity.update_steps": "skipped"},
        {"sparsity.regrow": True},
        {"sparsity.distribution": "uniform", "sparsity.initial_mask": "magnitude"},
        {"microbatches": 2},
        {"model.gradient_checkpointing": True},
        {"precision": "bfloat16"},
        {"fwd.compressor.kind": "topk", "bwd.compressor.kind": "topk", "fwd.feedback.kind": "ef"},
        {"grad.learners": 2},
        {"grad.learners": 2, "grad.compressor.kind": "live"},
        {
            "grad.learners": 2,
            "grad.compressor.kind": "topk",
            "grad.exchange": "allgather",
            "grad.feedback.kind": "ef",
        },
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_zeros_stay_zero_and_targets_are_met_after_every_step(changes):
    """Weights, gradients and moments; whatever takes part beside it, tied head and embedding
    included.
    """
    watch = MessageStatistics()
    task = trained(override(tiny_text(), MOVES | changes), watch)
    own = task.components["sparsity"]
    assert watch.seen == 16 and own.updates == 8 and task.train_loss < 5.7
    if "sparsity.modules" in changes:
        assert own.masks[-1].weight is task.model.get_input_embeddings().weight


def test_images_are_sparse_too():
    watch = MessageStatistics()
    task = trained(tiny(**{"sparsity.distribution": "erk"} | FIXED), watch)
    own = task.components["sparsity"]
    assert watch.seen and [one.name for one in own.network.products if one.head] == ["fc"]
    assert 0.19 < task.totals()["masks"]["density"] < 0.21


@pytest.mark.parametrize(
    "run", [tiny_text(), tiny(), tiny_text(grad__learners=2), tiny_text(microbatches=2)]
)
@pytest.mark.sampled(3)
@pytest.mark.parametrize("regrow", [False, True])
def test_sparsity_zero_is_bit_identical_to_no_section(run, regrow):
    plain, counted = (
        trained(run),
        trained(override(run, {"sparsity.interval": 3, "sparsity.regrow": regrow})),
    )
    for (name, a), b in zip(
        plain.model.state_dict().items(), counted.model.state_dict().values(), strict=True
    ):
        assert same_bits(a, b), name
    assert counted.totals()["masks"]["updates"] == 0
    again = override(override(run, {"sparsity.interval": 3}), {"sparsity": None})
    assert "sparsity" not in record(run) and run_id(again) == run_id(run)


# What an update chooses.


@given(
    numel=st.integers(4, 60),
    seed=st.integers(0, 999),
    score=st.sampled_from(("magnitude", "mest", "sensitivity", "reciprocal")),
    growth=st.sampled_from(("gradient", "random", "mixed")),
    regrow=st.booleans(),
)
def test_what_is_pruned_scores_least_and_what_grows_was_dead(numel, seed, score, growth, regrow):
    torch.manual_seed(seed)
    dead = torch.rand(numel) < 0.5
    weight, grad = torch.randn(numel).masked_fill(dead, 0.0), torch.randn(numel)
    alive = int((~dead).sum())
    prune = seed % (alive + 1)
    room = numel - alive + (prune if regrow else 0)
    grow = (seed * 7) % (room + 1)
    spec = Sparsity(score=score, growth=growth, regrow=regrow)
    pruned, grown = chosen(torch.nn.Parameter(weight), grad, dead, (prune, grow), spec, seed, 0, 5)
    assert int(pruned.sum()) == prune and int(grown.sum()) == grow
    assert not (pruned & dead).any()
    assert not (grown & ~dead & ~(pruned if regrow else dead)).any()
    value = {
        "magnitude": weight.abs(),
        "mest": weight.abs() + grad.abs(),
        "sensitivity": (weight * grad).abs(),
        "reciprocal": (weight / grad).abs(),
    }[score]
    kept = ~dead & ~pruned
    if prune and kept.any():
        assert value[pruned].max() <= value[kept].min()
    by_gradient = {"gradient": grow, "random": 0, "mixed": round(grow * 0.75)}[growth]
    candidates = (dead | pruned) if regrow else dead
    if by_gradient:
        least = grad.abs()[candidates].topk(by_gradient).values.min()
        assert int((grad.abs()[grown] >= least).sum()) >= by_gradient


def test_random_growth_is_a_function_of_seed_layer_and_step():
    weight, dead = torch.nn.Parameter(torch.zeros(1000)), torch.ones(1000, dtype=torch.bool)
    spec = Sparsity(growth="random")

    def grown(*place):
        return chosen(weight, None, dead, (0, 100), spec, *place)[1]

    assert torch.equal(grown(1, 2, 3), grown(1, 2, 3))
    assert (
        len(
            {
                tuple(grown(*place).nonzero().flatten().tolist())
                for place in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4))
            }
        )
        == 4
    )


def test_new_weights_begin_at_zero_and_what_was_ever_alive_is_counted():
    task = trained(override(tiny_text(), FIXED | {"sparsity.growth": "random"}))
    totals = task.totals()["masks"]
    moved = sum(mask.grown for mask in task.components["sparsity"].masks) / totals["weights"]
    assert totals["grown"] == moved > 0.2 and 0.2 + 0.5 * moved < totals["ever"] <= 0.2 + moved
    static = trained(override(tiny_text(), FIXED | {"sparsity.drop_fraction": 0})).totals()["masks"]
    assert (
        static["ever"] == static["density"] == pytest.approx(0.2, abs=1e-4)
        and static["updates"] == 0
    )


def test_skipped_steps_leave_all_weights_where_only_masks_move():
    """With `update_steps=skipped` an update prunes, grows and moves nothing else; beside it, it does."""
    held = {}

    class Held(Component):
        def before_exchange(self, moment):
            self.before = [p.detach().clone() for p in self.task[0].parameters()]

        def after_step(self, moment):
            own = self.task[0].components["sparsity"]
            if own.schedule.updates(moment.step):
                masked = {id(mask.weight) for mask in own.masks}
                held.setdefault(own.spec.update_steps, []).append(
                    all(
                        torch.equal(a, b)
                        for a, b in zip(self.before, self.task[0].parameters(), strict=True)
                        if id(b) not in masked
                    )
                )

    for how in ("skipped", "all"):
        trained(override(tiny_text(), FIXED | {"sparsity.update_steps": how}), Held())
    assert all(held["skipped"]) and not any(held["all"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"grad.learners": 2, "grad.compressor.kind": "live"}, marks=pytest.mark.slow),
        {
            "grad.learners": 2,
            "grad.exchange": "allgather",
            "grad.feedback.kind": "ef",
            "grad.compressor.kind": "topk",
        },
    ],
    ids=str,
)
def test_a_resumed_run_equals_an_uninterrupted_one(changes, tmp_path):
    """Interrupted between two updates, masks, moments, account and the share ever alive
    included.
    """
    run = override(
        linked({"kind": "topk", "ratio": 0.3}, None, {"kind": "ef"}, base=tiny_text),
        MOVES | changes,
    )
    straight = execute(run, Store(tmp_path / "a"), HOW)
    assert straight["status"] == "finished", straight["error"]
    assert straight["run"] == record(run)
    asked = iter((True,))
    with pytest.raises(KeyboardInterrupt):
        execute(
            run, Store(tmp_path / "b"), Execution("cpu", checkpoint_every=0), lambda: next(asked)
        )
    resumed = execute(run, Store(tmp_path / "b"), HOW)
    for key in ("metrics", "masks", "flops", "gradients"):
        assert resumed[key] == straight[key], key
    folders = [Store(tmp_path / name).folder(run_id(run)).metrics() for name in "ab"]
    assert [one["masks"] for one in folders[0]] == [one["masks"] for one in folders[1]]
    told = [one["masks"] for one in folders[0]]
    assert [step for one in told for step in one["steps"]] == [2, 4, 6, 8, 10, 12, 13, 15]
    assert (
        told[-1]["density"][-1] == pytest.approx([0.2 + 0.6] * 16, abs=0.3)
        and len(told[0]["ever"]) == 16
    )


def test_a_model_without_supported_layers_is_one_line(tmp_path):
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n\ndef net(sample, classes):\n    return nn.Sequential("
        "nn.Flatten(), nn.Linear(sample[0].numel(), classes))\n"
    )
    run = override(
        tiny(**{"model.cuts": []}), {"model.name": "own", "model.build": f"{tmp_path}/nets.py:net"}
    )
    with pytest.raises(
        UserError, match="beside the one that makes the logits; set sparsity.modules=all"
    ):
        build(override(run, {"sparsity.phases.all.sparsity": 0.5, "sparsity.interval": 1}), HOW)
    build(
        override(
            run,
            {
                "sparsity.phases.all.sparsity": 0.5,
                "sparsity.interval": 1,
                "sparsity.modules": "all",
            },
        ),
        HOW,
    )


def test_a_real_pipeline_refuses_masks_with_one_line(store, capsys):
    from commsweep.cli.main import main

    assert (
        main(
            ["pipeline", "synthetic_text", "sparsity.drop_fraction=0.1", "--store", str(store.root)]
        )
        == 2
    )
    assert (
        "sparsity does not go with a real pipeline: a stage does not move masks"
        in capsys.readouterr().err
    )


def test_it_learns(store):
    """Four fifths of the weights gone, the loss still falls to near the dense run's."""
    base = override(preset("synthetic_text"), {"epochs": 4, "eval_every": 4, "optim.lr": 3e-3})
    dense = execute(base, store, HOW)["metrics"]["test_on_loss"]
    sparse = execute(override(base, FIXED), store, HOW)["metrics"]["test_on_loss"]
    assert sparse < dense + 0.5


class Made(TorchDispatchMode):
    """Elements of every tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not any(out is one for one in args):
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize(
    "changes", [{}, {"grad.learners": 2, "grad.compressor.kind": "live"}], ids=str
)
def test_masks_make_nothing_of_their_size_between_updates(changes):
    """The bookkeeping of a plain step writes in place; an update of masks may allocate."""
    parts = build(override(tiny_text(), FIXED | {"sparsity.interval": 4} | changes), HOW)
    own, task = parts.task.components["sparsity"], parts.task
    made = {}

    def watched(inner, moment, *more):
        with Made() as mode:
            inner(moment, *more)
        made.setdefault(moment.step, []).extend(mode.sizes)

    for name in ("before_pass", "before_exchange", "after_backward", "after_step"):
        setattr(own, name, partial(watched, getattr(own, name)))
    trainer(task.run, parts, [], False).fit(task, parts.data.train, [])
    smallest = min(mask.dead.numel() for mask in own.masks)
    first = 1 if changes else 0  # the exchange hears of the first places once
    for step, sizes in made.items():
        if step >= first and not own.schedule.updates(step):
            assert max(sizes, default=0) < smallest, step
    assert max(made[4]) >= smallest  # an update does make some: the watch sees what there is


@pytest.mark.parametrize("regrow", [False, True])
def test_weights_that_grow_begin_without_moments(regrow):
    """Also those that the same update pruned. Steps of updates are left out, so that nothing is
    there since.
    """
    seen = []

    class Fresh(Component):
        def after_step(self, moment):
            own, optimizer = (
                self.task[0].components["sparsity"],
                self.task[0].optimizers().optimizer,
            )
            if own.schedule.updates(moment.step):
                for mask in own.masks:
                    new = ~mask.dead & (mask.weight == 0)
                    seen.append(int(new.sum()))
                    for one in optimizer.state[mask.weight].values():
                        assert one.dim() == 0 or not one[new].any()

    trained(
        override(
            tiny_text(),
            FIXED
            | {
                "sparsity.update_steps": "skipped",
                "sparsity.regrow": regrow,
                "sparsity.growth": "random",
                "sparsity.drop_fraction": 0.5,
            },
        ),
        Fresh(),
    )
    assert sum(seen) > 1000


def test_layers_that_share_a_weight_and_products_that_are_not_counted(tmp_path, capsys):
    (tmp_path / "nets.py").write_text("""
from torch import nn


def tied(sample, classes):
    a, b = nn.Linear(sample[0].numel(), sample[0].numel()), nn.Linear(sample[0].numel(), sample[0].numel())
    b.weight = a.weight
    return nn.Sequential(nn.Flatten(), a, b, nn.Linear(sample[0].numel(), classes))


def other(sample, classes):
    return nn.Sequential(nn.Flatten(2), nn.Conv1d(sample.shape[1], 8, 3), nn.Flatten(), nn.LazyLinear(16), nn.Linear(
        16, classes))
""")
    run = override(
        tiny(**{"model.cuts": []}),
        {
            "model.name": "own",
            "model.build": f"{tmp_path}/nets.py:tied",
            "sparsity.phases.all.sparsity": 0.5,
            "sparsity.interval": 1,
        },
    )
    with pytest.raises(UserError, match="sparsity: layer 2 shares its weight with another one"):
        build(run, HOW)
    build(override(run, {"model.build": f"{tmp_path}/nets.py:other"}), HOW)
    assert "products are in layers that are neither masked nor counted" in capsys.readouterr().err
