"""From raw text to a trained stage, with each tokenizer."""

import json
from pydoc_data.topics import topics

import pytest

from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.stream_folder import StreamFolder
from tests.commands import RUN, run_command


# Slow, because the README and the tests of lm-evaluation-harness run the same two commands on text of this kind.
@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["byte-bpe", "sentencepiece"])
def test_text_becomes_a_stream_and_a_stage(tmp_path, tokenizer):
    stream, out = tmp_path / "stream", tmp_path / "run"
    text = tmp_path / "topics.txt"  # Python's language reference, which pydoc contains
    text.write_text("\n".join(line for topic in topics.values() for line in topic.splitlines())[:100_000])
    result = run_command(
        "alma-prep", stream, "--source", f"text:{text}", "--mega-batches", 2, "--vocab-size", 600, "--seed", 1,
        "--valid-words", 500, "--tokenizer", tokenizer,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    folder = StreamFolder.open(stream)
    folder.verify_bytes()
    assert folder.description["tokenizer"]["kind"] == tokenizer
    result = run_command("alma-lm", f"stream={stream}", f"out={out}", *RUN, "wait=2", "updates=15", "validations=1")
    assert result.returncode == 0, result.stderr[-3000:]
    untrained, waiting, trained = Ledger(out / "ledger.jsonl").rows()
    # An untrained model is about as good as guessing, and a few updates make it better.
    assert untrained.scores.perplexity > folder.description["dictionary_size"] / 2
    assert waiting.scores == untrained.scores
    assert trained.scores.perplexity < untrained.scores.perplexity / 2
    assert json.loads((out / "summary.json").read_text())["num_stages"] == 1
