"""The evaluator of alma-lm: scores of several members together, and of frozen members from their kept outputs."""

import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fairseq_alma.checkpoints import read_checkpoint, write_checkpoint
from fairseq_alma.core.errors import RunError, StreamError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation import evaluator
from fairseq_alma.evaluation.evaluator import PerplexityEvaluator
from fairseq_alma.evaluation.flops import count_forward_flops
from fairseq_alma.evaluation.perplexity import combine, load_member, score_tokens
from fairseq_alma.evaluation.perplexity import main as alma_eval
from fairseq_alma.lm.fairseq_train import write_untrained_checkpoint
from tests.commands import STAGE
from tests.streams import make_stream

CPU = torch.device("cpu")


def untrained(stream: Path, path: Path, *options) -> Path:
    words = [str(stream), *map(str, STAGE[2:]), "--save-dir", str(path.parent), *map(str, options)]
    write_untrained_checkpoint(words, path)
    return path


@pytest.fixture(scope="module")
def members(stream, tmp_path_factory) -> list[Path]:
    """Two checkpoints with different seeds and sizes. Their outputs are sharpened, so that probabilities differ."""
    folder, paths = tmp_path_factory.mktemp("members"), []
    for seed, experts in ((1, 2), (2, 3)):
        path = untrained(stream, folder / f"{seed}.pt", "--seed", seed, "--num-experts", experts)
        state = read_checkpoint(path)
        state["model"]["decoder.layer_norm.weight"] = torch.full((128,), 2.0)
        write_checkpoint(state, path)
        paths.append(path)
    return paths


@pytest.fixture
def loaded(monkeypatch) -> list[Path]:
    """The checkpoints that the evaluator has loaded, in order."""
    paths = []
    monkeypatch.setattr(evaluator, "load_member", lambda path, *more: (paths.append(path), load_member(path, *more))[1])
    return paths


def learner(checkpoints: list[Path], frozen: bool):
    return SimpleNamespace(predictor=list(checkpoints), frozen=list(checkpoints) if frozen else [])


def test_members_are_scored_together_and_their_sizes_added_up(stream, members, tmp_path):
    folder = StreamFolder.open(stream)
    scores = PerplexityEvaluator(folder, tmp_path, CPU)(learner(members, False))
    models, tasks = zip(*(load_member(path, folder, CPU) for path in members), strict=True)
    for split, perplexity in (("test", scores.perplexity), ("valid", scores.validation_perplexity)):
        each = [score_tokens(model, task, split).log_probability_T for model, task in zip(models, tasks, strict=True)]
        mean_T = np.exp(np.stack(each).astype(np.float64)).mean(axis=0)
        assert perplexity == pytest.approx(math.exp(-np.log(mean_T).mean()), rel=1e-9)
        # The perplexity of an ensemble is not a mean of perplexities or of log-probabilities.
        alone = [combine([one], 1).perplexity for one in each]
        assert perplexity < min(math.exp(-np.stack(each).mean()), sum(alone) / 2) * (1 - 1e-4)
    assert scores.validation_loss == pytest.approx(math.log(scores.validation_perplexity))
    words, tokens = (folder.counts("test")[key] for key in ("words", "tokens"))
    assert scores.word_perplexity == pytest.approx(scores.perplexity ** (tokens / words))
    assert scores.num_params == sum(p.numel() for model in models for p in model.parameters())
    assert scores.forward_flops == sum(count_forward_flops(model).of_row(32) for model in models)
    assert (scores.num_members, scores.num_experts, scores.overflow) == (2, 3, 0.0)
    valid = [score_tokens(model, task, "valid").load for model, task in zip(models, tasks, strict=True)]
    assert [len(layer) for load in valid for layer in load] == [2, 2, 3, 3]
    for layer, expected in zip(scores.expert_load, [layer for load in valid for layer in load], strict=True):
        assert layer == pytest.approx(expected, abs=1e-4)
    assert not list(tmp_path.iterdir())  # no member is frozen, so nothing is kept


def test_outputs_of_a_frozen_member_are_kept_and_not_computed_again(stream, members, tmp_path, loaded):
    folder, keep_in = StreamFolder.open(stream), tmp_path / "kept"
    one = PerplexityEvaluator(folder, keep_in, CPU)(learner(members[:1], True))
    assert loaded == members[:1]
    both = PerplexityEvaluator(folder, keep_in, CPU)(learner(members, True))  # of another process, one member more
    assert loaded == members
    assert PerplexityEvaluator(folder, keep_in, CPU)(learner(members, True)) == both
    assert PerplexityEvaluator(folder, keep_in, CPU)(learner(members[:1], True)) == one
    assert loaded == members
    # Scoring them again gives the same, to the last bit.
    assert PerplexityEvaluator(folder, tmp_path / "elsewhere", CPU)(learner(members, False)) == both
    assert loaded == members * 2
    tokens = sum(folder.counts(split)["tokens"] for split in ("valid", "test"))
    kept = [np.load(path) for path in keep_in.glob("*.npy")]
    assert sum(array.nbytes for array in kept) == 2 * 4 * tokens  # 4 bytes a token and member


def test_only_outputs_of_frozen_members_are_kept(stream, members, tmp_path, loaded):
    folder, half = StreamFolder.open(stream), SimpleNamespace(predictor=members, frozen=members[1:])
    scores = [PerplexityEvaluator(folder, tmp_path / "kept", CPU)(half) for _ in range(2)]
    assert scores[0] == scores[1]
    assert loaded == [*members, members[0]]


def test_another_checkpoint_of_the_same_name_is_scored_again(stream, members, tmp_path, loaded):
    folder, path = StreamFolder.open(stream), tmp_path / "member.pt"
    score = PerplexityEvaluator(folder, tmp_path / "kept", CPU)
    results = []
    for member in (*members, members[0]):
        shutil.copyfile(member, path)
        results.append(score(learner([path], True)))
    assert loaded == [path, path]  # the third is the first again
    assert results[0] == results[2] != results[1]


def test_another_stream_is_scored_again(stream, members, tmp_path, loaded):
    other = make_stream(tmp_path / "stream", seed=5)
    for folder in (stream, other):
        PerplexityEvaluator(StreamFolder.open(folder), tmp_path / "kept", CPU)(learner(members[:1], True))
    assert loaded == [members[0]] * 2


def test_outputs_that_a_killed_process_kept_in_part_are_scored_again(stream, members, tmp_path, loaded):
    folder, keep_in = StreamFolder.open(stream), tmp_path / "kept"
    before = PerplexityEvaluator(folder, keep_in, CPU)(learner(members[:1], True))
    (mark,) = keep_in.glob("*.json")
    mark.unlink()  # it comes last
    for path in keep_in.glob("*.npy"):
        os.truncate(path, 100)
    assert PerplexityEvaluator(folder, keep_in, CPU)(learner(members[:1], True)) == before
    assert len(loaded) == 2
    assert PerplexityEvaluator(folder, keep_in, CPU)(learner(members[:1], True)) == before
    assert len(loaded) == 2


@pytest.mark.parametrize("damage", ["gone", "cut short", "a token too few"])
def test_kept_outputs_that_are_not_whole_are_scored_again(stream, members, tmp_path, loaded, damage):
    score = PerplexityEvaluator(StreamFolder.open(stream), tmp_path, CPU)
    before = score(learner(members[:1], True))
    (path,) = tmp_path.glob("*.test.npy")
    if damage == "gone":
        path.unlink()
    elif damage == "cut short":
        os.truncate(path, path.stat().st_size // 2)
    else:
        np.save(path, np.load(path)[:-1])
    assert score(learner(members[:1], True)) == before
    assert len(loaded) == 2


def test_a_damaged_mark_is_reported_by_its_name(stream, members, tmp_path):
    folder, keep_in = StreamFolder.open(stream), tmp_path / "kept"
    PerplexityEvaluator(folder, keep_in, CPU)(learner(members[:1], True))
    (mark,) = keep_in.glob("*.json")
    mark.write_text(mark.read_text()[:20])
    with pytest.raises(RunError, match=f"{mark.name} is not valid JSON"):
        PerplexityEvaluator(folder, keep_in, CPU)(learner(members[:1], True))


@pytest.mark.parametrize("frozen", [False, True])
def test_scores_that_leave_tokens_out_are_refused(own_stream, members, tmp_path, frozen):
    description = json.loads((own_stream / "stream.json").read_text())
    folder = StreamFolder.open(own_stream)
    folder.description["splits"]["test"]["tokens"] += 1
    tokens = description["splits"]["test"]["tokens"]
    with pytest.raises(
        StreamError, match=f"test: {tokens} tokens were scored, but its .idx file contains {tokens + 1}"
    ):
        PerplexityEvaluator(folder, tmp_path / "kept", CPU)(learner(members[:1], frozen))
    assert not (tmp_path / "kept").exists()


def test_checkpoints_of_two_dictionaries_are_reported_by_name(stream, members, tmp_path, capsys):
    other = make_stream(tmp_path / "other", num_words=30, tokens=400)
    stranger = untrained(other, tmp_path / "stranger.pt")
    assert alma_eval([str(members[0]), str(stranger), "--stream", str(stream)]) == 2
    output = capsys.readouterr().err
    assert f"{stranger} was trained with a dictionary of 34 types, but {stream} has 24" in output
    assert "Traceback" not in output
