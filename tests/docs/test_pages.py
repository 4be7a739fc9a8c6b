"""Every block of commands on every page, tested as the marker before it says (see blocks.py)."""

import re
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.docs.blocks import ACTIONS, PAGES, blocks_of, name_of
from tests.docs.running import LONG_PAGES, run_blocks


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_how_it_is_tested(page):
    for block in blocks_of(page):
        assert block.marker, f"{block.where}: a block of {block.language} has no marker <!-- test: ... --> before it"
        assert block.action in ACTIONS, f"{block.where}: {block.marker!r} begins with none of {', '.join(ACTIONS)}"
        if block.action == "skip":
            assert len(block.reason.split()) >= 3, f"{block.where}: the marker gives no reason"


def has_runs(page: Path) -> bool:
    """Return True for a page with a block that is run."""
    return any(block.action == "run" for block in blocks_of(page))


SHORT_PAGES = [page for page in PAGES if blocks_of(page) and page not in LONG_PAGES]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in SHORT_PAGES if has_runs(page)], ids=name_of)
def test_the_blocks_of_a_page_work(page, tmp_path):
    run_blocks(page, tmp_path)


SLOW = ("docs/using-a-model.md", "docs/cluster.md", "docs/extending.md", "docs/forgetting.md", "docs/reports.md")
"""Pages that take long, also in forks. What they show has tests of its own."""


def is_quick(page: Path) -> bool:
    """Return False for SLOW pages, and for those of the paper: each runs the same commands with other settings."""
    return not has_runs(page) or (page.parent.name != "paper" and name_of(page) not in SLOW)


@pytest.mark.parametrize("page", [page for page in SHORT_PAGES if is_quick(page)], ids=name_of)
def test_the_blocks_of_a_page_work_in_forks(page, tmp_path):
    """The commands are forks of processes that have imported torch and fairseq."""
    run_blocks(page, tmp_path, in_forks=True)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_of_the_repository_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for path in re.findall(r"\]\(((?!https?:)[^)#\s]+)[^)]*\)", text):
        if not path.startswith("api/") and "/api/" not in path and path not in ("contributing.md", "changelog.md"):
            assert (page.parent / path).exists(), f"{name_of(page)} links to {path}"


def test_the_glossary_explains_every_word_of_the_vocabulary_and_every_metric():
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    table = design[design.index("## Vocabulary") : design.index("## Layout")]
    words = [word for row in re.findall(r"^\| ([^|:]+) \|", table, re.MULTILINE) for word in row.split(", ")]
    assert len(words) >= 16
    glossary = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    terms = {
        term.lower() for line in re.findall(r"^(\S[^\n]*)\n:   ", glossary, re.MULTILINE) for term in line.split(", ")
    }
    metrics = ["CER", "Mem", "Comp", "SM", "Ens", "UMix", "gEns", "gMoE", "FF"]
    assert {word.lower() for word in [*words, *metrics]} - {"word"} <= terms
