"""The partition of a dataset into mega-batches: the same for every learner, given by the data seed alone."""

from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
import torch

from fairseq_alma.core.errors import SettingError
from tests.vision.tiny_runs import SMALL, VALIDATED_ON, small_run, taken
from vision.datasets import Dataset, Examples, Pixels, load_dataset
from vision.datasets import examples as examples_module
from vision.learners import LEARNERS
from vision.stream import partition, stacked_stream


def numbered(count: int) -> Dataset:
    """Return a dataset. Training example i has one pixel, i, and class i mod 3."""
    numbers = torch.arange(count)
    examples = Examples(numbers[:, None].to(torch.uint8), numbers % 3)
    return Dataset("numbered", (1, 1, 1), 3, Pixels(255.0, 0.0, 1.0), examples, examples)


def numbers(examples: Examples) -> list[int]:
    return examples.images[:, 0].tolist()


def test_ten_examples_in_three_mega_batches_are_numpys_permutation_cut_at_4_and_7():
    order = np.random.RandomState(7).permutation(10).tolist()
    arrivals = partition(numbered(10), 3, validation_share=0.34, seed=7)
    # int(0.34 * 4) and int(0.34 * 3) are 1: the last example of each mega-batch is validation data.
    assert [numbers(arrival.training) for arrival in arrivals] == [order[:3], order[4:6], order[7:9]]
    assert [numbers(arrival.validation) for arrival in arrivals] == [order[3:4], order[6:7], order[9:]]
    assert all((arrival.training.labels == arrival.training.images[:, 0] % 3).all() for arrival in arrivals)


@pytest.mark.parametrize(
    ("share", "num_validation"), [(0.1, 2), (0.149, 2), (0.15, 3), (0.5, 10), (0.99, 19), (0.01, 1)]
)
def test_the_validation_share_of_20_examples_is_rounded_down_to_at_least_one(share, num_validation):
    (arrival,) = partition(numbered(20), 1, share, seed=0)
    assert (len(arrival.training), len(arrival.validation)) == (20 - num_validation, num_validation)


def test_every_example_arrives_once():
    arrivals = partition(numbered(101), 7, 0.1, seed=3)
    seen = [
        number for arrival in arrivals for part in (arrival.training, arrival.validation) for number in numbers(part)
    ]
    assert sorted(seen) == list(range(101))
    assert {len(arrival.training) + len(arrival.validation) for arrival in arrivals} == {14, 15}


def test_two_examples_per_mega_batch_are_enough_and_fewer_are_refused():
    assert all(len(a.training) == len(a.validation) == 1 for a in partition(numbered(10), 5, 0.1, seed=0))
    with pytest.raises(SettingError, match=r"mega_batches=6 is too many for 10 training examples.*give at most 5"):
        partition(numbered(10), 6, 0.1, seed=0)


def test_a_digest_depends_on_images_labels_and_the_validation_share():
    dataset = numbered(12)
    other_label = replace(dataset, training=Examples(dataset.training.images, dataset.training.labels.clone()))
    other_label.training.labels[0] = 2

    def digests(which=dataset, share=0.25, seed=0):
        return [arrival.digest for arrival in partition(which, 2, share, seed)]

    assert digests() == digests()
    assert set(digests()).isdisjoint(digests(seed=1))
    assert set(digests()).isdisjoint(digests(share=0.5))
    assert len(set(digests()) - set(digests(other_label))) == 1  # that of the mega-batch with example 0


def test_the_digests_are_those_of_earlier_versions(monkeypatch):
    """Otherwise no run that was started with an earlier version could be continued. The values are from July 2026."""
    arrivals = partition(load_dataset("digits", "."), 20, 0.1, seed=0)
    assert arrivals[0].digest == "a8a2682a51f561920e03e88ee7bed5f44f13c5dace34e3cf9b286e313e557c32"
    joined = "".join(arrival.digest for arrival in arrivals)
    assert sha256(joined.encode()).hexdigest() == "22b02e99cf8defdc3e24ddf29cca06810e4dd55f9941a590514aea329b2e00c6"
    monkeypatch.setattr(examples_module, "PART_BYTES", 64 * 10)  # images are read in parts of 10
    assert "".join(arrival.digest for arrival in arrivals) == joined


@pytest.mark.parametrize(
    ("name", "folder", "num_mega_batches", "expected"),
    [
        ("mnist", "MNIST", 500, "0a3bb167a1e86ac5302042b67a8e72e89ea2147d16c46d047280e9b53e416bde"),
        ("cifar10", "cifar-10-batches-py", 100, "16e18730b62e10bdfe61d82dc129756d2fe930b9823a0c47b5cbeba2063c2d3e"),
    ],
)
def test_the_digests_of_real_data_are_those_of_earlier_versions(alma_data, name, folder, num_mega_batches, expected):
    if not (alma_data / folder).is_dir():
        pytest.skip(f"no {folder} in ALMA_DATA")
    arrivals = partition(load_dataset(name, alma_data), num_mega_batches, 0.1, seed=0)
    assert sha256("".join(arrival.digest for arrival in arrivals).encode()).hexdigest() == expected


def test_the_images_of_a_mega_batch_are_copied_when_they_are_asked_for():
    dataset = numbered(12)
    (arrival, _) = partition(dataset, 2, 0.25, seed=0)
    before = numbers(arrival.training)
    arrival.training.images[:] = 99  # a copy, so this changes nothing
    assert numbers(arrival.training) == before
    dataset.training.images[before[0]] = 77
    assert numbers(arrival.training)[0] == 77
    assert numbers(arrival.training[torch.tensor([2, 0])]) == [before[2], 77]


def test_a_stream_of_two_seeds_has_two_arrivals_in_each_mega_batch():
    streams = [partition(numbered(20), 4, 0.2, seed) for seed in (0, 1)]
    mega_batches = list(stacked_stream(streams))
    assert [mega_batch.t for mega_batch in mega_batches] == [1, 2, 3, 4]
    for t in range(4):
        assert mega_batches[t].data == [streams[0][t], streams[1][t]]
        assert mega_batches[t].counts == {"training": 4, "validation": 1}


def test_the_partition_is_the_same_for_every_learner(tmp_path):
    small = {**SMALL, "epochs": 1}
    digests = {}
    for learner in LEARNERS:
        small_run(tmp_path / learner, **small, **taken(learner, experts=2, members=2), wait=2)
        digests[learner] = (tmp_path / learner / "arrivals.json").read_text()
    assert len(set(digests.values())) == 1
    arrivals = partition(load_dataset("digits", "."), 4, 0.1, seed=0)
    assert all(f'"{arrival.digest}"' in digests["sm"] for arrival in arrivals)
    assert tuple(len(arrival.validation) for arrival in arrivals) == VALIDATED_ON


def test_the_seed_decides_the_partition(tmp_path):
    def digests(name, **seeds):
        small_run(tmp_path / name, epochs=1, mega_batches=2, **seeds)
        return (tmp_path / name / "arrivals.json").read_text()

    assert digests("a", seed=3) == digests("b", seed=3, width=4) != digests("c", seed=4)
