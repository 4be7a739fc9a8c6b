"""Damaged files of runs and streams: each is named, or does not change any result."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_alma.app.command import status
from fairseq_alma.core.errors import RunError, StageError, StreamError
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.metrics import read_summary
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.members import find_members, load_member
from fairseq_alma.evaluation.perplexity import combine
from fairseq_alma.evaluation.scoring import score_tokens
from fairseq_alma.lm import run as alma_lm
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.reading import read_runs
from fairseq_alma.report.tables import tables_of
from tests.fairseq_alma.lm.test_learners import ForkedProcesses, settings_of
from tests.rotten import defects
from tests.vision.tiny_runs import small_settings
from vision.datasets import load_dataset
from vision.predictor import load
from vision.runs import run_learner

SECONDS = ("train_seconds", "score_seconds", "wall_seconds")
UPDATES = 6
LABELS = ("setting", "run")
"""Columns of the tables of a report that repeat what settings.json says."""


def report(run: Path):
    """Return the numbers in the tables of a report, without the labels, which repeat what settings.json says."""
    data = read_runs([run])
    if data.errors or data.notes:
        raise RunError("; ".join([*data.errors, *data.notes]))
    tables = [table for comparison in data.comparisons for table in tables_of(comparison, all_numbers(comparison))]
    return [
        [[cell for name, cell in zip(table.columns, row, strict=True) if name not in LABELS] for row in table.rows]
        for table in tables
    ]


def shown_status(run: Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        status(run)
    if len(Ledger(run / "ledger.jsonl").rows()) <= read_summary(run)["num_arrivals"]:
        raise RunError(f"{run}: status says that mega-batches are left")
    return shown.getvalue().partition("\n")[2]  # without the title, which repeats what settings.json says


def content_of(run: Path) -> list:
    """Return what a run has recorded, without times."""
    rows = [row.to_json() for row in Ledger(run / "ledger.jsonl").rows()]
    summary = json.loads((run / "summary.json").read_text())
    decisions = [json.loads(line) for line in (run / "decisions.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in one.items() if key not in SECONDS} for one in (*rows, summary)]
    return [*kept, decisions, json.loads((run / "arrivals.json").read_text())]


# ---- alma-vision


def predict(run: Path):
    return load(run)(load_dataset("digits").test.images[:50]).tolist()


def continued(run: Path, **changes) -> list:
    run_learner(small_settings(run, **VISION, **changes))
    return [*content_of(run), predict(run)]


VISION = {"learner": "gmoe", "wait": 1, "width": 4, "epochs": 1, "grow_every": 1, "order": "classes"}


@pytest.fixture(scope="module")
def vision_run(tmp_path_factory) -> Path:
    """A run of alma-vision with 2 of 4 mega-batches."""
    run = tmp_path_factory.mktemp("vision") / "run"
    run_learner(small_settings(run, **VISION, arrivals=2))
    return run


PLAUSIBLE = [
    *(("summary.json", f"{name} -1") for name in ("forgetting", "backward_transfer", "forward_transfer")),
    ("summary.json", "wall_seconds None"),
    ("settings.json", "plugin x"),  # load says that there is no such plugin
]
"""Values that are possible, so that nobody could notice them."""
VISION_READERS = {"report": report, "status": shown_status, "predict": predict}


@pytest.mark.slow
def test_each_damaged_file_of_a_run_of_images_is_named_or_harmless(vision_run, tmp_path):
    """With the same command, and with more mega-batches, which are trained on."""
    for arrivals in (2, 3):
        commands = {**VISION_READERS, "continue": lambda run, arrivals=arrivals: continued(run, arrivals=arrivals)}
        count, found = defects(vision_run, tmp_path / "run", commands, lambda path: True, True, PLAUSIBLE)
        print(f"alma-vision, {arrivals} arrivals: {count} cases, {len(found)} defects")
        assert found == []


def test_a_damaged_file_of_a_run_of_images_is_named_or_harmless(vision_run, tmp_path):
    commands = {"predict": predict, "continue": lambda run: continued(run, arrivals=3)}
    some = ("predictor.json", "inputs.json", "learner.json", "ledger.jsonl", "networks.pt")
    count, found = defects(vision_run, tmp_path / "run", commands, lambda path: path.name in some, with_fields=False)
    assert (count > 40, found) == (True, [])


def test_changed_weights_are_not_trained_on(vision_run, tmp_path):
    """Also if whoever changed them has written a valid file."""
    run = shutil.copytree(vision_run, tmp_path / "run")
    path = run / "stages/stage_002/train/networks.pt"
    state = torch.load(path, weights_only=True)
    next(iter(state["parameters"].values())).view(-1)[:64] += 1
    torch.save(state, path)
    with pytest.raises(RunError, match=r"train/networks\.pt cannot be read: it has changed"):
        continued(run, arrivals=3)


# ---- alma-lm


class StoppedInStage2(ForkedProcesses):
    """The training of stage 2 is stopped after half of its updates."""

    def run(self, stage, jobs, num_jobs, updates):
        if stage.index < 2:
            return super().run(stage, jobs, num_jobs, updates)
        path = Path(jobs[1][0][3])
        whole, config = path.read_bytes(), OmegaConf.load(path)
        config.optimization.max_update = updates // 2
        OmegaConf.save(config, path)
        super().run(stage, jobs, num_jobs, updates)
        path.write_bytes(whole)
        return {1: 143}


def lm_settings(stream: Path, run: Path):
    return settings_of(stream, run, "sm", updates=UPDATES, validations=1, mega_batches=2)


def lm_run(stream: Path, run: Path, processes=ForkedProcesses) -> list:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alma_lm, "LocalProcesses", processes)
        alma_lm.run(lm_settings(stream, run))
    return content_of(run)


def evaluate(run: Path, stream: Path) -> float:
    found = find_members([run])
    folder = StreamFolder.open(found.stream)
    model, task = load_member(found.checkpoints[0], folder, torch.device("cpu"))
    scores = score_tokens(model, task, "test", [torch.device("cpu")])
    return combine([scores.log_probability_T], folder.counts("test")["words"]).word_perplexity


@pytest.fixture(scope="module")
def lm_runs(stream, tmp_path_factory) -> dict[str, Path]:
    """A run of alma-lm that was stopped in the middle of stage 2, and one that is finished."""
    folder = tmp_path_factory.mktemp("lm")
    with pytest.raises(StageError):
        lm_run(stream, folder / "stopped", StoppedInStage2)
    lm_run(stream, folder / "finished")
    return {name: folder / name for name in ("stopped", "finished")}


def of_training(path: Path) -> bool:
    return path.name not in ("log.txt", "lease.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stopped", "finished"])
def test_each_damaged_file_of_a_run_of_text_is_named_or_harmless(stream, lm_runs, tmp_path, name):
    commands = {
        "report": report,
        "status": shown_status,
        "evaluate": lambda run: evaluate(run, stream),
        "continue": lambda run: lm_run(stream, run),
    }
    count, found = defects(lm_runs[name], tmp_path / "run", commands, of_training, True, PLAUSIBLE)
    print(f"alma-lm, {name}: {count} cases, {len(found)} defects")
    assert found == []


@pytest.mark.parametrize("changed", ["stage_001/member_1/checkpoint_best.pt"])
def test_changed_weights_of_a_language_model_are_neither_trained_on_nor_scored(stream, lm_runs, tmp_path, changed):
    run = shutil.copytree(lm_runs["stopped"], tmp_path / "run")
    path = run / "stages" / changed
    checkpoint = torch.load(path, weights_only=True)
    next(iter(checkpoint["model"].values())).view(-1)[:64] += 1
    torch.save(checkpoint, path)
    shutil.rmtree(run / "stages/stage_002")
    with pytest.raises(RunError, match=r"checkpoint_best\.pt cannot be read: it has changed"):
        lm_run(stream, run)
    with pytest.raises(RunError, match=r"checkpoint_best\.pt cannot be read: it has changed"):
        evaluate(run, stream)


@pytest.fixture(scope="module")
def continued_run(stream, lm_runs, tmp_path_factory) -> Path:
    """The run that was stopped, continued to its end."""
    run = shutil.copytree(lm_runs["stopped"], tmp_path_factory.mktemp("continued") / "run")
    lm_run(stream, run)
    return run


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", marks=pytest.mark.slow),
        pytest.param(bytes(64), marks=pytest.mark.slow),
        b"\xff",
        b"optimization:\n  max_update: x\n",
    ],
    ids=["empty", "zeros", "no text", "a word instead of a number"],
)
def test_a_damaged_configuration_of_a_finished_training_stops_nothing(
    stream, lm_runs, continued_run, tmp_path, content
):
    """It is read only to draw curves."""
    run = shutil.copytree(lm_runs["stopped"], tmp_path / "run")
    (run / "stages/stage_001/member_1/config.yaml").write_bytes(content)
    assert lm_run(stream, run) == content_of(continued_run)


def test_flipped_bytes_of_a_checkpoint_are_noticed(stream, lm_runs, continued_run, tmp_path):
    """The stage is continued from the other checkpoint, or repeated if there is none."""
    run = shutil.copytree(lm_runs["stopped"], tmp_path / "run")
    path = run / "stages/stage_002/member_1/checkpoint_last.pt"
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    lm_run(stream, run)
    rows, expected = (
        [row.to_json() | {"train_seconds": 0, "score_seconds": 0} for row in Ledger(one / "ledger.jsonl").rows()]
        for one in (run, continued_run)
    )
    assert rows == expected


# ---- Streams


def trained_on(stream: Path) -> list:
    """Train on the first mega-batch of a stream, and return what the run has recorded."""
    run = stream.with_name("run_on_it")
    shutil.rmtree(run, ignore_errors=True)
    return lm_run(stream, run)


@pytest.mark.slow
def test_each_damaged_file_of_a_stream_is_named_or_harmless(stream, tmp_path):
    count, found = defects(stream, tmp_path / "stream", {"train": trained_on}, lambda path: True, with_fields=True)
    print(f"stream: {count} cases, {len(found)} defects")
    assert found == []


@pytest.mark.parametrize(
    "name", ["mega_batch_1/train.bin", "valid/valid.bin", "test/test.bin", "mega_batch_2/train.idx"]
)
def test_zeroed_data_are_not_trained_on(own_stream, tmp_path, name):
    path = own_stream / name
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StreamError, match=f"{path.name} has changed since alma-prep wrote it"):
        lm_run(own_stream, tmp_path / "run")
