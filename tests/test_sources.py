"""Which files become training, validation and test data: the usual names are known, mixtures are
refused.
"""

from __future__ import annotations

import io

import pytest

from commsweep import errors
from commsweep.cli.main import main
from commsweep.data import images, sources, text
from commsweep.errors import UserError

FOLDERS = {
    "files": ("train.txt", "val.txt", "test.txt"),
    "dev": ("train.txt", "dev.txt", "test.txt"),
    "folders": ("train/a.txt", "valid/b.txt", "test/c.txt"),
    "wikitext": ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
    "prefixes": ("my-train.txt", "my-validation.txt", "my-test.txt"),
    "upper case": ("TRAIN.TXT", "VALID.TXT", "TEST.TXT"),
    "numbered": ("train_0.txt", "val_0.txt", "test_0.txt"),
}


def written(root, names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name} " * 20)
    return root


@pytest.mark.parametrize("what", FOLDERS)
def test_a_folder_that_is_split_by_name_is_taken_as_it_is(what, tmp_path):
    names = FOLDERS[what]
    found = text.documents("text", written(tmp_path, names))
    assert found == {
        split: [f"text of {name} " * 20] for split, name in zip(sources.SPLITS, names, strict=True)
    }


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("train.txt", "valid.txt"), "no test text"),
        (("train.txt", "valid.txt", "test.txt", "more.txt"), "more.txt belongs to none"),
        (("train.txt", "all.txt"), "no validation and no test text"),
        (("train_test.txt",), "is named after two splits, test and train"),
    ],
)
def test_a_mixture_is_refused(names, line, tmp_path):
    with pytest.raises(UserError, match=line):
        text.documents("text", written(tmp_path, names))


def test_checkpoints_of_notebooks_and_hidden_files_are_no_text(tmp_path):
    written(tmp_path, ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", ".hidden.txt"))
    assert sources.text_files(tmp_path) == {"": [tmp_path / "a.txt"]}


def test_what_went_where_is_said_before_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(errors, "_noticed", set())  # a line is said once a process
    sources.text_files(written(tmp_path / "one", ("essays.txt", "letters.txt")))
    assert (
        "essays.txt, letters.txt in" in (said := capsys.readouterr().err)
        and "each cut into 90 % training" in said
    )
    sources.text_files(written(tmp_path / "two", FOLDERS["dev"]))
    assert "train train.txt; validation dev.txt; test test.txt" in capsys.readouterr().err


def picture(jpeg=False, side=32):
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (side, side), (10, 20, 30)).save(out, "JPEG" if jpeg else "PNG")
    return out.getvalue()


def shard(path, labels, kinds=(False,), side=32):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"bytes": picture(kinds[place % len(kinds)], side), "path": ""}
        for place in range(len(labels))
    ]
    pq.write_table(pa.table({"img": rows, "label": labels}), path)


def test_all_shards_of_a_split_are_read_in_order(tmp_path):
    shard(tmp_path / "train-00001-of-00002.parquet", [5, 6, 7])
    shard(tmp_path / "train-00000-of-00002.parquet", [1, 2])
    shard(tmp_path / "test.parquet", [0])
    made = images.load("cifar10", tmp_path)
    assert made.train_y.tolist() == [1, 2, 5, 6, 7] and made.test_y.tolist() == [0]
    (tmp_path / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(UserError, match="their names promise shards 0 to 1; some are missing"):
        images.load("cifar10", tmp_path)


def test_train_of_one_set_and_test_of_another_are_not_joined(tmp_path):
    shard(tmp_path / "a_other" / "train.parquet", [1])
    for split in ("train", "test"):
        shard(tmp_path / "cifar10" / f"{split}.parquet", [2, 3])
    with pytest.raises(UserError, match="several folders hold Parquet files"):
        images.load("cifar10", tmp_path)
    assert images.load("cifar10", tmp_path / "cifar10").train_y.tolist() == [2, 3]


def test_another_file_beside_torchvisions_folder_is_no_reason_to_refuse_it(tmp_path):
    (tmp_path / sources.CIFAR_FOLDER).mkdir()
    shard(tmp_path / "train_of_something.parquet", [1])
    assert sources.cifar_files(tmp_path) is None


@pytest.mark.parametrize(
    ("labels", "kinds", "side", "line"),
    [
        ([1, -1], (False,), 32, "row 1: label -1 is none of 0 to 9"),
        ([1, 10], (False,), 32, "row 1: label 10 is none of 0 to 9"),
        ([1, None], (False,), 32, "row 1: label None is none of 0 to 9"),
        ([1, 2], (False, True), 32, r"mixes JPEG images with exact ones \(first: row 1\)"),
        ([1, 2], (False,), 16, "images of 16 x 16 pixels"),
    ],
)
def test_images_and_labels_that_are_not_cifars_are_named(labels, kinds, side, line, tmp_path):
    shard(tmp_path / "train.parquet", labels, kinds, side)
    shard(tmp_path / "test.parquet", [0])
    with pytest.raises(UserError, match=line):
        images.load("cifar10", tmp_path)


def test_a_missing_corpus_is_said_before_anything_is_imported(tmp_path, capsys, monkeypatch):
    import commsweep.cli.runs

    monkeypatch.setattr(commsweep.cli.runs, "_execute", lambda *_: pytest.fail("the run was begun"))
    for preset in ("wikitext_small", "cifar_small_jpeg"):
        assert (
            main(["run", preset, "--data-root", str(tmp_path), "--store", str(tmp_path / "s")]) == 2
        )
        assert "data.name=" in capsys.readouterr().err
