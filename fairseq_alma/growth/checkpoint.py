"""Growing a saved model: a checkpoint of fairseq in, one with more experts out.

alma-grow CHECKPOINT OUT --experts 2
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq_alma.core.errors import AlmaError, SettingError
from fairseq_alma.growth.experts import RouterGrowth, grow_experts
from fairseq_alma.lm.checkpoints import read_whole, write_checkpoint


def grow_checkpoint(
    source: Path, target: Path, num_new: int, router: RouterGrowth = "copy", noise: float = 0.01, seed: int = 0
) -> None:
    """Write `source` with `num_new` more experts in every mixture to `target`, whole or not at all.

    fairseq's tools read it as any other checkpoint; give it to a stage with --finetune-from-model and the new
    --num-experts: the optimizer starts anew, its state is left out.

    Raises:
        SettingError: no whole checkpoint of a switch_lm there, or as grow_experts.
    """
    checkpoint, config = _read(source)
    try:
        checkpoint["model"] = grow_experts(checkpoint["model"], num_new, router, noise, seed)
    except SettingError as error:
        raise SettingError(f"{source} cannot grow: {error}") from error
    config["num_experts"] += num_new
    if "ema" in checkpoint["extra_state"]:  # the average of the weights starts anew too, from these
        checkpoint["extra_state"]["ema"] = checkpoint["model"]
        checkpoint["extra_state"].pop("ema_fp32_params", None)
    checkpoint.pop("last_optimizer_state", None)
    write_checkpoint(checkpoint, target)


def num_experts(source: Path) -> int:
    """Experts in each mixture of a checkpoint. Raises as grow_checkpoint."""
    _, config = _read(source)
    return config["num_experts"]


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checkpoint, and the settings of its model."""
    checkpoint = read_whole(source)
    if checkpoint is None:
        raise SettingError(f"no whole checkpoint at {source}: train a stage first (alma-lm, or fairseq-train)")
    config = (checkpoint.get("cfg") or {}).get("model")
    if not isinstance(config, dict) or "num_experts" not in config:
        raise SettingError(f"{source} is no checkpoint of a switch_lm: it does not say how many experts it has")
    return checkpoint, config


def main(argv: Sequence[str] | None = None) -> int:
    """The command alma-grow."""
    parser = argparse.ArgumentParser(prog="alma-grow", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, metavar="CHECKPOINT", help="saved after a validation, which ranks experts")
    parser.add_argument("target", type=Path, metavar="OUT", help="the grown checkpoint")
    parser.add_argument("--experts", type=int, required=True, help="how many to add to every mixture")
    parser.add_argument("--router", choices=["copy", "tree"], default="copy", help="copy: the paper's; tree: exact")
    parser.add_argument("--noise", type=float, default=0.01, help="of the new router rows, relative to the old")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    arguments = parser.parse_args(argv)
    try:
        # Drawn with another seed at each growth: twins of twins would be moved the same way twice.
        seed = arguments.seed * 1000 + num_experts(arguments.source)
        grow_checkpoint(arguments.source, arguments.target, arguments.experts, arguments.router, arguments.noise, seed)
    except (AlmaError, OSError) as error:
        print(f"alma-grow: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.target}: train on with --finetune-from-model and the new --num-experts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
