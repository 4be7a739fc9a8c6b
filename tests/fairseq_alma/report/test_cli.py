import os
import signal
import subprocess
import sys
import time

import pytest

from fairseq_alma.core.lease import Lease
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.report.cli import main
from tests.fairseq_alma.report.ledgers import vision_rows, write_text, write_vision


def alma_report(monkeypatch, *arguments):
    """Run the command in this process and return its exit status."""
    monkeypatch.setattr(sys, "argv", ["alma-report", *map(str, arguments)])
    try:
        return main()
    except SystemExit as ended:
        return ended.code or 0


def test_a_report_is_figures_tables_and_a_page(tmp_path, monkeypatch, capsys):
    write_vision(tmp_path / "runs/a", [0.9, 0.5, 0.25])
    write_vision(tmp_path / "runs/b", [0.9, 0.9, 0.2], wait=2)
    write_text(tmp_path / "runs/c", [900.0, 50.0])
    assert alma_report(monkeypatch, tmp_path / "runs", "--out", tmp_path / "report") == 0
    files = {path.relative_to(tmp_path / "report").as_posix() for path in (tmp_path / "report").rglob("*.*")}
    assert {
        "index.html", "figures/mnist_B2/over_the_stream.png", "figures/mnist_B2/over_the_stream.pdf",
        "figures/mnist_B2/against_wait.png", "figures/books_B1/running_average.pdf", "tables/mnist_B2/summary.csv",
        "tables/mnist_B2/summary.md", "tables/mnist_B2/summary.tex", "tables/mnist_B2/table1.md",
        "tables/books_B1/table2.csv",
    } <= files  # fmt: skip
    printed = capsys.readouterr().out
    assert "3 runs in 2 comparisons" in printed
    assert f"wrote {len(files)} files: open {tmp_path / 'report/index.html'} in a browser" in printed


def test_a_stream_whose_name_is_not_unicode_is_reported(tmp_path, monkeypatch):
    write_text(tmp_path / "a", [900.0, 50.0], stream="/s/caf\udce9")
    assert alma_report(monkeypatch, tmp_path / "a", "--out", tmp_path / "report") == 0
    assert "caf\\udce9" in next((tmp_path / "report/tables").rglob("summary.md")).read_text()


def test_a_report_is_not_written_into_a_run_folder(tmp_path, monkeypatch, capsys):
    run = write_vision(tmp_path / "runs/a", [0.9, 0.5])
    for out in (run, tmp_path / "runs"):
        before = sorted(tmp_path.rglob("*"))
        assert alma_report(monkeypatch, out, "--out", out) == 2
        assert "give another folder for the report" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before
    assert alma_report(monkeypatch, tmp_path / "runs", "--out", run) == 2


def test_the_page_alone(tmp_path, monkeypatch):
    write_vision(tmp_path / "a", [0.9, 0.5])
    assert alma_report(monkeypatch, tmp_path / "a", "--out", tmp_path / "report", "--page-only") == 0
    assert [path.name for path in (tmp_path / "report").iterdir()] == ["index.html"]


def test_a_damaged_run_is_skipped_with_a_message_and_the_rest_is_reported(tmp_path, monkeypatch, capsys):
    write_vision(tmp_path / "a", [0.9, 0.5])
    bad = write_vision(tmp_path / "b", [0.9, 0.5], wait=2, learner="gmoe")
    (bad / "ledger.jsonl").write_text("{\n")
    folder = write_vision(tmp_path / "c", [0.9, 0.5], learner="gmoe", row_experts=[1, 1])
    (folder / "stages/stage_001").mkdir(parents=True)
    (folder / "stages/stage_001/routing.npz").write_bytes(b"no archive")
    assert alma_report(monkeypatch, tmp_path, "--out", tmp_path / "report") == 0
    message = capsys.readouterr().err
    assert f"skipped: {bad / 'ledger.jsonl'}, line 1 is damaged" in message
    assert f"skipped: {folder / 'stages/stage_001/routing.npz'} cannot be read" in message
    assert "routing.npz cannot be read" in (tmp_path / "report/index.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--out", "report"], "nowhere is not a folder: give run folders"),
        (["empty", "--out", "report"], "empty contains no run: there is no settings.json in it"),
        (["good", "--out", "good/settings.json"], "is a file, or a link to a missing folder: give a folder"),
        (["good", "--out", "broken"], "is a file, or a link to a missing folder: give a folder"),
        (["good", "--out", "broken/report"], "File exists: broken: remove this file or broken link"),
        (["good", "--out", "loop"], "is a file, or a link to a missing folder: give a folder"),
        (["good", "--out", "loop/report"], "loop"),
        (["loop", "--out", "report"], "loop is not a folder"),
        (["good"], "the following arguments are required: --out"),
        (["--out", "report"], "the following arguments are required: RUN"),
        (["good", "--out", "report", "--watch", "0"], "give at least 1 second"),
        (["good", "--out", "report", "--watch", "nan"], "give at least 1 second"),
    ],
)
def test_bad_input_gives_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").symlink_to("gone")
    (tmp_path / "loop").symlink_to("loop")
    write_vision(tmp_path / "good", [0.9, 0.5])
    assert alma_report(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def watch_command(folder, out, seconds):
    """Return the command that writes the page of a run every `seconds`."""
    options = ["--watch", str(seconds), "--page-only"]
    return [sys.executable, "-m", "fairseq_alma.report.cli", folder, "--out", out, *options]


def test_a_watched_report_follows_a_run_to_its_end(tmp_path):
    folder = write_vision(tmp_path / "a", [0.9, 0.5], mega_batches=3)
    page = tmp_path / "report/index.html"
    command = watch_command(folder, page.parent, seconds=1)
    with Lease(folder):
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            until("running, 1 of 3", page)
            assert 'data-reload="1' in page.read_text()
            for row in vision_rows([0.9, 0.5, 0.4, 0.3])[2:]:
                Ledger(folder / "ledger.jsonl").append(row)
            until('"state":"finished"', page)
        except BaseException:
            watching.kill()
            raise
    printed, _ = watching.communicate(timeout=60)
    assert watching.returncode == 0
    assert "no run is running any more: this is the last report" in printed
    assert "data-reload=" not in page.read_text()


def until(text, page, seconds=60):
    """Wait until the page contains a text."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if page.exists() and text in page.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"no {text!r} in {page} after {seconds} s")


def test_ctrl_c_ends_a_watch_without_a_traceback(tmp_path):
    folder = write_vision(tmp_path / "a", [0.9, 0.5], mega_batches=3)
    page = tmp_path / "report/index.html"
    command = watch_command(folder, page.parent, seconds=60)
    # A process in the background of a script inherits an ignored SIGINT, and Python then ignores Ctrl-C.
    watching = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        until("stopped, 1 of 3", page)
        os.kill(watching.pid, signal.SIGINT)
        _, message = watching.communicate(timeout=60)
    except BaseException:
        watching.kill()
        raise
    assert message.strip() == "alma-report: stopped; run the same command again"
    assert watching.returncode == 130
