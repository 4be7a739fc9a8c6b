"""A stream to which mega-batches are added month by month, and a run that continues on it."""

import json
from pathlib import Path

import pytest

from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.protocol import StreamSettings
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.commands import RUN, run_command


@pytest.mark.parametrize(
    ("given", "more_will_follow", "expected"),
    [(None, False, "train"), (None, True, "wait"), ("train", True, "train"), ("wait", False, "wait")],
)
def test_the_last_mega_batches_wait_if_more_will_follow(given, more_will_follow, expected):
    settings = LanguageModelSettings(stream="s", out="o", updates=1, wait=2, last_group=given)
    assert settings.stream_settings(7, more_will_follow) == StreamSettings(7, 2, False, expected)


def succeed(*command: object) -> str:
    result = run_command(*map(str, command))
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def ledger_of(out: Path) -> list[dict]:
    rows = [row.to_json() for row in Ledger(out / "ledger.jsonl").rows()]
    return [{key: value for key, value in row.items() if not key.endswith("_seconds")} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(("learner", "partition"), [("sm", "equal"), ("gmoe", "equal"), ("sm", "chronological")])
def test_a_run_that_grows_with_its_stream_is_the_run_over_the_whole_stream(tmp_path, alma_data, learner, partition):
    """Six periods of dated texts at wait 2, then two more, one at a time. Every twelfth text, to save time."""
    lines = (alma_data / "dated" / "peps.jsonl").read_text().splitlines()
    by_date = sorted(lines, key=lambda line: json.loads(line)["date"])[::12]
    size = len(by_date) // 8
    stream = tmp_path / "stream"
    duplicates = ("--duplicates", "keep" if partition == "equal" else "exact")
    prep = ("--workers", 2, "--vocab-size", 500, "--partition", partition, *duplicates)
    (tmp_path / "first.jsonl").write_text("\n".join(by_date[: 6 * size]))
    succeed("alma-prep", stream, "--source", f"text:{tmp_path}/first.jsonl", "--mega-batches", 6, *prep)
    run = ("alma-lm", f"stream={stream}", *RUN, f"learner={learner}", "wait=2", "updates=20", "validations=2")
    run += ("experts=2", "grow_experts=1") if learner == "gmoe" else ("experts=2",)
    succeed(*run, f"out={tmp_path}/grown")
    for number in (6, 7):
        (tmp_path / f"{number}.jsonl").write_text("\n".join(by_date[number * size : (number + 1) * size]))
        succeed("alma-prep", "--extend", stream, "--source", f"text:{tmp_path}/{number}.jsonl", *duplicates)
        said = succeed(*run, f"out={tmp_path}/grown")
        assert ("mega-batch 7 waits for 1 more" in said) == (number == 6)
    succeed(*run, f"out={tmp_path}/whole")
    grown, whole = ledger_of(tmp_path / "grown"), ledger_of(tmp_path / "whole")
    assert [row["stage"] for row in grown] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    if partition == "chronological":
        # A row has the periods that had arrived when it was written, also if its mega-batch only waited (t = 7).
        assert [len(row["period_perplexities"]) for row in grown] == [6, 6, 6, 6, 6, 6, 6, 7, 8]
        for row, all_periods in zip(grown, whole, strict=True):
            row["period_perplexities"] += all_periods["period_perplexities"][len(row["period_perplexities"]) :]
    assert grown == whole
