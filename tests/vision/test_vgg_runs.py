"""Every learner on the VGG, from settings to ledger: two seeds of tiny colour images in three mega-batches."""

import os
from functools import cache

import pytest
import torch

from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import read_json
from tests.vision.tiny_runs import ledger
from vision.checkpoints import read_checkpoint
from vision.datasets import Dataset, Examples, Pixels
from vision.firefly.chain import chain_from_stack
from vision.inputs import Images
from vision.learners import LEARNERS, VisionLearner
from vision.learners import firefly as learners
from vision.networks import GatedModuleStack, ModuleStack, Structure, module_stack
from vision.runs import run_learner
from vision.seeds import generator
from vision.settings import VisionSettings
from vision.stream import partition

B = 3
C = 2
"""Channels: networks of 688 parameters."""
VGG = Structure("vgg", (3, 32, 32), 10, C)


def tiny_dataset():
    """Images that are brighter where their class says."""
    drawn_by = generator("tiny images")
    labels = torch.arange(80) % 10
    images = torch.randint(0, 120, (80, 3, 32, 32), generator=drawn_by, dtype=torch.uint8)
    for image, label in zip(images, labels, strict=True):
        image[:, 3 * label : 3 * label + 3] += 120
    examples = Examples(images.flatten(1), labels)
    which = torch.arange(80)
    pixels = Pixels(255.0, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    return Dataset("cifar10", (3, 32, 32), 10, pixels, examples[which[:60]], examples[which[60:]])


def small_run(out, learner="sm", **more):
    values = {"learner": learner, "epochs": 2, "seeds": 2, "mega_batches": B, "width": C, "batch_size": 16}
    if learner in ("ens", "umix"):
        values["members"] = 2
    if learner in ("moe", "ens_moe"):
        values["experts"] = 2
    settings = VisionSettings.from_mapping({"out": str(out), "dataset": "cifar10", **values, **more})
    return run_learner(settings, tiny_dataset())


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A function that returns the ledgers of a run of a learner. Tests with the same settings share the run."""

    @cache
    def whole(learner, **more):
        return small_run(tmp_path_factory.mktemp(learner), learner, **more)

    return whole


ALIKE = ("umix", "gmoe_flat", "ens_moe")
"""Learners that differ from another one in a few lines only. Other tests of the quick suite run them, on digits."""
MORE_LEARNERS = ("sm", "ens", "gens", "ff")

MEAN = "block_1.norm_1.running_mean"


def layers_of(out, k):
    """Return the width of each layer after stage k, and whether pooling follows it."""
    stack = read_checkpoint(out / f"stages/stage_{k:03d}/train/networks.pt", torch.device("cpu"))
    chain = chain_from_stack(stack)
    return [(layer.width, layer.is_pooled) for layer in chain.layers]


NUM_PARAMS = 27 * C + 135 * C**2 + 32 * C + 10 * C + 10
BLOCKS_2_TO_5 = 14 * (9 * C**2 + 2 * C)
GATE = 4 * (16 * C + 1)
"""Of one branch in each of the four mixtures."""


@pytest.mark.parametrize(
    ("learner", "num_params"),
    [
        ("sm", [NUM_PARAMS] * 4),
        ("ens", [2 * NUM_PARAMS] * 4),
        pytest.param("umix", [2 * NUM_PARAMS] * 4, marks=pytest.mark.slow),
        ("gens", [NUM_PARAMS, NUM_PARAMS, 2 * NUM_PARAMS, 3 * NUM_PARAMS]),
        ("gmoe", [NUM_PARAMS + k * (BLOCKS_2_TO_5 + 2 * GATE) for k in (0, 0, 1, 2)]),
        pytest.param(
            "gmoe_flat",
            [NUM_PARAMS + k * BLOCKS_2_TO_5 + gates * GATE for k, gates in ((0, 0), (0, 0), (1, 2), (2, 3))],
            marks=pytest.mark.slow,
        ),
        ("moe", [NUM_PARAMS + BLOCKS_2_TO_5 + 2 * GATE] * 4),
        pytest.param(
            "ens_moe", [k * (NUM_PARAMS + BLOCKS_2_TO_5 + 2 * GATE) for k in (1, 1, 2, 3)], marks=pytest.mark.slow
        ),
    ],
)
def test_each_learner_runs(learner, num_params, whole_run):
    ledgers = whole_run(learner)
    for rows in ledgers:
        assert [row.scores.num_params for row in rows] == num_params
        assert [row.spent.num_updates > 0 for row in rows] == [False, True, True, True]
    assert ledgers[0] != ledgers[1]


@pytest.mark.parametrize("learner", ["moe", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ens", *ALIKE))])
def test_a_second_run_is_identical(learner, tmp_path, whole_run):
    """For the learners that the next test continues, it shows this too."""
    again = small_run(tmp_path, learner)
    assert [[row.scores for row in rows] for rows in again] == [
        [row.scores for row in rows] for rows in whole_run(learner)
    ]


@pytest.mark.parametrize("learner", ["gens", "gmoe", "ff", pytest.param("sm", marks=pytest.mark.slow)])
def test_a_run_that_is_continued_ends_as_the_whole_one(learner, tmp_path, whole_run):
    # Firefly trains the seeds one after another, so one of them is enough.
    more = {"candidates": 5, "seeds": 1} if learner == "ff" else {}
    whole = whole_run(learner, **more)
    small_run(tmp_path / "parts", learner, **more, arrivals=1)
    parts = small_run(tmp_path / "parts", learner, **more, arrivals=B)
    assert [[row.scores for row in rows] for rows in parts] == [[row.scores for row in rows] for rows in whole]


def test_firefly_adds_a_quarter_of_the_first_parameters_at_each_growth(tmp_path, whole_run):
    first, second = small_run(tmp_path / "a", "ff", candidates=5)
    for rows in (first, second):
        sizes = [row.scores.num_params for row in rows]
        assert sizes[0] == sizes[1] == NUM_PARAMS
        for growths, size in ((1, sizes[2]), (2, sizes[3])):
            target = NUM_PARAMS + growths * round(NUM_PARAMS / 4)
            assert target <= size < target + 9 * (5 + 5) + 2  # less than one unit too many: widths are 5 at most
    # Its passes are charged: more than three epochs of training alone would cost.
    plain = whole_run("sm")[0]
    assert first[2].spent.train_flops > 2 * plain[2].spent.train_flops
    assert first[1].spent.train_flops == plain[1].spent.train_flops
    assert [row.scores for row in first] != [row.scores for row in second]
    (alone,) = small_run(tmp_path / "one", "ff", candidates=5, seed=1, seeds=1)
    assert [row.scores for row in alone] == [row.scores for row in second]


@pytest.fixture
def growths(monkeypatch):
    """What each growth of ff was given: (images and classes of an epoch, number of candidates, first numbers drawn)."""
    seen = []
    width = learners.grow_width

    def spied(chain, batches, how_many, noise, num_candidates):
        state = noise.get_state()
        before = torch.rand(3, generator=noise).tolist()
        noise.set_state(state)
        grown = width(chain, batches, how_many, noise, num_candidates)
        epoch = list(batches())
        seen.append({"images": torch.cat([x for x, _ in epoch]), "labels": torch.cat([y for _, y in epoch]),
                     "candidates": num_candidates, "noise": before, "flops": grown.flops})  # fmt: skip
        return grown

    monkeypatch.setattr(learners, "grow_width", spied)
    return seen


def as_set(images):
    return {tuple(one.flatten().mul(1e4).round().long().tolist()) for one in images}


def test_firefly_ranks_on_the_plain_images_of_the_coming_stage(tmp_path, growths):
    small_run(tmp_path, "ff", seeds=1, candidates=3)
    dataset = tiny_dataset()
    inputs = Images(dataset.pixels, dataset.image_shape)
    own = as_set(inputs.to_input(inputs.to_storage(dataset.training.images)).movedim(-1, 1))  # without flips and crops
    first, second = growths
    assert len(as_set(first["images"])) == len(as_set(second["images"])) == 18  # of 20, two are to validate on
    assert as_set(first["images"]) | as_set(second["images"]) <= own
    assert not as_set(first["images"]) & as_set(second["images"])
    # Those of stages 2 and 3: what is left of the partition is stage 1's.
    parts = partition(dataset, B, 0.1, 0)
    for growth, part in ((first, parts[1]), (second, parts[2])):
        assert as_set(growth["images"]) <= as_set(
            inputs.to_input(inputs.to_storage(part.training.images)).movedim(-1, 1)
        )
    assert first["noise"] != second["noise"]
    assert first["candidates"] == 3


def test_firefly_with_replay_ranks_on_the_past_too(tmp_path, growths):
    small_run(tmp_path / "plain", "ff", seeds=1, candidates=3, epochs=1)
    plain = growths[-1]["images"]
    growths.clear()
    small_run(tmp_path / "share", "ff", seeds=1, candidates=3, epochs=1, replay=0.5)
    share = growths[-1]["images"]
    assert len(share) == len(plain)  # at unchanged cost
    assert len(as_set(share) - as_set(plain)) >= len(share) / 3
    growths.clear()
    small_run(tmp_path / "all", "ff", seeds=1, candidates=3, epochs=1, replay="all")
    assert len(growths[-1]["images"]) == 3 * len(plain)


def test_firefly_grows_by_the_number_of_growths_whatever_their_distance(tmp_path, growths):
    (rows,) = small_run(tmp_path, "ff", seeds=1, candidates=5, grow_every=2)
    sizes = [row.scores.num_params for row in rows]
    target = NUM_PARAMS + round(NUM_PARAMS / 4)
    assert sizes[1] == sizes[2] == NUM_PARAMS
    assert target <= sizes[3] < target + 9 * (5 + 5) + 2
    # The stage that grows is charged for it, and for nothing twice.
    trained = ModuleStack.initialised(VGG, [generator(0)], torch.device("cpu")).flops.training
    assert rows[2].spent.train_flops == trained * 18 * 2  # two epochs
    assert len(growths) == 1
    last = read_checkpoint(tmp_path / "stages/stage_003/train/networks.pt", torch.device("cpu"))
    assert rows[3].spent.train_flops == growths[0]["flops"] + last.flops.training * 18 * 2


def test_firefly_of_the_original_code_grows_by_t_whatever_the_distance(tmp_path):
    small_run(tmp_path, "ff", seeds=1, grow_by="width", grow_ratio=0.6, candidates=5, grow_every=2, keep_stages=True)
    widths = [sum(width for width, _ in layers_of(tmp_path, k)) for k in (1, 2, 3)]
    assert widths == [16 * C, 16 * C, 16 * C + int(16 * C * (2.2 / 1.6 - 1))]  # before stage 3: t = 2


def test_firefly_of_the_original_code_follows_its_formula_of_widths(tmp_path):
    (rows,) = small_run(tmp_path, "ff", seeds=1, grow_by="width", grow_ratio=0.6, candidates=5, keep_stages=True)
    widths = [sum(width for width, _ in layers_of(tmp_path, k)) for k in (1, 2, 3)]
    assert widths[0] == 16 * C
    assert widths[1] == widths[0] + int(widths[0] * (1.6 / 1 - 1))
    assert widths[2] == widths[1] + int(widths[1] * (2.2 / 1.6 - 1))
    assert rows[-1].scores.num_params > rows[-2].scores.num_params > NUM_PARAMS


def test_firefly_grows_on_what_its_stage_reads(tmp_path, monkeypatch):
    """A learner of a plugin may say which examples a stage reads."""
    read = []

    def newest(self, stage):
        read.append(stage.index)
        return self.memory.stage_data(stage.new[-1:], (), False)

    monkeypatch.setattr(LEARNERS["ff"], "stage_data", newest)
    small_run(tmp_path, "ff", seeds=1, candidates=5, epochs=1)
    assert read == [1, 2, 2, 3, 3]  # growth and training


def test_firefly_refuses_a_folder_of_other_seeds(tmp_path):
    small_run(tmp_path, "ff", candidates=5, epochs=1, arrivals=1)
    with pytest.raises(RunError, match="contains a run of other seeds"):
        small_run(tmp_path, "ff", candidates=5, epochs=1, arrivals=1, seed=1)
    small_run(tmp_path, "ff", candidates=5, epochs=1, arrivals=2)  # the same go on


def test_a_copied_member_is_the_last_one_with_its_statistics(tmp_path):
    """A new member that learns nothing (lr too small to change a number) says what the last one says."""
    run_of = {"learner": "gens", "new_members_from": "copy", "seeds": 1, "epochs": 1, "lr": 1e-30, "keep_stages": True}
    small_run(tmp_path, **run_of)
    first, last = (
        read_checkpoint(tmp_path / f"stages/stage_{k:03d}/train/networks.pt", torch.device("cpu")) for k in (1, 3)
    )
    torch.testing.assert_close(first.parameters.flat, last.parameters.flat, rtol=0, atol=1e-20)
    # Statistics went on from the last member's: a tenth nearer to the data at every update.
    assert last.statistics[MEAN].abs().sum() > 1.5 * first.statistics[MEAN].abs().sum()


@pytest.mark.parametrize("learner", ["sm", "gens", "gmoe"])
def test_what_backward_needed_is_let_go_of_after_a_stage(learner, tmp_path, monkeypatch):
    seen = []
    trained = VisionLearner.train

    def train(self, stage):
        spent = trained(self, stage)
        seen.append(self.stack)
        with pytest.raises((ValueError, IndexError, AssertionError, RuntimeError)):
            self.stack.backward(torch.zeros(len(self.stack), 4, 10))
        return spent

    monkeypatch.setattr(VisionLearner, "train", train)
    small_run(tmp_path, learner, seeds=1, epochs=1)
    assert len(seen) == B


def test_expert_load_is_that_of_all_validation_examples(tmp_path, monkeypatch):
    whole = small_run(tmp_path / "whole", "moe", seeds=1, epochs=1)[0]
    drawn = GatedModuleStack.__init__

    def small_parts(self, *args, **kwargs):
        drawn(self, *args, **kwargs)
        self.examples_at_once = 1

    monkeypatch.setattr(GatedModuleStack, "__init__", small_parts)
    parts = small_run(tmp_path / "parts", "moe", seeds=1, epochs=1)[0]
    for row, other in zip(whole, parts, strict=True):
        if row.scores.expert_load:
            torch.testing.assert_close(torch.tensor(row.scores.expert_load), torch.tensor(other.scores.expert_load))


def test_seeds_together_are_seeds_alone(tmp_path, whole_run):
    both = whole_run("sm")
    (one,) = small_run(tmp_path, seed=1, seeds=1)
    assert [row.scores for row in both[1]] == [row.scores for row in one]


def test_what_is_deployed_is_what_was_scored(tmp_path):
    """By torch's own modules, from the file that predictor.json names."""
    (rows,) = small_run(tmp_path, "gmoe", seeds=1)
    predictor = read_json(tmp_path / "predictor.json")
    (checkpoint,) = predictor["checkpoints"]
    network = read_checkpoint(tmp_path / checkpoint["path"], torch.device("cpu")).to_module(0).eval()
    test = tiny_dataset().test
    x = (test.images.view(-1, 3, 32, 32) / 255 - 0.5) / 0.25
    assert rows[-1].scores.error_rate == float((network(x).argmax(-1) != test.labels).double().mean())


def test_augmentation_and_replay_change_what_is_learned_and_not_what_it_costs(tmp_path):
    plain = small_run(tmp_path / "plain", crop_padding=0, seeds=1, epochs=1)[0]
    changed = small_run(tmp_path / "changed", seeds=1, epochs=1)[0]
    assert [row.spent.train_flops for row in plain] == [row.spent.train_flops for row in changed]
    assert plain[-1].scores != changed[-1].scores
    shared = small_run(tmp_path / "shared", replay=0.5, seeds=1, epochs=1)[0]
    assert [row.spent.train_flops for row in shared] == [row.spent.train_flops for row in changed]
    everything = small_run(tmp_path / "all", replay="all", seeds=1, epochs=1)[0]
    assert everything[-1].spent.train_flops == 3 * changed[-1].spent.train_flops


@pytest.mark.slow  # tests/vision/test_cifar.py reads the real images, too
@pytest.mark.skipif("ALMA_DATA" not in os.environ, reason="ALMA_DATA names no folder with CIFAR-10")
def test_a_stage_on_cifar10(tmp_path):
    settings = VisionSettings.from_mapping({
        "out": str(tmp_path), "dataset": "cifar10", "data_root": os.environ["ALMA_DATA"], "mega_batches": 50,
        "arrivals": 1, "width": 8, "epochs": 20, "lr": 0.05,
    })  # fmt: skip
    (rows,) = run_learner(settings)
    assert abs(rows[0].scores.error_rate - 0.9) < 0.02
    assert rows[1].scores.error_rate < 0.88
    assert rows[1].spent.num_updates == 20 * 8  # epochs, and batches of 900 examples


@pytest.mark.parametrize("learner", ["gmoe", *(pytest.param(one, marks=pytest.mark.slow) for one in MORE_LEARNERS)])
def test_gaps_between_the_parameters_change_nothing(tmp_path, monkeypatch, learner):
    """On a GPU, each parameter begins at a multiple of 64 values."""
    more = {"candidates": 5} if learner == "ff" else {}
    small_run(tmp_path / "packed", learner, **more)
    monkeypatch.setattr(module_stack, "ALIGNMENT", {"cpu": 64})
    small_run(tmp_path / "aligned", learner, **more)
    for seed in ("seed_0", "seed_1"):
        assert ledger(tmp_path / "aligned" / seed) == ledger(tmp_path / "packed" / seed)
