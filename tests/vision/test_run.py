"""alma-vision from settings to ledger: repeated, stacked, continued, refused, and as a user types it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch

import vision
import vision.runs
from fairseq_alma.app.command import store_settings
from fairseq_alma.core import catalogue
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.lease import Lease
from tests.commands import run_command
from tests.vision.test_datasets import no_network, write_mnist  # noqa: F401 (a fixture)
from tests.vision.tiny_runs import (
    EPOCHS,
    PARAMS,
    TESTED_ON,
    TRAINED_ON,
    TRAINING,
    B,
    as_arguments,
    flat,
    ledger,
    mixture_params,
    mixture_training_flops,
    networks,
    small_run,
    summary,
    taken,
)
from vision import display
from vision.learners import LEARNERS
from vision.settings import VisionSettings


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- Repeated and stacked


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"learner": "ens", "bagging": True, "replay": 0.5, "seeds": 2},
        {"learner": "gmoe", "experts": 2, "hard_gates": True},
    ],
    ids=["sm", "ens", "gmoe"],
)
def test_two_runs_of_one_seed_are_identical(tmp_path, settings):
    for name in ("a", "b"):
        small_run(tmp_path / name, **settings)
    folders = ["."] if settings.get("seeds", 1) == 1 else ["seed_0", "seed_1"]
    for folder in folders:
        assert ledger(tmp_path / "a" / folder) == ledger(tmp_path / "b" / folder)
        arrivals = [(tmp_path / name / folder / "arrivals.json").read_bytes() for name in ("a", "b")]
        assert arrivals[0] == arrivals[1]
    assert torch.equal(flat(networks(tmp_path / "a", B)), flat(networks(tmp_path / "b", B)))


def test_another_seed_is_another_run(tmp_path):
    rows = [small_run(tmp_path / str(seed), seed=seed)[0] for seed in (0, 1)]
    assert rows[0][0].scores.error_rate != rows[1][0].scores.error_rate


@pytest.mark.parametrize("learner", list(LEARNERS))
def test_stacked_seeds_are_the_seeds_alone(tmp_path, learner):
    """Data exactly; parameters to rounding, which 72 updates let grow to 1e-3 at most; errors within 2 of 359."""
    settings = {**taken(learner, members=2, experts=2), "seed": 4}
    together = small_run(tmp_path / "stack", **settings, seeds=3)
    for number, seed in enumerate((4, 5, 6)):
        (alone,) = small_run(tmp_path / str(seed), **{**settings, "seed": seed})
        digests = [(tmp_path / name / "arrivals.json").read_text() for name in (f"stack/seed_{seed}", str(seed))]
        assert digests[0] == digests[1]
        for a, b in zip(together[number], alone, strict=True):
            assert abs(a.scores.error_rate - b.scores.error_rate) <= 2.01 / TESTED_ON
            assert a.spent.train_flops == b.spent.train_flops
            assert a.spent.num_updates == b.spent.num_updates
            assert (a.scores.num_params, a.scores.num_experts) == (b.scores.num_params, b.scores.num_experts)


# ---- What is summed up


@pytest.mark.parametrize("cer_from", [1, 0])
def test_the_summary_of_a_perceptron_by_hand(tmp_path, cer_from):
    (rows,) = small_run(tmp_path, cer_from=cer_from)
    error_rates = [json.loads(line)["error_rate"] for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    found = summary(tmp_path)
    assert len(error_rates) == 1 + B
    assert found["cer"] == pytest.approx(sum(error_rates[cer_from:]), abs=1e-12)
    assert found["final"] == error_rates[-1]
    assert found["mem"] == 5 * PARAMS
    assert found["comp"] == 4 * TRAINED_ON * EPOCHS * TRAINING
    assert found["final_validation"] == rows[-1].scores.validation_error_rate
    assert (found["num_arrivals"], found["num_stages"]) == (4, 4)


def test_an_untrained_learner_is_charged_while_it_waits(tmp_path):
    (rows,) = small_run(tmp_path, wait=3)
    rates = [row.scores.error_rate for row in rows]
    assert rates[0] == rates[1] == rates[2]
    assert summary(tmp_path)["cer"] == pytest.approx(2 * rates[0] + rates[3] + rates[4])


def test_the_summary_of_an_ensemble_is_that_of_its_members(tmp_path):
    small_run(tmp_path, learner="ens", members=3)
    assert summary(tmp_path)["mem"] == 5 * 3 * PARAMS
    assert summary(tmp_path)["comp"] == 3 * 4 * TRAINED_ON * EPOCHS * TRAINING


def test_the_summary_of_a_growing_mixture_by_hand(tmp_path):
    small_run(tmp_path, learner="gmoe")
    sizes = [(1, 0), (1, 0), (2, 2), (3, 4), (4, 6)]  # experts and branches at t = 0..4
    assert summary(tmp_path)["mem"] == sum(mixture_params(*size) for size in sizes)
    flops = sum(mixture_training_flops(*size) for size in sizes[1:])
    assert summary(tmp_path)["comp"] == TRAINED_ON * EPOCHS * flops


# ---- Continued


def test_a_finished_run_is_passed_over(tmp_path, alma_vision):
    arguments = (*as_arguments(seeds=2, learner="gens"), f"out={tmp_path / 'run'}")
    first = alma_vision(*arguments)
    before = files_of(tmp_path)
    again = alma_vision(*arguments)
    assert (first.status, again.status) == (0, 0)
    assert again.out.replace("nothing was left to do: the run had been finished before\n", "") == first.out
    assert again.out != first.out
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("learner", ["sm", "gens", "gmoe"])
def test_a_run_of_two_arrivals_goes_on_to_four_as_if_it_had_never_stopped(tmp_path, learner):
    settings = taken(learner, experts=2)
    small_run(tmp_path / "whole", **settings)
    small_run(tmp_path / "parts", **settings, arrivals=2)
    assert len(ledger(tmp_path / "parts")) == 3
    small_run(tmp_path / "parts", **settings)
    assert ledger(tmp_path / "parts") == ledger(tmp_path / "whole")
    assert torch.equal(flat(networks(tmp_path / "parts", B)), flat(networks(tmp_path / "whole", B)))


def test_other_settings_are_refused_by_name_and_nothing_is_touched(tmp_path, alma_vision):
    small_run(tmp_path / "run")
    before = files_of(tmp_path)
    said = alma_vision(*as_arguments(), f"out={tmp_path / 'run'}", "width=9", "replay=all")
    assert said.status == 2
    assert "contains a run with other settings" in said.err
    assert "width: was 8, is 9" in said.err
    assert "replay: was False, is 'all'" in said.err
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"seed": 0, "seeds": 2}, {"seed": 5, "seeds": 2}),
        ({"seed": 0, "seeds": 2}, {"seed": 1, "seeds": 2}),
        ({"seed": 0, "seeds": 2}, {"seed": 0, "seeds": 3}),
        ({"seed": 0, "seeds": 3}, {"seed": 0, "seeds": 2}),
        ({"seed": 0, "seeds": 2}, {"seed": 0, "seeds": 1}),
        ({"seed": 0, "seeds": 1}, {"seed": 0, "seeds": 2}),
        ({"seed": 0, "seeds": 1}, {"seed": 1, "seeds": 1}),
    ],
)
def test_stages_of_some_seeds_are_not_taken_for_those_of_others(tmp_path, first, then):
    small_run(tmp_path / "run", **first, epochs=1)
    before = files_of(tmp_path)
    with pytest.raises(RunError, match=r"contains a run (of other seeds|with other settings)"):
        small_run(tmp_path / "run", **then, epochs=1)
    assert files_of(tmp_path) == before


def test_where_things_lie_and_where_it_runs_may_change(tmp_path, alma_vision):
    small_run(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    elsewhere = ("data_root=elsewhere", "keep_stages=true")
    said = alma_vision(*as_arguments(), f"out={tmp_path / 'moved'}", *elsewhere)
    assert said.status == 0
    assert "nothing was left to do" in said.out


@pytest.mark.parametrize(("damage", "message"), [("gone", "is missing: restore it"), ("damaged", "cannot be read")])
def test_networks_that_are_gone_or_damaged_are_told(tmp_path, alma_vision, damage, message):
    small_run(tmp_path / "run", arrivals=2)
    path = tmp_path / "run/stages/stage_002/train/networks.pt"
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:1000])
    said = alma_vision(*as_arguments(), f"out={tmp_path / 'run'}")
    assert said.status == 2
    assert f"{path} {message}" in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("name", ["learner.json", "../train.done.json"])
def test_a_damaged_file_of_a_stage_is_told(tmp_path, alma_vision, name):
    """The done mark is read if a kill came before the row of the stage was written."""
    small_run(tmp_path / "run", arrivals=2)
    rows = (tmp_path / "run/ledger.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run/ledger.jsonl").write_text("".join(rows[:-1]))
    path = tmp_path / "run/stages/stage_002/train" / name
    path.write_text(path.read_text()[:20])
    said = alma_vision(*as_arguments(), f"out={tmp_path / 'run'}")
    assert said.status == 2
    assert path.name in said.err
    assert "is not valid JSON" in said.err


# ---- Refused


# What is wrong with each of these does not depend on the command, and test_settings.py looks at most of them.
MORE_BAD = [
    (("width=0",), "width=0 must be an integer of at least 1"),
    (("learner=nobody",), "learner='nobody' is not one of sm, ens, umix, gens, gmoe"),
    (("replay=2",), "replay=2 must be false, all, uniform, a share between 0 and 1, or for text auto"),
    (("learner=moe",), "experts=1 must be at least 2, because learner=moe"),
    (("dataset=cifar",), "dataset='cifar' is not one of digits, mnist, emnist"),
    (("device=meta",), "device='meta' cannot be used on this machine"),
    (("device=toaster",), "device='toaster' cannot be used on this machine"),
    (("data_root=null",), "data_root=None must be a string"),
]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("wait=5",), "wait=5 must lie between 1 and 4 mega-batches"),
        (("mega_batches=1000",), "mega_batches=1000 is too many for 1438 training examples"),
        (("lr=fast",), "lr='fast' must be a number"),
        (("device=cuda:99",), "device='cuda:99' cannot be used on this machine"),
        (("plugin=no_such_module_of_mine",), "plugin=no_such_module_of_mine: No module named"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BAD),
    ],
)
def test_bad_settings_are_told_before_anything_is_written(tmp_path, alma_vision, settings, message):
    out = tmp_path / "run"
    said = alma_vision(*as_arguments(), *settings, f"out={out}")
    assert said.status == 2
    assert message in said.err
    assert "Traceback" not in said.err
    assert not out.exists() or list(out.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_told(tmp_path, alma_vision):
    said = alma_vision(*as_arguments(device="cuda"), f"out={tmp_path}")
    assert said.status == 2
    assert "device='cuda' cannot be used on this machine" in said.err
    assert "give device=auto, cpu or cuda" in said.err


def test_cuda_graphs_need_a_gpu(tmp_path, alma_vision):
    said = alma_vision(*as_arguments(backbone="vgg", cuda_graphs=True, device="cpu"), f"out={tmp_path}")
    assert said.status == 2
    assert "cuda_graphs=true needs a CUDA device, but device=cpu: give cuda_graphs=false" in said.err


class Normalised(torch.nn.Sequential):
    def __init__(self, image_shape, num_classes):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 10))


def test_a_batch_of_one_image_that_the_network_cannot_normalise_is_told(tmp_path):
    with pytest.raises(RunError, match=r"a batch has one image .* give batch_size= of at least 2"):
        vision.run(dataset="digits", backbone=Normalised, mega_batches=719, arrivals=1, epochs=1, out=str(tmp_path))


def test_full_memory_is_told(alma_vision, tmp_path):
    """Two million units: a matrix of 16 terabytes."""
    said = alma_vision(*as_arguments(width=2_000_000), f"out={tmp_path}")
    assert said.status == 2
    assert "the memory of cpu is full" in said.err
    assert "smaller value of width= (now 2000000)" in said.err
    assert "Traceback" not in said.err


def test_the_installed_command_refuses_what_is_no_setting(tmp_path):
    result = run_command("alma-vision", *as_arguments(), "colour=red", f"out={tmp_path / 'run'}")
    assert result.returncode != 0
    assert "colour" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_dataset_that_is_not_there_is_told_where_there_is_no_network(tmp_path, alma_vision, no_network):  # noqa: F811
    said = alma_vision("dataset=mnist", f"data_root={tmp_path / 'empty'}", f"out={tmp_path / 'run'}", "device=cpu")
    assert said.status == 2
    assert f"not in {tmp_path / 'empty/MNIST/raw'} and could not be downloaded" in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []


def test_a_damaged_dataset_is_told(tmp_path, alma_vision, no_network):  # noqa: F811
    write_mnist(tmp_path)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-100])
    said = alma_vision("dataset=mnist", f"data_root={tmp_path}", f"out={tmp_path / 'run'}", "device=cpu")
    assert said.status == 2
    assert f"{path} is damaged" in said.err
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []


def test_the_real_mnist_cut_short_is_told(tmp_path, alma_vision, alma_data):
    if not (alma_data / "MNIST/raw").is_dir():
        pytest.skip("no MNIST/raw in ALMA_DATA")
    shutil.copytree(alma_data / "MNIST/raw", tmp_path / "MNIST/raw", ignore=shutil.ignore_patterns("*.gz"))
    path = tmp_path / "MNIST/raw/t10k-images-idx3-ubyte"
    path.chmod(0o644)
    os.truncate(path, 1_000_000)
    said = alma_vision("dataset=mnist", f"data_root={tmp_path}", f"out={tmp_path / 'run'}", "device=cpu")
    assert said.status == 2
    assert f"{path} is damaged: " in said.err
    assert "of 1000000 bytes" in said.err


def test_a_run_in_use_is_not_entered(tmp_path, alma_vision):
    with Lease(tmp_path / "run"):
        said = alma_vision(*as_arguments(), f"out={tmp_path / 'run'}")
    assert said.status == 2
    assert f"in use by process {os.getpid()}" in said.err


# ---- Small data


def test_mega_batches_smaller_than_a_batch_and_without_some_classes_work(tmp_path):
    """100 mega-batches of 14 or 15 images: 13 or 14 to train on, one to validate on, never all ten classes in the
    latter."""
    (rows,) = small_run(tmp_path / "small", mega_batches=100, wait=30, batch_size=1000, learner="gmoe", experts=2)
    assert [row.spent.num_updates for row in rows if row.updated] == [EPOCHS] * 4
    (rows,) = small_run(tmp_path / "tiny", mega_batches=400, arrivals=3, learner="ens")
    # 1438 / 400: 4 images, of which 3 are trained on in one batch.
    assert [row.spent.num_updates for row in rows] == [0, 5 * EPOCHS, 5 * EPOCHS, 5 * EPOCHS]
    assert [row.spent.train_flops for row in rows[1:]] == [5 * 3 * EPOCHS * TRAINING] * 3


def test_mnist_end_to_end(tmp_path, alma_data):
    if not (alma_data / "MNIST/raw").is_dir():
        pytest.skip("no MNIST/raw in ALMA_DATA")
    changes = {"dataset": "mnist", "data_root": str(alma_data), "mega_batches": 500, "arrivals": 20, "wait": 10}
    (rows,) = small_run(tmp_path, **changes, width=32, epochs=10, batch_size=128)
    assert rows[-1].scores.error_rate < 0.25
    assert rows[0].scores.error_rate > 0.8
    assert rows[-1].scores.num_params == 785 * 32 + 33 * 32 + 33 * 10


# ---- The command


def test_a_run_tells_its_table_and_status_tells_it_again(tmp_path, alma_vision):
    arguments = (*as_arguments(learner="ens"), f"out={tmp_path / 'run'}")
    said = alma_vision(*arguments, "arrivals=3")
    assert said.status == 0
    assert "learner=ens wait=1" in " ".join(said.out.split())  # it is as wide as it can be
    assert "CER" in said.out
    rows = [json.loads(line) for line in (tmp_path / "run/ledger.jsonl").read_text().splitlines()]
    assert f"{rows[3]['error_rate']:.2%}" in said.out
    status = alma_vision("status", tmp_path / "run")
    assert status.status == 0
    assert f"{rows[3]['error_rate']:.2%}" in status.out
    assert "finished" in status.out  # as far as it was asked for
    last = tmp_path / "run/ledger.jsonl"
    last.write_text("".join(last.read_text().splitlines(keepends=True)[:3]))
    assert "1 of 3 mega-batches are left: run the training command again" in alma_vision("status", tmp_path / "run").out


def test_status_of_several_seeds_shows_each_path_in_one_piece_and_of_no_run_says_so(tmp_path, alma_vision):
    run = tmp_path / ("a_long_name_" * 10) / "run"
    small_run(run, seeds=2)
    status = alma_vision("status", run)
    assert status.out.count("finished") == 2
    assert all(str(run / folder) in status.out for folder in ("seed_0", "seed_1"))
    nothing = alma_vision("status", tmp_path / "nowhere")
    assert nothing.status != 0
    assert "no run at" in nothing.err


def test_status_says_who_trains_several_seeds_and_which_mega_batches_wait(tmp_path, alma_vision):
    run = tmp_path / "run"
    small_run(run, seeds=2, wait=3, last_group="wait")
    status = alma_vision("status", run)
    waiting = "mega-batch 4 waits for 2 more (wait=3); to train now, give last_group=train"
    assert status.out.count(f"finished; {waiting}") == 2
    for seed in (0, 1):
        last = run / f"seed_{seed}/ledger.jsonl"
        last.write_text("".join(last.read_text().splitlines(keepends=True)[:3]))
    with Lease(run):
        assert alma_vision("status", run).out.count("is working on the run") == 2


def test_several_seeds_end_in_their_mean_and_standard_error(tmp_path, alma_vision):
    said = alma_vision(*as_arguments(seeds=3), f"out={tmp_path / 'run'}")
    whole = summary(tmp_path / "run")
    finals = [summary(tmp_path / f"run/seed_{seed}")["final"] for seed in range(3)]
    mean = sum(finals) / 3
    assert whole["mean"]["final"] == pytest.approx(mean)
    assert whole["stderr"]["final"] == pytest.approx((sum((x - mean) ** 2 for x in finals) / 2 / 3) ** 0.5)
    assert whole["mean"]["mem"] == 5 * PARAMS
    assert "3 seeds, CER" in said.out


def test_a_sweep_ends_in_a_table_ordered_by_validation(tmp_path, alma_vision):
    out = tmp_path / "sweep"
    said = alma_vision("-m", *as_arguments(epochs=5), "lr=1e-6,1.0", "seeds=1,2", f"out={out}")
    assert said.status == 0, said.err
    runs = json.loads((out / "sweep.json").read_text())
    assert len(runs) == 4
    assert [run["prequential_error_rate"] for run in runs] == sorted(run["prequential_error_rate"] for run in runs)
    assert ["lr=1e-06" in run["run"] or "lr=1e-6" in run["run"] for run in runs] == [False, False, True, True]
    assert "sorted by prequential validation error rate, best first" in said.out
    table = said.out[said.out.index("by prequential validation") :]
    assert table.index("lr=1.0") < table.index("lr=1e-")


def test_a_bad_value_in_a_sweep_is_told_and_the_others_are_run_and_ranked(tmp_path, alma_vision):
    said = alma_vision("-m", *as_arguments(epochs=1), "wait=1,99,2", f"out={tmp_path / 'sweep'}")
    assert "wait=99 must lie between" in said.err
    assert said.status == 1
    assert "wait=99 must lie between 1 and 4 mega-batches\n" in said.err
    assert "wait=99" in said.err.partition("failed, with a message above")[2]
    runs = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert len(runs) == 2
    assert "CER" in said.out[said.out.index("best first") :]
    # The corrected sweep in the same folder has no failed job.
    assert alma_vision("-m", *as_arguments(epochs=1), "wait=1,2", f"out={tmp_path / 'sweep'}").status == 0
    assert alma_vision("-m", *as_arguments(epochs=1), "wait=1,99", f"out={tmp_path / 'sweep'}").status == 1


@pytest.mark.parametrize("name", ["", "null", '""'])
def test_an_out_that_names_nothing_is_told_and_nothing_is_written(tmp_path, alma_vision, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    said = alma_vision(*as_arguments(), f"out={name}")
    assert said.status == 2
    assert "out= is empty: give the folder of the run" in said.err
    assert not any(tmp_path.iterdir())


def test_an_out_that_is_or_lies_in_a_file_is_told(tmp_path, alma_vision):
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        said = alma_vision(*as_arguments(), f"out={out}")
        assert said.status == 2
        assert f"{tmp_path / 'file'} is a file: give a folder" in said.err
    assert (tmp_path / "file").read_text() == "mine"


def test_the_name_of_a_sweeps_run_can_be_given_as_it_is(tmp_path, alma_vision):
    said = alma_vision(*as_arguments(epochs=1), f"out={tmp_path}/lr=1,wait=[5]")
    assert said.status == 0, said.err
    assert (tmp_path / "lr=1,wait=[5]" / "ledger.jsonl").exists()


def test_growth_that_never_comes_is_told(tmp_path, alma_vision, caplog):
    alma_vision(*as_arguments(epochs=1, learner="gmoe", grow_every=5), f"out={tmp_path}/never")
    assert "the learner never grows, because the run has 4 stage(s) and grow_every=5" in caplog.text
    caplog.clear()
    alma_vision(*as_arguments(epochs=1, learner="gmoe", grow_every=3), f"out={tmp_path}/once")
    assert "nothing ever grows" not in caplog.text


def test_training_that_diverges_is_told(tmp_path, caplog):
    (rows,) = small_run(tmp_path, lr=1e30, epochs=1, arrivals=2)
    assert "stage 1 did not change 1 of 1 networks" in caplog.text and "try a smaller lr=" in caplog.text
    assert rows[2].scores.error_rate == rows[0].scores.error_rate


def test_all_errors_of_a_command_line_are_reported_together(alma_vision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = alma_vision("+datset=digits", "wait=0", "lr=-1", "learner=ans", "out=/proc/x")
    assert said.status == 2
    lines = said.err.splitlines()
    assert lines[0] == "alma-vision: 5 errors:"
    assert [line[:20] for line in lines[1:]] == [
        "- unknown settings d", "- out=/proc/x cannot", "- learner='ans' is n", "- lr=-1 must be a fi",
        "- wait=0 must be an ",
    ]  # fmt: skip
    assert "did you mean dataset? --help" in said.err
    # Without a mistyped name, Hydra reads the command line, and the values are checked together all the same.
    said = alma_vision("wait=0", "lr=-1", "seeds=0", "out=run")
    assert [line.partition("=")[0] for line in said.err.splitlines()[1:]] == ["- seeds", "- lr", "- wait"]
    assert not any(tmp_path.iterdir())


def test_without_out_the_run_has_a_folder_named_after_its_settings(alma_vision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = as_arguments(epochs=1, seeds=2)
    said = alma_vision(*words)
    assert said.status == 0, said.err
    (run,) = (tmp_path / "runs/digits").iterdir()
    assert f"no out= is given: using out=runs/digits/{run.name}" in said.err
    assert "epochs=1," in run.name and "seeds=2" in run.name
    assert "nothing was left to do" not in said.out
    command = json.loads((run / "seed_0/provenance.json").read_text())["command"]
    assert command == ["alma-vision", *words, f"out=runs/digits/{run.name}"]
    assert "nothing was left to do: the run had been finished before" in alma_vision(*command[1:]).out


def test_a_job_of_a_sweep_records_the_command_that_repeats_it_alone(alma_vision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert alma_vision("-m", *as_arguments(epochs=1), "wait=2,4").status == 0
    command = json.loads(next((tmp_path / "runs/digits/sweep").glob("*wait=4*/provenance.json")).read_text())["command"]
    assert command[-1].startswith("out=runs/digits/sweep/") and "wait=4" in command
    assert "nothing was left to do" in alma_vision(*command[1:]).out


@pytest.mark.parametrize("name", [
    "it's [a], b=${x}", " 写真 ",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("Fotos für Müller; #1", '"quoted"\\')),
])  # fmt: skip
def test_a_folder_of_any_name_is_taken_recorded_continued_and_shown(alma_vision, tmp_path, name):
    words = [*as_arguments(epochs=1), f"out={tmp_path}/{name}/run", f"data_root={tmp_path}/{name}"]
    said = alma_vision(*words)
    assert said.status == 0, said.err
    run = tmp_path / name / "run"
    command = json.loads((run / "provenance.json").read_text())["command"]
    assert command == ["alma-vision", *words]
    assert "nothing was left to do" in alma_vision(*command[1:]).out
    assert "finished" in alma_vision("status", run).out
    assert json.loads((run / "settings.json").read_text())["data_root"] == str(tmp_path / name)


def test_a_sweep_over_folders_of_any_name_can_be_repeated_and_each_job_alone(alma_vision, tmp_path):
    for name in ("für, 1", "b"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((20, 8, 8), np.uint8), y=np.arange(20) % 2)
    words = [*as_arguments(epochs=1, mega_batches=2, batch_size=2, backbone="mlp"), f"out={tmp_path}/Zürich"]
    words[0] = f"dataset='{tmp_path}/für, 1.npz',{tmp_path}/b.npz"
    said = alma_vision("-m", *words)
    assert said.status == 0, said.err
    runs = list((tmp_path / "Zürich").rglob("provenance.json"))
    assert len(runs) == 2
    for run in runs:
        command = json.loads(run.read_text())["command"]
        assert not any("'" in word for word in command if word.startswith("dataset="))
        assert "nothing was left to do" in alma_vision(*command[1:]).out


def test_the_folders_of_a_sweep_are_inside_it_and_have_names_of_a_possible_length(alma_vision, tmp_path, monkeypatch):
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b")
    np.savez(tmp_path / "mine.npz", x=np.zeros((20, 8, 8), np.uint8), y=np.arange(20) % 2)
    words = as_arguments(dataset="../../mine.npz", epochs=1, mega_batches=2, backbone="mlp")
    words.remove("batch_size=64")
    more = ("seed=5", "lr=0.5", "label_smoothing=0.1", "replay=uniform", "cer_from=1", "select_by=validation_loss",
            "schedule=constant", "average=power:8", "extra_epochs=0", "wait=1", "last_group=train")  # fmt: skip
    for out, given in (("short", ()), ("long", more)):
        said = alma_vision("-m", *words, *given, "batch_size=2,4", f"out={out}")
        assert said.status == 0, said.err
        runs = {path.parent.relative_to(tmp_path / "a/b").parts for path in tmp_path.rglob("ledger.jsonl")}
        assert len([parts for parts in runs if parts[0] == out and len(parts) == 2]) == 2, runs
        assert json.loads(Path(out, "sweep.json").read_text())[1]["run"]


def test_a_run_inside_another_run_or_around_one_is_refused(alma_vision, tmp_path):
    words = as_arguments(epochs=1)
    assert alma_vision(*words, f"out={tmp_path}/a/run").status == 0
    assert f"is inside the run folder {tmp_path}/a/run" in alma_vision(*words, f"out={tmp_path}/a/run/in").err
    said = alma_vision(*words, f"out={tmp_path}/a")
    assert (said.status, f"a contains another run, {tmp_path}/a/run" in said.err) == (2, True)
    assert alma_vision(*words, "seeds=2", f"out={tmp_path}/b").status == 0
    assert "nothing was left to do" in alma_vision(*words, "seeds=2", f"out={tmp_path}/b").out


def test_seeds_that_are_trained_together_are_cancelled_together(alma_vision, tmp_path):
    out = tmp_path / "run"
    words = as_arguments(epochs=100_000, seeds=2)
    process = subprocess.Popen([Path(sys.executable).parent / "alma-vision", *words, f"out={out}"])
    while not (out / "seed_1/settings.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    said = alma_vision("cancel", out / "seed_1")
    assert (said.status, f"cancelled: {out}\n" in said.out) == (0, True), said.err
    assert process.wait(timeout=60) != 0
    assert f"{out}: no run is pending or running" in alma_vision("cancel", out).out


@pytest.mark.parametrize(
    ("settings", "start"),
    [({"seeds": 2}, "seeds 0 to 1  sm "), ({"seed": 3}, "sm "), ({"learner": "ff", "seeds": 2}, "")],
)
def test_the_progress_line_says_which_seeds_are_trained(alma_vision, tmp_path, monkeypatch, settings, start):
    monkeypatch.setattr(display, "SECONDS_BETWEEN_REFRESHES", 0)
    monkeypatch.setattr(display, "SECONDS_BETWEEN_LINES", 0)
    lines = alma_vision(*as_arguments(epochs=1, **settings), f"out={tmp_path}").err.splitlines()
    if start:
        assert {line.startswith(start) for line in lines if "stage" in line} == {True}
    else:  # the networks of this learner are trained one after the other
        assert [line[:10] for line in lines if "stage 1/" in line] == ["seed 0  ff", "seed 1  ff"]


def test_a_word_that_is_no_setting_is_named(alma_vision):
    said = alma_vision("dataset=Fotos", "für", "Müller")
    assert (said.status, "'für' is no setting: settings are written NAME=VALUE" in said.err) == (2, True)
    said = alma_vision("lr=Zürich", "out=x")
    assert (said.status, "lr=Zürich cannot be read: give a number" in said.err) == (2, True)


def test_an_unknown_preset_is_refused_with_the_most_similar_one_and_all_others(alma_vision, tmp_path):
    said = alma_vision("preset=original", f"out={tmp_path}/x")
    assert said.status == 2
    assert (
        "preset=original does not exist: did you mean original_code? They are anytime, original_code, paper" in said.err
    )
    (tmp_path / "preset").mkdir()
    (tmp_path / "preset/für mich.yaml").write_text("# @package _global_\nepochs: 1\n")
    said = alma_vision("--config-dir", tmp_path, "preset=für mich", "mega_batches=2", f"out={tmp_path}/x")
    assert said.status == 0, said.err
    assert json.loads((tmp_path / "x/settings.json").read_text())["epochs"] == 1


def test_usage(alma_vision):
    for words in (["status"], ["status", "--all", "x"], ["status", "--all"]):
        assert "usage: alma-vision status RUN" in (said := alma_vision(*words)).err
        assert said.status == 2
    said = alma_vision("status", "--help")
    assert (said.status, said.out.splitlines()[0]) == (0, "usage: alma-vision status RUN [--json]")
    assert "the ledger, jobs" in said.out
    assert "best run first" in alma_vision("--help").out
    assert alma_vision("--version").out.startswith(f"alma-vision {metadata.version('fairseq-alma')} (Hydra 1.")


@pytest.mark.parametrize(
    ("settings", "stages", "networks_of"),
    [
        ({"learner": "ens", "members": 3, "seeds": 2}, [B], {0: [0, 1, 2], 1: [3, 4, 5]}),
        ({"learner": "gens", "members": 2, "seeds": 2}, [1, 2, 3, 4], {0: [0, 1], 1: [2, 3]}),
        ({"learner": "gmoe"}, [B], {0: [0]}),
    ],
    ids=["ens", "gens", "gmoe"],
)
def test_a_run_names_what_it_would_deploy(tmp_path, settings, stages, networks_of):
    small_run(tmp_path / "run", **settings)
    (tmp_path / "run").rename(tmp_path / "moved")
    for seed, numbers in networks_of.items():
        folder = tmp_path / "moved" if len(networks_of) == 1 else tmp_path / f"moved/seed_{seed}"
        predictor = json.loads((folder / "predictor.json").read_text())
        assert (predictor["combine"], predictor["dataset"]) == ("probability", "digits")
        assert len(predictor["checkpoints"]) == len(stages)
        for stage, checkpoint in zip(stages, predictor["checkpoints"], strict=True):
            path = (folder / checkpoint["path"]).resolve()
            assert path == (tmp_path / f"moved/stages/stage_{stage:03d}/train/networks.pt").resolve()
            assert hashlib.sha256(path.read_bytes()).hexdigest() == checkpoint["sha256"]
            assert checkpoint["networks"] == numbers


PLUGIN = '''
from dataclasses import dataclass

from fairseq_alma.core.settings import Count
from vision.learners import LearnerSettings, SingleModel, register_learner


@dataclass(frozen=True)
class ManySettings(LearnerSettings):
    networks: Count = 2
    """Number of networks."""
    note: str = "none"
    """Anything."""


@register_learner("many", label="Many", settings=ManySettings)
class Many(SingleModel):
    """An ensemble."""

    @property
    def networks_per_seed(self):
        return self.learner_settings.networks
'''


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """A module `plugin_of_a_test` in the current folder, forgotten when the test ends."""
    (tmp_path / "plugin_of_a_test.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "plugin_of_a_test.py"
    sys.modules.pop("plugin_of_a_test", None)
    LEARNERS.pop("many", None)
    catalogue.remove_learner("many")
    store_settings(VisionSettings)


def test_a_plugin_learner_has_settings_of_its_own_that_are_swept_and_recorded(tmp_path, plugin, alma_vision):
    words = ("-m", *as_arguments(learner="many"), "plugin=plugin_of_a_test", "networks=2,3")
    said = alma_vision(*words, f"out={tmp_path / 'sweep'}")
    assert said.status == 0, said.err
    found = {}
    for path in (tmp_path / "sweep").rglob("settings.json"):
        settings = json.loads(path.read_text())
        row = json.loads((path.parent / "ledger.jsonl").read_text().splitlines()[-1])
        found[settings["networks"]] = (settings["note"], row["num_members"], row["num_params"])
    assert found == {2: ("none", 2, 2 * PARAMS), 3: ("none", 3, 3 * PARAMS)}


def test_a_setting_of_a_plugin_is_checked_suggested_and_refused_to_others(tmp_path, plugin, alma_vision):
    common = (*as_arguments(learner="many"), "plugin=plugin_of_a_test", f"out={tmp_path / 'run'}")
    assert "networks=0 must be an integer of at least 1" in alma_vision(*common, "networks=0").err
    assert "did you mean networks?" in alma_vision(*common, "network=3").err
    assert "networks=3 is for learner=many, not for learner=sm" in alma_vision(*common, "learner=sm", "networks=3").err


def test_a_plugin_whose_source_has_changed_does_not_return_the_old_result(tmp_path, plugin, alma_vision):
    words = (*as_arguments(learner="many"), "plugin=plugin_of_a_test", f"out={tmp_path / 'run'}")
    assert alma_vision(*words).status == 0
    assert alma_vision(*words).status == 0  # unchanged, it is finished
    plugin.write_text(
        PLUGIN.replace("return self.learner_settings.networks", "return self.learner_settings.networks + 1")
    )
    sys.modules.pop("plugin_of_a_test")
    said = alma_vision(*words)
    assert said.status == 2
    assert "plugin_digest: was" in said.err


@pytest.mark.slow
def test_without_arguments_it_shows_sm_and_ens_on_digits(tmp_path):
    program = Path(sys.executable).parent / "alma-vision"
    result = subprocess.run([str(program)], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    for learner in ("sm", "ens"):
        assert f"runs/quickstart/{learner}: learner={learner} wait=1" in " ".join(result.stdout.split())
        assert summary(tmp_path / "runs/quickstart" / learner)["num_arrivals"] == 20
    report = tmp_path / "runs/quickstart/report"
    assert (report / "figures/digits_B20/over_the_stream.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "Ens" in (report / "tables/digits_B20/summary.md").read_text()
    assert (report / "index.html").is_file()
    again = subprocess.run([str(program)], cwd=tmp_path, capture_output=True, text=True)
    assert again.stdout.count("nothing was left to do") == 2
    cer = [summary(tmp_path / "runs/quickstart" / learner)["cer"] for learner in ("sm", "ens")]
    assert cer[1] < cer[0]


def test_a_learner_whose_files_are_not_its_members_is_refused(tmp_path, plugin, alma_vision):
    """predictor.json would name other networks than those that were evaluated."""
    more = "\n    @property\n    def members(self):\n        return [('first', self.stack), (None, self.stack)]\n"
    plugin.write_text(PLUGIN + more)
    said = alma_vision(*as_arguments(learner="many"), "plugin=plugin_of_a_test", f"out={tmp_path / 'run'}")
    assert said.status != 0
    assert "predicts with 2 stacks of networks (members), but predictor_files names 1 files" in said.err


def test_after_a_start_that_failed_the_stream_may_be_another(tmp_path, monkeypatch):
    def fail(*_):
        raise RunError("no evaluator")

    monkeypatch.setattr(vision.runs, "_evaluator", fail)
    with pytest.raises(RunError, match="no evaluator"):
        small_run(tmp_path, mega_batches=2)
    monkeypatch.undo()
    assert len(small_run(tmp_path, mega_batches=3)[0]) == 4
