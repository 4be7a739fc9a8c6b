"""The commands of docs/corpora.md for a cluster, on a real Slurm: from Common Crawl to a stream."""

import subprocess

import pytest

from tests.commands import ROOT
from tests.docs import files
from tests.docs.blocks import blocks_of
from tests.docs.commands import environment

pytest.importorskip("fastwarc", reason="needs the extra `corpora`")
pytestmark = [pytest.mark.usefixtures("slurm"), pytest.mark.slow]


def blocks() -> list[str]:
    """Return the blocks of the page that are for Slurm, for the cluster of the test, which has two small nodes."""
    return [block.replaced() for block in blocks_of(ROOT / "docs/corpora.md") if block.action == "slurm"]


def run(text: str, folder) -> str:
    """Run commands in a folder. Return what they print."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_from_common_crawl_to_a_stream_on_slurm(slurm, tmp_path):
    for name in ("typed", "job"):
        (tmp_path / name).mkdir()
        files.corpora(tmp_path / name)
    typed, submitted = blocks()
    run(typed, tmp_path / "typed")
    printed = run(submitted, tmp_path / "job")
    job = printed.split()[-1]
    slurm.wait_for(lambda: slurm.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), seconds=300)
    assert slurm.job(job)["JobState"] == "COMPLETED", (tmp_path / f"job/slurm-{job}.out").read_text()
    parts = [f"mega_batch_{t}/train.bin" for t in range(1, 6)]
    made = [[(tmp_path / name / "streams/web" / part).read_bytes() for part in parts] for name in ("typed", "job")]
    assert made[0] == made[1]
