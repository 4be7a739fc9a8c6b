"""A stream with a tokenizer, checkpoints of all kinds, and a run. Tests must not write to them."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import RUN, run_command

try:
    import torchaudio  # noqa: F401
except (ImportError, RuntimeError):
    # fairseq-fixed requires torchaudio, but does not import it here. It refuses to be imported beside a torch for
    # another version of CUDA, and transformers imports it if it is there.
    sys.modules["torchaudio"] = None  # type: ignore[assignment]

SENTENCE = "the stream of mega-batches arrives, a small <s>learner</s> waits: naïve café größe слово 単語 don't 1984 "


@pytest.fixture(scope="session")
def stream(tmp_path_factory) -> Path:
    """A stream of two mega-batches with a byte-level BPE tokenizer."""
    from data_prep.cli import main

    folder = tmp_path_factory.mktemp("huggingface")
    books = folder / "books"
    books.mkdir()
    for number in range(12):
        words = SENTENCE.split() * 60
        generator = torch.Generator().manual_seed(number)
        order = torch.randperm(len(words), generator=generator).tolist()
        (books / f"{number}.txt").write_text("\n".join(" ".join(words[i] for i in order[k::8]) for k in range(8)))
    out = folder / "stream"
    arguments = [str(out), "--source", f"books:{books}", "--mega-batches", "2", "--vocab-size", "341", "--workers", "1"]
    assert main(arguments) == 0
    return out


@pytest.fixture(scope="session")
def checkpoint(stream, tmp_path_factory):
    """checkpoint(experts, seed=0, arch=..., tree=False): the path of a checkpoint with random weights, also biases."""
    from fairseq_alma.checkpoints import write_checkpoint
    from fairseq_alma.lm.fairseq_config import member_config, write_untrained_checkpoint

    folder, made = tmp_path_factory.mktemp("checkpoints"), {}

    def make(
        experts: int, seed: int = 0, arch: str = "switch_lm_tiny", tree: bool = False, stream: Path = stream
    ) -> Path:
        key = (experts, seed, arch, tree, stream)
        if key in made:
            return made[key]
        path = folder / f"{len(made)}.pt"
        values = {"arch": arch, "data": stream, "num_experts": experts, "tokens_per_sample": 512, "seed": seed}
        write_untrained_checkpoint(member_config({**values, "batch_size": 8, "total_num_update": 1}), path)
        content = torch.load(path, weights_only=True)
        generator = torch.Generator().manual_seed(seed + 100)
        for name, tensor in content["model"].items():
            if name.endswith(("weight", "bias")):
                size = 0.1 if tensor.dim() == 1 else 0.3 * tensor.std()
                tensor += size * torch.randn(tensor.shape, generator=generator)
            if tree and name.endswith("split_E"):
                tensor[2], tensor[3] = 0, 1
        write_checkpoint(content, path)
        made[key] = path
        return path

    return make


@pytest.fixture(scope="session")
def run(stream, tmp_path_factory) -> Path:
    """A run of an ensemble of two members with two stages."""
    out = tmp_path_factory.mktemp("runs") / "ens"
    done = run_command("alma-lm", f"stream={stream}", f"out={out}", *RUN, "learner=ens", "members=2", "experts=2",
                       "updates_per_mega_batch=4", "validations=1")  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture
def own(tmp_path):
    """own(folder): a copy of a folder that a test may damage."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "copy"))
