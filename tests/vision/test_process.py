"""Settings of the process hold while a run computes, and are restored afterwards."""

import subprocess
import sys

import pytest
import torch

from tests.commands import run_module
from vision.runs import _process_settings


def settings_now():
    cudnn = torch.backends.cudnn
    return torch.get_num_threads(), cudnn.deterministic, cudnn.allow_tf32


def set_all(threads, deterministic, allow_tf32):
    torch.set_num_threads(threads)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = deterministic, allow_tf32


@pytest.fixture(params=[(2, False, True), (1, True, False)])
def outside(request):
    """The settings of a notebook before it starts a run."""
    original = settings_now()
    set_all(*request.param)
    yield request.param
    set_all(*original)


def test_settings_hold_in_the_block_and_are_restored_at_its_end(outside):
    with _process_settings(tf32=False):
        assert settings_now() == (1, True, False)
        with _process_settings(tf32=True):
            assert settings_now() == (1, True, True)
        assert settings_now() == (1, True, False)
    assert settings_now() == outside


def test_a_program_that_uses_the_newer_switches(tmp_path):
    """In a process of its own, because the older switches cannot be used afterwards."""
    script = """
import torch
from vision.flops import count_flops
from vision.runs import _process_settings
switches = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
switches[0].fp32_precision, switches[1].fp32_precision = "tf32", "ieee"
before = [one.fp32_precision for one in switches]
with _process_settings(tf32=False):
    assert [one.fp32_precision for one in switches] == ["ieee"] * 3
    with _process_settings(tf32=True):
        assert [one.fp32_precision for one in switches] == ["tf32"] * 3
        assert count_flops(torch.nn.Conv2d(1, 1, 3), (1, 3, 3)).forward == 2 * 9
assert [one.fp32_precision for one in switches] == before
"""
    (tmp_path / "switches.py").write_text(script)
    done = run_module("switches", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_settings_are_restored_after_an_error(outside):
    with pytest.raises(RuntimeError, match="a failed run"), _process_settings(tf32=False):
        raise RuntimeError("a failed run")
    assert settings_now() == outside


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults of glibc's allocator")
def test_freed_memory_is_kept_by_the_process():
    """64 MB are allocated and freed many times. A process that keeps them stops fetching pages from the system.

    Run in other processes, because the allocator of the test's process must not change.
    """
    program = """
import resource, sys, torch
from fairseq_alma.core.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(1 << 24)
before = faults()
for _ in range(20):
    torch.ones(1 << 24)
print(faults() - before)
"""
    counts = {}
    for choice in ("keep", "default"):
        done = subprocess.run([sys.executable, "-c", program, choice], capture_output=True, text=True, check=True)
        counts[choice] = int(done.stdout)
    if counts["default"] < 1000:
        pytest.skip("the C library of this machine keeps freed memory by default")
    assert counts["keep"] < counts["default"] / 10
