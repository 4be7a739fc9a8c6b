"""Real text with dates: streams of five periods, a learner on them, and its matrix of perplexities."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_alma.core.ledger import Ledger
from tests.data_prep.encoding.test_documents import splits_of, write_lines

NUM_PERIODS = 5
TINY = ("preset=quickstart", "arch=switch_lm_tiny", "tokens_per_sample=64")


def run(*argv: str) -> None:
    command, *rest = argv
    done = subprocess.run([str(Path(sys.executable).with_name(command)), *rest], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def check_matrix(
    tmp_path: Path, corpus: Path, prepare: list[str], train: list[str], num_arrivals: int = NUM_PERIODS
) -> dict:
    """Make a stream of five periods, train on it, and check the matrix of perplexities. Return summary.json."""
    out, run_folder = tmp_path / "stream", tmp_path / "run"
    periods = ["--partition", "chronological", "--mega-batches", str(NUM_PERIODS)]
    run("alma-prep", str(out), "--source", f"text:{corpus}", *periods, *prepare)
    stream = json.loads((out / "stream.json").read_text())
    dates = [period[key] for period in stream["periods"] for key in ("first_date", "last_date")]
    rows = [json.loads(line) for line in corpus.read_text(encoding="utf-8").splitlines()]
    assert dates == sorted(dates)
    assert (dates[0], dates[-1]) == (min(row["date"] for row in rows), max(row["date"] for row in rows))
    parts = splits_of(out)
    words = [
        sum(parts[f"mega_batch_{t}{part}"]["words"] for part in ("", "/valid", "/test"))
        for t in range(1, NUM_PERIODS + 1)
    ]
    longest = max(len(row["text"].split()) for row in rows)
    assert max(words) - min(words) <= 2 * longest
    run("alma-lm", f"stream={out}", f"out={run_folder}", *TINY, *train)
    ledger = Ledger(run_folder / "ledger.jsonl").rows()
    matrix = [row.scores.period_perplexities for row in ledger[1:]]
    assert [len(row or []) for row in matrix] == [NUM_PERIODS] * num_arrivals
    for row in ledger[1:]:
        # The test set is the test text of all periods.
        tokens = [period["test"]["tokens"] for period in stream["periods"]]
        losses = [math.log(value) for value in row.scores.period_perplexities or []]
        loss = sum(count * one for count, one in zip(tokens, losses, strict=True)) / sum(tokens)
        assert row.scores.perplexity == pytest.approx(math.exp(loss), rel=1e-6)
    return json.loads((run_folder / "summary.json").read_text())


@pytest.mark.slow
def test_a_part_of_the_messages_of_presidents(tmp_path, shared_data):
    lines = (shared_data / "dated" / "sotu.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row | {"text": " ".join(row["text"].split()[:60])} for row in rows]
    corpus = write_lines(tmp_path / "sotu.jsonl", rows)
    prepare = ["--vocab-size", "300", "--duplicates", "exact", "--test-words", "1500", "--workers", "1"]
    train = ["updates=2", "sequences_per_update=4", "batch_size=4", "validations=1", "mega_batches=2"]
    summary = check_matrix(tmp_path, corpus, prepare, train, num_arrivals=2)
    assert {"backward_perplexity", "in_distribution_perplexity", "forward_perplexity"} <= summary.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sotu", "peps"])
def test_a_learner_knows_the_past_better_than_the_future(tmp_path, shared_data, name):
    corpus = shared_data / "dated" / f"{name}.jsonl"
    prepare = ["--vocab-size", "1000", "--tokenizer-words", "200000", "--test-words", "50000"]
    train = ["updates=150", "sequences_per_update=16", "batch_size=16", "validations=2"]
    summary = check_matrix(tmp_path, corpus, prepare, train)
    # Averages over the matrix also differ because later rows are of a better model. The diagonal and what is below it
    # have more text behind them than what is above.
    assert summary["in_distribution_perplexity"] < summary["forward_perplexity"]
    assert summary["backward_perplexity"] < summary["forward_perplexity"]
