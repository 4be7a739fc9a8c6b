"""Every block of commands on every page, tested as the marker before it says (see blocks.py)."""

import re
import subprocess

import pytest

from tests.commands import ROOT
from tests.docs import files
from tests.docs.blocks import ACTIONS, PAGES, blocks_of, files_of
from tests.docs.commands import check_block, environment

NEEDS = {"corpora": "fastwarc"}
"""Packages of the extra `corpora` that the files of a page are made with."""


def name_of(page) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_how_it_is_tested(page):
    for block in blocks_of(page):
        assert block.marker, f"{block.where}: a block of {block.language} has no marker <!-- test: ... --> before it"
        assert block.action in ACTIONS, f"{block.where}: {block.marker!r} begins with none of {', '.join(ACTIONS)}"
        if block.action == "skip":
            assert len(block.reason.split()) >= 3, f"{block.where}: the marker gives no reason"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=name_of)
def test_the_blocks_of_a_page_work(page, tmp_path):
    for name in files_of(page):
        pytest.importorskip(NEEDS.get(name, "json"), reason="needs the extra `corpora`")
        getattr(files, name)(tmp_path)
    (tmp_path / "fairseq_alma").symlink_to(ROOT / "fairseq_alma")  # --user-dir is relative to the repository
    for block in blocks_of(page):
        if block.action == "save":
            path = tmp_path / block.argument
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.action == "check":
            assert check_block(block.text), f"{block.where}: no command of the block could be checked"
        elif block.action == "run":
            program = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else ["python", "-c"]
            result = subprocess.run(
                [*program, block.replaced()], cwd=tmp_path, env=environment(), capture_output=True, text=True
            )
            output = f"{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
            assert result.returncode == 0, f"{block.where} ended with {result.returncode}:\n{output}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_of_the_repository_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path in re.findall(r"\]\(((?!https?:)[^)#\s]+)[^)]*\)", text):
        if not path.startswith("api/") and "/api/" not in path and path not in ("contributing.md", "changelog.md"):
            assert (page.parent / path).exists(), f"{name_of(page)} links to {path}"
