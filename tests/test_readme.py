"""The README's commands, exactly as they stand there, in an empty folder."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_alma.core.ledger import Ledger
from tests.commands import ROOT
from tests.data_prep.sources import write_dump, write_warc

README = (ROOT / "README.md").read_text()
TESTED = re.findall(r"<!-- tested[^>]*-->\n```bash\n(.*?)```", README, flags=re.DOTALL)


def test_what_the_readme_says_to_type_works(tmp_path):
    assert len(TESTED) == 4
    (tmp_path / "fairseq_alma").symlink_to(ROOT / "fairseq_alma")  # --user-dir is relative to the repository
    scripts = Path(sys.executable).parent
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(TESTED)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rows = Ledger(tmp_path / "runs/sm_w1/ledger.jsonl").rows()
    perplexity = [row.scores.perplexity for row in rows]
    assert len(rows) == 5
    assert perplexity == sorted(perplexity, reverse=True)  # it falls along the stream
    assert "all of the .idx" in result.stdout
    assert "Perplexity:" in result.stdout + result.stderr  # fairseq-eval-lm
    assert "2 member(s)" in result.stdout
    assert (tmp_path / "report/index.html").is_file()
    summaries = {path.parent.name for path in (tmp_path / "report/tables").glob("*/summary.md")}
    assert summaries == {"digits_B20", "docs_B4"}
    for name in ("by_hand", "by_hand_2"):
        assert (tmp_path / "checkpoints" / name / "checkpoint_best.pt").is_file()


def test_the_corpora_of_the_readme_become_a_stream_that_is_trained_on_and_extended(tmp_path):
    pytest.importorskip("fastwarc", reason="needs the extra `corpora`")
    text = README[README.index("<!-- corpora:") :]
    download, extend = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)[:2]
    commands = download.strip().splitlines()
    assert len(commands) == 5
    lines = [*commands[2:], *extend.strip().splitlines()]
    assert [line.split()[0] for line in lines] == ["alma-prep", "alma-lm", "alma-eval", "alma-prep", "alma-lm"]
    for folder in ("crawl", "wiki", "books", "crawl-2024-18"):
        (tmp_path / folder).mkdir()
    write_warc(tmp_path / "crawl/a.warc.wet.gz", [english(200, seed) for seed in range(150)], kind="conversion")
    write_warc(tmp_path / "crawl-2024-18/b.warc.wet.gz", [english(200, 900 + n) for n in range(20)], kind="conversion")
    write_dump(tmp_path / "wiki/d.xml.bz2", [(f"Page {seed}", 0, None, english(200, 300 + seed)) for seed in range(50)])
    for seed in range(10):
        (tmp_path / "books" / f"{seed}.txt").write_text(english(2000, 600 + seed))
    script = "\n".join(lines).replace("switch_lm_base", "switch_lm_tiny").replace("updates=10000", "updates=3")
    script = script.replace("preset=quickstart", "preset=quickstart tokens_per_sample=64")
    script = script.replace("--mega-batches 5", "--mega-batches 5 --vocab-size 500")
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    rows = Ledger(tmp_path / "runs/web/ledger.jsonl").rows()
    assert [row.t for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert all(row.updated for row in rows[1:])


def english(num_words: int, seed: int) -> str:
    """Words of a book in another order: English to every filter, and near to no other text."""
    rng = random.Random(seed)
    words = [
        "the",
        "of",
        "and",
        "to",
        "that",
        "with",
        "have",
        "be",
        "whale",
        "sea",
        "ship",
        "sailor",
        "captain",
        "island",
        "harbour",
        "storm",
        "wind",
        "water",
        "night",
    ]
    words += [
        "morning",
        "old",
        "small",
        "great",
        "white",
        "long",
        "never",
        "always",
        "under",
        "over",
        "between",
        "before",
        "after",
        "came",
        "went",
        "saw",
        "said",
    ]
    text = [rng.choice(words) for _ in range(num_words)]
    return ".\n".join(" ".join(text[start : start + 12]) for start in range(0, num_words, 12))


def test_the_learner_that_the_readme_adds_works(tmp_path):
    text = README[README.index("<!-- learner:") :]
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL)[:3]
    assert [kind for kind, _ in blocks] == ["python", "yaml", "bash"]
    assert sum(block.count("\n") for _, block in blocks) < 40
    for (_, block), name in zip(blocks, ("shrink.py", "conf/preset/shrink.yaml"), strict=False):
        assert f"# {name}" in block
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block)
    command = blocks[2][1].replace("alma-vision", str(Path(sys.executable).parent / "alma-vision")).split()
    result = subprocess.run([*command, "epochs=20"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    ledgers = [Ledger(tmp_path / f"runs/shrink/seed_{seed}/ledger.jsonl").rows() for seed in range(3)]
    assert all(len(rows) == 21 and rows[-1].scores.error_rate < 0.3 for rows in ledgers)
    # It is that learner: from the second stage on another one than SM.
    assert json.loads((tmp_path / "runs/shrink/seed_0/settings.json").read_text())["learner"] == "shrink"
    plain = [word.replace("shrink", "paper" if "preset" in word else "sm") for word in command if "conf" not in word]
    subprocess.run([*plain, "epochs=20"], cwd=tmp_path, check=True, capture_output=True)
    other = Ledger(tmp_path / "runs/sm/seed_0/ledger.jsonl").rows()
    errors = [[row.scores.error_rate for row in rows] for rows in (ledgers[0], other)]
    assert errors[0][:2] == errors[1][:2]
    assert errors[0][2:] != errors[1][2:]


def test_a_preset_without_its_first_line_is_refused(tmp_path):
    (tmp_path / "conf/preset").mkdir(parents=True)
    (tmp_path / "conf/preset/mine.yaml").write_text("# mine\n# @package _global_\nlearner: ens\n")
    command = [str(Path(sys.executable).with_name("alma-vision")), "--config-dir", "conf", "preset=mine"]
    result = subprocess.run([*command, "dataset=digits", "out=run"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert "must begin with the line '# @package _global_'" in result.stderr


def test_the_readme_names_files_that_exist():
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / path).exists(), path


def test_the_readme_names_every_command_that_is_installed():
    scripts = re.findall(r"^(alma-\w+) =", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert len(scripts) == 6
    for script in scripts:
        assert script in README
