"""The plugins for images in results/rivals, and the study that compares them."""

import base64
import json
import random
import sys
from dataclasses import replace

import pytest
import torch

import vision.runs
from fairseq_alma.app.plugins import load_plugin
from fairseq_alma.core import catalogue
from fairseq_alma.core.files import write_json
from fairseq_alma.core.protocol import Stage
from tests.commands import ROOT
from tests.studies import study_module
from tests.vision.test_killed import Child, kill_at_random_moments
from tests.vision.tiny_runs import (
    EPOCHS,
    FORWARD,
    TRAINED_ON,
    TRAINING,
    UPDATES,
    VALIDATED_ON,
    flat,
    networks,
    small_run,
    small_settings,
)
from vision import learners
from vision.backbones import Backbone
from vision.batches import Memory
from vision.datasets import Selection, load_dataset
from vision.inputs import Vectors
from vision.networks import MLPStack
from vision.seeds import generator
from vision.stream import partition, stacked_stream

CPU = torch.device("cpu")
DIGITS = load_dataset("digits", ".")
PLUGINS = {"er": "er", "derpp": "der", "gdumb": "gdumb"}
"""Name of the learner -> name of its module."""
REPLAY = {"er": 0.5, "derpp": 2 / 3, "gdumb": "all"}


@pytest.fixture(autouse=True)
def rivals(monkeypatch):
    """Import the plugins. Their learners are removed at the end of the test."""
    monkeypatch.chdir(ROOT)
    before = set(learners.LEARNERS)
    for name in PLUGINS.values():
        load_plugin(f"results.rivals.{name}")
    yield {name: sys.modules[f"results.rivals.{name}"] for name in PLUGINS.values()}
    for name in set(learners.LEARNERS) - before:
        del learners.LEARNERS[name]
        catalogue.remove_learner(name)
    for name in PLUGINS.values():
        del sys.modules[f"results.rivals.{name}"]


@pytest.fixture(scope="module")
def study():
    """The module of the study."""
    return study_module("frontier/image_rivals.py")


def settings_of(learner, **changes):
    return {
        "learner": learner, "plugin": f"results.rivals.{PLUGINS[learner]}", "replay": REPLAY[learner],
        "select_by": "last", "memory": 20, **changes,
    }  # fmt: skip


def test_a_reservoir_of_two_places_after_five_examples(rivals):
    """Example 2 draws place 0.5 x 3 = 1, example 3 place 0.9 x 4 = 3, which does not exist, example 4 place 0."""
    draws = torch.tensor([0.9, 0.9, 0.5, 0.9, 0.1], dtype=torch.float64)
    contents = [rivals["er"].reservoir(draws[:count], 2).tolist() for count in range(6)]
    assert contents == [[], [0], [0, 1], [0, 2], [0, 2], [4, 2]]
    both = torch.tensor([0, 0, 0.5, 0.25], dtype=torch.float64)  # examples 2 and 3 draw place 1: the later one has it
    assert rivals["er"].reservoir(both, 2).tolist() == [0, 3]


def test_each_example_is_equally_likely_to_be_in_the_reservoir(rivals):
    draws = torch.rand(2000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    counts = torch.stack([torch.bincount(rivals["er"].reservoir(row, 2), minlength=8) for row in draws]).sum(0)
    # Each count has the mean 2000 x 2 / 8 = 500 and the standard deviation 19.
    assert ((counts - 500).abs() < 80).all()


def test_er_keeps_a_bounded_memory_and_costs_as_much_as_sm(tmp_path):
    (rows,) = small_run(tmp_path, **settings_of("er"))
    new = [TRAINED_ON + count for count in VALIDATED_ON]
    assert [row.scores.num_stored for row in rows] == [0, new[0], *(20 + count for count in new[1:])]
    assert [row.spent.num_updates for row in rows] == [0] + [UPDATES] * 4
    assert [row.spent.train_flops for row in rows] == [0] + [EPOCHS * TRAINED_ON * TRAINING] * 4


@pytest.mark.parametrize("replay", [0.5, "uniform"])
def test_er_that_remembers_everything_is_sm_with_replay(tmp_path, replay):
    small_run(tmp_path / "er", **settings_of("er", replay=replay, memory=10_000))
    small_run(tmp_path / "sm", replay=replay, select_by="last")
    assert flat(networks(tmp_path / "er", 4)).equal(flat(networks(tmp_path / "sm", 4)))


def test_the_gradient_of_derpp_is_that_of_its_loss(rivals):
    """Two classes; one new example, one for the distance and one for the cross entropy, and weights for means of each.

    The gradient of CE + 0.2 MSE + 0.5 CE is (0.5 - 1, 0.5), 0.2 x (0 - 1, 0 + 1) and 0.5 x (0.5, 0.5 - 1).
    """
    logits = torch.zeros(1, 3, 2)
    targets = torch.tensor([[[1, 0, 0, 0, 3, 0], [1, 0, 1, -1, 0, 0.6], [0, 1, 0, 0, 1.5, 0]]])
    gradient = rivals["der"].DarkLoss(1, 1).gradient(logits, targets)
    assert torch.allclose(gradient, torch.tensor([[[-0.5, 0.5], [-0.2, 0.2], [0.25, -0.25]]]))


def test_derpp_reads_its_memory_twice_with_weights_that_make_each_term_a_mean(rivals, tmp_path):
    settings = small_settings(tmp_path, **settings_of("derpp", alpha=0.2, beta=0.5))
    memory = Memory(Vectors(DIGITS.pixels), 10, 1, CPU)
    learner = learners.LEARNERS["derpp"](settings, Backbone((64, 8, 8, 10)), memory, CPU)
    stream = list(stacked_stream([partition(DIGITS, 4, 0.1, 0)]))
    first = learner.stage_data(Stage(1, (stream[0],), (), 2 / 3, tmp_path)).training.one_hot
    assert first[:, 20].unique().tolist() == [1] and first[:, 21].unique().tolist() == [0]
    learner.logits_SmC = torch.full((1, 2, 10), 7.0)
    past = rivals["er"].remembered(stream[:1], [torch.tensor([5, 6, 5, 6])])
    data = learner.stage_data(Stage(2, (stream[1],), (past,), 2 / 3, tmp_path))
    assert (data.num_past, past.counts) == (4, {"training": 2})
    rows = data.training.one_hot
    assert torch.allclose(rows[:5, 20:], torch.tensor([[0, 0.6], [0, 0.6], [1.5, 0], [1.5, 0], [3, 0]]))
    assert rows[:2, 10:20].unique().tolist() == [7] and rows[2:, 10:20].unique().tolist() == [0]
    assert rows[:4, :10].argmax(1).tolist() == stream[0].data[0].training.labels[[5, 6, 5, 6]].tolist()


def test_derpp_stores_the_logits_of_the_stage_in_which_an_example_arrived(rivals, tmp_path):
    (rows,) = small_run(tmp_path, **settings_of("derpp", memory=40), arrivals=2, last_group="train", keep_stages=True)
    state = json.loads((tmp_path / "stages/stage_002/train/learner.json").read_text())
    flat_logits = torch.frombuffer(bytearray(base64.b64decode(state["logits"])), dtype=torch.float32)
    stored = flat_logits.view(state["logits_shape"])
    draws = torch.rand(2 * TRAINED_ON, dtype=torch.float64, generator=generator(0, "reservoir"))
    places = rivals["er"].reservoir(draws, 40)
    parts = [arrival.training for arrival in partition(DIGITS, 4, 0.1, 0)[:2]]
    x = DIGITS.pixels.normalise(Selection.join(parts).images)[None, places]
    expected = torch.where(places[:, None] < TRAINED_ON, *(networks(tmp_path, k).logits(x)[0] for k in (1, 2)))
    assert torch.allclose(stored[0], expected, atol=1e-5)
    num_second = int((places >= TRAINED_ON).sum())
    assert 0 < num_second < 40
    assert [row.spent.train_flops for row in rows[1:]] == [
        EPOCHS * TRAINED_ON * TRAINING + count * FORWARD for count in (40, num_second)
    ]


class Oldest(random.Random):
    """Draws the first of several things."""

    def randrange(self, *_):
        return 0


def test_gdumb_balances_classes_in_a_memory_of_four(rivals):
    """The fifth 0 is not stored. The first two 1s replace 0s; then each class has 4 / 2. The 2 replaces a 0."""
    labels = [0, 0, 0, 0, 0, 1, 1, 1, 2]
    contents = [rivals["gdumb"].greedy_sample(labels[:count], 4, Oldest()) for count in (5, 6, 8, 9)]
    assert contents == [[0, 1, 2, 3], [1, 2, 3, 5], [2, 3, 5, 6], [3, 5, 6, 8]]


def test_gdumb_trains_a_new_network_on_its_memory_only(tmp_path):
    still = {"optimizer": "sgd", "lr": 1e-12, "weight_decay": 0.0}
    (rows,) = small_run(tmp_path, **settings_of("gdumb"), **still, keep_stages=True)
    assert [row.spent.train_flops for row in rows] == [0] + [EPOCHS * 20 * TRAINING] * 4
    assert [row.scores.num_stored for row in rows] == [0] + [20] * 4
    untrained = MLPStack.initialised((64, 8, 8, 10), [generator(0, "initialisation", 0, 3)], CPU)
    assert torch.allclose(flat(networks(tmp_path, 3)), flat(untrained))


@pytest.mark.parametrize("learner", PLUGINS)
def test_class_after_class_it_remembers_more_than_sm(learner, tmp_path):
    stream = {"order": "classes", "mega_batches": 10, "epochs": 20}
    (own,) = small_run(tmp_path / learner, **settings_of(learner), **stream)
    (sm,) = small_run(tmp_path / "sm", **stream)
    assert sm[-1].scores.error_rate > 0.85
    assert own[-1].scores.error_rate < 0.7


@pytest.mark.parametrize(
    "learner", ["derpp", pytest.param("er", marks=pytest.mark.slow), pytest.param("gdumb", marks=pytest.mark.slow)]
)
def test_a_killed_run_ends_as_it_would_have(learner, tmp_path, monkeypatch):
    monkeypatch.setattr(vision.runs, "SAVE_SECONDS", 0.02)
    settings = settings_of(learner, order="classes", mega_batches=10)
    if learner != "gdumb":
        settings["seeds"] = 2
    kill_at_random_moments(lambda out: Child(lambda: small_run(out, **settings)), tmp_path, random.Random(0))


def test_gdumb_has_as_many_epochs_as_its_memory_allows_at_equal_flops(study):
    """10 passes over 50 mega-batches of 900 images are 450,000 images. At wait 5 there are 10 stages.

    With a memory of 500, they read 5,000 images in each epoch: 90 epochs. With one of 5,000, the first stage has 4,500
    images: 49,500 in each epoch, and 9 epochs.
    """
    cifar10 = study.STUDIES[0]
    assert [cifar10.epochs(study.RECIPES[name], "5") for name in ("gdumb_500", "gdumb_5000", "anytime")] == [90, 9, 10]
    job = cifar10.job("gdumb_500", {"lr": "0.03", "wait": "5"})
    assert {"order=classes", "memory=500", "lr=0.03", "wait=5", "epochs=90"} <= set(job.settings)
    # Geometric waits train at arrivals 1, 2, 3, 5, 8, 12, 18, 27, 41 and 50: 900, 1,800, 2,700, 4,500 and six times
    # 5,000 images, 39,900 in each epoch.
    assert cifar10.epochs(study.RECIPES["gdumb_5000"], "geometric") == 11


def test_rates_and_schedules_are_chosen_together(study):
    cifar10 = study.STUDIES[0]
    rates = cifar10.grid("er_500")["lr,schedule"]
    assert rates == tuple(f"{lr},{name}" for name in ("constant", "cosine") for lr in ("0.01", "0.003", "0.03"))
    job = cifar10.job("er_500", {"lr,schedule": rates[-1], "replay": "0.8"})
    assert {"lr=0.03", "schedule=cosine", "replay=0.8", "memory=500"} <= set(job.settings)
    assert cifar10.grid("anytime") == {"lr": ("0.01", "0.003", "0.03")}


def test_settings_are_chosen_by_errors_on_validation_data(study, tmp_path, monkeypatch):
    small_run(tmp_path / "classes", order="classes")
    lines = [json.loads(line) for line in (tmp_path / "classes/errors.jsonl").read_text().splitlines()]
    errors = [error for line in lines[1:] for error in line["by_mega_batch"]]
    assert study.validation_error(tmp_path / "classes") == pytest.approx(sum(errors) / 16)
    (rows,) = small_run(tmp_path / "random")
    errors = [row.prequential.error_rate for row in rows if row.t >= 2]  # at t = 1 it is untrained
    assert study.validation_error(tmp_path / "random") == pytest.approx(sum(errors) / 3)
    monkeypatch.setattr(study, "SELECTION", replace(study.SELECTION, path=tmp_path / "selection.json"))
    cifar10 = study.STUDIES[0]
    assert (cifar10._best("anytime"), cifar10._best("sm_w1")) == (None, {})
    cifar10 = replace(cifar10, lr=("0.01", "0.03"))
    tried = [{"values": {"lr": lr}, "validation_error": error} for lr, error in (("0.01", 0.5), ("0.03", 0.4))]
    write_json(tmp_path / "selection.json", {"cifar10_classes": {"anytime": tried}})
    assert cifar10._best("anytime") == {"lr": "0.03"}


def test_the_table_compares_the_seeds_with_those_of_anytime(study, tmp_path):
    """CER 9 against 10 is 10% better, 19 against 20 is 5% better."""
    for name, cers in {"anytime": (10, 20), "er_500": (9, 19)}.items():
        (tmp_path / f"ledgers/mnist_random_{name}").mkdir(parents=True)
        seeds = [{"cer": cer, "final": 0.05, "comp": 100 if name == "anytime" else 102} for cer in cers]
        write_json(tmp_path / f"ledgers/mnist_random_{name}/summary.json", {"per_seed": seeds})
    lines = study._table(replace(study.STUDIES[3], folder=tmp_path))
    assert lines[4:6] == [
        "| ER, memory 500 | 14.00 ± 5.00 | -7.5 ± 2.5 | 5.0 ± 0.0 | 1.02 | 2 |",
        "| **anytime** | 15.00 ± 5.00 |  | 5.0 ± 0.0 | 1.00 | 2 |",
    ]
    assert study._table(replace(study.STUDIES[2], folder=tmp_path)) == []
