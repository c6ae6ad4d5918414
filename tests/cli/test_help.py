"""Help that finds things: commands in groups, presets and sweeps by a word."""

from __future__ import annotations

import json

import pytest

from commsweep import registry
from commsweep.cli.main import main


def test_every_command_stands_in_one_group(capsys):
    from commsweep.cli.main import GROUPS, build_parser

    listed = [name for names in GROUPS.values() for name in names]
    parser = build_parser()
    (commands,) = [a for a in parser._actions if isinstance(a.choices, dict)]
    assert sorted(listed) == sorted(commands.choices) and len(set(listed)) == len(listed)
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(f"\n    {name} " in text for name in listed)


def test_presets_and_sweeps_are_found_by_a_word(capsys):
    assert main(["presets", "k--fac"]) == 2
    assert "unknown preset 'k--fac'" in capsys.readouterr().err
    assert main(["presets", "kfac"]) == 0
    out = capsys.readouterr().out
    assert "digits_kfac" in out and "K-FAC" in out and "resnet18" not in out
    assert main(["presets", "gpt2"]) == 0  # by what they train
    assert "sotu_nano " in capsys.readouterr().out
    assert main(["presets"]) == 0
    assert all(name in capsys.readouterr().out for name in ("gpt2_mst",))
    assert main(["sweep", "list", "mst"]) == 0
    assert "gpt2_mst" in capsys.readouterr().out
    assert main(["sweep", "list", "nothing-like-it"]) == 2
    assert main(["sweep", "list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == set(registry.sweeps()) and all(told.values())
