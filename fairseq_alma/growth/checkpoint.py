"""alma-grow: add experts or layers to the model of a fairseq checkpoint, and write the result as a new checkpoint.

alma-grow CHECKPOINT OUT --experts 2
alma-grow RUN/stages/stage_001/member_1/checkpoint_best.pt OUT --experts 2 --stage 2    # like alma-lm before stage 2
alma-grow CHECKPOINT OUT --experts 2 --copy-experts-by gradient --stream STREAM
alma-grow DENSE OUT --experts 3 --drop 0.5       # from 1 expert in each mixture, a dense model, to 4
alma-grow CHECKPOINT OUT --layers 2
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from fairseq_alma.checkpoints import AVERAGE, EXPERT_DIGESTS, read_checkpoint, write_checkpoint
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.learner_settings import ExpertChoice
from fairseq_alma.core.program import Parser, command
from fairseq_alma.core.settings import MAX_SEED
from fairseq_alma.evaluation.expert_utility import measure_utilities
from fairseq_alma.growth.experts import RouterGrowth, grow_experts
from fairseq_alma.growth.layers import grow_layers
from fairseq_alma.modules.expert_parallel import digests_of_experts


def growth_seed(run_seed: int, growth: int) -> int:
    """Return the random seed for the noise of one growth step, in alma-lm and in alma-grow.

    Every step has a different seed. With equal seeds, two steps would add the same noise. If an expert were copied in
    one step, and the copy in the next, the noise would shift the router weights twice in the same direction.

    Args:
        run_seed: seed of the run.
        growth: a different number for each growth step. In a run, the index of the stage that follows the growth.
    """
    return run_seed * 1000 + growth


def grow_checkpoint(
    source: Path,
    target: Path,
    num_new: int,
    router: RouterGrowth = "copy",
    noise: float = 0.01,
    seed: int = 0,
    copy_experts_by: ExpertChoice = "validation_loss",
    utilities: Mapping[str, Tensor] | None = None,
    drop: float = 0.0,
    num_layers: int = 0,
) -> None:
    """Atomically write a copy of the checkpoint `source` with more experts or more layers to `target`.

    To train the result further, give it to fairseq-train with `--finetune-from-model` and the new `--num-experts` and
    `--decoder-layers`. It has no optimizer state, so the optimizer starts from scratch.

    Args:
        source: a checkpoint that was saved after a validation, because the validation records the loss of each expert.
        target: the checkpoint to write. It may be the same file as `source`.
        num_new: number of experts to add to every mixture.
        router, noise, seed, copy_experts_by, utilities, drop: see grow_experts.
        num_layers: number of layers to add after that, see grow_layers.

    Raises:
        SettingError: if `source` is missing, damaged or not a checkpoint of a switch_lm model, or if grow_experts or
            grow_layers refuses an argument.
    """
    checkpoint, model_config = _read(source)
    for name, digests in checkpoint["extra_state"].get(EXPERT_DIGESTS, {}).items():
        if name not in checkpoint["model"] or digests_of_experts(checkpoint["model"][name]) != digests:
            raise SettingError(f"{source} is damaged: the experts in {name} are not those that were saved")
    try:
        if num_new or not num_layers:
            checkpoint["model"] = grow_experts(
                checkpoint["model"], num_new, router, noise, seed, copy_experts_by, utilities, drop
            )
        checkpoint["model"] = grow_layers(checkpoint["model"], num_layers)
    except SettingError as error:
        raise SettingError(f"cannot grow {source}: {error}") from error
    model_config["num_experts"] += num_new
    model_config["decoder_layers"] += num_layers
    write_with_new_weights(checkpoint, target)


def write_with_new_weights(checkpoint: dict[str, Any], target: Path) -> None:
    """Atomically write a checkpoint whose weights were changed, without the states that belong to the old weights."""
    # Restart the average of the weights (fairseq's --store-ema) from the grown weights, because the average in the
    # checkpoint does not contain the new weights.
    if "ema" in checkpoint["extra_state"]:
        checkpoint["extra_state"]["ema"] = checkpoint["model"]
        checkpoint["extra_state"].pop("ema_fp32_params", None)
    checkpoint["extra_state"].pop(EXPERT_DIGESTS, None)
    # The average of alma-lm (the setting `average`) begins again, for the same reason.
    checkpoint["extra_state"].pop(AVERAGE, None)
    checkpoint.pop("last_optimizer_state", None)
    write_checkpoint(checkpoint, target)


def num_experts(source: Path) -> int:
    """Return the number of experts in each mixture of a checkpoint. Raise SettingError if it has no switch_lm model."""
    _, model_config = _read(source)
    return model_config["num_experts"]


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checkpoint in the file `source`, and the model configuration that this checkpoint contains.

    The file may come from somebody else, so its configuration is checked. Nothing that it names is run.
    """
    checkpoint = read_checkpoint(source)
    if checkpoint is None:
        raise SettingError(f"no complete checkpoint at {source}: train a stage first (alma-lm, or fairseq-train)")
    # Import fairseq only here, because the import takes seconds and is not needed to report bad arguments.
    from fairseq_alma.models.stored import stored_entry, stored_model

    stored_model(checkpoint, source)
    stored_entry(checkpoint, source, "extra_state")
    return checkpoint, checkpoint["cfg"]["model"]


@command("alma-grow")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alma-grow and return its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.experts is None and arguments.layers is None:
        parser.error("give --experts, --layers or both")
    _grow(arguments)
    changed = [name for name, value in (("--num-experts", arguments.experts), ("--decoder-layers", arguments.layers))
               if value is not None]  # fmt: skip
    print(
        f"wrote {arguments.target}. To train it further, give it to fairseq-train with --finetune-from-model and the "
        f"new {' and '.join(changed)}"
    )
    return 0


def _grow(arguments: argparse.Namespace) -> None:
    """Write the grown checkpoint that the command line asks for. Raise AlmaError if an argument or file is invalid."""
    source, target, num_new, num_layers = arguments.source, arguments.target, arguments.experts, arguments.layers
    if not 0 <= arguments.seed < MAX_SEED:
        raise SettingError(f"cannot grow {source}: --seed {arguments.seed} must be at least 0 and below {MAX_SEED}")
    for number, option in ((num_new, "--experts"), (num_layers, "--layers")):
        if number is not None and number < 1:
            raise SettingError(f"cannot add {number} {option[2:]} to {source}: give {option} 1 or more")
    if num_new is None and (given := _given_for_experts(arguments)):
        raise SettingError(f"{given} is for growth by experts, so it has no effect on {source}: give --experts too")
    if arguments.stream is not None and arguments.copy_experts_by != "gradient":
        raise SettingError(
            f"--stream {arguments.stream} has no effect with --copy-experts-by {arguments.copy_experts_by}: leave it "
            f"out, or give --copy-experts-by gradient"
        )
    if target.exists():
        raise SettingError(f"{target} exists already: choose another name for the grown checkpoint, or remove the file")
    experts = num_experts(source)
    router: RouterGrowth = arguments.router or ("tree" if experts == 1 else "copy")
    seed = growth_seed(arguments.seed, experts if arguments.stage is None else arguments.stage)
    utilities = None
    if arguments.copy_experts_by == "gradient" and experts > 1:
        if arguments.stream is None:
            raise SettingError(
                f"--copy-experts-by gradient needs the validation set, to compute the gradients of {source}: give "
                f"--stream STREAM, the stream folder on which it was trained"
            )
        utilities = measure_utilities(source, arguments.stream).utilities
    grow_checkpoint(
        source, target, num_new or 0, router, arguments.noise, seed, arguments.copy_experts_by, utilities,
        arguments.drop, num_layers or 0,
    )  # fmt: skip


def _given_for_experts(arguments: argparse.Namespace) -> str:
    """Return the given options that only concern new experts, as text; "" if there are none."""
    given = {"--router": arguments.router, "--drop": arguments.drop or None, "--stream": arguments.stream}
    given["--copy-experts-by"] = None if arguments.copy_experts_by == "validation_loss" else arguments.copy_experts_by
    return ", ".join(name for name, value in given.items() if value is not None)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(prog="alma-grow", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint that was saved after a validation; its validation losses decide which experts are copied",
    )
    parser.add_argument("target", type=Path, metavar="OUT", help="the grown checkpoint to write")
    parser.add_argument(
        "--experts",
        type=int,
        help="number of experts to add to every mixture: at most as many as it has, or any number if it has one (a "
        "dense model)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        help="number of layers to add, an even number: copies of layers with output projections of 0, so that output "
        "and loss do not change",
    )
    _add_options_of_experts(parser)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the run; the seed of the random numbers is computed from it (default: 0)",
    )
    parser.add_argument(
        "--stage",
        type=int,
        metavar="K",
        help="index of the stage that follows the growth. With the seed of an alma-lm run, the result equals the "
        "checkpoint from which that run trains stage K (if stage K - 1 has a checkpoint_continuation.pt, give that one "
        "as CHECKPOINT). Without --stage, the noise depends on the seed and on the "
        "number of experts in CHECKPOINT, so successive growth steps use different noise",
    )
    return parser


def _add_options_of_experts(parser: argparse.ArgumentParser) -> None:
    """Add the options that only concern new experts."""
    parser.add_argument(
        "--router",
        choices=get_args(RouterGrowth),
        help="how to set the router row of a new expert: copy (the row of the copied expert plus noise, as in the "
        "paper; the default) or tree (does not change output and loss; the default for a dense model)",
    )
    parser.add_argument(
        "--noise",
        type=float,
        default=0.01,
        help="standard deviation of the noise in new router rows, relative to the root mean square of the mixture's "
        "router rows (default: 0.01)",
    )
    parser.add_argument(
        "--copy-experts-by",
        choices=get_args(ExpertChoice),
        default="validation_loss",
        help="which experts are copied: those with the largest validation_loss (the paper; the default), those with "
        "the largest gradient of the validation loss (needs --stream), or random",
    )
    parser.add_argument("--stream", type=Path, help="the stream folder, for --copy-experts-by gradient")
    parser.add_argument(
        "--drop",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="for a dense model: share of the hidden units of each expert that is re-initialized, between 0 (exact "
        "copies; the default) and 1. With more than 0, output and loss change",
    )


if __name__ == "__main__":
    sys.exit(main())
