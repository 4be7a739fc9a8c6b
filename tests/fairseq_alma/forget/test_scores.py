"""Masked text in training batches and scores: it is neither trained on nor counted."""

import json
import math
import shutil
from argparse import Namespace

import numpy as np
import pyarrow.parquet
import pytest
import torch
from fairseq.data import Dictionary, TokenBlockDataset

from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.data.blocks import Blocks
from fairseq_alma.evaluation.cli import _print_score
from fairseq_alma.evaluation.evaluator import PerplexityEvaluator
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.perplexity import combine, scores_by_source
from fairseq_alma.evaluation.scoring import score_tokens
from fairseq_alma.forget.mask import PAD
from tests.streams import _sha256


@pytest.fixture
def masked(stream, tmp_path):
    """A copy of the stream in which tokens 20 to 69 of the test set, and 0 to 39 of the validation set, are masked."""
    out = shutil.copytree(stream, tmp_path / "masked")
    description = json.loads((out / "stream.json").read_text())
    (out / "documents").mkdir()
    for split, start, end in (("test", 20, 70), ("valid", 0, 40)):
        tokens = np.memmap(out / split / f"{split}.bin", np.uint16, "r+")
        tokens[start:end] = PAD
        tokens.flush()
        description["splits"][split] |= {"masked": [[start, end]], "sha256": _sha256(out / split / f"{split}.bin")}
    (out / "stream.json").write_text(json.dumps(description))
    return out


def test_masked_tokens_are_not_scored(trained, stream, masked):
    folder = StreamFolder.open(masked)
    model, task = load_member(trained, folder, torch.device("cpu"))
    scores = score_tokens(model, task, "test").log_probability_T
    assert (scores[20:70] == 0).all() and (scores[:20] < 0).all() and (scores[70:] < 0).all()
    tokens, num_masked = folder.counts("test")["tokens"], folder.num_masked("test")
    assert (num_masked, len(scores)) == (50, tokens)
    score = combine([scores], 1, num_masked=num_masked)
    assert score.num_tokens == tokens - 50
    assert score.perplexity == pytest.approx(math.exp(-scores.astype(float).sum() / (tokens - 50)))
    assert [folder.num_masked("test", *span) for span in ((0, 20), (0, 30), (60, None), (30, 40))] == [0, 10, 10, 10]
    # Far behind the masked text, the model predicts what it does without masks.
    model, task = load_member(trained, StreamFolder.open(stream), torch.device("cpu"))
    before = score_tokens(model, task, "test").log_probability_T
    np.testing.assert_allclose(scores[96:], before[96:], rtol=1e-4, atol=1e-4)  # the first whole block after it
    np.testing.assert_array_equal(scores[:20], before[:20].astype(scores.dtype))


def test_the_ledger_counts_only_what_is_scored(trained, masked, tmp_path):
    class Learner:
        predictor = (trained,)
        frozen = ()
        is_trained = True
        num_stored = None

    folder = StreamFolder.open(masked)
    found = PerplexityEvaluator(folder, tmp_path / "kept")(Learner())
    model, task = load_member(trained, folder, torch.device("cpu"))
    scores = score_tokens(model, task, "valid").log_probability_T
    assert found.validation_loss == pytest.approx(-scores[40:].astype(float).mean(), rel=1e-6)
    assert found.scored_tokens is None


def test_scores_by_source_leave_masked_text_out(trained, masked):
    folder = StreamFolder.open(masked)
    sequences = folder.counts("test")["sequences"]
    # Of the last source, no word is left: alma-forget has masked its text.
    words = [*[1] * (sequences - 1), 0]
    columns = {"source": [*["a"] * (sequences - 1), "b"], "words": words, "bytes": [1] * sequences}
    pyarrow.parquet.write_table(pyarrow.table(columns), masked / "documents/test.parquet")
    model, task = load_member(trained, folder, torch.device("cpu"))
    scores = score_tokens(model, task, "test").log_probability_T
    found = scores_by_source([scores], folder, "test")
    assert list(found) == ["a"] and len(scores) - 50 - 200 < found["a"].num_tokens < len(scores) - 50


def test_batches_say_what_is_masked():
    dictionary = Dictionary()
    for number in range(20):
        dictionary.add_symbol(f"w{number}")
    tokens = torch.arange(4, 20)
    tokens[4:8] = PAD
    blocks = TokenBlockDataset([tokens], [len(tokens)], 4, pad=1, eos=2, break_mode="none", include_targets=True)
    found = Blocks(blocks, blocks.sizes, dictionary, dictionary, shuffle=False, targets=["future"])
    batch = found.collater([found[0], found[2]])
    # The input of block 2 begins with the last masked token.
    assert (batch["ntokens"], batch["net_input"]["has_padding"]) == (8, True)
    assert (found.collater([found[0]])["net_input"]["has_padding"], found.collater([found[1]])["ntokens"]) == (False, 0)


def test_a_split_without_text_has_no_score(capsys):
    score = combine([np.full(7, -2, np.float32)], 0, 0, num_masked=4)  # each </s> is kept
    assert score.num_tokens == score.nll_sum == 0
    assert math.isnan(score.perplexity) and math.isnan(score.word_perplexity) and score.bits_per_byte is None
    _print_score(score, {"a": score}, {"num_members": 1}, None, Namespace(split="test", json=True))
    printed = json.loads(capsys.readouterr().out)
    assert printed["perplexity"] is None and printed["num_tokens"] == printed["by_source"]["a"]["num_words"] == 0
