"""New mega-batches are scored before a stage trains on them, and a gate keeps a bad predictor from being deployed."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data_prep.encoding.mmap_writer import MMapWriter
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.ledger import Ledger, LedgerRow, Prequential, Scores
from fairseq_alma.core.metrics import excess_losses, unusual_arrivals
from fairseq_alma.deploy import deploy, go_back
from fairseq_alma.lm.rollback import roll_back
from tests.commands import RUN, run_command
from tests.streams import make_stream

SETTINGS = (*RUN, "updates=10", "validations=1", "experts=2", "replay=false")
GARBAGE = 3


def tokens_of(prefix: Path) -> np.ndarray:
    return np.fromfile(prefix.with_suffix(".bin"), np.uint16)


def write(prefix: Path, tokens: np.ndarray) -> dict:
    """Write a split and return its entry in stream.json."""
    prefix.parent.mkdir(exist_ok=True)
    ends = np.flatnonzero(tokens == 2) + 1
    lengths = np.diff(ends, prepend=0)
    with MMapWriter(prefix, "uint16") as writer:
        writer.write(tokens, lengths)
    sizes = {"tokens": len(tokens), "words": len(tokens) - len(ends), "sequences": len(ends), "documents": len(ends)}
    return {**sizes, "sha256": sha256_of(f"{prefix}.bin")}


@pytest.fixture(scope="module")
def months(tmp_path_factory) -> Path:
    """Four periods, each with validation text of its own. The third is garbage: random words."""
    folder = make_stream(tmp_path_factory.mktemp("months") / "stream", num_mega_batches=4, tokens=2000)
    description = json.loads((folder / "stream.json").read_text())
    chance = np.random.default_rng(1)
    periods = []
    for t in range(1, 5):
        prefix = folder / f"mega_batch_{t}/train"
        tokens = tokens_of(prefix)
        if t == GARBAGE:
            tokens = np.where(tokens == 2, tokens, chance.integers(4, 24, len(tokens))).astype(np.uint16)
        cut = int(np.flatnonzero(tokens == 2)[-12]) + 1
        held_out = tokens[cut:]
        description["splits"][f"mega_batch_{t}"] |= write(prefix, tokens[:cut])
        entries = {part: write(folder / f"mega_batch_{t}/{part}", held_out) for part in ("valid", "test")}
        periods.append({"first_date": str(2000 + t), "last_date": str(2000 + t), **entries})
    description |= {"periods": periods, "periods_in_test": 0}
    (folder / "stream.json").write_text(json.dumps(description))
    return folder


def lm(stream: Path, out: Path, *settings: str):
    return run_command("alma-lm", f"stream={stream}", f"out={out}", *SETTINGS, *settings)


def test_garbage_is_unusual_and_does_not_widen_the_range():
    """The perplexities of three months of which the second was scrambled, and the same month again."""
    months = {7: 146, 8: 825, 9: 106, 10: 825}
    validation = 130.0
    scores = Scores(1, 1, perplexity=1.0, validation_loss=math.log(validation))
    rows = [LedgerRow(6, 6, True, scores)]
    rows += [LedgerRow(t, t, True, scores, prequential=Prequential(None, math.log(p), 100)) for t, p in months.items()]
    excess = excess_losses(rows)
    assert excess == pytest.approx({t: math.log(p / validation) for t, p in months.items()})
    assert unusual_arrivals(excess) == [8, 10]
    assert unusual_arrivals({1: math.nan, 2: -0.6, 3: 0.4}) == [1, 2]


def status_of(run: Path) -> dict:
    return json.loads(run_command("alma-lm", "status", run, "--json").stdout)


def test_the_gate_compares_with_the_predictor_that_is_in_use(months, tmp_path):
    """The predictor of stage 2 passes the gate and is deployed, but then its user takes it back."""
    out, to = tmp_path / "run", tmp_path / "to"
    for t in (1, 2):
        assert lm(months, out, "gate=9", f"mega_batches={t}").returncode == 0
        deploy(out, to)
    assert (status_of(out)["predictor"], status_of(out)["deployed"]) == (2, 2)
    go_back(to)
    assert (status_of(out)["predictor"], status_of(out)["deployed"]) == (2, 1)
    result = lm(months, out, "gate=9", "mega_batches=2")  # nothing to do
    stages = [part.split(":")[-1].split(",")[0] for part in result.stdout.splitlines()[-1].split("; ")]
    assert stages == [" stage 2", " stage 1"] and f"deployed in {to}" in result.stdout
    assert lm(months, out, "gate=0.0001", "mega_batches=3").returncode == 3
    assert Ledger(out / "ledger.jsonl").rows()[3].scores.gate["deployed"] == 1
    assert (out / "predictor.json").read_bytes() == (out / "predictors/stage_001.json").read_bytes()
    assert (status_of(out)["predictor"], status_of(out)["deployed"]) == (1, 1)
    # Another folder to which stage 2 is deployed last is the measure from then on, and a lost folder changes nothing.
    deploy(out, tmp_path / "other", stage=2)
    shutil.rmtree(tmp_path / "other")
    assert status_of(out)["deployed"] == 2
    roll_back(out, 1)  # there is no stage 2 any more
    assert status_of(out)["deployed"] == 1


@pytest.fixture(scope="module")
def gated_run(months, tmp_path_factory) -> tuple[Path, tuple[str, ...]]:
    """A run on the first two months whose gate also scores a text of the user, and its settings."""
    folder = tmp_path_factory.mktemp("gated")
    (folder / "mine.txt").write_text("w1 w2 w3\nw4 w5")
    gated = ("gate=0.02", f"gate_text={folder / 'mine.txt'}", f"gate_command=cat >> {folder / 'alarm.jsonl'}")
    assert lm(months, folder / "run", *gated, "mega_batches=2").returncode == 0
    return folder / "run", gated


def test_a_garbage_month_is_reported_refused_and_taken_back(months, gated_run, tmp_path):
    folder, gated = gated_run[0].parent, gated_run[1]
    out, alarm, text = shutil.copytree(gated_run[0], tmp_path / "run"), folder / "alarm.jsonl", folder / "mine.txt"
    good = (out / "predictor.json").read_bytes()
    result = lm(months, out, *gated, "mega_batches=3")
    assert result.returncode == 3, result.stderr[-3000:]
    assert "mega-batch 3, before training on it: perplexity" in result.stderr
    assert (
        "warning: this is unusual compared with earlier mega-batches. Look at the text of mega-batch 3" in result.stderr
    )
    assert (
        "the predictor of stage 3 is not deployed, that of stage 2 stays: validation text of earlier" in result.stderr
    )
    assert (out / "predictor.json").read_bytes() == good
    assert result.stdout.splitlines()[-1].startswith("deployed: stage 2, validation ")
    rows = Ledger(out / "ledger.jsonl").rows()
    assert rows[2].scores.gate["passed"] and rows[2].scores.gate["deployed"] == 2
    gate = rows[3].scores.gate
    assert (gate["passed"], gate["deployed"]) == (False, 2)
    assert [check["text"] for check in gate["checks"]] == [
        "validation text of earlier periods", "validation text of the newest periods", str(text),
    ]  # fmt: skip
    earlier, newest, _ = gate["checks"]
    assert earlier["new"] > 1.02 * earlier["deployed"]
    assert newest["passed"] and newest["deployed"] == pytest.approx(math.exp(rows[3].prequential.loss))
    (line,) = [json.loads(line) for line in alarm.read_text().splitlines()]
    assert (line["event"], line["stage"], line["deployed"], line["checks"]) == ("refused", 3, 2, gate["checks"])
    assert json.dumps(line) in result.stdout
    assert lm(months, out, *gated, "mega_batches=3").returncode == 3  # nothing is new, and it is still refused
    assert len(alarm.read_text().splitlines()) == 1

    state = json.loads(run_command("alma-lm", "status", out, "--json").stdout)
    expected = {"run": str(out), "state": "finished", "arrivals": 3, "arrivals_left": 0, "stage": 3, "deployed": 2}
    assert state.items() >= {**expected, "refused": True, "rollbacks": 0}.items()
    assert (state["unusual"], state["skipped"]) == ([3], [])
    assert state["new_text_perplexity"] == pytest.approx(newest["deployed"])

    roll_back(out, 2)
    result = lm(months, out, *gated, "skip_mega_batches=[3]")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = Ledger(out / "ledger.jsonl").rows()
    assert [row.is_skipped for row in rows] == [False, False, False, True, False]
    assert (rows[4].scores.gate["passed"], rows[4].scores.gate["deployed"]) == (True, 3)
    assert (out / "predictor.json").read_bytes() == (out / "predictors/stage_003.json").read_bytes()
    state = json.loads(run_command("alma-lm", "status", out, "--json").stdout)
    assert (state["refused"], state["deployed"], state["skipped"], state["rollbacks"]) == (False, 3, [3], 1)
    assert "train s" in result.stdout
    assert all(row.scores.score_seconds > 0 for row in rows)


def test_a_process_that_was_killed_before_its_row_decides_again_in_the_same_way(months, gated_run, tmp_path):
    out = shutil.copytree(gated_run[0], tmp_path / "run")
    row = (out / "ledger.jsonl").read_text().splitlines()[2]
    lines = (out / "ledger.jsonl").read_text().splitlines(keepends=True)
    (out / "ledger.jsonl").write_text("".join(lines[:2]))
    (out / "summary.json").unlink()
    shutil.copy(out / "predictors/stage_002.json", out / "predictor.json")
    state = status_of(out)
    assert (state["arrivals"], state["arrivals_left"], state["new_text_arrival"]) == (1, 1, 2)
    assert state["new_text_perplexity"] == pytest.approx(math.exp(json.loads(row)["prequential_loss"]))
    deploy(out, tmp_path / "to", stage=2)  # it is trained, but not scored yet
    assert status_of(out)["deployed"] == 1 and run_command("alma-lm", "status", out).returncode == 0
    assert lm(months, out, *gated_run[1], "mega_batches=2").returncode == 0
    assert json.loads((out / "ledger.jsonl").read_text().splitlines()[2])["gate"] == json.loads(row)["gate"]


def test_a_period_whose_held_out_text_was_forgotten_does_not_count(months, gated_run, tmp_path):
    out, stream = shutil.copytree(gated_run[0], tmp_path / "run"), shutil.copytree(months, tmp_path / "stream")
    description = json.loads((stream / "stream.json").read_text())
    description["periods"][1]["valid"]["words"] = 0  # only the ends of its documents are left
    (stream / "stream.json").write_text(json.dumps(description))
    lines = (out / "ledger.jsonl").read_text().splitlines(keepends=True)
    (out / "ledger.jsonl").write_text("".join(lines[:2]))
    (out / "summary.json").unlink()
    result = lm(stream, out, *gated_run[1], "mega_batches=2")
    assert result.returncode == 0, result.stderr[-3000:]
    gate = Ledger(out / "ledger.jsonl").rows()[2].scores.gate
    assert [check["text"] for check in gate["checks"]] == ["validation text of earlier periods", gated_run[1][1][10:]]
    assert gate["passed"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("gate=-0.1",), "gate=-0.1 must be a finite number, and not negative"),
        (("gate_command=true",), "gate_command= needs gate=: add it"),
        (("gate=0", "gate_text=nowhere.txt"), "gate_text=nowhere.txt does not exist"),
    ],
)
def test_settings_of_the_gate(months, tmp_path, settings, message):
    result = lm(months, tmp_path / "run", *settings)
    assert (result.returncode, message in result.stderr) == (2, True), result.stderr


def test_rows_keep_the_decision_and_the_score(tmp_path):
    gate = {"passed": False, "deployed": 1, "checks": [{"text": "x", "deployed": 2.0, "new": 3.0, "passed": False}]}
    scores = Scores(1, 1, perplexity=1.0, gate=gate)
    row = LedgerRow(0, 2, True, scores, prequential=Prequential(None, 2.5, 10), is_skipped=True)
    Ledger(tmp_path / "ledger.jsonl").append(row)
    assert Ledger(tmp_path / "ledger.jsonl").rows() == [row]
    with pytest.raises(ValueError, match="gate"):
        LedgerRow.from_json({**row.to_json(), "gate": {"passed": 1}})
    with pytest.raises(ValueError, match="prequential"):
        LedgerRow.from_json({**replace(row, prequential=None).to_json(), "prequential_loss": 1.0})
