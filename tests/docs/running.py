"""Runs the blocks of a page, one after another, in one folder."""

import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.commands import MODULES, ROOT, run_command, run_module, run_vision
from tests.docs import files
from tests.docs.blocks import Block, blocks_of, files_of
from tests.docs.commands import check_block, command_lines, environment

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


def run_blocks(page: Path, folder: Path, in_forks: bool = False) -> None:
    """Do what the markers of a page say, in `folder`. Raises AssertionError with the line of the block that fails.

    Args:
        page: the page.
        folder: an empty folder.
        in_forks: as for `run_block`.
    """
    for name in files_of(page):
        pytest.importorskip(NEEDS.get(name, "json"), reason="needs the extra `corpora`")
        getattr(files, name)(folder)
    (folder / "fairseq_alma").symlink_to(ROOT / "fairseq_alma")  # --user-dir is relative to the repository
    for block in blocks_of(page):
        run_block(block, folder, in_forks)


def run_block(block: Block, folder: Path, in_forks: bool = False) -> None:
    """Do what the marker of a block says, in `folder`. Raises AssertionError if the block fails.

    Args:
        block: the block.
        folder: the folder of the page.
        in_forks: if True and if a block contains only our commands and Python files, each command is a fork of a
            process that has imported torch. This saves several seconds for each command. Otherwise bash runs the
            installed commands.
    """
    if block.action == "save":
        path = folder / block.argument
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
    elif block.action in ("check", "slurm"):
        assert check_block(block.text), f"{block.where}: no command of the block could be checked"
    elif block.action == "run" and in_forks and (commands := our_commands(block)):
        for name, *arguments in commands:
            if name == "python":
                run = partial(run_module, Path(arguments[0]).stem, *arguments[1:])
            else:
                run = (
                    partial(run_vision, *arguments) if name == "alma-vision" else partial(run_command, name, *arguments)
                )
            report(block, run(folder=folder))
    elif block.action == "run":
        program = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else ["python", "-c"]
        result = subprocess.run(
            [*program, block.replaced()], cwd=folder, env=environment(), capture_output=True, text=True
        )
        report(block, result)


def our_commands(block: Block) -> list[list[str]]:
    """Return our commands and the Python files in a block of bash, each as a list of words; none if there are others.

    A word with a character that bash would interpret is not one of ours.
    """
    commands = command_lines(block.replaced()) if block.language == "bash" else []
    names = (*MODULES, "alma-vision", "alma-prep", "alma-report")
    is_ours = all(words[0] in names or (words[0] == "python" and words[1].endswith(".py")) for words in commands)
    characters = {character for words in commands for word in words for character in word}
    return commands if is_ours and not characters & set("|&;<>$`*?") else []


def report(block: Block, result: subprocess.CompletedProcess) -> None:
    """Raise AssertionError if a command of a block has failed."""
    output = f"{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    assert result.returncode == 0, f"{block.where} ended with {result.returncode}:\n{output}"
