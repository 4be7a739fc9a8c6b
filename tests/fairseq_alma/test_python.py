"""`fairseq_alma.prepare`, `extend` and `run`: the same as the commands, for Python programs and notebooks."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fairseq_alma as alma
from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.lm import run as alma_lm
from fairseq_alma.python import _settings_from
from tests.commands import RUN, run_command
from tests.fairseq_alma.lm.test_learners import ForkedProcesses

SMALL = {
    "preset": "quickstart", "precision": "float32", "tokens_per_sample": 32, "sequences_per_update": 8, "batch_size": 8,
    "lr": 0.005, "updates": 4, "validations": 2,
}  # fmt: skip


def test_the_settings_are_those_of_the_command(tmp_path):
    """Those of a preset, of an architecture, and of a preset that computes with a value of the architecture."""
    tiny = _settings_from({"stream": "s", "out": str(tmp_path), "preset": "table2/sm_w4", "arch": "switch_lm_tiny"})
    assert (tiny.updates, tiny.lr, tiny.wait, tiny.arch) == (300, 0.005, 4, "switch_lm_tiny")
    quick = _settings_from({"stream": "s", "out": str(tmp_path), "preset": "quickstart", "updates": 3, "lr": 0.1})
    assert (quick.arch, quick.dropout, quick.updates, quick.lr) == ("switch_lm_tiny", 0.0, 3, 0.1)
    other = {"stream": "s", "out": str(tmp_path), "updates": 3, "arch": "transformer_lm_gpt"}
    assert _settings_from(other).arch == "transformer_lm_gpt"


OPTIONS = {"workers": 1, "duplicates": "exact"}


def prepare(folder: Path) -> StreamFolder:
    """Make a stream of one mega-batch from old.jsonl in a folder. new.jsonl has other text."""
    rng, words = random.Random(0), [f"word{number}" for number in range(50)]
    for name in ("old", "new"):
        texts = [" ".join(rng.choices(words, k=60)) for _ in range(100)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return alma.prepare(
        folder / "stream", [f"text:{folder}/old.jsonl"], mega_batches=1, vocab_size=300, test_words=500, **OPTIONS
    )


def test_a_stream_is_made_and_extended_and_a_run_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [""])
    out = tmp_path / "stream"
    assert prepare(tmp_path).num_mega_batches == 1
    first = alma.run(stream=out, out=tmp_path / "run", **SMALL)
    monkeypatch.setattr(alma_lm, "LocalProcesses", ForkedProcesses)  # the others are quicker
    assert alma.extend(out, f"text:{tmp_path}/new.jsonl", **OPTIONS).num_mega_batches == 2
    run = alma.run(stream=out, out=tmp_path / "run", seed=np.int64(0), **SMALL)
    assert [row.to_json() for row in run.ledger[:2]] == [row.to_json() for row in first.ledger] and len(run.ledger) == 3
    assert (
        run.curves["perplexity"].shape == (1, 3) and run.curves["perplexity"][0, 2] == run.ledger[2].scores.perplexity
    )
    assert run.summary["final"] == pytest.approx(run.ledger[2].scores.perplexity)
    assert run.predictor.score("word1 word2")[0].num_bytes == 11 and run.folders == [tmp_path / "run"]
    again = alma.run(run.settings)
    assert [row.to_json() for row in again.ledger] == [row.to_json() for row in run.ledger]
    with pytest.raises(RunError, match="other settings"):
        alma.run(replace(run.settings, lr=0.1))


@pytest.mark.slow  # the tests of grown vocabularies start a run from another one, by the command
def test_a_run_on_other_text_with_the_same_tokenizer_starts_from_what_another_has_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [""])
    monkeypatch.setattr(alma_lm, "LocalProcesses", ForkedProcesses)
    out = prepare(tmp_path).path
    run = alma.run(stream=out, out=tmp_path / "run", **SMALL)
    more = alma.prepare(
        tmp_path / "other", f"text:{tmp_path}/new.jsonl", mega_batches=1, tokenizer=str(out / "tokenizer.json"),
        test_words=500, **OPTIONS,
    )  # fmt: skip
    start = run.folder / json.loads((run.folder / "predictor.json").read_text())["checkpoints"][0]["path"]
    further = alma.run(stream=more.path, out=tmp_path / "further", init_from=str(start), **SMALL)
    assert further.ledger[0].scores.perplexity < run.ledger[0].scores.perplexity / 2


@pytest.mark.slow
def test_it_is_the_run_of_the_command(stream, tmp_path):
    run = alma.run(stream=stream, out=tmp_path / "python", seeds=2, mega_batches=2, **SMALL)
    settings = (*RUN, "updates=4", "mega_batches=2", "seeds=2")
    assert run_command("alma-lm", f"stream={stream}", f"out={tmp_path / 'command'}", *settings).returncode == 0
    for seed, folder in enumerate(run.folders):
        wanted = [row.to_json() for row in Ledger(tmp_path / f"command/seed_{seed}/ledger.jsonl").rows()]
        found = [row.to_json() for row in Ledger(folder / "ledger.jsonl").rows()]
        for one, other in zip(found, wanted, strict=True):
            assert {k: v for k, v in one.items() if "seconds" not in k} == {
                k: v for k, v in other.items() if "seconds" not in k
            }
    assert run.summary["mean"]["final"] > 1 and run.curves["perplexity"].shape == (2, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"out": "x"}, "stream= is missing"),
        ({"stream": "x"}, "out= is missing"),
        ({"stream": "x", "out": "y", "preset": "none"}, "none"),
        ({"stream": "x", "out": "y", "arch": "none"}, "arch='none' is not an architecture"),
        ({"stream": "x", "out": "y", "wiat": 2}, "wiat"),
        ({"stream": "x", "out": "y", "updates": 0}, "updates"),
    ],
)
def test_bad_settings_are_refused(values, message):
    with pytest.raises(SettingError, match=message):
        alma.run(**values)


def test_bad_options_of_a_stream_are_refused(tmp_path):
    with pytest.raises(SettingError, match=r"megabatches= is not an option of alma-prep: use one of .*mega_batches"):
        alma.prepare(tmp_path / "out", "text:x.jsonl", megabatches=2)
    with pytest.raises(SettingError, match="number of mega-batches is missing"):
        alma.prepare(tmp_path / "out", "text:x.jsonl")
    with pytest.raises(SettingError, match="give all settings by name"):
        settings = _settings_from({"stream": "s", "out": str(tmp_path), "preset": "quickstart", "updates": 3})
        alma.run(settings, lr=3)


def test_a_number_that_is_given_as_a_text_is_named(tmp_path):
    with pytest.raises(SettingError, match="--mega-batches '4' is a text: give a number"):
        alma.prepare(tmp_path / "stream", "python-docs", mega_batches="4")
