"""The evaluator of alma-lm: scores of several members together, and of frozen members from their kept outputs."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
import torch

from data_prep.encoding.mmap_writer import MMapWriter
from fairseq_alma.app.tables import ledger_table
from fairseq_alma.checkpoints import read_checkpoint, write_checkpoint
from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.ledger import LedgerRow
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation import evaluator, stored_scores
from fairseq_alma.evaluation.cli import main as alma_eval
from fairseq_alma.evaluation.evaluator import PerplexityEvaluator
from fairseq_alma.evaluation.flops import count_forward_flops
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.perplexity import combine
from fairseq_alma.evaluation.scoring import score_tokens
from fairseq_alma.lm.fairseq_config import write_untrained_checkpoint
from tests.commands import STAGE
from tests.fairseq_alma.configs import config_of
from tests.streams import make_stream

CPU = torch.device("cpu")


def untrained(stream: Path, path: Path, *options) -> Path:
    words = [str(stream), *map(str, STAGE[2:]), "--save-dir", str(path.parent), *map(str, options)]
    write_untrained_checkpoint(config_of(words), path)
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


def learner(checkpoints: list[Path], frozen: bool, is_trained: bool = True):
    kept = list(checkpoints) if frozen else []
    return SimpleNamespace(predictor=list(checkpoints), frozen=kept, is_trained=is_trained, num_stored=None)


def test_members_are_scored_together_and_their_sizes_added_up(stream, members, tmp_path):
    folder = StreamFolder.open(stream)
    scores = PerplexityEvaluator(folder, tmp_path, [CPU])(learner(members, False))
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
    bits = tokens * math.log2(scores.perplexity)
    assert scores.bits_per_byte == pytest.approx(bits / folder.counts("test")["bytes"])
    assert scores.num_params == sum(p.numel() for model in models for p in model.parameters())
    assert scores.forward_flops == sum(count_forward_flops(model).of_row(32) for model in models)
    assert (scores.num_members, scores.num_experts, scores.overflow) == (2, 3, 0.0)
    valid = [score_tokens(model, task, "valid").load for model, task in zip(models, tasks, strict=True)]
    assert [len(layer) for load in valid for layer in load] == [2, 2, 3, 3]
    for layer, expected in zip(scores.expert_load, [layer for load in valid for layer in load], strict=True):
        assert layer == pytest.approx(expected, abs=1e-4)
    assert not list(tmp_path.iterdir())  # no member is frozen, so nothing is kept


@pytest.fixture
def in_periods(own_stream) -> Path:
    """A stream of three periods. The test set is the test text of the first two; the third was added later."""
    description = json.loads((own_stream / "stream.json").read_text())
    tokens = np.fromfile(own_stream / "test" / "test.bin", np.uint16)
    middle = int(np.flatnonzero(tokens == 2)[5]) + 1
    texts = {"valid": np.fromfile(own_stream / "valid" / "valid.bin", np.uint16)}
    periods = []
    for t, test in enumerate((tokens[:middle], tokens[middle:], texts["valid"][::-1].copy()), start=1):
        entries = {}
        for part, text in (texts | {"test": test}).items():
            prefix = own_stream / f"mega_batch_{t}" / part
            with MMapWriter(prefix, "uint16") as writer:
                writer.write(text, np.array([len(text)]))
            sha256 = sha256_of(f"{prefix}.bin")
            entries[part] = {"tokens": len(text), "words": len(text), "sequences": 1, "sha256": sha256}
        periods.append({"first_date": str(1800 + t), "last_date": str(1800 + t), **entries})
    description |= {"periods": periods, "periods_in_test": 2}
    (own_stream / "stream.json").write_text(json.dumps(description))
    return own_stream


def test_each_period_is_scored_and_the_test_set_only_once(in_periods, members, tmp_path, capsys):
    folder = StreamFolder.open(in_periods)
    scores = PerplexityEvaluator(folder, tmp_path / "kept", [CPU])(learner(members[:1], True))
    model, task = load_member(members[0], folder, CPU)
    test = score_tokens(model, task, "test").log_probability_T.astype(np.float64)
    added = score_tokens(model, task, "mega_batch_3/test").log_probability_T.astype(np.float64)
    middle = folder.counts("mega_batch_1/test")["tokens"]
    expected = [math.exp(-part.mean()) for part in (test[:middle], test[middle:], added)]
    assert scores.period_perplexities == pytest.approx(expected, rel=1e-6)
    assert scores.bits_per_byte > 0
    assert scores.perplexity == pytest.approx(math.exp(-test.mean()), rel=1e-6)
    # The kept outputs give the same again.
    assert PerplexityEvaluator(folder, tmp_path / "kept", [CPU])(learner(members[:1], True)) == scores
    assert len(list(tmp_path.glob("kept/*/mega_batch_3/test.npy"))) == 1
    # Scores from before the third period was added get its perplexity. Complete ones, and samples, stay as they are.
    another = PerplexityEvaluator(folder, tmp_path / "other", [CPU])
    before = replace(scores, period_perplexities=[1.5, 2.5], overflow=0.25)
    completed = replace(before, period_perplexities=[1.5, 2.5, scores.period_perplexities[2]])
    assert another.complete(learner(members[:1], False), before) == completed
    for unchanged in (scores, replace(scores, period_perplexities=None)):
        assert another.complete(learner([], False), unchanged) is unchanged
    argv = [str(members[0]), "--stream", str(in_periods), "--device", "cpu", "--json"]
    assert alma_eval([*argv, "--split", "mega_batch_3/test"]) == 0
    assert json.loads(capsys.readouterr().out)["perplexity"] == pytest.approx(expected[2], rel=1e-6)
    assert alma_eval([*argv, "--split", "mega_batch_4/test"]) == 2
    assert "--split mega_batch_4/test is not held-out text" in capsys.readouterr().err


def test_each_source_is_scored_alone(own_stream, members, capsys):
    folder = StreamFolder.open(own_stream)
    argv = [str(members[0]), "--stream", str(own_stream), "--device", "cpu", "--json", "--by-source"]
    assert alma_eval(argv) == 2
    assert "documents/test.parquet is missing" in capsys.readouterr().err
    # alma-prep lists the file in manifest.json.
    manifest = {"outputs": {"documents/test.parquet": {"sha256": 64 * "0", "bytes": 1}}}
    (own_stream / "manifest.json").write_text(json.dumps(manifest))
    assert alma_eval(argv) == 2
    assert "documents/test.parquet is missing" in capsys.readouterr().err
    (own_stream / "manifest.json").unlink()
    model, task = load_member(members[0], folder, CPU)
    test = -score_tokens(model, task, "test").log_probability_T.astype(np.float64)
    ends = np.flatnonzero(np.fromfile(own_stream / "test" / "test.bin", np.uint16) == 2) + 1
    losses = np.split(test, ends[:-1])
    sources = ["text:a" if number % 3 else "books:b" for number in range(len(ends))]
    words = [len(loss) - 1 for loss in losses]
    (own_stream / "documents").mkdir()
    table = pyarrow.table({"source": sources, "words": words, "bytes": [3 * word for word in words]})
    pyarrow.parquet.write_table(table, own_stream / "documents" / "test.parquet")
    assert alma_eval(argv) == 0
    found = json.loads(capsys.readouterr().out)["by_source"]
    assert list(found) == ["books:b", "text:a"]
    for name, first in (("books:b", (0,)), ("text:a", (1, 2))):
        mine = np.concatenate([loss for number, loss in enumerate(losses) if number % 3 in first])
        assert found[name]["num_tokens"] == len(mine)
        assert found[name]["loss"] == pytest.approx(mine.mean(), rel=1e-6)
        assert found[name]["num_words"] == sum(word for number, word in enumerate(words) if number % 3 in first)
        bits = found[name]["loss"] * found[name]["num_tokens"] / math.log(2)
        assert found[name]["bits_per_byte"] == pytest.approx(bits / (3 * found[name]["num_words"]))
    pyarrow.parquet.write_table(table.slice(1), own_stream / "documents" / "test.parquet")
    assert alma_eval(argv) == 2
    assert f"has {len(ends) - 1} rows, expected {len(ends)}" in capsys.readouterr().err
    path = own_stream / "documents" / "test.parquet"
    pyarrow.parquet.write_table(table.drop_columns(["words"]), path)
    assert alma_eval(argv) == 2
    assert f"{path} has no column words: make the stream again" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-40])
    assert alma_eval(argv) == 2
    assert f"{path} cannot be read" in capsys.readouterr().err


def test_outputs_of_a_frozen_member_are_kept_and_not_computed_again(stream, members, tmp_path, loaded):
    folder, keep_in = StreamFolder.open(stream), tmp_path / "kept"
    one = PerplexityEvaluator(folder, keep_in, [CPU])(learner(members[:1], True))
    assert loaded == members[:1]
    both = PerplexityEvaluator(folder, keep_in, [CPU])(learner(members, True))  # of another process, one member more
    assert loaded == members
    assert PerplexityEvaluator(folder, keep_in, [CPU])(learner(members, True)) == both
    tokens = sum(folder.counts(split)["tokens"] for split in ("valid", "test"))
    kept = [np.load(path) for path in keep_in.glob("*/*.npy")]
    assert sum(array.nbytes for array in kept) == 2 * 4 * tokens  # 4 bytes a token and member
    assert PerplexityEvaluator(folder, keep_in, [CPU])(learner(members[:1], True)) == one
    assert loaded == members
    # Scoring them again gives the same, to the last bit.
    assert PerplexityEvaluator(folder, tmp_path / "elsewhere", [CPU])(learner(members, False)) == both
    assert loaded == members * 2


def test_only_outputs_of_frozen_members_are_kept(stream, members, tmp_path, loaded):
    folder, half = (
        StreamFolder.open(stream),
        SimpleNamespace(predictor=members, frozen=members[1:], is_trained=True, num_stored=None),
    )
    scores = [PerplexityEvaluator(folder, tmp_path / "kept", [CPU])(half) for _ in range(2)]
    assert scores[0] == scores[1]
    assert loaded == [*members, members[0]]


def test_another_checkpoint_of_the_same_name_is_scored_again(stream, members, tmp_path, loaded):
    folder, path = StreamFolder.open(stream), tmp_path / "member.pt"
    score = PerplexityEvaluator(folder, tmp_path / "kept", [CPU])
    results = []
    for member in (*members, members[0]):
        shutil.copyfile(member, path)
        results.append(score(learner([path], True)))
    assert loaded == [path] * 3
    assert score(learner([path], True)) == results[2]
    assert loaded == [path] * 3
    assert results[0] == results[2] != results[1]


def test_another_stream_is_scored_again(stream, members, tmp_path, loaded):
    other = make_stream(tmp_path / "stream", seed=5)
    for folder in (stream, other):
        PerplexityEvaluator(StreamFolder.open(folder), tmp_path / "kept", [CPU])(learner(members[:1], True))
    assert loaded == [members[0]] * 2


def test_outputs_that_a_killed_process_kept_in_part_are_scored_again(stream, members, tmp_path, loaded):
    folder, keep_in = StreamFolder.open(stream), tmp_path / "kept"
    before = PerplexityEvaluator(folder, keep_in, [CPU])(learner(members[:1], True))
    (mark,) = keep_in.glob("*/entry.json")
    mark.unlink()
    for path in keep_in.glob("*/*.npy"):
        os.truncate(path, 100)
    assert PerplexityEvaluator(folder, keep_in, [CPU])(learner(members[:1], True)) == before
    assert len(loaded) == 2
    assert PerplexityEvaluator(folder, keep_in, [CPU])(learner(members[:1], True)) == before
    assert len(loaded) == 2


@pytest.mark.parametrize("damage", ["gone", "cut short", "a token too few", "another value", "facts cut short"])
def test_kept_outputs_that_are_not_whole_are_scored_again(stream, members, tmp_path, loaded, damage):
    score = PerplexityEvaluator(StreamFolder.open(stream), tmp_path, [CPU])
    before = score(learner(members[:1], True))
    (path,) = tmp_path.glob("*/test.npy")
    if damage == "gone":
        path.unlink()
    elif damage == "cut short":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "a token too few":
        np.save(path, np.load(path)[:-1])
    elif damage == "another value":
        np.save(path, np.load(path) - 1)
    else:
        facts = path.with_name("entry.json")
        facts.write_text(facts.read_text()[:20])
    assert score(learner(members[:1], True)) == before
    assert len(loaded) == 2


def test_only_what_is_needed_again_stays_in_the_run_folder(stream, members, tmp_path):
    score = PerplexityEvaluator(StreamFolder.open(stream), tmp_path / "kept", [CPU])
    score(learner(members, True))
    assert len(list((tmp_path / "kept").iterdir())) == 2
    (tmp_path / "kept" / "half.123.part").mkdir()  # a killed process left it
    before = score(learner(members[:1], True))
    (kept,) = (tmp_path / "kept").iterdir()
    assert {path.name for path in kept.iterdir()} == {"entry.json", "test.npy", "valid.npy"}
    assert score(learner(members[:1], False)) == before


def test_a_checkpoint_that_another_run_has_scored_is_not_scored_again(stream, members, tmp_path, loaded, monkeypatch):
    folder, shared = StreamFolder.open(stream), tmp_path / "shared"
    one = PerplexityEvaluator(folder, tmp_path / "one", [CPU], shared)(learner(members, False))
    assert loaded == members
    assert not (tmp_path / "one").exists()  # in the run folder, only frozen members are kept
    checkpoint = read_checkpoint(members[0])
    checkpoint["extra_state"]["previous_training_time"] = 7.0  # another run needed another time
    copied = tmp_path / "copied.pt"
    write_checkpoint(checkpoint, copied)
    other = PerplexityEvaluator(folder, tmp_path / "other", [CPU], shared)
    assert other(learner([copied, members[1]], True)) == one
    assert loaded == members
    # Another model, another precision, another stream and a sample are scored.
    checkpoint["cfg"]["model"]["precision"] = "bfloat16"
    write_checkpoint(checkpoint, tmp_path / "bfloat16.pt")
    half = other(learner([tmp_path / "bfloat16.pt", members[1]], True))
    assert half != one
    assert half.perplexity == pytest.approx(one.perplexity, rel=2e-2)
    PerplexityEvaluator(folder, tmp_path / "one", [CPU], shared, 64)(learner([copied], False, is_trained=False))
    assert loaded == [*members, tmp_path / "bfloat16.pt", copied]
    assert len(list(shared.iterdir())) == 4
    # So is everything, after the code has changed.
    monkeypatch.setattr(stored_scores, "digest_of_code", lambda parts: "other code")
    assert other(learner(members, True)) == one
    assert loaded[4:] == members


def test_a_shared_folder_that_cannot_be_written_stops_no_run(stream, members, tmp_path, caplog):
    (tmp_path / "shared").write_text("a file is in its place")
    score = PerplexityEvaluator(StreamFolder.open(stream), tmp_path / "kept", [CPU], tmp_path / "shared")
    assert score(learner(members, True)) == score(learner(members, False))
    assert "cannot store the scores" in caplog.text


def test_an_untrained_learner_is_scored_on_a_sample_that_the_row_names(stream, members, tmp_path):
    folder, tokens = StreamFolder.open(stream), StreamFolder.open(stream).counts("test")["tokens"]
    model, task = load_member(members[0], folder, CPU)
    whole_T = score_tokens(model, task, "test").log_probability_T
    sampled = PerplexityEvaluator(folder, tmp_path, [CPU], untrained_tokens=100)
    scores = sampled(learner(members[:1], False, is_trained=False))
    assert scores.scored_tokens == 96  # three blocks of 32
    assert scores.perplexity == pytest.approx(math.exp(-whole_T[:96].astype(np.float64).mean()), rel=1e-6)
    assert scores.word_perplexity is scores.bits_per_byte is None
    full = sampled(learner(members[:1], False))  # the same learner, trained
    assert (full.scored_tokens, full.perplexity) == (None, pytest.approx(combine([whole_T], 1).perplexity, rel=1e-6))
    for enough in (None, tokens, 10**6):  # valid is smaller than test
        all_of_it = PerplexityEvaluator(folder, tmp_path, [CPU], untrained_tokens=enough)
        assert all_of_it(learner(members[:1], False, is_trained=False)) == full
    row = LedgerRow(0, 0, False, scores)
    assert row.to_json()["scored_tokens"] == 96
    assert LedgerRow.from_json(row.to_json()) == row
    assert "scored_tokens" not in LedgerRow(0, 0, False, full).to_json()  # as in ledgers of earlier versions
    ledger_table([row, LedgerRow(1, 1, True, full)], title="")


@pytest.mark.parametrize("frozen", [False, True])
def test_scores_that_leave_tokens_out_are_refused(own_stream, members, tmp_path, frozen):
    description = json.loads((own_stream / "stream.json").read_text())
    folder = StreamFolder.open(own_stream)
    folder.description["splits"]["test"]["tokens"] += 1
    tokens = description["splits"]["test"]["tokens"]
    message = f"{tokens} tokens of the split test were scored, but stream.json says {tokens + 1}: run `alma-prep` again"
    with pytest.raises(StreamError, match=message):
        PerplexityEvaluator(folder, tmp_path / "kept", [CPU])(learner(members[:1], frozen))
    assert not (tmp_path / "kept").exists()


def test_checkpoints_of_two_dictionaries_are_reported_by_name(stream, members, tmp_path, capsys):
    other = make_stream(tmp_path / "other", num_words=30, tokens=400)
    stranger = untrained(other, tmp_path / "stranger.pt")
    assert alma_eval([str(members[0]), str(stranger), "--stream", str(stream)]) == 2
    output = capsys.readouterr().err
    assert f"{stranger} was trained with a dictionary of 34 entries, but the dictionary of {stream} has 24" in output
    assert "Traceback" not in output
