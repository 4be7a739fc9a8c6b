"""Every block of commands on the pages that take longest (see blocks.py)."""

import pytest

from tests.commands import ROOT
from tests.docs.blocks import name_of
from tests.docs.running import LONG_PAGES, run_blocks


@pytest.mark.slow
@pytest.mark.parametrize("page", LONG_PAGES, ids=name_of)
def test_the_blocks_of_a_page_work(page, tmp_path):
    run_blocks(page, tmp_path)


def test_the_blocks_of_the_readme_work(tmp_path):
    """In the quick suite, the commands are forks of processes that have imported torch and fairseq."""
    run_blocks(ROOT / "README.md", tmp_path, in_forks=True)
