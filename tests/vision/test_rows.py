"""Tables of examples: large ones, which stay in the dataset, give the same batches and results as small ones."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.vision.pictures import noise
from tests.vision.tiny_runs import ledger, small_run, taken
from vision import rows as rows_module
from vision.batches import Batches, Memory
from vision.datasets import Dataset, dataset_from_arrays, load_dataset
from vision.inputs import Images, Transformed, Vectors
from vision.rows import LargeRows, Rows, rows_of
from vision.seeds import generator
from vision.stream import partition, stacked_stream

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def colours() -> Dataset:
    """Return a dataset of 120 random colour images of 6 x 4 pixels."""
    labels = np.arange(120) % 3
    return dataset_from_arrays("colours", noise(120, 6, 4, 3), labels, noise(3, 6, 4, 3), labels[:3])


def inputs_of(kind: str, dataset: Dataset):
    images = Images(dataset.pixels, dataset.image_shape, padding=2)
    return {
        "vectors": Vectors(dataset.pixels),
        "images": images,
        "transformed": Transformed(images, dataset.image_shape, lambda image: image.flip(-1)),
    }[kind]


@pytest.mark.parametrize("kind", ["vectors", "images", "transformed"])
@pytest.mark.parametrize(("num_seeds", "replay", "bagging"), [(1, False, False), (2, "all", True), (3, 0.5, False)])
def test_a_large_stage_has_the_same_batches_as_a_small_one(monkeypatch, colours, kind, num_seeds, replay, bagging):
    inputs = inputs_of(kind, colours)
    mega_batches = list(stacked_stream([partition(colours, 4, 0.2, seed) for seed in range(num_seeds)]))
    small, large = (Memory(inputs, 3, num_seeds, CPU) for _ in range(2))
    for t in range(1, 4):
        both = []
        for memory, large_bytes in ((small, 10**9), (large, 0)):
            monkeypatch.setattr(rows_module, "LARGE_BYTES", large_bytes)
            both.append(memory.stage_data(mega_batches[t : t + 1], mega_batches[:t], replay))
        assert [isinstance(data.training, LargeRows) for data in both] == [False, True]
        assert both[0].num_past == both[1].num_past
        epochs = []
        for data in both:
            orders = [generator(number, "order") for number in range(num_seeds)]
            found = Batches(data, orders, 16, replay if isinstance(replay, float) else 0.0, bagging)
            epochs.append([*found.epoch(), *found.epoch(augmented=False)])
        assert len(epochs[0]) == len(epochs[1]) > 2
        for (x, one_hot), (other_x, other_one_hot) in zip(*epochs, strict=True):
            assert torch.equal(x, other_x)
            assert torch.equal(one_hot, other_one_hot)
        for rows, other in ((data.training, data.validation) for data in both):
            parts = [torch.cat(list(one.parts(at_once=7)), dim=1) for one in (rows, other)]
            assert all(torch.equal(a, b.examples) for a, b in zip(parts, (rows, other), strict=True))
        for rows, other in zip(
            (both[0].training, both[0].validation), (both[1].training, both[1].validation), strict=True
        ):
            assert torch.equal(rows.examples, other.examples)
            assert torch.equal(rows.labels, other.labels)


def test_parts_have_at_most_the_given_number_of_examples(colours):
    rows = rows_of(colours.training, 3, inputs_of("images", colours), CPU)
    assert [part.shape for part in rows.parts(at_once=50)] == [(1, 50, 6, 4, 3), (1, 50, 6, 4, 3), (1, 20, 6, 4, 3)]


def test_a_stage_becomes_large_when_its_examples_need_more_than_the_limit(monkeypatch, colours):
    monkeypatch.setattr(rows_module, "LARGE_BYTES", 72 * 60)
    inputs = inputs_of("images", colours)
    mega_batches = list(stacked_stream([partition(colours, 4, 0.2, 0)]))  # 30 images each, of 72 bytes
    memory = Memory(inputs, 3, 1, CPU)
    data = [memory.stage_data(mega_batches[t : t + 1], mega_batches[:t], "all") for t in range(4)]
    assert [isinstance(one.training, LargeRows) for one in data] == [False, False, True, True]
    assert isinstance(memory.stage_data(mega_batches[1:2], mega_batches[:1], "all").validation, Rows)
    assert all(torch.equal(b.training.examples[:, :24], a.training.examples[:, :24]) for a, b in pairwise(data))
    # Vectors are stored as floats, so they need four times as many bytes.
    large = Memory(inputs_of("vectors", colours), 3, 1, CPU).stage_data(mega_batches[:1], [], False)
    assert isinstance(large.training, LargeRows)


def test_a_test_set_is_a_table_too(monkeypatch, colours):
    inputs = inputs_of("images", colours)
    small = rows_of(colours.test, 3, inputs, CPU)
    monkeypatch.setattr(rows_module, "LARGE_BYTES", 0)
    large = rows_of(colours.test, 3, inputs, CPU)
    assert [isinstance(rows, LargeRows) for rows in (small, large)] == [False, True]
    assert torch.equal(small.examples, large.examples)
    assert torch.equal(small.examples[0], inputs.to_input(inputs.to_storage(colours.test.images)))
    assert torch.equal(small.labels, large.labels)


@pytest.mark.parametrize("learner", ["sm", "ens", "gens", "gmoe", "ff"])
def test_a_run_whose_stages_are_large_has_the_same_ledger(tmp_path, monkeypatch, learner):
    digits = load_dataset("digits")
    how = {**taken(learner, members=2, experts=2), "replay": 0.5, "wait": 2, "epochs": 2}
    small_run(tmp_path / "small", digits, **how)
    # The validation data of all mega-batches and the test set stay in the dataset, too.
    monkeypatch.setattr(rows_module, "LARGE_BYTES", 0)
    small_run(tmp_path / "large", digits, **how)
    assert ledger(tmp_path / "large") == ledger(tmp_path / "small")
