"""Learners that train apart: equal to plain loops of DiLoCo, Streaming DiLoCo and delayed
averaging, and to the laws of facts: data-parallel SGD, plain training, independent training, equal
weights, bytes, resumes, real processes.
"""

from __future__ import annotations

import copy

import pytest
import scipy.fft
import torch
from torch import nn

from commsweep import seeds
from commsweep.cli.main import main
from commsweep.config import Execution, override, record
from commsweep.config.execution import LearnerWiring
from commsweep.config.outer import Outer
from commsweep.config.override import parse
from commsweep.data_parallel.outer.demo import SignStep
from commsweep.data_parallel.outer.noloco import pairs
from commsweep.data_parallel.outer.roles import MERGES, OuterSGD, Role
from commsweep.data_parallel.outer.streaming import fragments
from commsweep.errors import UserError
from commsweep.processes import ddp
from commsweep.store import Store
from commsweep.training.run import build, execute, trainer
from tests.helpers import resumed, same_bits, tiny, tiny_text, trained

HOW = Execution("cpu")
PLAIN = {
    "optim.kind": "sgd",
    "optim.momentum": 0.0,
    "optim.weight_decay": 0.0,
    "optim.lr": 0.1,
    "schedule.kind": "constant",
}
SLOW = pytest.mark.slow


def apart(base=None, learners=2, **outer):
    """A perceptron of two epochs of four steps, whose learners train apart."""
    made = base or tiny(
        model__name="mlp", **{key.replace(".", "__"): value for key, value in PLAIN.items()}
    )
    return override(
        made,
        {"grad.learners": learners} | {f"grad.outer.{key}": value for key, value in outer.items()},
    )


def weights(task):
    return {name: p.detach().clone() for name, p in task.model.named_parameters()}


def far(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def by_hand(run, optimizer, turned=False):
    """Streaming DiLoCo as arXiv 2501.18512, algorithm 2, has it, on whole copies of a model;
    (common weights, those of the learners). optimizer: makes an inner one. turned: each learner
    adds up its rows in the opposite order, which changes nothing but rounding.
    """
    torch.set_num_threads(1)
    outer, n = run.grad.outer, run.grad.learners
    parts = build(run, HOW)
    reference = parts.task.model
    models = [copy.deepcopy(reference) for _ in range(n)]
    inner = [optimizer(model.parameters()) for model in models]
    sgd = torch.optim.SGD(
        reference.parameters(), outer.rate, outer.momentum, nesterov=outer.momentum > 0
    )
    names = [name for name, _ in reference.named_parameters()]
    parts_of, waiting, steps, total = (
        fragments(names, outer),
        {},
        0,
        len(parts.data.train) * run.epochs,
    )
    for epoch in range(run.epochs):
        parts.data.train.set_epoch(epoch)
        for x, y, _ in parts.data.train:
            for model, opt, rows in zip(models, inner, torch.arange(len(y)).chunk(n), strict=True):
                opt.zero_grad()
                rows = rows.flip(0) if turned else rows
                out = model(x[rows])
                logits = getattr(out, "logits", out)
                loss = nn.functional.cross_entropy(logits, y[rows])
                loss.backward()
                opt.step()
            steps += 1
            for every, name in (
                (outer.first_moment, "exp_avg"),
                (outer.second_moment, "exp_avg_sq"),
            ):
                if every and steps % every == 0:
                    states = [[one.state[p][name] for p in one.state] for one in inner]
                    for column in zip(*states, strict=True):
                        together = sum(column) / n
                        for moment in column:
                            moment.copy_(together)
            for number, (offset, among) in enumerate(parts_of):

                def use(number=number, among=among):
                    moved, sent = waiting.pop(number)[1:]
                    own = [list(model.parameters()) for model in models]
                    for place, p in enumerate(reference.parameters()):
                        p.grad = (
                            None if place not in among else sum(one[place] for one in moved) / n
                        )
                    sgd.step()
                    with torch.no_grad():
                        for place in among:
                            common = list(reference.parameters())[place]
                            for m in range(n):
                                theta = own[m][place]
                                theta.copy_(
                                    common + theta - sent[m][place]
                                    if outer.local_update == "add"
                                    else outer.local_share * theta
                                    + (1 - outer.local_share) * common
                                )

                if number in waiting and (waiting[number][0] == steps or steps == total):
                    use()
                if steps == total or (steps > offset and (steps - offset) % outer.interval == 0):
                    sent = [
                        {place: p.detach().clone() for place, p in enumerate(model.parameters())}
                        for model in models
                    ]
                    moved = [
                        {
                            place: p.detach() - one[place]
                            for place, p in enumerate(reference.parameters())
                        }
                        for one in sent
                    ]
                    waiting[number] = steps + outer.overlap, moved, sent
                    if steps == total or not outer.overlap:
                        use()
    return dict(reference.named_parameters()), [dict(model.named_parameters()) for model in models]


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01, (0.9, 0.99), weight_decay=0.1)


ADAMW = {
    "optim.kind": "adamw",
    "optim.lr": 0.01,
    "optim.beta2": 0.99,
    "optim.weight_decay": 0.1,
    "optim.clip": 0.0,
    "schedule.kind": "constant",
}


@pytest.mark.parametrize(
    "outer",
    [
        {"interval": 3},
        {"interval": 2, "rate": 1.0, "momentum": 0.0},
        {"interval": 3, "nesterov": True, "momentum": 0.5},
        {"interval": 3, "fragments": 2},
        {"interval": 4, "fragments": 2, "overlap": 1, "local_share": 0.5},
        {"interval": 3, "overlap": 2, "local_share": 0.25},
        {"interval": 3, "overlap": 2, "local_update": "add", "rate": 1.0, "momentum": 0.0},
    ],
)
@pytest.mark.parametrize(
    ("changes", "optimizer"), [(PLAIN, sgd), (ADAMW, adamw)], ids=["sgd", "adamw"]
)
def test_it_is_the_published_rule(outer, changes, optimizer):
    run = apart(override(tiny(model__name="mlp"), changes), learners=4, **outer)
    common, _ = by_hand(run, optimizer)
    assert far({name: p.detach() for name, p in common.items()}, weights(trained(run))) < 1e-5


DESLOC = {"interval": 2, "first_moment": 3, "second_moment": 4}


def test_moments_are_averaged_at_their_own_intervals():
    """DES-LOC beside a plain loop; each interval changes what is learnt."""
    base = override(tiny(model__name="mlp"), ADAMW)
    run = apart(base, learners=4, **DESLOC)
    # Adam divides a gradient that is zero but for rounding by its own size: such a weight differs
    # between two orders of the same sum, by processor, and says nothing.
    common, turned = (by_hand(run, adamw, turned)[0] for turned in (False, True))
    learned, left_out, entries = weights(trained(run)), 0, 0
    for name, p in common.items():
        wanted = p.detach()
        decided = (wanted - turned[name].detach()).abs() < 1e-6
        assert float(((learned[name] - wanted).abs() * decided).max()) < 1e-5, name
        left_out, entries = left_out + int((~decided).sum()), entries + wanted.numel()
    assert left_out <= 0.02 * entries
    for left in DESLOC:
        fewer = {name: every for name, every in DESLOC.items() if name != left}
        other = apart(base, learners=4, **fewer)
        assert far(weights(trained(run)), weights(trained(other))) > 1e-4


def test_moments_cost_as_many_bytes_as_weights_each_time():
    base = override(tiny(model__name="mlp"), ADAMW)
    rare, often = (
        trained(apart(base, interval=4, **more)).components["learners"].exchange.ledger.totals()
        for more in ({}, {"first_moment": 4, "second_moment": 8})
    )
    # Eight steps: two exchanges of weights, then two of first moments and one of second ones.
    assert often["up"] == pytest.approx(2.5 * rare["up"])


def test_muon_and_momentum_have_first_moments():
    for changes in (
        PLAIN | {"optim.momentum": 0.9},
        {"optim.kind": "muon", "schedule.kind": "constant"},
    ):
        base = override(tiny(model__name="mlp"), changes)
        with_, without = (
            weights(trained(apart(base, interval=4, **more))) for more in ({"first_moment": 2}, {})
        )
        assert far(with_, without) > 1e-6


def test_one_step_between_exchanges_is_data_parallel_sgd():
    """Law 1: eta 1, mu 0, H 1, plain SGD inside; what is left is the rounding of ref - (ref - lr
    g).
    """
    together = trained(override(apart(interval=1), {"grad.outer": None}))
    assert (
        far(weights(together), weights(trained(apart(interval=1, rate=1.0, momentum=0.0)))) < 1e-6
    )


def test_one_learner_is_plain_training():
    """Law 2."""
    plain = trained(override(apart(), {"grad.outer": None, "grad.learners": 1}))
    for interval in (1, 3, 8):
        one = trained(apart(learners=1, interval=interval, rate=1.0, momentum=0.0))
        assert far(weights(plain), weights(one)) < 1e-6
    # and with momentum it is not
    assert far(weights(plain), weights(trained(apart(learners=1, interval=3)))) > 1e-4


def test_local_steps_are_a_case_of_it():
    """H plain steps on H parts of a batch, whose sum the optimizer's momentum acts on, are H
    batches, plain SGD inside and that momentum outside.
    """
    steps = tiny(
        model__name="mlp", **{key.replace(".", "__"): value for key, value in PLAIN.items()}
    )
    local = override(steps, {"grad.local_steps": 4, "optim.momentum": 0.9})
    outer = override(
        apart(steps, learners=1, interval=4, rate=1.0, momentum=0.9, nesterov=False),
        {"data.batch_size": local.data.batch_size // 4},
    )
    assert far(weights(trained(local)), weights(trained(outer))) < 1e-5
    assert far(weights(trained(local)), weights(trained(steps))) > 1e-3


def test_who_keeps_everything_trains_alone():
    """Law 4: every learner's weights are those of a training on its own rows."""
    task = trained(apart(interval=3, local_share=1.0, overlap=1, fragments=2))
    _, alone = by_hand(apart(interval=3, local_share=1.0, overlap=1, fragments=2), sgd)
    learners = task.components["learners"]
    for own, wanted in zip(learners._own, alone, strict=True):
        assert (
            far(
                dict(zip(wanted, own, strict=True)),
                {name: p.detach() for name, p in wanted.items()},
            )
            < 1e-6
        )


def test_after_an_exchange_all_weights_are_equal_and_before_it_they_are_not():
    """Law 5, at every step of a training; the common weights are what is scored."""
    run = apart(interval=3)
    parts, seen = build(run, HOW), []
    learners = parts.task.components["learners"]
    after = learners.after_step

    def look(moment):
        after(moment)
        equal = [
            all(same_bits(a, b) for a, b in zip(*learners._own, strict=True)),
            all(
                same_bits(a, b.data)
                for a, b in zip(learners._own[0], learners.references[0], strict=True)
            ),
        ]
        seen.append(equal)

    learners.after_step = look
    trainer(run, parts, [], False).fit(parts.task, parts.data.train, parts.data.val_dataloader())
    steps = len(seen)
    assert seen == [[(n + 1) % 3 == 0 or n + 1 == steps] * 2 for n in range(steps)]
    assert all(
        same_bits(p.data, one.data)
        for p, one in zip(learners.trained, learners.references[0], strict=True)
    )


def test_bytes_are_those_of_the_fragments_sent():
    """Law 6: a learner sends every fragment once an interval, and once more at the end."""
    run = apart(interval=4, fragments=2)
    task = trained(run)
    learners = task.components["learners"]
    steps, dense = task.global_step, [layer.dense_bytes for layer in learners.exchange.layers]
    sent = sum(
        (sum(1 for n in range(1, steps) if n > offset and (n - offset) % 4 == 0) + 1)
        * sum(dense[place] for place in among)
        for offset, among in learners.fragments
    )
    totals = task.totals()["gradients"]
    assert totals["up"] == pytest.approx(sent / steps) and totals["rate"] == pytest.approx(
        sum(dense) * steps / sent
    )
    assert sorted(place for _, among in learners.fragments for place in among) == list(
        range(len(dense))
    )


def test_fragments_are_strided_blocks_and_the_rest():
    names = [
        "wte.weight",
        *(f"h.{n}.{part}" for n in range(5) for part in ("attn.1.weight", "mlp.bias")),
        "ln.weight",
    ]
    made = fragments(names, Outer(interval=30, fragments=2))
    assert [[names[place] for place in own] for _, own in made] == [
        [f"h.{n}.{part}" for n in own for part in ("attn.1.weight", "mlp.bias")]
        for own in ((0, 2, 4), (1, 3))
    ] + [["wte.weight", "ln.weight"]]
    assert [offset for offset, _ in made] == [0, 10, 20]
    with pytest.raises(UserError, match="the model has 5 blocks"):
        fragments(names, Outer(fragments=6))


COMPRESSED = {
    "grad.exchange": "allgather",
    "grad.compressor.kind": "topk",
    "grad.compressor.ratio": 0.1,
    "grad.feedback.kind": "ef",
}


@pytest.mark.parametrize(
    "base",
    [
        apart(tiny(), interval=3),
        apart(override(tiny(), COMPRESSED), interval=3, overlap=2, local_share=0.5),
        apart(
            override(tiny_text(epochs=2, grad__learners=2), COMPRESSED),
            interval=5,
            fragments=2,
            overlap=3,
            local_update="add",
        ),
        apart(learners=4, interval=3, peers="pairs", overlap=2),
        apart(override(tiny(model__name="mlp"), ADAMW), **DESLOC),
        apart(override(tiny(), COMPRESSED), learners=4, interval=3, eager=True),
    ],
    ids=["resnet", "overlap", "text", "pairs", "moments", "eager"],
)
def test_a_resumed_run_is_the_same(base, tmp_path):
    """Law 7: stopped after an epoch, in the middle of a round and of an overlap, and continued."""
    torch.set_num_threads(1)
    whole = execute(base, Store(tmp_path / "whole"), HOW)
    parts = resumed(base, tmp_path / "parts")
    assert parts["metrics"] == whole["metrics"] and parts["gradients"] == whole["gradients"]


@SLOW
@pytest.mark.parametrize(
    "name", ["streaming", "dense", "text", "pairs", "sent", "moments", "eager"]
)
def test_processes_equal_the_simulation_bit_for_bit(name, tmp_path):
    run = {
        "streaming": apart(
            override(tiny(epochs=1, eval_every=1), COMPRESSED),
            interval=2,
            fragments=2,
            overlap=1,
            local_share=0.5,
        ),
        "dense": apart(tiny(epochs=1, eval_every=1), interval=3),
        "pairs": apart(tiny(epochs=1, eval_every=1), learners=4, interval=3, peers="pairs"),
        "eager": apart(
            override(tiny(epochs=1, eval_every=1), COMPRESSED), interval=2, fragments=2, eager=True
        ),
        "moments": apart(override(tiny(epochs=1, eval_every=1), ADAMW), **DESLOC),
        "sent": apart(
            override(tiny(epochs=1, eval_every=1), RANDOM),
            interval=1,
            rate=1.0,
            momentum=0.0,
            local_update="sent",
        ),
        "text": apart(override(tiny_text(grad__learners=2), COMPRESSED), interval=4),
    }[name]
    (row,), simulated = ddp.execute([(run, LearnerWiring())], Store(tmp_path), HOW), trained(run)
    assert row["weights"] == ddp.digest(simulated.model.state_dict())
    assert {key: row["metrics"][key] for key in simulated.scores} == simulated.scores
    assert row["run"] == record(run)


def rows_of(run, use, exchange):
    """A plain loop over the learners' models, with SGD inside; `use(models, step)` after every
    exchange's step.
    """
    torch.set_num_threads(1)
    parts, n, steps = build(run, HOW), run.grad.learners, 0
    models = [copy.deepcopy(parts.task.model) for _ in range(n)]
    total = len(parts.data.train) * run.epochs
    for epoch in range(run.epochs):
        parts.data.train.set_epoch(epoch)
        for x, y, _ in parts.data.train:
            for model, rows in zip(models, torch.arange(len(y)).chunk(n), strict=True):
                model.zero_grad()
                nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(0.1 * p.grad)
            steps += 1
            if steps % exchange == 0 or steps == total:
                with torch.no_grad():
                    use(models, steps - 1)
    return {
        name: sum(dict(model.named_parameters())[name].detach() for model in models) / n
        for name, _ in models[0].named_parameters()
    }


def test_what_is_recorded_is_read_again():
    run = apart(momentum=0.0)
    assert run.grad.outer.nesterov is False and parse(record(run)) == run
    with pytest.raises(UserError, match=r"set grad\.outer\.nesterov=false"):
        apart(momentum=0.0, nesterov=True)


def test_pairs_are_the_published_rule():
    """NoLoCo as its code has it: m <- mu m + eta mean(delta) + eta (mean(s) - s); s <- s + m; theta
    <- s.
    """
    run = apart(learners=4, interval=3, rate=0.7, momentum=0.5, nesterov=False, peers="pairs")
    slow = [
        {name: p.detach().clone() for name, p in build(run, HOW).task.model.named_parameters()}
        for _ in range(4)
    ]
    momentum = [{name: torch.zeros_like(p) for name, p in own.items()} for own in slow]
    met = []

    def use(models, step):
        partners = pairs(4, seeds.draw(seeds.PAIRS, run.seed, step))
        met.append(partners)
        before = [{name: p.clone() for name, p in own.items()} for own in slow]
        for m in range(4):
            for name in slow[m]:
                both = (m, partners[m])
                delta = (
                    sum(dict(models[k].named_parameters())[name] - before[k][name] for k in both)
                    / 2
                )
                level = sum(before[k][name] for k in both) / 2
                momentum[m][name] = (
                    0.5 * momentum[m][name] + 0.7 * delta + 0.7 * (level - before[m][name])
                )
        for own, moved in zip(slow, momentum, strict=True):
            for name in own:
                own[name] += moved[name]
        for model, own in zip(models, slow, strict=True):
            for name, p in model.named_parameters():
                p.copy_(own[name])

    wanted, task = rows_of(run, use, 3), trained(run)
    assert far(wanted, weights(task)) < 1e-5 and len({tuple(one) for one in met}) > 1
    own = task.components["learners"]._own
    assert not all(same_bits(a, b) for a, b in zip(own[0], own[1], strict=True))  # they stay apart
    gradients, steps = task.totals()["gradients"], task.global_step
    assert (
        gradients["up"] == gradients["learner_sends"] == len(met) * 2 * gradients["dense"] / steps
    )


def test_eager_updates_are_the_published_rule():
    """Own share at once, the others' an exchange later; after the last one everything."""
    run = apart(learners=4, interval=3, rate=0.7, momentum=0.5, nesterov=False, eager=True)
    slow = [
        {name: p.detach().clone() for name, p in build(run, HOW).task.model.named_parameters()}
        for _ in range(4)
    ]
    momentum = [{name: torch.zeros_like(p) for name, p in own.items()} for own in slow]
    late = [{name: torch.zeros_like(p) for name, p in own.items()} for own in slow]

    def use(models, step):
        moved = [
            {name: own[name] - p.detach() for name, p in model.named_parameters()}
            for own, model in zip(slow, models, strict=True)
        ]
        for m in range(4):
            for name in slow[m]:
                others = sum(moved[k][name] for k in range(4) if k != m) / 4
                used = moved[m][name] / 4 + late[m][name] + (others if step == 7 else 0)
                late[m][name] = others
                momentum[m][name] = 0.5 * momentum[m][name] + used
                slow[m][name] -= 0.7 * momentum[m][name]
        for model, own in zip(models, slow, strict=True):
            for name, p in model.named_parameters():
                p.copy_(own[name])

    wanted, task = rows_of(run, use, 3), trained(run)
    assert far(wanted, weights(task)) < 1e-5
    assert far(wanted, weights(trained(apart(interval=3, learners=4)))) > 1e-3
    own = task.components["learners"]._own
    assert not all(same_bits(a, b) for a, b in zip(own[0], own[1], strict=True))


def test_one_eager_learner_is_diloco():
    settings = {"interval": 3, "rate": 0.7}
    wanted = weights(trained(apart(learners=1, **settings)))
    assert far(weights(trained(apart(learners=1, eager=True, **settings))), wanted) < 1e-6


def test_two_learners_in_pairs_are_diloco_without_nesterov():
    settings = {"interval": 3, "rate": 0.7, "momentum": 0.5, "nesterov": False}
    together, paired = trained(apart(**settings)), trained(apart(**settings, peers="pairs"))
    assert far(weights(together), weights(paired)) < 1e-6
    assert all(
        one[partner] == place
        for one in (pairs(8, seed) for seed in range(9))
        for place, partner in enumerate(one)
    )


RANDOM = {
    "grad.compressor.kind": "randomk",
    "grad.compressor.ratio": 0.25,
    "grad.compress_vectors": True,
}


def test_what_is_sent_is_averaged_and_the_rest_stays():
    """SPARTA: after every step a drawn share of the weights, the same places at all learners,
    becomes their mean.
    """
    run = apart(
        override(tiny(model__name="mlp"), PLAIN | RANDOM),
        learners=4,
        interval=1,
        rate=1.0,
        momentum=0.0,
        local_update="sent",
    )
    task = trained(run)
    exchange = task.components["learners"].exchange

    def use(models, step):
        parameters = [list(model.parameters()) for model in models]
        for index, own in enumerate(zip(*parameters, strict=True)):
            ones = torch.ones_like(own[0])
            places = (
                exchange.compressor(index, 0).apply(ones[None], exchange._draw(index, 0, step))[0]
                != 0
            )
            assert 0 < float(places.float().mean()) <= 0.3 + 1 / ones.numel()
            middle = sum(own) / len(own)
            for p in own:
                p[places] = middle[places]

    assert far(rows_of(run, use, 1), weights(task)) < 1e-5
    whole = override(run, {"grad.compressor.ratio": 1.0})
    assert (
        far(
            weights(trained(whole)),
            weights(trained(apart(learners=4, interval=1, rate=1.0, momentum=0.0))),
        )
        < 1e-6
    )


def test_scoring_changes_nothing_where_learners_never_all_meet():
    for changes in (
        {"grad.outer.peers": "pairs", "grad.outer.interval": 3, "grad.outer.nesterov": False},
        RANDOM
        | {
            "grad.outer.local_update": "sent",
            "grad.outer.interval": 1,
            "grad.outer.momentum": 0.0,
            "grad.outer.nesterov": False,
        },
    ):
        often = override(apart(tiny(epochs=2, eval_every=1)), changes)
        assert (
            far(weights(trained(often)), weights(trained(override(often, {"eval_every": 2})))) == 0
        )


def test_senders_share_a_place_among_themselves():
    """Of disjoint places the mean of senders is the sum, learners times the mean of all; of equal
    ones both agree.
    """
    from commsweep.config.compressors.sparse import TopKSpec
    from commsweep.config.gradients import Gradients
    from commsweep.data_parallel.exchange import Exchange

    def exchanged(aggregate, messages, **more):
        spec = Gradients(
            learners=2,
            exchange="allgather",
            compressor=TopKSpec(ratio=0.5),
            compress_vectors=True,
            outer=Outer(aggregate=aggregate, **more),
        )
        made = Exchange(spec, nn.Linear(4, 1, bias=False), 0)
        made.merges = [method() for method in MERGES.classes(spec.outer)]
        return made.begin([[one] for one in messages], 0, 0, [0])()[0]

    apart_, same = (
        [torch.tensor([[4.0, 2.0, 0, 0]]), torch.tensor([[0, 0, 8.0, 6.0]])],
        [torch.tensor([[4.0, 2.0, 0, 0]]), torch.tensor([[2.0, 8.0, 0, 0]])],
    )
    assert exchanged("all", apart_).tolist() == [[2.0, 1.0, 4.0, 3.0]]
    assert exchanged("senders", apart_).tolist() == [[4.0, 2.0, 8.0, 6.0]]
    assert (
        exchanged("senders", same).tolist()
        == exchanged("all", same).tolist()
        == [[3.0, 5.0, 0.0, 0.0]]
    )
    long = [torch.tensor([[3.0, 4.0, 0, 0]]), torch.tensor([[30.0, 40.0, 0, 0]])]
    assert exchanged("all", long, clip=True)[0].tolist() == pytest.approx(
        [(3 + 16.5) / 2, (4 + 22) / 2, 0, 0]
    )


def demo(net, batches, rate, decay, kept, n=2):
    """DeMo as its released code has it (arXiv 2411.19870), for matrices of one tile and vectors; in
    float64. kept: of so many coefficients. Returns the network and, for each parameter, where the
    sum was zero up to rounding in a step: of a unit that no row woke.
    """

    def coefficients(x, back=False):
        turn = scipy.fft.idctn if back else scipy.fft.dctn
        return torch.from_numpy(turn(x.numpy(), type=2, norm="ortho"))

    residues = [[torch.zeros_like(p) for p in net.parameters()] for _ in range(n)]
    zero = [torch.zeros_like(p, dtype=torch.bool) for p in net.parameters()]
    for x, y in batches:
        sent = []
        for own, rows in zip(residues, torch.arange(len(y)).chunk(n), strict=True):
            net.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            messages = []
            for d, p in zip(own, net.parameters(), strict=True):
                d.mul_(decay).add_(p.grad, alpha=rate)
                there = coefficients(d)
                k = kept(there.numel())
                chosen = there.abs() >= there.abs().flatten().topk(k).values[-1]
                d.sub_(coefficients(there * chosen, back=True))
                messages.append((there * chosen, chosen))
            sent.append(messages)
        with torch.no_grad():
            for place, p in enumerate(net.parameters()):
                total = sum(own[place][0] for own in sent) / sum(
                    own[place][1] for own in sent
                ).clamp(min=1)
                step = coefficients(total, back=True)
                zero[place] |= step.abs() < 1e-6 * step.abs().max()
                p.sub_(rate * step.sign())
    return net, zero


@pytest.mark.parametrize(
    ("settings", "kept", "seed"),
    [
        ({"ratio": 0.1, "tile": 256}, lambda n: max(1, round(0.1 * n)), 9),
        ({"ratio": 32 / 4096, "tile": 64, "per_tile": "number"}, lambda n: min(n, 32), 4),
    ],
    ids=["share", "published"],
)
def test_demo_is_the_published_rule(settings, kept, seed):
    """A perceptron of 8 and 10 units: every matrix is narrow enough to be one tile."""
    run = override(
        tiny(model__name="mlp", model__width=8, seed=seed),
        PLAIN
        | {"optim.lr": 0.01}
        | {
            "grad.learners": 2,
            "grad.exchange": "allgather",
            "grad.compress_vectors": True,
            "grad.transform": "dct",
            "grad.compressor.kind": "topk",
            "grad.compressor.scope": "tile",
            "grad.feedback.kind": "ef",
            "grad.feedback.decay": 0.9,
            "grad.outer.interval": 1,
            "grad.outer.rate": 1.0,
            "grad.outer.momentum": 0.0,
            "grad.outer.nesterov": False,
            "grad.outer.aggregate": "senders",
            "grad.outer.sign": True,
            "epochs": 1,
            "eval_every": 1,
        }
        | {f"grad.compressor.{key}": value for key, value in settings.items()},
    )
    torch.set_num_threads(1)
    parts = build(run, HOW)
    parts.data.train.set_epoch(0)
    net = copy.deepcopy(parts.task.model).double()
    wanted, zero = demo(net, [(x.double(), y) for x, y, _ in parts.data.train], 0.01, 0.9, kept)
    ours, theirs = (
        weights(trained(run)),
        {name: p.detach().float() for name, p in wanted.named_parameters()},
    )
    # The sign of a sum that is zero up to rounding is any. With these seeds no such weight has a
    # say in another one.
    for known, name in zip(zero, theirs, strict=True):
        assert float(known.float().mean()) < 0.2, name
        assert float(((ours[name] - theirs[name]).abs() * ~known).max()) < 1e-5, name
    assert far(ours, weights(build(run, HOW).task)) > 0.01


def test_what_plain_sgd_moves_by_is_not_rounded_away():
    """A step of 1e-10 is lost in a difference of weights near 0.1, and not in what travels."""
    together = weights(trained(override(apart(), {"grad.outer": None})))
    small = override(apart(interval=1, rate=1e8, momentum=0.0), {"optim.lr": 1e-9})
    assert far(together, weights(trained(small))) < 1e-5


def test_sign_of_everything_is_sign_sgd():
    run = apart(interval=1, rate=0.5, momentum=0.0, nesterov=False, sign=True)
    parts = build(run, HOW)
    parts.data.train.set_epoch(0)
    net = copy.deepcopy(parts.task.model)
    for epoch in range(2):
        parts.data.train.set_epoch(epoch)
        for x, y, _ in parts.data.train:
            net.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(0.5 * 0.1 * p.grad.sign())
    ours = weights(trained(run))
    close = torch.cat(
        [(ours[name] - p.detach()).abs().flatten() < 1e-5 for name, p in net.named_parameters()]
    )
    assert float(close.float().mean()) > 0.99


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"grad.outer.interval": 4, "grad.outer.overlap": 4},
            "grad.outer.overlap=4: a fragment must be used before",
        ),
        ({"grad.outer.local_update": "add"}, "set grad.outer.overlap to at least 1"),
        (
            {"grad.outer.rate": 1.0, "grad.local_steps": 2},
            "grad.local_steps=2 does not go with grad.outer",
        ),
        ({"grad.outer.aggregate": "senders"}, "every learner sends every place"),
        ({"grad.outer.rate": 1.0, "kfac.damping": 0.1}, "kfac does not go with grad.outer"),
        ({"grad.outer.local_share": 1.5}, "grad.outer.local_share=1.5"),
        ({"grad.outer.sign": True}, "grad.outer.sign=true takes the sign"),
        ({"grad.outer.local_update": "sent"}, "leaves everything but what has just been sent"),
        ({"grad.outer.local_update": "sent", "grad.outer.momentum": 0.0}, "every place is sent"),
        ({"grad.outer.peers": "pairs", "grad.learners": 1}, "grad.learners=1 is odd"),
        (
            {"grad.outer.peers": "pairs", "grad.compressor.kind": "randomk"},
            "one learner to another, uncompressed",
        ),
        ({"grad.transform": "dct"}, "grad.transform=dct has no effect"),
        (
            {"grad.outer.peers": "pairs", "grad.outer.first_moment": 2},
            "meets two learners at a time",
        ),
        ({"grad.outer.eager": True, "grad.outer.overlap": 1}, "leave out overlap, local_update"),
        ({"grad.outer.second_moment": 2}, "optim.kind=sgd keeps no second moments"),
        (PLAIN | {"grad.outer.first_moment": 2}, "keeps no first moments"),
    ],
)
def test_what_does_not_go_together_is_one_line(changes, line):
    with pytest.raises(UserError, match=line):
        override(tiny(grad__learners=2), changes)


def test_too_many_fragments_are_one_line(tmp_path, capsys):
    assert (
        main(
            [
                "run",
                "synthetic",
                "grad.learners=2",
                "grad.outer.fragments=9",
                "--store",
                str(tmp_path),
            ]
        )
        == 2
    )
    err = capsys.readouterr().err
    assert "grad.outer.fragments=9: the model has" in err and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("section", ["outer", "kfac"])
def test_learners_that_die_go_on_from_their_checkpoints(section, store, monkeypatch):
    """One is killed after its third epoch: one line; the same call ends with the weights of the
    simulation.
    """
    run = (
        apart(tiny(epochs=5, eval_every=1), interval=3, overlap=1, local_share=0.5)
        if section == "outer"
        else tiny(epochs=5, eval_every=1, grad__learners=2, kfac__damping=0.1)
    )
    monkeypatch.setenv("KILLED", "3")
    # not balanced by costs that each start measures anew: the bytes of inverses follow from them
    wiring = LearnerWiring(placement="spread")
    wanted, how = [(run, wiring)], Execution("cpu", checkpoint_every=0.0)
    with monkeypatch.context() as patch:
        patch.setattr(ddp, "MODULE", "tests.data_parallel.dying_learner")
        with pytest.raises(
            UserError, match="learner 1 was ended by SIGKILL; .* continue from the last checkpoint"
        ):
            ddp.execute(wanted, store, how)
    folder = ddp.folder_of(store, *wanted[0])
    assert folder.row() is None and sorted(
        path.name.split(".")[0] for path in folder.path.glob("*.ckpt")
    ) == [*["learner0"] * 2, *["learner1"] * 2]
    before = len((folder.path / "metrics.jsonl").read_text().splitlines())
    (row,), simulated = ddp.execute(wanted, store, how), trained(run)
    # and did not begin anew
    assert len((folder.path / "metrics.jsonl").read_text().splitlines()) - before == 5 - 3
    simulated.components["learners"].settle()
    assert row["weights"] == ddp.digest(simulated.model.state_dict())
    assert {key: row["metrics"][key] for key in simulated.scores} == simulated.scores
    (straight,) = ddp.execute(wanted, Store(store.root.parent / "straight"), how)
    sent, wanted_sent = (
        [{what: n for what, n in one.items() if what != "probe"} for one in made["transport"]]
        for made in (row, straight)
    )  # costs are probed at each start
    assert sent == wanted_sent and row["gradients"] == straight["gradients"]
    assert not list(folder.path.glob("*.ckpt"))


def test_the_state_of_an_earlier_version_is_named():
    run = tiny(grad__learners=2, grad__outer__interval=2, model__cuts=[])
    learners = build(run, Execution("cpu")).task.components["learners"]
    with pytest.raises(UserError, match="has no late, so an earlier commsweep wrote it"):
        learners.set_extra_state({"reference": [], "own": []})


def test_two_classes_for_one_role_are_refused():
    role = Role()
    role.when(lambda outer: outer.sign)(OuterSGD)
    role.when(lambda outer: outer.clip)(SignStep)
    assert role.of(Outer(clip=True), OuterSGD) is SignStep
    with pytest.raises(UserError, match="OuterSGD and SignStep, which play one role"):
        role.of(Outer(sign=True, clip=True, momentum=0, nesterov=False), OuterSGD)
