"""The published table of measured steps: written by the code, as its schema says, nothing lost."""

from __future__ import annotations

import json

import pandas as pd

from docs.tools.corpus import COLUMNS, FOLDER, PACKAGE, RESULTS, SOURCES, TABLE, write

TYPES = {"string": (str,), "integer": (int,), "number": (int, float)}


def test_the_published_files_are_what_the_code_writes(tmp_path):
    write(tmp_path)
    for name in (TABLE, PACKAGE):
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text()


def test_the_table_is_as_its_schema_says():
    schema = json.loads((FOLDER / PACKAGE).read_text())["resources"][0]["schema"]
    table = pd.read_csv(FOLDER / TABLE)
    assert [field["name"] for field in schema["fields"]] == list(table.columns)
    assert len(table.columns) == len(COLUMNS)
    assert not table.duplicated(schema["primaryKey"]).any()
    for field in schema["fields"]:
        column = table[field["name"]]
        if field.get("constraints", {}).get("required"):
            assert column.notna().all(), field
        assert all(isinstance(value, TYPES[field["type"]]) for value in column.dropna()), field


def test_no_measurement_is_lost_and_units_are_those_of_the_sources():
    table = pd.read_csv(FOLDER / TABLE)
    for source in SOURCES:
        theirs = pd.read_csv(RESULTS / source / "measurements.csv").set_index("id")
        ours = table[table["source"] == source].set_index("id")
        assert set(ours.index) == set(theirs.index)
        assert ((ours["step_ms"] / 1e3 - theirs["seconds"]).abs() < 1e-6).all()
        assert (ours["quartile_1_ms"] <= ours["step_ms"]).all()
        limited = ours["bandwidth_mbit"].dropna()
        assert (limited * 1e6 == theirs.loc[limited.index, "bandwidth"]).all()
