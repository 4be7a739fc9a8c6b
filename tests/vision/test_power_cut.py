"""Power failures while alma-vision runs: what is on the disk then is continued to the same result."""

import random
import time

import pytest

from tests.power_cut import cut_power, mounted
from tests.vision.test_killed import AUTO, FF, GENS, GMOE, Child, same_run
from tests.vision.tiny_runs import ledger, small_run


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"seeds": 2}, GENS, GMOE, FF, AUTO], ids=["sm", "gens", "gmoe", "ff", "auto"])
def test_after_a_power_failure_a_run_is_continued(tmp_path, settings):
    def run(out):
        small_run(out, **{"mega_batches": 40, **settings}, epochs=15)

    small_run(
        tmp_path / "warm", **{**settings, "mega_batches": 10, "arrivals": 2}, epochs=1
    )  # imports modules before the forks
    began = time.monotonic()
    Child(lambda: run(tmp_path / "whole")).finish()
    seconds = time.monotonic() - began
    images = cut_power(lambda disk: Child(lambda: run(disk / "run")).pid, tmp_path, 3, seconds, random.Random(0))
    for image in images:
        with mounted(image) as disk:
            if image == images[-1]:
                for path in (tmp_path / "whole").rglob("ledger.jsonl"):  # the finished run was on the disk
                    assert ledger(disk / "run" / path.parent.relative_to(tmp_path / "whole")) == ledger(path.parent)
            Child(lambda disk=disk: run(disk / "run")).finish()
            same_run(tmp_path / "whole", disk / "run")
