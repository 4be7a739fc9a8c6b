"""The README's commands, exactly as they stand there, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

from fairseq_alma.core.ledger import Ledger
from tests.commands import ROOT

README = (ROOT / "README.md").read_text()
TESTED = re.findall(r"<!-- tested[^>]*-->\n```bash\n(.*?)```", README, flags=re.DOTALL)


def test_what_the_readme_says_to_type_works(tmp_path):
    assert len(TESTED) == 3
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
    for name in ("by_hand", "by_hand_2"):
        assert (tmp_path / "checkpoints" / name / "checkpoint_best.pt").is_file()


def test_the_learner_that_the_readme_adds_works(tmp_path):
    text = README[README.index("<!-- learner:") :]
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL)[:3]
    assert [kind for kind, _ in blocks] == ["python", "yaml", "bash"]
    assert sum(block.count("\n") for _, block in blocks) < 40
    for _, block in blocks[:2]:
        path = tmp_path / block.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block)
    command = blocks[2][1].replace("alma-vision", str(Path(sys.executable).parent / "alma-vision")).split()
    result = subprocess.run([*command, "epochs=20"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    ledgers = [Ledger(tmp_path / f"runs/shrink/seed_{seed}/ledger.jsonl").rows() for seed in range(3)]
    assert all(len(rows) == 21 and rows[-1].scores.error_rate < 0.3 for rows in ledgers)


def test_the_readme_names_files_that_exist():
    for path in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / path).exists(), path


def test_the_readme_names_every_command_that_is_installed():
    scripts = re.findall(r"^(alma-\w+) =", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert len(scripts) == 5
    for script in scripts:
        assert script in README
