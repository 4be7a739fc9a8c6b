"""`alma-prep --drop-last` takes the newest extension back, so that it has never been."""

import json
import signal
import subprocess
import sys
import time

import pytest

from data_prep.cli import main
from data_prep.running import work_folder
from tests.commands import ROOT
from tests.data_prep.test_extend import write_texts
from tests.killed_here import killed_before_stream_json, killed_when_it_calls

MORE = ["--text-field", "story", "--duplicates"]


def add(out, path):
    argv = ["--extend", str(out), "--source", f"text:{path}", "--workers", "1"]
    assert main(argv) == 0


def content(out):
    """The content of every file of a stream, with stream.json and manifest.json."""
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.fixture
def texts(tmp_path):
    """Files old, first, bad and good, of which bad and good have the same name in different folders."""
    for seed, name in enumerate(("old", "first", "bad", "good")):
        (tmp_path / name).mkdir()
        write_texts(tmp_path / name / "month.jsonl", 60, seed)
    return {name: tmp_path / name / "month.jsonl" for name in ("old", "first", "bad", "good")}


@pytest.mark.parametrize("duplicates", ["near", pytest.param("keep", marks=pytest.mark.slow)])
def test_the_corrected_month_is_as_if_the_bad_one_had_never_been(tmp_path, texts, alma_prep, duplicates, capsys):
    if duplicates == "near":
        pytest.importorskip("datatrove", reason="needs the extra `corpora`")
    out = tmp_path / "out"
    assert alma_prep(out, f"text:{texts['old']}", num_mega_batches=1, more=[*MORE, duplicates]) == 0
    never_extended = content(out)
    add(out, texts["first"])
    before = content(out)
    add(out, texts["good"])
    wanted = content(out)
    assert main(["--drop-last", str(out)]) == 0 and content(out) == before
    add(out, texts["bad"])
    assert main(["--drop-last", str(out)]) == 0 and content(out) == before
    assert "alma-lm rollback RUN" in capsys.readouterr().err
    add(out, texts["good"])
    assert content(out) == wanted
    assert main([str(out), "--drop-last"]) == 0 == main([str(out), "--drop-last"])
    assert content(out) == never_extended
    assert main([str(out), "--drop-last"]) == 2
    assert "was never extended" in capsys.readouterr().err
    assert main([str(tmp_path / "none"), "--drop-last"]) == 2
    assert "there is no stream" in capsys.readouterr().err


def test_periods_are_taken_back(tmp_path, alma_prep):
    pytest.importorskip("datatrove", reason="needs the extra `corpora`")
    for month in (1, 2, 3):
        write_texts(tmp_path / f"2020-0{month}.jsonl", 60, month)
    out = tmp_path / "out"
    more = ["--partition", "chronological", "--period", "month", "--causal", "--text-field", "story"]
    argv = [str(out), "--vocab-size", "300", "--source", f"text:{tmp_path}/2020-01.jsonl", "--workers", "1", *more]
    assert main(argv) == 0
    add(out, tmp_path / "2020-02.jsonl")
    before = content(out)
    add(out, tmp_path / "2020-03.jsonl")
    wanted = content(out)
    assert main([str(out), "--drop-last"]) == 0 and content(out) == before
    add(out, tmp_path / "2020-03.jsonl")
    assert content(out) == wanted


def test_a_call_that_was_killed_is_finished_and_takes_back_one_month_only(tmp_path, texts, alma_prep, capsys):
    out = tmp_path / "out"
    assert alma_prep(out, f"text:{texts['old']}", num_mega_batches=1, more=[*MORE, "keep"]) == 0
    add(out, texts["first"])
    before = content(out)
    add(out, texts["bad"])

    # Killed before each of the changes to the folder.
    kills = [killed_when_it_calls(work_folder, name) for name in ("_remove_shard", "part_of_stream")]
    for number, killed in enumerate([killed_before_stream_json(), *kills]):
        with killed:
            main([str(out), "--drop-last"])
        assert json.loads((out / "stream.json").read_text())["num_mega_batches"] == 3 - (number > 0)
    assert main([str(out), "--drop-last"]) == 0
    assert "as an interrupted call has begun" in capsys.readouterr().err
    assert content(out) == before


def test_a_process_that_is_killed_leaves_a_stream_that_can_be_used(tmp_path, texts, alma_prep):
    out = tmp_path / "out"
    assert alma_prep(out, f"text:{texts['old']}", num_mega_batches=1, more=[*MORE, "keep"]) == 0
    with_first = []
    for name in ("first", "bad"):
        with_first.append(content(out))
        add(out, texts[name])
    process = subprocess.Popen([sys.executable, "-m", "data_prep", str(out), "--drop-last"], cwd=ROOT)
    while json.loads((out / "stream.json").read_text())["num_mega_batches"] == 3 and process.poll() is None:
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    manifest = json.loads((out / "manifest.json").read_text())
    if len(manifest["extensions"]) == 2 or (out / ".alma-prep").exists():
        assert main([str(out), "--drop-last"]) == 0
    assert content(out) in with_first


def test_an_unfinished_extension_is_removed_first(tmp_path, texts, alma_prep, capsys):
    out = tmp_path / "out"
    assert alma_prep(out, f"text:{texts['old']}", num_mega_batches=1, more=[*MORE, "keep"]) == 0
    before = [content(out)]
    add(out, texts["first"])
    before.append(content(out))

    # Killed when the shards and manifest.json are there, and stream.json is not.
    with killed_before_stream_json():
        add(out, texts["bad"])
    assert (out / "mega_batch_3").is_dir() and (out / ".alma-prep").is_dir()
    assert main([str(out), "--drop-last"]) == 0
    assert "the unfinished extension of" in capsys.readouterr().err and content(out) == before[1]
    assert main([str(out), "--drop-last"]) == 0 and content(out) == before[0]
    assert main([str(out), "--drop-last"]) == 2
