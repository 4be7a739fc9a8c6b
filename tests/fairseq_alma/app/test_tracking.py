"""The run of Weights & Biases, read back from the files that wandb writes without a network."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from fairseq_alma.app.scalars import RunScalars
from fairseq_alma.app.tracking import Tracker
from fairseq_alma.core.ledger import Ledger
from tests.commands import ROOT, RUN, run_command
from tests.fairseq_alma.app.test_scalars import scalars_in, vision_rows
from tests.vision.tiny_runs import small_run


def records_in(path: Path) -> list[Record]:
    """The records of a .wandb file: a log in the format of LevelDB, in blocks of 32 KiB, after a head of 7 bytes."""
    content, position, found, part = path.read_bytes(), 7, [], b""
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        part += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(part))
            part = b""
    return found


def sent(run: Path) -> tuple[list[Record], dict[str, list[tuple[float, float]]]]:
    """The records of all processes of a run, and name -> [(position on the x axis of the name, value)]."""
    paths = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    records = [record for path in paths for record in records_in(path)]
    axes = {record.metric.name: record.metric.step_metric for record in records if record.HasField("metric")}
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for name in row.keys() & axes.keys():
            if axes[name]:
                found.setdefault(name, []).append((row[axes[name]], row[name]))
    return records, found


def test_a_run_of_alma_lm_that_is_continued_is_one_run_of_wandb(stream, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "300")  # for wandb's own process, beside other tests
    run = tmp_path / "ens"
    settings = (f"stream={stream}", f"out={run}", *RUN, "learner=ens", "members=2", "updates=3", "wandb=growing")
    for arrivals in (1, 2):
        result = run_command("alma-lm", *settings, f"mega_batches={arrivals}")
        assert result.returncode == 0, result.stderr[-3000:]
        assert "W&B" not in result.stderr
    records, found = sent(run)
    runs = [record.run for record in records if record.HasField("run")]
    assert {(one.run_id, one.project, one.display_name) for one in runs} == {
        (json.loads((run / "wandb.json").read_text())["id"], "growing", "ens")
    }
    config = {item.key: json.loads(item.value_json) for one in runs[:1] for item in one.config.update}
    wanted = json.loads((run / "settings.json").read_text())
    assert {name: config[name] for name in ("lr", "members", "arch")} == {
        name: wanted[name] for name in ("lr", "members", "arch")
    }
    rows = Ledger(run / "ledger.jsonl").rows()
    assert found["test/perplexity"] == [(row.t, row.scores.perplexity) for row in rows]
    assert found["test/bits_per_byte"] == [(row.t, row.scores.bits_per_byte) for row in rows]
    assert found["model/parameters"] == [(row.t, row.scores.num_params) for row in rows]
    assert found["cost/updates"] == [(0, 0), (1, 6), (2, 12)]
    for stage in (1, 2):
        for member in (1, 2):
            log = (run / f"stages/stage_00{stage}/member_{member}/log.txt").read_text().splitlines()
            logged = [json.loads(line.split("| train_inner | ")[1]) for line in log if "| train_inner | " in line]
            losses = [(float(one["num_updates"]), math.log(float(one["ppl"]))) for one in logged]
            assert [update for update, _ in losses] == [1, 2, 3]
            assert found[f"stage_{stage}/member_{member}/training_loss"] == losses
            assert found[f"stage_{stage}/member_{member}/validation_loss"][-1][0] == 3


SENDS = """
import os, signal, sys, time
from pathlib import Path
from fairseq_alma.app.tracking import Tracker

folder, arrivals = Path(sys.argv[1]), int(sys.argv[2])
tracker = Tracker(folder, "p", {})
for t in range(arrivals):
    tracker.log("arrival", t, {"test/perplexity": 10.0 - t})
if sys.argv[3:] == ["killed"]:
    while not list(folder.glob("wandb/offline-run-*/*.wandb")):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
tracker.close()
"""


def python(code: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_a_kill_loses_nothing_and_a_continued_run_sends_only_what_is_new(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert python(SENDS, tmp_path, 3, "killed").returncode == -9
    identity = json.loads((tmp_path / "wandb.json").read_text())["id"]
    for arrivals in (4, 6):
        assert python(SENDS, tmp_path, arrivals).returncode == 0
    records, found = sent(tmp_path)
    # wandb may or may not have stored what it got just before the kill.
    assert found["test/perplexity"][-6:] == [(0, 10), (1, 9), (2, 8), (3, 7), (4, 6), (5, 5)]
    assert {record.run.run_id for record in records if record.HasField("run")} == {identity}


def test_each_seed_of_a_vision_run_is_a_run_of_a_group(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    small_run(tmp_path / "mlp", seeds=2, wandb="images")
    for seed in (0, 1):
        folder = tmp_path / f"mlp/seed_{seed}"
        records, found = sent(folder)
        [run] = [record.run for record in records if record.HasField("run")]
        assert (run.display_name, run.run_group) == (f"mlp/seed_{seed}", "mlp")
        rows = Ledger(folder / "ledger.jsonl").rows()
        assert found["test/error_rate"] == [(row.t, row.scores.error_rate) for row in rows]


def test_without_wandb_a_run_goes_on_with_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    scalars = RunScalars(tmp_path, tracker=Tracker(tmp_path, "p", {}))
    for count in range(1, 5):
        scalars.rows(vision_rows()[:count])
        scalars.during_stage("perplexity", 70.0, 1, 0.5)
    scalars.close()
    assert caplog.text.count("WARNING") == caplog.text.count("wandb is not installed: pip install") == 1
    assert scalars_in(tmp_path)["test/error_rate"]


UNREACHABLE = """
import logging, sys, time
from fairseq_alma.app.tracking import Tracker

logging.basicConfig()
tracker, start = Tracker(sys.argv[1], "p", {}), time.monotonic()
for t in range(1000):
    tracker.log("arrival", t, {"test/perplexity": 1.0})
print(time.monotonic() - start)
tracker.close()
"""


@pytest.mark.parametrize("key", ["", pytest.param("0" * 40, marks=pytest.mark.slow)])
def test_without_a_login_or_a_server_nothing_waits_and_nothing_fails(tmp_path, monkeypatch, key):
    monkeypatch.setenv("HOME", str(tmp_path))  # without the login of the user
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", key)
    result = python(UNREACHABLE, tmp_path)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1
    assert result.stderr.count("the run continues, but its numbers are no longer sent to W&B: ") == 1
    assert "Traceback" not in result.stderr
    assert ("not logged in: give `wandb login`" in result.stderr) == (not key)
