"""A model continues on a stream whose vocabulary has been grown."""

import json

import pytest
import torch

import fairseq_alma as alma
from data_prep.cli import main as alma_prep
from data_prep.tokenization.growth import with_more_symbols
from data_prep.tokenization.tokenizers import ByteBPE, dictionary_names, dictionary_text
from fairseq_alma.checkpoints import dictionary_of, require_checkpoint
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.run_folder import RunFolder
from fairseq_alma.evaluation.vocabulary import EMBEDDINGS, earlier_vocabularies, with_new_symbols
from fairseq_alma.stream_tokenizer import StreamTokenizer
from tests.commands import RUN, run_command
from tests.fairseq_alma.forget.test_stream import month, write_month

SMALL = (*RUN, "updates=4", "validations=1")


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """A stream of three months, and a copy with 30 more symbols, learned from the third."""
    folder = tmp_path_factory.mktemp("streams")
    for t in (1, 2, 3):
        write_month(folder / "texts", t, month(t))
    made = [str(folder / "old"), "--source", f"text:{folder / 'texts'}", "--partition", "by-date", "--workers", "1"]
    assert alma_prep([*made, "--vocab-size", "300"]) == 0
    assert alma_prep(["grow-vocab", str(folder / "old"), str(folder / "new"), "--symbols", "30"]) == 0
    return folder / "old", folder / "new"


@pytest.fixture(scope="module")
def run(streams):
    """A run of an ensemble of two on the first two months, in one stage."""
    out = streams[0].parent / "run"
    words = (f"stream={streams[0]}", f"out={out}", *SMALL, "mega_batches=2", "wait=2", "learner=ens", "members=2")
    result = run_command("alma-lm", *words)
    assert result.returncode == 0, result.stderr
    return out


def tokenizer_with(folder, tokenizer: bytes) -> StreamTokenizer:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(tokenizer)
    names = dictionary_names(ByteBPE(folder / "tokenizer.json").symbols())
    (folder / "dict.txt").write_text(dictionary_text(names))
    return StreamTokenizer(folder)


def test_the_embedding_of_a_new_symbol_is_the_mean_of_its_pieces(tmp_path):
    first = with_more_symbols(ByteBPE.train_on_counts([], 256), {("a", "b", "c"): 3, ("a", "b"): 2}, 2)
    tokenizer = tokenizer_with(tmp_path / "first", first)
    weights_VD = torch.arange(264 * 2, dtype=torch.float32).view(264, 2) ** 2  # 4 special, 256 bytes, 4 unused
    result = with_new_symbols({EMBEDDINGS: weights_VD, "other": torch.ones(1)}, 256, tokenizer.path)
    assert result["other"].equal(torch.ones(1)) and result[EMBEDDINGS].shape == (264, 2)
    assert result[EMBEDDINGS][:260].equal(weights_VD[:260])
    a, b, c, ab, abc = (tokenizer.id_of[symbol] for symbol in ("a", "b", "c", "ab", "abc"))
    assert result[EMBEDDINGS][ab].equal(weights_VD[[a, b]].mean(0))
    assert result[EMBEDDINGS][abc].equal(weights_VD[[a, b, c]].mean(0))
    assert result[EMBEDDINGS][262:].equal(weights_VD[263:].repeat(2, 1))
    # After two more symbols, all 264 entries are used. Then unused entries get the mean of all symbols.
    second = with_more_symbols(first, {("x", "y"): 9, ("v", "w"): 8}, 2)
    third = tokenizer_with(tmp_path / "third", with_more_symbols(second, {("abc", "xy"): 7}, 1))
    assert third.dictionary_size == 272
    result = with_new_symbols({EMBEDDINGS: weights_VD}, 260, third.path)[EMBEDDINGS]
    abc, xy, both = (third.id_of[symbol] for symbol in ("abc", "xy", "abcxy"))
    assert result[both].equal(weights_VD[[abc, xy]].mean(0))
    assert result[265:].equal(weights_VD[4:].mean(0).repeat(7, 1))


def test_a_run_continues_on_the_grown_stream(streams, run):
    _, new = streams
    member = RunFolder(run).member(1, 2) / "checkpoint_best.pt"
    command = (f"stream={new}", f"out={run.parent / 'further'}", *SMALL, "known_mega_batches=2", "replay=0.5")
    result = run_command("alma-lm", *command, f"init_from={run}")
    assert result.returncode == 2 and "is an ensemble: give the checkpoint of one member" in result.stderr
    result = run_command("alma-lm", *command, f"init_from={new}")
    assert result.returncode == 2 and f"init_from={new}: {new} is a stream, not a run" in result.stderr
    result = run_command("alma-lm", *command, f"init_from={member}")
    assert result.returncode == 0, result.stderr
    further = RunFolder(run.parent / "further")
    start = require_checkpoint(further.member(0, 1) / "checkpoint_untrained.pt")
    before = require_checkpoint(member)
    num_old = earlier_vocabularies(new)[dictionary_of(before)]
    assert num_old == 300 and dictionary_of(start) == StreamTokenizer(new).dictionary_digest
    expected = with_new_symbols(before["model"], num_old, new)
    assert expected.keys() == start["model"].keys()
    assert all(start["model"][name].equal(weights) for name, weights in expected.items())
    rows = Ledger(further.ledger).rows()
    assert [row.updated for row in rows] == [False, False, False, True]
    assert rows[-1].scores.bits_per_byte < rows[0].scores.bits_per_byte
    config = (further.member(1, 1) / "config.yaml").read_text()
    assert "replay_mega_batches: 1-2" in config and "replay_share: 0.5" in config
    assert json.loads((further.path / "settings.json").read_text())["init_from"] == str(member)
    # The same command again does nothing; the next run starts from this one by its folder.
    assert "nothing" in run_command("alma-lm", *command, f"init_from={member}").stdout
    words = (f"stream={new}", f"out={run.parent / 'third'}", *SMALL, "mega_batches=1", f"init_from={further.path}")
    assert run_command("alma-lm", *words).returncode == 0


def test_an_old_model_is_scored_with_the_larger_vocabulary(streams, run):
    """Its new symbols have embeddings, but it has never predicted them. So it is worse than with its own vocabulary."""
    results = [run_command("alma-eval", run, "--stream", stream, "--json") for stream in streams]
    old, new = (json.loads(result.stdout) for result in results)
    assert new["num_bytes"] == old["num_bytes"] and new["num_tokens"] < old["num_tokens"]
    assert old["bits_per_byte"] < new["bits_per_byte"] < 2 * old["bits_per_byte"]
    assert alma.load(run).score("the key")[0].num_tokens > 0


def test_another_vocabulary_is_refused(streams, run, tmp_path):
    write_month(tmp_path / "texts", 1, month(7))
    words = [str(tmp_path / "other"), "--source", f"text:{tmp_path / 'texts'}", "--mega-batches", "1"]
    assert alma_prep([*words, "--vocab-size", "300", "--workers", "1"]) == 0
    member = RunFolder(run).member(1, 1) / "checkpoint_best.pt"
    command = (f"stream={tmp_path / 'other'}", f"out={tmp_path / 'out'}", *SMALL, f"init_from={member}")
    result = run_command("alma-lm", *command)
    assert result.returncode == 2 and "was trained with another dictionary" in result.stderr
