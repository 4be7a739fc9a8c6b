"""alma-grow: add experts to the model of a fairseq checkpoint, and write the result as a new checkpoint.

alma-grow CHECKPOINT OUT --experts 2
alma-grow RUN/stages/stage_001/member_1/checkpoint_best.pt OUT --experts 2 --stage 2    # like alma-lm before stage 2
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_alma.checkpoints import AVERAGE, EXPERT_DIGESTS, read_checkpoint, write_checkpoint
from fairseq_alma.core.errors import AlmaError, SettingError
from fairseq_alma.growth.experts import RouterGrowth, grow_experts
from fairseq_alma.modules.expert_parallel import digests_of_experts


def growth_seed(run_seed: int, growth: int) -> int:
    """Return the random seed for the noise of one growth step.

    alma-lm and alma-grow both call this function, so they add the same noise. Every growth step has a different seed,
    because with equal seeds, two growth steps would add the same noise. If an expert were copied in one step, and the
    copy were copied in the next step, the noise would shift the router weights twice in the same direction.

    Args:
        run_seed: seed of the run.
        growth: a different number for each growth step. In a run, the index of the stage that follows the growth.
    """
    return run_seed * 1000 + growth


def grow_checkpoint(
    source: Path, target: Path, num_new: int, router: RouterGrowth = "copy", noise: float = 0.01, seed: int = 0
) -> None:
    """Atomically write a copy of the checkpoint `source`, with `num_new` more experts in every mixture, to `target`.

    fairseq can read the result like any other checkpoint. To train it further, give it to fairseq-train with
    `--finetune-from-model` and the new `--num-experts`. The optimizer state is left out, so the optimizer starts from
    scratch.

    Args:
        source: a checkpoint that was saved after a validation, because the validation records the loss of each expert.
        target: the checkpoint to write. It may be the same file as `source`.
        num_new, router, noise, seed: see grow_experts.

    Raises:
        SettingError: if `source` is missing, damaged or not a checkpoint of a switch_lm model, or if grow_experts
            refuses an argument.
    """
    checkpoint, model_config = _read(source)
    for name, digests in checkpoint["extra_state"].get(EXPERT_DIGESTS, {}).items():
        if digests_of_experts(checkpoint["model"][name]) != digests:
            raise SettingError(f"{source} is damaged: the experts in {name} are not those that were saved")
    try:
        checkpoint["model"] = grow_experts(checkpoint["model"], num_new, router, noise, seed)
    except SettingError as error:
        raise SettingError(f"cannot add experts to {source}: {error}") from error
    model_config["num_experts"] += num_new
    # Restart the average of the weights (fairseq's --store-ema) from the grown weights, because the average in the
    # checkpoint does not contain the new experts.
    if "ema" in checkpoint["extra_state"]:
        checkpoint["extra_state"]["ema"] = checkpoint["model"]
        checkpoint["extra_state"].pop("ema_fp32_params", None)
    checkpoint["extra_state"].pop(EXPERT_DIGESTS, None)
    # The average of alma-lm (predict_with=average) begins again, for the same reason.
    checkpoint["extra_state"].pop(AVERAGE, None)
    checkpoint.pop("last_optimizer_state", None)
    write_checkpoint(checkpoint, target)


def num_experts(source: Path) -> int:
    """Return the number of experts in each mixture of the checkpoint file `source`.

    Raises:
        SettingError: if `source` is missing, damaged or not a checkpoint of a switch_lm model.
    """
    _, model_config = _read(source)
    return model_config["num_experts"]


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checkpoint in the file `source`, and the model configuration that this checkpoint contains."""
    checkpoint = read_checkpoint(source)
    if checkpoint is None:
        raise SettingError(f"no complete checkpoint at {source}: train a stage first (alma-lm, or fairseq-train)")
    config = (checkpoint.get("cfg") or {}).get("model")
    if not isinstance(config, dict) or "num_experts" not in config:
        raise SettingError(
            f"{source} is not a checkpoint of a switch_lm model, because its configuration has no num_experts: give a "
            f"checkpoint of a switch_lm model"
        )
    return checkpoint, config


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alma-grow and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="alma-grow", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint that was saved after a validation; its validation losses decide which experts are copied",
    )
    parser.add_argument("target", type=Path, metavar="OUT", help="the grown checkpoint to write")
    parser.add_argument("--experts", type=int, required=True, help="number of experts to add to every mixture")
    parser.add_argument(
        "--router",
        choices=["copy", "tree"],
        default="copy",
        help="how to set the router row of a new expert: copy (the row of the copied expert plus noise, as in the "
        "paper; the default) or tree (does not change output and loss)",
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.01,
        help="standard deviation of the noise in new router rows, relative to the root mean square of the mixture's "
        "router rows (default: 0.01)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the run; the seed of the noise is computed from it (default: 0)"
    )
    parser.add_argument(
        "--stage",
        type=int,
        metavar="K",
        help="index of the stage that follows the growth. With the seed of an alma-lm run, the result equals the "
        "checkpoint from which that run trains stage K. Without --stage, the noise depends on the seed and on the "
        "number of experts in CHECKPOINT, so successive growth steps use different noise",
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.experts < 1:
            raise SettingError(
                f"cannot add {arguments.experts} experts to {arguments.source}: give --experts 1 or more"
            )
        if arguments.target.exists():
            raise SettingError(
                f"{arguments.target} exists already: choose another name for the grown checkpoint, or remove the file"
            )
        growth = num_experts(arguments.source) if arguments.stage is None else arguments.stage
        seed = growth_seed(arguments.seed, growth)
        grow_checkpoint(arguments.source, arguments.target, arguments.experts, arguments.router, arguments.noise, seed)
    except (AlmaError, OSError) as error:
        print(f"alma-grow: {error}", file=sys.stderr)
        return 2
    print(
        f"wrote {arguments.target}. To train it further, give it to fairseq-train with --finetune-from-model and the "
        f"new --num-experts"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
