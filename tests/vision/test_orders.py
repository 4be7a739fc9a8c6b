"""Streams that drift: class after class, by a column, and by folder. On real digits."""

import itertools
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import vision
from fairseq_alma.core.errors import RunError, SettingError
from tests.vision.pictures import write_classes
from tests.vision.tiny_runs import small_run, small_settings
from vision.datasets import load_dataset
from vision.stream import partition


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits")


def labels_of(arrivals) -> list[list[int]]:
    """Return the labels of each mega-batch, training examples first."""
    return [torch.cat([one.training.labels, one.validation.labels]).tolist() for one in arrivals]


def sizes(arrivals) -> list[int]:
    return [len(one.training) + len(one.validation) for one in arrivals]


def images_of(arrivals) -> list[tuple]:
    """Return all images of a stream, in order."""
    parts = [part.images for one in arrivals for part in (one.training, one.validation)]
    return [tuple(image) for image in torch.cat(parts).tolist()]


def test_four_mega_batches_of_ten_classes_have_3_3_2_and_2_classes(digits):
    arrivals = partition(digits, 4, 0.1, seed=0, order="classes")
    assert [sorted(set(labels)) for labels in labels_of(arrivals)] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    counts = digits.training.labels.bincount().tolist()
    assert sizes(arrivals) == [sum(counts[:3]), sum(counts[3:6]), sum(counts[6:8]), sum(counts[8:])]
    for arrival, labels in zip(arrivals, labels_of(arrivals), strict=True):
        assert len(arrival.validation) == int(0.1 * len(labels))
        # Training and validation data are drawn at random within the mega-batch.
        assert set(arrival.validation.labels.tolist()) == set(labels)
        assert labels != sorted(labels)


def test_more_mega_batches_than_classes_are_cut_from_the_sorted_examples(digits):
    arrivals = partition(digits, 20, 0.1, seed=0, order="classes")
    assert set(sizes(arrivals)) == {71, 72}
    in_order = sorted(digits.training.labels.tolist())
    ends = np.cumsum(sizes(arrivals))
    for labels, end in zip(labels_of(arrivals), ends, strict=True):
        assert sorted(labels) == in_order[end - len(labels) : end]


@pytest.mark.parametrize("how", [{"order": "classes"}, {"order": "column:sum"}])
def test_every_example_arrives_once_and_seeds_differ_in_order_but_not_in_sizes(digits, how):
    dataset = replace(digits, columns={"sum": digits.training.images.sum(1).numpy()})
    order = how["order"]
    first, again, other = (partition(dataset, 6, 0.1, seed, order) for seed in (0, 0, 1))
    expected = sorted(tuple(image) for image in digits.training.images.tolist())
    assert sorted(images_of(first)) == sorted(images_of(other)) == expected
    assert images_of(first) == images_of(again) != images_of(other)
    assert sizes(first) == sizes(other)
    assert [len(one.validation) for one in first] == [len(one.validation) for one in other]


def test_a_column_of_numbers_or_texts_sorts_the_examples(digits):
    brightness = digits.training.images.sum(1).numpy()
    dates = np.array([f"20{value // 10:02d}-{value % 10}" for value in brightness])
    dataset = replace(digits, columns={"brightness": brightness, "date": dates})
    for name in ("brightness", "date"):
        arrivals = partition(dataset, 5, 0.1, seed=0, order=f"column:{name}")
        assert set(sizes(arrivals)) == {287, 288}
        sums = [torch.cat([one.training.images, one.validation.images]).sum(1) for one in arrivals]
        assert all(int(a.max()) <= int(b.min()) for a, b in itertools.pairwise(sums))


@pytest.mark.parametrize("texts", [["0.5", "0.25", "0.125"], ["-2.5", "-10.5", "3"], ["10", "9", "1e2"]])
def test_a_column_of_texts_that_are_all_numbers_is_sorted_by_their_values(digits, texts):
    values = (texts * 480)[:1438]
    for column in (np.array(values), np.array([one.encode() for one in values])):
        arrivals = partition(replace(digits, columns={"n": column}), 2, 0.1, seed=0, order="column:n")
        expected = partition(replace(digits, columns={"n": np.array(values, float)}), 2, 0.1, seed=0, order="column:n")
        assert images_of(arrivals) == images_of(expected)


@pytest.mark.parametrize(
    "texts", [["0.2019", "0.1987", "12.2001", "2020.5"], ["1-10", "1-11", "2-05"], ["03-20", "04-01"]]
)
def test_what_only_looks_like_a_date_is_sorted(digits, texts):
    values = np.array((texts * 720)[:1438])
    arrivals = partition(replace(digits, columns={"n": values}), 4, 0.1, seed=0, order="column:n")
    assert len(arrivals) == 4


def test_a_missing_value_is_named(digits):
    dataset = replace(digits, columns={"day": np.array(["2026-01", None] * 719, object)})
    with pytest.raises(SettingError, match=r"order=column:day: the value of training example 1 is None"):
        partition(dataset, 5, 0.1, seed=0, order="column:day")


@pytest.mark.parametrize("values", [["7", "x"], [7, "x"], ["7", 7]])
def test_numbers_and_texts_in_one_column_are_refused(digits, values):
    dataset = replace(digits, columns={"n": np.array(values * 719, object)})
    with pytest.raises(SettingError, match="order=column:n has numbers and texts: give numbers only, or texts only"):
        partition(dataset, 5, 0.1, seed=0, order="column:n")


def test_a_column_has_one_value_for_each_example(digits):
    dataset = replace(digits, columns={"n": np.zeros((1438, 2))})
    with pytest.raises(SettingError, match=r"found values of shape \(1438, 2\), expected one for each example"):
        partition(dataset, 5, 0.1, seed=0, order="column:n")


def test_class_names_may_be_numbers(tmp_path):
    digits = load_digits()
    for names in (list(range(10)), digits.target_names):
        dataset = vision.dataset_from_arrays("mine", digits.images.astype("uint8"), digits.target, class_names=names)
        out = tmp_path / type(names).__name__
        vision.run(dataset=dataset, order="classes", mega_batches=2, epochs=1, width=4, out=str(out), backbone="mlp")
        assert json.loads((out / "errors.jsonl").read_text().splitlines()[0])["class_names"][3] == "3"


def test_a_missing_column_is_refused_with_a_list_of_the_columns(digits):
    dataset = replace(digits, columns={"day": np.zeros(1438), "place": np.full(1438, np.nan)})
    with pytest.raises(SettingError, match=r"has no column 'date'; its columns are day, place\. Columns come from"):
        partition(dataset, 5, 0.1, seed=0, order="column:date")
    with pytest.raises(SettingError, match=r"order=column:place: the value of training example 0 is nan"):
        partition(dataset, 5, 0.1, seed=0, order="column:place")
    with pytest.raises(SettingError, match="order=folders needs a folder of images"):
        partition(dataset, 5, 0.1, seed=0, order="folders")


def test_a_group_of_classes_with_one_example_is_refused(digits):
    labels = digits.training.labels.clone()
    labels[labels == 9] = 8
    labels[0] = 9
    dataset = replace(digits, training=replace(digits.training, labels=labels))
    with pytest.raises(SettingError, match="order=classes: mega-batch 10 has 1 training examples, but needs two"):
        partition(dataset, 10, 0.1, seed=0, order="classes")


@pytest.mark.parametrize(
    ("changes", "message_part"),
    [
        ({"order": "class"}, "order='class' is not one of random, classes, column:NAME, folders"),
        ({"order": "column:"}, "order='column:' is not one of"),
        ({"order": "column:NAME"}, None),
        (
            {"backbone": "mlp", "order": "folders", "mega_batches": None},
            "order=folders: dataset='digits' is not a folder of images. If it is a Dataset with folder_of_example",
        ),
        (
            {"dataset": "mine.npz"},
            "backbone= is missing: dataset=mine.npz has no default network. Give backbone=resnet20",
        ),
        (
            {"dataset": "mine.npz", "backbone": "mlp", "mega_batches": None},
            "mega_batches= is missing: dataset=mine.npz has no default",
        ),
        ({"transform": "mine"}, "transform='mine' must have the form MODULE:FUNCTION"),
        ({"image_size": 0}, "image_size=0 must be an integer of at least 1"),
    ],
)
def test_settings_are_checked_before_data_are_loaded(tmp_path, changes, message_part):
    if message_part is None:
        assert small_settings(tmp_path, **changes).to_json()["order"] == "column:NAME"
        return
    with pytest.raises(SettingError) as error:
        small_settings(tmp_path, **changes)
    assert message_part in str(error.value)


# ---- A folder for each mega-batch.


def write_years(root):
    """Write two mega-batches of 3 + 3 and 2 + 4 images with the values 0, 1, ..., and a test set."""
    first = write_classes(root / "train/2019", {"a": 3, "b": 3})
    write_classes(root / "train/2020", {"a": 2, "b": 4}, first=first)
    write_classes(root / "test", {"a": 2, "b": 2}, first=100)
    return {
        "dataset": str(root),
        "data_root": str(root / "data"),
        "backbone": "mlp",
        "order": "folders",
        "mega_batches": None,
    }


def test_with_order_folders_each_folder_of_train_is_a_mega_batch(tmp_path):
    how = write_years(tmp_path)
    dataset = load_dataset(how["dataset"], tmp_path / "data", order="folders")
    arrivals = partition(dataset, 2, 0.2, seed=3, order="folders")
    pixels = [[image[0] for image in images_of([one])] for one in arrivals]
    assert [sorted(values) for values in pixels] == [list(range(6)), list(range(6, 12))]
    assert pixels[0] != sorted(pixels[0])
    assert sorted(labels_of(arrivals)[1]) == [0, 0, 1, 1, 1, 1]


def test_a_run_on_folders_is_continued_after_a_folder_was_added(tmp_path):
    how = write_years(tmp_path)
    (rows,) = small_run(tmp_path / "run", **how, epochs=2)
    assert len(rows) == 3
    write_classes(tmp_path / "train/2021", {"a": 3, "b": 1}, first=50)
    (more,) = small_run(tmp_path / "run", **how, epochs=2)
    assert (len(more), more[:3]) == (4, rows)
    write_classes(tmp_path / "train/2020b", {"a": 3, "b": 1}, first=70)  # between the others
    with pytest.raises(RunError, match="used another stream: mega-batch 3 differs"):
        small_run(tmp_path / "run", **how, epochs=2)
    shutil.rmtree(tmp_path / "train/2020b")
    write_classes(tmp_path / "train/2019", {"c": 1}, first=60)
    write_classes(tmp_path / "test", {"c": 1}, first=60)
    with pytest.raises(RunError, match="the test set has changed"):
        small_run(tmp_path / "run", **how, epochs=2)


def test_the_layout_of_the_other_order_is_explained(tmp_path):
    how = write_years(tmp_path)
    with pytest.raises(SettingError, match=r"Only in training: 2019, 2020\. Only in test: a, b\. .*\(or order=folders"):
        load_dataset(how["dataset"], tmp_path / "data")
    (tmp_path / "train").rename(tmp_path / "years")
    (tmp_path / "years/2019").rename(tmp_path / "train")
    with pytest.raises(SettingError, match=r"train/a contains no class folders\. With order=folders, the folder must"):
        load_dataset(how["dataset"], tmp_path / "data", order="folders")


def test_another_number_of_mega_batches_than_folders_is_refused(tmp_path):
    how = write_years(tmp_path)
    with pytest.raises(SettingError, match=r"train contains 2 folders, but mega_batches=3: leave out mega_batches="):
        small_run(tmp_path / "run", **{**how, "mega_batches": 3})
    how = {**how, "dataset": str(tmp_path / "test")}
    with pytest.raises(SettingError, match=r"order=folders: there are no folders in .*/test/train: put the images in"):
        small_settings(tmp_path / "run", **how)


def test_a_drifting_run_of_two_seeds_records_its_order(tmp_path):
    how = {"order": "classes", "seeds": 2, "epochs": 1}
    together = small_run(tmp_path / "run", **how)
    assert len(together) == 2
    recorded = (tmp_path / "run/seed_0/settings.json").read_text()
    assert '"order": "classes"' in recorded
    with pytest.raises(RunError, match="order"):
        small_run(tmp_path / "run", **{**how, "order": "random"})
