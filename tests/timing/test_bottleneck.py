"""The answer to "is my network the bottleneck?" follows from the predicted step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commsweep.cli.main import main
from commsweep.errors import UserError
from commsweep.timing import bottleneck, gpt

CLUSTER = gpt.read_cluster("a100-nvlink")
CODES = {"eight bits": 0.53, "four bits": 0.28}


def shape(gpus=64, tensor=2):
    layers, hidden, heads = bottleneck.SIZES["7b"]
    data = gpus // tensor
    return gpt.Shape(hidden, layers, 2048, 1024, 1, heads, tensor, 1, data)


def answer(rate, codes=CODES):
    return bottleneck.answer(shape(), replace(CLUSTER, node_link=rate / 8), codes)


def test_the_share_is_that_of_the_prediction_and_its_range_holds_the_error():
    cluster = replace(CLUSTER, node_link=2e11 / 8)
    predicted = gpt.predict(shape(), cluster, gpt.Choices(collective="nccl"))
    found = bottleneck.answer(shape(), cluster, CODES)
    assert found.share == pytest.approx(float(predicted["data"] / predicted["total"]))
    # all of the error, 10 % of a step, lies in the network
    waits, rest = found.share, 1 - found.share
    assert found.high == pytest.approx((waits + 0.1) / (waits + 0.1 + rest))
    assert found.low == pytest.approx(max(0.0, waits - 0.1) / (max(0.0, waits - 0.1) + rest))


@given(st.floats(1e9, 1e12), st.floats(1.1, 10))
def test_a_slower_link_waits_more_and_saves_more(rate, times):
    fast, slow = answer(rate * times), answer(rate)
    assert slow.share > fast.share and slow.low >= fast.low and slow.high > fast.high
    assert 0 <= slow.low <= slow.share <= slow.high < 1
    assert slow.codes[0].saves >= fast.codes[0].saves
    assert slow.most >= max(0.0, slow.codes[0].saves) or slow.most == slow.high


def test_the_sentence_says_yes_no_or_perhaps():
    assert answer(1e10).sentence().startswith("Yes: ")
    assert answer(1e12).sentence().startswith("No: ")
    assert answer(2e11).sentence().startswith("Perhaps: ")
    alone = bottleneck.answer(shape(gpus=2), CLUSTER, CODES)
    assert alone.share == 0 and "no code of the gradients would save time" in alone.sentence()


def test_a_sharded_training_waits_for_weights_and_saves_on_both():
    cluster = replace(CLUSTER, node_link=2e11 / 8)
    shape_ = shape(tensor=1)
    found = bottleneck.answer(shape_, cluster, CODES, sharded=True)
    waits = found.seconds_by_part["data"] + found.seconds_by_part["gathers"]
    assert found.share == pytest.approx(waits / found.seconds)
    assert found.share > bottleneck.answer(shape_, cluster, CODES).share
    assert "gathered weights and gradients in four bits would save" in found.sentence()
    assert bottleneck.memory_note(shape_) and not bottleneck.memory_note(shape_, sharded=True)


def test_a_model_is_split_until_its_state_fits():
    layers, hidden, _ = bottleneck.SIZES["7b"]
    assert bottleneck.split(layers, hidden, 64, 8) == (2, 1)
    layers, hidden, _ = bottleneck.SIZES["175b"]
    tensor, pipeline = bottleneck.split(layers, hidden, 1024, 8)
    need = bottleneck.STATE * gpt.weights_of(hidden, layers, bottleneck.VOCABULARY)
    assert need / (tensor * pipeline) <= bottleneck.FILLED * bottleneck.ROOM
    assert need / (tensor * pipeline // 2) > bottleneck.FILLED * bottleneck.ROOM
    with pytest.raises(UserError, match="does not fit"):
        bottleneck.split(layers, hidden, 8, 8)


def test_the_command_answers_with_a_rate_or_a_measured_link(tmp_path, capsys):
    asked = ["advise", "--model", "7b", "--gpus", "64"]
    assert main([*asked, "--link", "10Gbit", "--json"]) == 0
    by_rate = json.loads(capsys.readouterr().out)
    link = tmp_path / "iperf3.json"
    link.write_text(json.dumps({"end": {"sum_received": {"bits_per_second": 1e10}}}))
    assert main([*asked, "--links", str(link), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    # a nominal rate may not be reached: the same answer with a wider range
    same = ("answer", "seconds", "share", "low", "codes")
    assert [measured[name] for name in same] == [by_rate[name] for name in same]
    assert measured["high"] < by_rate["high"] and measured["most"] < by_rate["most"]
    assert by_rate["answer"] == "Yes" and len(by_rate["codes"]) == 2
    assert main([*asked, "--link", "10Gbit"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == by_rate["sentence"]
    assert main([*asked, "--link", "10Gbit", "--tensor", "1"]) == 0
    assert "note: 106 GB" in capsys.readouterr().out
    assert main(["predict", "--model", "gpt:layers=32,hidden=4096"]) == 0
    assert "note: 106 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--model", "7b"], "--model needs --gpus N"),
        (["--model", "7b", "--gpus", "64", "--link", "25GB/s"], "is no bandwidth"),
        (["--model", "8b", "--gpus", "8", "--link", "1Gbit"], "write one of 125m"),
        (["--model", "7b", "--gpus", "1", "--link", "1Gbit"], "does not fit"),
        (["--model", "7b", "--gpus", "12", "--link", "1Gbit"], "no multiple of --per-node 8"),
        (["--gpus", "8", "--link", "1Gbit"], "name a size, as 7b"),
        (["digits", "--model", "7b", "--gpus", "8", "--link", "1Gbit"], "goes without a preset"),
        (
            ["--model", "7b", "--gpus", "64", "--link", "1Gbit", "--batch", "33"],
            "no multiple of data-parallel 32",
        ),
    ],
)
def test_bad_questions_end_in_a_line(capsys, options, sentence):
    assert main(["advise", *options]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == 1
