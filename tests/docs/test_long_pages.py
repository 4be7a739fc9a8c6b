"""Every block of commands on the pages that take longest (see blocks.py)."""

import pytest

from tests.docs.blocks import name_of
from tests.docs.running import LONG_PAGES, run_blocks


@pytest.mark.parametrize(
    "page",
    [page if page.name == "README.md" else pytest.param(page, marks=pytest.mark.slow) for page in LONG_PAGES],
    ids=name_of,
)
def test_the_blocks_of_a_page_work(page, tmp_path):
    run_blocks(page, tmp_path)
