"""Runs the blocks of a page, one after another, in one folder."""

import subprocess
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.docs import files
from tests.docs.blocks import Block, blocks_of, files_of
from tests.docs.commands import check_block, environment

NEEDS = {"corpora": "fastwarc"}
"""Package of the extra `corpora` without which the files of a page cannot be made."""

LONG_PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "docs/first-steps/text.md",
        "docs/first-steps/images.md",
        "docs/corpora.md",
        "docs/deployment.md",
        "docs/fairseq.md",
    )
]
"""Pages whose blocks take about as long as those of all others. They have a test file of their own, so that two
workers share the work."""


def run_blocks(page: Path, folder: Path) -> None:
    """Do what the markers of a page say, in `folder`. Raises AssertionError with the line of the block that fails."""
    for name in files_of(page):
        pytest.importorskip(NEEDS.get(name, "json"), reason="needs the extra `corpora`")
        getattr(files, name)(folder)
    (folder / "fairseq_alma").symlink_to(ROOT / "fairseq_alma")  # --user-dir is relative to the repository
    for block in blocks_of(page):
        run_block(block, folder)


def run_block(block: Block, folder: Path) -> None:
    """Do what the marker of a block says, in `folder`. Raises AssertionError if the block fails."""
    if block.action == "save":
        path = folder / block.argument
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
    elif block.action == "check":
        assert check_block(block.text), f"{block.where}: no command of the block could be checked"
    elif block.action == "run":
        program = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else ["python", "-c"]
        result = subprocess.run(
            [*program, block.replaced()], cwd=folder, env=environment(), capture_output=True, text=True
        )
        output = f"{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
        assert result.returncode == 0, f"{block.where} ended with {result.returncode}:\n{output}"
