"""Every learner of alma-vision on a GPU, against the CPU."""

import pytest
import torch

from tests.vision.test_vgg_runs import small_run as small_vgg_run
from tests.vision.tiny_runs import ledger, small_run, taken

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test-gpu"),
]

LEARNERS = ["sm", "ens", "umix", "gens", "moe", "gmoe", "ens_moe", "ff"]


def compare(on_cpu, on_gpu, test_examples: int) -> None:
    """Compare the ledgers of a CPU and of a GPU, which add in another order."""
    for rows, others in zip(on_cpu, on_gpu, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert (row.t, row.stage, row.scores.num_params) == (other.t, other.stage, other.scores.num_params)
            assert other.spent.train_flops == pytest.approx(row.spent.train_flops)
            assert abs(row.scores.error_rate - other.scores.error_rate) <= max(2, 0.03 * test_examples) / test_examples


@pytest.mark.parametrize("learner", LEARNERS)
def test_perceptrons(tmp_path, learner):
    runs = [
        small_run(tmp_path / device, seeds=2, device=device, **taken(learner, members=3, experts=2, grow_every=1))
        for device in ("cpu", "cuda")
    ]
    compare(*runs, test_examples=359)


@pytest.mark.parametrize("learner", LEARNERS)
def test_networks_for_images(tmp_path, learner):
    """With 3 channels, and with those by which Firefly widens, few parameters begin at an even address."""
    more = {"candidates": 5} if learner == "ff" else {}
    runs = [small_vgg_run(tmp_path / device, learner, width=3, device=device, **more) for device in ("cpu", "cuda")]
    compare(*runs, test_examples=20)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_on_the_same_gpu_computes_the_same_again(tmp_path, precision):
    for name in ("first", "second"):
        average = {"average": "power:8"}
        small_vgg_run(tmp_path / name, width=5, device="cuda", precision=precision, seeds=1, **average)
    assert ledger(tmp_path / "first") == ledger(tmp_path / "second")
