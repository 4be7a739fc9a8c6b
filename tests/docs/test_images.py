"""The two examples of docs/first-steps/images.md with data and a network of the user's own work, and are short.

test_long_pages.py runs the whole page, but takes longer. In the quick suite, tests/vision/test_api.py has a script with
data and a network of its own.
"""

import pytest

from fairseq_alma.core.ledger import Ledger
from tests.commands import ROOT
from tests.docs.blocks import Block, blocks_of
from tests.docs.files import own_images
from tests.docs.running import run_block

BLOCKS = blocks_of(ROOT / "docs/first-steps/images.md")


def example(name: str) -> tuple[Block, Block]:
    """Return the block that is saved as the file `name`, and the block after it, which uses the file."""
    (index,) = [index for index, block in enumerate(BLOCKS) if block.action == "save" and block.argument == name]
    return BLOCKS[index], BLOCKS[index + 1]


@pytest.mark.parametrize(
    ("name", "num_commands", "ledger"),
    [
        pytest.param("my_resnet.py", 1, "runs/mine/resnet/ledger.jsonl", marks=pytest.mark.slow),
        pytest.param("notebook.py", 1, "runs/notebook/seed_1/ledger.jsonl", marks=pytest.mark.slow),
    ],
)
def test_an_example_works_and_has_under_25_lines(tmp_path, name, num_commands, ledger):
    saved, used = example(name)
    assert saved.text.count("\n") < 25
    assert used.text.count("\n") == num_commands
    own_images(tmp_path)
    for block in (saved, used):
        run_block(block, tmp_path, in_forks=True)
    rows = Ledger(tmp_path / ledger).rows()
    assert rows[-1].scores.num_members == 3
    assert rows[-1].t == (2 if name == "my_resnet.py" else 5)
