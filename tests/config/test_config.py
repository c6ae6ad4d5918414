"""Runs are hashed whole, changed by one function, and every mistake names its fix."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

import commsweep as cs
from commsweep.config import Run, flatten, override, record, run_id
from commsweep.config.base import kinds_of
from commsweep.config.compressors import CompressorSpec
from commsweep.config.compressors.base import Compression
from commsweep.config.compressors.own import OwnCodeSpec
from commsweep.config.compressors.spelling import codec, in_words
from commsweep.config.feedback import FeedbackSpec
from commsweep.config.links import Link
from commsweep.config.override import parse, parse_gradients
from commsweep.config.run import canonical
from commsweep.errors import UserError
from commsweep.launching.grid import axes, product
from commsweep.registry import preset, presets
from tests.helpers import COMPRESSORS, FEEDBACKS, linked, tiny

# Another valid value for every setting of a Run with TopK and AQ-SGD forward, uniform and EF
# backward, signs between learners.
OTHER: dict[str, Any] = {
    "model.name": "resnet_small",
    "model.width": 5,
    "model.cuts": ["layer1"],
    "data.name": "digits",
    "data.batch_size": 7,
    "data.augment": "shift",
    "data.fixed_augment": True,
    "data.val_size": 1,
    "data.drop_last": True,
    "optim.lr": 0.5,
    "optim.momentum": 0.5,
    "optim.weight_decay": 0.1,
    "schedule.t_max": 3,
    "fwd.compressor.ratio": 0.2,
    "fwd.compressor.scope": "tensor",
    "fwd.feedback.buffer": "bfloat16",
    "fwd.start_epoch": 1,
    "bwd.compressor.bits": 3,
    "bwd.compressor.scale": "sample",
    "bwd.compressor.group": 64,
    "bwd.compressor.rounding": "stochastic",
    "bwd.feedback.key": "sample",
    "bwd.start_epoch": 1,
    "epochs": 4,
    "eval_every": 2,
    "precision": "bfloat16",
    "channels_last": True,
    "seed": 9,
    "grad.learners": 2,
    "grad.exchange": "allgather",
    "grad.vote": True,
    "grad.compress_vectors": True,
    "grad.local_steps": 2,
    "grad.start_epoch": 1,
    "grad.compressor.scale": "one",
}


def base() -> Run:
    return linked(
        {"kind": "topk", "ratio": 0.1},
        {"kind": "uniform", "bits": 4, "scale": "group"},
        {"kind": "aqsgd"},
        {"kind": "ef"},
        grad__compressor__kind="sign",
        grad__exchange="server",
    )


def test_every_setting_changes_the_run_id():
    flat = flatten(record(base()))
    untested = [
        key for key in flat if key not in {*OTHER, "microbatches"} and not key.endswith(".kind")
    ]
    assert not untested, f"add another value for {untested}"
    ids = {run_id(base())}
    for key, value in OTHER.items():
        if key in ("model.name",):
            continue
        needed = {"data.augment": "shift"} if key == "data.fixed_augment" else {}
        ids.add(run_id(override(base(), needed | {key: value})))
    assert len(ids) == len(OTHER)
    assert run_id(tiny(microbatches=2)) != run_id(tiny())  # does not go with the learners of base()


def test_run_id_is_stable_and_pinned():
    """A change of this number means that old stores no longer match: raise SCHEMA when that is
    meant.
    """
    assert run_id(preset("digits")) == run_id(parse(json.loads(canonical(preset("digits")))))
    assert run_id(preset("digits")) == "8bbddb2c6389"


def test_text_and_typed_values_make_the_same_run():
    typed = override(
        Run(), {"fwd.compressor.kind": "topk", "fwd.compressor.ratio": 0.05, "channels_last": True}
    )
    text = override(
        Run(),
        {"fwd.compressor.ratio": "0.05", "fwd.compressor.kind": "topk", "channels_last": "true"},
    )
    assert run_id(typed) == run_id(text)


def test_a_boundary_of_its_own_begins_from_what_holds_everywhere_and_vanishes_when_equal():
    changes = {
        "at.layer1.bwd.compressor.bits": 8,
        "at.layer1.bwd.compressor.kind": "fixed",
        "fwd.compressor.kind": "topk",
        "fwd.compressor.ratio": 0.3,
    }
    run = override(tiny(), changes)
    assert run.at["layer1"].fwd == run.fwd and run.at["layer1"].bwd.compressor.bits == 8
    assert override(run, {"at.layer1.bwd.compressor.kind": "none"}).at == {}
    assert run_id(override(run, {"at.layer1.bwd.compressor.kind": "none"})) == run_id(
        override(tiny(), {"fwd.compressor.kind": "topk", "fwd.compressor.ratio": 0.3})
    )
    assert parse(json.loads(canonical(run))) == run


def test_changing_a_kind_drops_the_old_parameters():
    run = override(
        base(),
        {"fwd.compressor.kind": "uniform", "fwd.compressor.bits": 8, "fwd.feedback.kind": "none"},
    )
    assert run.fwd.model_dump() == {
        "compressor": {
            "kind": "uniform",
            "bits": 8,
            "scale": "tensor",
            "group": 128,
            "coding": None,
            "rounding": "nearest",
        },
        "feedback": {"kind": "none"},
        "start_epoch": 0,
        "start_step": None,
    }


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"fwd.compresor.kind": "topk"}, "did you mean 'fwd.compressor.kind'"),
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"fwd.compressor.kind": "topkk"}, "did you mean 'topk'"),
        (
            {"fwd.compressor.kind": "topk", "fwd.compressor.ratio": "0"},
            "fwd.compressor.ratio=0: input should be greater",
        ),
        (
            {"fwd.compressor.kind": "topk", "fwd.compressor.ratio": "1.01"},
            "less than or equal to 1",
        ),
        (
            {"fwd.compressor.kind": "topk", "fwd.compressor.ratio": "NaN"},
            "fwd.compressor.ratio=nan",
        ),
        (
            {"fwd.compressor.kind": "topk", "fwd.compressor.bits": 4},
            "unknown setting 'fwd.compressor.bits'",
        ),
        ({"fwd.compressor.kind": "uniform", "fwd.compressor.bits": 0}, "fwd.compressor.bits=0"),
        ({"fwd.compressor.kind": "uniform", "fwd.compressor.bits": 9}, "less than or equal to 8"),
        (
            {"fwd.compressor.kind": "uniform", "fwd.compressor.group": 32},
            "no effect unless fwd.compressor.scale=group",
        ),
        ({"fwd.feedback.kind": "ef"}, "nothing to correct: set fwd.compressor.kind"),
        ({"fwd.start_epoch": 2}, "no effect while fwd.compressor.kind=none"),
        (
            {"bwd.compressor.kind": "uniform", "bwd.feedback.kind": "ef_mixed"},
            "halves a sparsifier's ratio",
        ),
        ({"fwd.compressor.kind": "forward_mask"}, "exists for bwd only"),
        ({"bwd.compressor.kind": "forward_mask"}, "needs a forward sparsifier"),
        ({"model.name": "resnet19"}, "did you mean 'resnet18'"),
        ({"model.name": "resnet18"}, "takes 3-channel images"),
        ({"eval_every": 3}, "does not divide epochs=10"),
        (
            {"schedule.kind": "constant", "schedule.t_max": 5},
            "'schedule.t_max': constant has no parameters",
        ),
        ({"seed": "abc"}, "seed=abc"),
        ({"fwd": 3}, "'fwd' is a section"),
    ],
)
def test_a_mistake_is_one_line_that_says_where_and_how(changes, message):
    with pytest.raises(UserError) as caught:
        override(Run(), changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stored_settings_with_an_unknown_field_are_refused():
    tree = record(base())
    tree["fwd"]["compressor"]["ration"] = 0.1
    with pytest.raises(
        UserError, match="unknown setting 'fwd.compressor.ration'; did you mean 'ratio'"
    ):
        parse(tree)


def test_presets_differ_and_unknown_ones_are_named():
    assert len({run_id(run) for run in presets().values()}) == len(presets())
    with pytest.raises(UserError, match="did you mean 'digits'"):
        preset("digit")


@pytest.mark.parametrize(
    "setting", ["grad.compressor.kind=bottleneck", "fwd.compressor.kind=adacomp"]
)
def test_a_compressor_of_another_place_is_named_as_that(setting):
    key, _, kind = setting.partition("=")
    with pytest.raises(UserError, match=f"{key}={kind}: this compressor is not for here"):
        override(tiny(), {"grad.learners": 2, key: kind})


@pytest.mark.parametrize(
    ("changes", "setting", "value"),
    [
        (
            {"fwd.compressor.kind": "topk", "fwd.compressor.ratio": "10%"},
            "fwd.compressor.ratio",
            0.1,
        ),
        ({"fwd.compressor": "topk:2.5%"}, "fwd.compressor.ratio", 0.025),
        ({"fwd.compressor": "topk:0.1", "fwd.feedback": "ef"}, "fwd.feedback.kind", "ef"),
        ({"schedule": "linear"}, "schedule.kind", "linear"),
        ({"bwd.compressor": "topk:0.1,values.kind=sign"}, "bwd.compressor.values.kind", "sign"),
    ],
)
def test_a_word_means_what_it_says(changes, setting, value):
    assert flatten(record(override(preset("synthetic"), changes)))[setting] == value


def test_a_kind_stands_for_its_section_in_a_record():
    settings = {"compressor": {"kind": "topk", "values": "sign"}, "feedback": "ef"}
    spec = parse_gradients(settings | {"exchange": "allgather"})
    assert spec.compressor.values.kind == "sign" and spec.feedback.kind == "ef"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fwd.compressor": "topk:x"},
            "fwd.compressor.ratio=x: write a number, such as 0.1 or 10%",
        ),
        ({"fwd.compressor": "topk:110%"}, "fwd.compressor.ratio"),
        ({"epochs": "10%"}, "epochs=10%: write a whole number"),
    ],
)
def test_a_value_that_cannot_be_meant_is_one_line(changes, message):
    with pytest.raises(UserError, match=message):
        override(preset("synthetic"), changes)


def assert_word(spec, feedback=None) -> str:
    word = in_words(spec, feedback)
    read = codec(word)
    assert type(spec).model_validate(read["compressor"]) == spec, word
    if feedback is not None:
        assert type(feedback).model_validate(read["feedback"]) == feedback, word
    return word


def test_every_codec_has_one_word_that_means_its_settings():
    crossing = TypeAdapter(CompressorSpec)
    for settings in COMPRESSORS:
        spec = crossing.validate_python(settings)
        for remembered in ({"kind": "none"}, *FEEDBACKS):
            assert_word(spec, TypeAdapter(FeedbackSpec).validate_python(remembered))
    for spec in kinds_of(Compression):  # what only learners send has every default, too
        if spec is not OwnCodeSpec:
            assert_word(spec())


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"kind": "topk"}, "topk:0.1"),
        ({"kind": "mx", "format": "nvfp4", "rounding": "stochastic"}, "nvfp4,rounding=stochastic"),
        (
            {"kind": "topk", "ratio": 0.2, "values": {"kind": "uniform", "bits": 3}},
            "topk:0.2,values.kind=uniform,values.bits=3",
        ),
    ],
)
def test_a_word_says_what_differs_from_the_kind(settings, word):
    spec = TypeAdapter(CompressorSpec).validate_python(settings)
    assert assert_word(spec) == word


def test_a_codec_in_one_word_is_taken_wherever_settings_are():
    spelt = override(preset("synthetic"), {"fwd": "ef,key=sample+topk:0.05", "at.2.bwd": "mxfp4"})
    full = {
        "fwd.compressor.kind": "topk",
        "fwd.compressor.ratio": 0.05,
        "fwd.feedback.kind": "ef",
        "fwd.feedback.key": "sample",
        "at.layer2.bwd.compressor.kind": "mx",
        "at.layer2.bwd.compressor.format": "mxfp4",
    }
    assert spelt == override(preset("synthetic"), full)
    assert spelt.codecs == {
        "fwd": "ef,key=sample+topk:0.05",
        "at.layer2.fwd": "ef,key=sample+topk:0.05",
        "at.layer2.bwd": "mxfp4",
    }
    again = parse(record(preset("synthetic")) | {"fwd": "ef,key=sample+topk:0.05"})
    assert again.fwd == spelt.fwd and Run(fwd="sign").fwd == Link(compressor={"kind": "sign"})
    assert axes(["fwd=topk:0.1,scope=last,ef+sign,codec.py:A,k=2"]) == {
        "fwd": ["topk:0.1,scope=last", "ef+sign", "codec.py:A,k=2"]
    }
    assert axes(["fwd={,ef+}topk:{0.3,0.1},values.kind=uniform,values.bits={2,4}"])["fwd"] == [
        f"{feedback}topk:{ratio},values.kind=uniform,values.bits={bits}"
        for feedback in ("", "ef+")
        for ratio in (0.3, 0.1)
        for bits in (2, 4)
    ]
    for wrong in ("fwd={,ef+topk:0.1", "fwd=topk:{0.1,{0.2}}", "fwd=topk:0.1}"):
        with pytest.raises(UserError, match="braces do not match"):
            axes([wrong])
    grid = product(preset("synthetic"), axes(["fwd=topk:0.1,ef+topk:0.1", "at.1.fwd=none,sign"]))
    assert len({run_id(run) for run in grid}) == 4
    net = nn.Sequential(nn.Linear(3, 3))
    inserted = cs.insert(net, {"0": {"fwd": "ef+sign"}}, torch.ones(1, 3), 2)
    assert inserted.links()["0"].fwd.word == "ef+sign"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"fwd": "topkk:0.1"}, "no compressor 'topkk'; did you mean 'topk'"),
        ({"fwd": "eff+topk:0.1"}, "no feedback 'eff'; did you mean 'ef'"),
        ({"fwd": "mxfp8"}, "did you mean 'mxfp8_e4m3' or 'mxfp8_e5m2'"),
        ({"fwd": "topk:0.1", "fwd.compressor": "sign"}, "both say the compressor; give one"),
        ({"fwd": "ef+sign", "fwd.feedback.kind": "ef21"}, "both say the feedback; give one"),
        ({"at.4.fwd": "sign"}, "the boundaries are 1 to 3"),
        ({"fwd": "dgc+topk:0.1"}, "fwd.feedback"),
    ],
)
def test_a_mistake_in_a_codec_is_one_line(changes, line):
    with pytest.raises(UserError, match=line) as raised:
        override(preset("synthetic"), changes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "exchange"),
    [
        ({"grad": "topk:0.1"}, "allgather"),
        ({"grad.compressor": "topk:0.1", "grad.feedback": "ef"}, "allgather"),
        ({"grad": "topk:0.1", "grad.exchange": "server"}, "server"),
        ({"grad": "uniform:8"}, "allgather"),
        ({"grad": "powersgd"}, "allreduce"),
        ({"grad": "uniform:8", "grad.collective": "ring"}, "allreduce"),
        (
            {
                "grad": "randomk:0.1",
                "grad.layers.fc.match": ["fc.*"],
                "grad.layers.fc.compressor.kind": "topk",
            },
            "allgather",
        ),
    ],
)
def test_learners_gather_what_does_not_add_up_where_nothing_is_said(changes, exchange):
    run = override(preset("synthetic"), {"grad.learners": 2} | changes)
    assert run.grad.exchange == exchange
    assert record(run)["grad"]["exchange"] == exchange  # and is hashed
