import shutil
from pathlib import Path

import pytest

from tests.commands import STAGE, run_command
from tests.streams import make_stream


@pytest.fixture(scope="session")
def stream(tmp_path_factory) -> Path:
    """A stream of three mega-batches of about 3000 tokens over 20 words. Tests must not write to it."""
    return make_stream(tmp_path_factory.mktemp("streams") / "markov")


@pytest.fixture
def own_stream(stream, tmp_path) -> Path:
    """A copy of the stream that a test may damage."""
    return shutil.copytree(stream, tmp_path / "stream")


@pytest.fixture(scope="session")
def trained(stream, tmp_path_factory) -> Path:
    """checkpoint_best.pt after 30 updates of fairseq-train on mega-batches 1 and 2; log.txt is in the same folder."""
    folder = tmp_path_factory.mktemp("trained")
    result = run_command(
        "fairseq-train", stream, *STAGE, "--mega-batches", "1-2", "--max-update", 30, "--save-dir", folder
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (folder / "log.txt").write_text(result.stdout)
    return folder / "checkpoint_best.pt"
