"""The progress of scoring."""

import io
import re
import sys

import pytest
import torch

from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation import progress
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.scoring import score_tokens


def test_a_file_gets_lines_with_the_tokens_that_are_scored(stream, trained, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    model, task = load_member(trained, StreamFolder.open(stream), torch.device("cpu"))
    quiet = score_tokens(model, task, "test", tokens_per_batch=256)
    assert sys.stderr.getvalue() == ""
    shown = score_tokens(model, task, "test", tokens_per_batch=256, title="the split test")
    assert (shown.log_probability_T == quiet.log_probability_T).all()
    lines = sys.stderr.getvalue().splitlines()
    total = len(shown.log_probability_T)
    assert len(lines) >= 2
    for number, line in enumerate(lines, start=1):
        assert line.startswith(f"scoring the split test  {min(256 * number, total):,}/{total:,} tokens  ")
        assert re.search(r"[\d,]+ s left$", line)


def test_a_terminal_gets_a_bar_that_disappears(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with progress.scoring_progress("x", 10) as advance:
        advance(5)
    assert "scoring x" in sys.stderr.getvalue()
    with pytest.raises(RuntimeError), progress.scoring_progress("x", 10):
        raise RuntimeError
