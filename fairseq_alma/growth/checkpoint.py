"""alma-grow: add experts to the model of a fairseq checkpoint, and write it as a new checkpoint.

alma-grow CHECKPOINT OUT --experts 2
alma-grow RUN/stages/stage_001/member_1/checkpoint_best.pt OUT --experts 2 --stage 2    as in a run of alma-lm
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_alma.checkpoints import read_checkpoint, write_checkpoint
from fairseq_alma.core.errors import AlmaError, SettingError
from fairseq_alma.growth.experts import RouterGrowth, grow_experts


def growth_seed(run_seed: int, growth: int) -> int:
    """Return the seed of the noise of one growth. alma-lm and alma-grow both use it, and so draw the same noise.

    Each growth has a seed of its own: with equal noise, copies of copies would move in the same direction.

    Args:
        run_seed: the seed of the run.
        growth: a number that differs from growth to growth; in a run the index of the stage that follows the growth.
    """
    return run_seed * 1000 + growth


def grow_checkpoint(
    source: Path, target: Path, num_new: int, router: RouterGrowth = "copy", noise: float = 0.01, seed: int = 0
) -> None:
    """Write the checkpoint `source`, with `num_new` more experts in every mixture, to `target` in one step.

    fairseq reads the result like any other checkpoint. To train it further, give it to fairseq-train with
    `--finetune-from-model` and the new `--num-experts`. The optimizer's state is left out, so the optimizer starts
    anew.

    Args:
        source: a checkpoint that was saved after a validation, which recorded the loss of each expert.
        target: may be the same file as `source`.
        num_new, router, noise, seed: see grow_experts.

    Raises:
        SettingError: `source` is missing, damaged or no checkpoint of a switch_lm; or as grow_experts.
    """
    checkpoint, model_config = _read(source)
    try:
        checkpoint["model"] = grow_experts(checkpoint["model"], num_new, router, noise, seed)
    except SettingError as error:
        raise SettingError(f"{source} cannot grow: {error}") from error
    model_config["num_experts"] += num_new
    if "ema" in checkpoint["extra_state"]:  # the average of the weights (--store-ema) restarts from the grown weights
        checkpoint["extra_state"]["ema"] = checkpoint["model"]
        checkpoint["extra_state"].pop("ema_fp32_params", None)
    checkpoint.pop("last_optimizer_state", None)
    write_checkpoint(checkpoint, target)


def num_experts(source: Path) -> int:
    """Return the number of experts in each mixture of a checkpoint.

    Raises:
        SettingError: `source` is missing, damaged or no checkpoint of a switch_lm.
    """
    _, model_config = _read(source)
    return model_config["num_experts"]


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint and, as a part of it, the configuration of its model."""
    checkpoint = read_checkpoint(source)
    if checkpoint is None:
        raise SettingError(f"no whole checkpoint at {source}: train a stage first (alma-lm, or fairseq-train)")
    config = (checkpoint.get("cfg") or {}).get("model")
    if not isinstance(config, dict) or "num_experts" not in config:
        raise SettingError(f"{source} is no checkpoint of a switch_lm: its configuration has no num_experts")
    return checkpoint, config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alma-grow and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="alma-grow", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, metavar="CHECKPOINT", help="a checkpoint saved after a validation, which ranks the experts"
    )
    parser.add_argument("target", type=Path, metavar="OUT", help="the grown checkpoint to write")
    parser.add_argument("--experts", type=int, required=True, help="number of experts to add to every mixture")
    parser.add_argument(
        "--router",
        choices=["copy", "tree"],
        default="copy",
        help="router row of a new expert: copy (the paper; the default) or tree (keeps output and loss)",
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.01,
        help="size of the noise in new router rows, relative to the rows of the mixture (default: 0.01)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the run, from which the noise is drawn (default: 0)"
    )
    parser.add_argument(
        "--stage",
        type=int,
        metavar="K",
        help="index of the stage that follows the growth. With the seed of a run of alma-lm, the result is the "
        "checkpoint from which that run trains stage K. By default the noise depends on the seed and on the number of "
        "experts of CHECKPOINT, so that successive growths draw different noise",
    )
    arguments = parser.parse_args(argv)
    try:
        growth = num_experts(arguments.source) if arguments.stage is None else arguments.stage
        seed = growth_seed(arguments.seed, growth)
        grow_checkpoint(arguments.source, arguments.target, arguments.experts, arguments.router, arguments.noise, seed)
    except (AlmaError, OSError) as error:
        print(f"alma-grow: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.target}: to train it further, use --finetune-from-model and the new --num-experts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
