import pytest

from fairseq_alma.app.plots import plot_perplexity
from fairseq_alma.core.errors import RunError
from tests.commands import ROOT


def test_the_picture_is_drawn_from_ledgers(tmp_path):
    runs = {f"wait {w}": ROOT / f"results/demo/sm/wait_{w}" for w in (1, 4)}
    picture = plot_perplexity(runs, tmp_path / "new/folder/perplexity.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_a_finished_stage_is_told(tmp_path):
    with pytest.raises(RunError, match="no finished stage to draw"):
        plot_perplexity({"empty": tmp_path}, tmp_path / "picture.png")
