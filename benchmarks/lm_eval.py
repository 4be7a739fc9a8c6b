"""Measure how many tokens per second alma-lm and alma-eval score, beside the training step of the same model.

.venv/bin/python benchmarks/lm_eval.py                    on the CPU, printed, in about ten minutes
.venv/bin/python benchmarks/lm_eval.py --device cuda      on one GPU, the large model too
.venv/bin/python benchmarks/lm_eval.py --write            also written to benchmarks/lm_eval.md

The alternatives are run in turn in one process:
  ours       score_tokens: the loss of each token, a chunk of tokens at a time
  old        the way of earlier versions: all logits of a batch, transposed for the cross entropy
  training   an update: forward and backward pass with the criterion switch_lm, clipping, Adam

Each ratio is shown twice: the ratio of the two smallest times, and the median of the ratios of measurements that are
neighbours in time. The median decides whether the target is met. The exit status is 0 whether targets are met or not.
"""

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import provenance, ratio_columns, table, verdict, write_part
from _lm_stream import write_stream
from torch.nn import functional as F

from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.criteria.switch_lm import SwitchLanguageModelCriterion
from fairseq_alma.evaluation.devices import default_tokens_per_batch
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.scoring import score_tokens
from fairseq_alma.lm.fairseq_config import member_config, write_untrained_checkpoint

VOCABULARY = 50_264  # words of a fairseq dictionary for the 50,257 symbols of GPT-2
LENGTH, NUM_EXPERTS = 512, 4
MODELS = {"cpu": ["switch_lm_base"], "cuda": ["switch_lm_base", "switch_lm_large"]}
TOKENS = {"cpu": 4096, "cuda": 1 << 20}
"""Device -> default number of tokens that are scored in one measurement."""
TRAINING_SEQUENCES = {"cpu": 8, "cuda": 64}
"""Device -> number of sequences in an update."""
OLD_TOKENS = 8192
"""Number of tokens in a forward pass of the old way."""
TARGET = 2.5
"""Smallest ratio of the rate of evaluation to the rate of training that passes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=MODELS, default="cpu", help="device to measure (default: cpu)")
    parser.add_argument("--archs", nargs="+", help="models to measure (default: base; on a GPU, large too)")
    parser.add_argument("--tokens", type=int, help=f"tokens to score in one measurement (default: {TOKENS})")
    parser.add_argument("--repeats", type=int, default=7, help="number of measurements (default: 7)")
    parser.add_argument("--threads", type=int, default=1, help="threads on the CPU (default: 1)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/lm_eval.md")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no GPU")
    load_at_start, device = os.getloadavg()[0], torch.device(options.device)
    tokens = options.tokens or TOKENS[options.device]
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    torch.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory(prefix="lm_eval_") as scratch:
        stream = write_stream(Path(scratch) / "stream", VOCABULARY, tokens=LENGTH, test_tokens=tokens)
        for arch in options.archs or MODELS[options.device]:
            for precision in ("float32", "bfloat16"):
                rows.append(_row(arch, precision, stream, device, tokens, options.repeats))
                print(" ".join(map(str, rows[-1])), flush=True)
    text = "\n".join([*_section(rows, device, tokens, options), "", *provenance(load_at_start)])
    print(text)
    if options.write:
        introduction = "# Speed of evaluation\n\nWritten by `benchmarks/lm_eval.py --write`."
        commands = {f"On {name}": f"benchmarks/lm_eval.py --device {name}" for name in MODELS}
        write_part(introduction, commands, f"On {options.device}", text.splitlines())


def _row(arch: str, precision: str, stream: Path, device: torch.device, tokens: int, repeats: int) -> list[object]:
    """Measure one model in one precision. Return the columns of the table."""
    values = {"data": str(stream), "arch": arch, "precision": precision, "num_experts": NUM_EXPERTS}
    values |= {"tokens_per_sample": LENGTH, "total_num_update": 10, "save_dir": str(stream.parent)}
    checkpoint = stream.parent / "untrained.pt"
    write_untrained_checkpoint(member_config(values), checkpoint)
    model, task = load_member(checkpoint, StreamFolder.open(stream), device)
    update, tokens_of_update = _training(model, task, device), TRAINING_SEQUENCES[device.type] * LENGTH
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: score_tokens(model.eval(), task, "test"),
        "old": lambda: _score_as_before(model.eval(), task, tokens, device),
        "training": update,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(-1, repeats):  # the first is a warm-up
        for name, way in ways.items():
            spent = _seconds(way, device)
            if repeat >= 0:
                seconds[name].append(spent / (tokens_of_update if name == "training" else tokens))  # for one token
    rates = [f"{1 / statistics.median(seconds[name]):,.0f}" for name in ways]
    best_old, old, _ = ratio_columns(seconds["old"], seconds["ours"])
    best, median, spread = ratio_columns(seconds["training"], seconds["ours"])
    ratios = [f"{best_old:.2f}", f"{old:.2f}", f"{best:.2f}", f"{median:.2f}", f"{spread:.2f}"]
    return [f"{arch}, {precision}", *rates, *ratios, verdict(median, TARGET, at_most=False)]


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `work` takes: CPU seconds of this process, or on a GPU seconds of the clock."""
    if device.type == "cpu":
        before = time.process_time()
        work()
        return time.process_time() - before
    torch.cuda.synchronize()
    before = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - before


def _training(model: Any, task: Any, device: torch.device) -> Callable[[], None]:
    """Return a function that makes one update of the model, as in a stage but with random words."""
    criterion = SwitchLanguageModelCriterion(task, balance_loss_weight=0.01, router_z_loss_weight=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    words = torch.randint(4, VOCABULARY, (TRAINING_SEQUENCES[device.type], LENGTH + 1), device=device)
    sample = {"net_input": {"src_tokens": words[:, :-1]}, "target": words[:, 1:], "ntokens": words[:, 1:].numel()}

    def update() -> None:
        model.train()
        optimizer.zero_grad(set_to_none=True)
        loss, num_tokens, _ = criterion.train()(model, sample)
        (loss / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


@torch.no_grad()
def _score_as_before(model: Any, task: Any, tokens: int, device: torch.device) -> torch.Tensor:
    """Return the loss of each token of the test set, computed as in earlier versions."""
    if "test" not in task.datasets:
        task.load_dataset("test")
    dataset, rows, losses = task.dataset("test"), OLD_TOKENS // LENGTH, []
    for start in range(0, len(dataset), rows):
        sample = dataset.collater([dataset[i] for i in range(start, min(start + rows, len(dataset)))])
        target = sample["target"].to(device)
        scores, _ = model(sample["net_input"]["src_tokens"].to(device))
        losses.append(F.cross_entropy(scores.float().transpose(1, 2), target, reduction="none").flatten().cpu())
    return torch.cat(losses)


def _section(rows: list[list[object]], device: torch.device, tokens: int, options: argparse.Namespace) -> list[str]:
    """Return the lines of the report."""
    header = ["", "ours, tokens/s", "old, tokens/s", "training, tokens/s", "ours / old, ratio of minima", "median"]
    header += ["ours / training, ratio of minima", "median", "spread of ratios", f"at least {TARGET}"]
    on_cpu = f"the CPU ({options.threads} thread), rates in tokens per CPU second"
    where = on_cpu if device.type == "cpu" else f"one {torch.cuda.get_device_name()}, rates in tokens per second"
    return [
        f"On {where}. E = {NUM_EXPERTS}, {VOCABULARY:,} words, blocks of {LENGTH} tokens; {tokens:,} tokens are scored "
        f"in passes of at most {default_tokens_per_batch([device]):,} tokens (old: {OLD_TOKENS:,}). An update of "
        f"the training has {TRAINING_SEQUENCES[device.type]} sequences, with capacity 1, dropout 0.1 and fused "
        f"Adam; {options.repeats} measurements of each after one warm-up, in turn. Untrained weights and random words, "
        f"which cost the same as trained weights and text except that an untrained router drops more tokens in "
        f"training, which makes the training look faster.",
        "",
        *table(header, rows),
    ]


if __name__ == "__main__":
    main()
