"""Check that the tensors in a checkpoint have the sizes of the model into which they are loaded."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fairseq_alma.core.errors import SettingError
from fairseq_alma.modules.switch_feed_forward import EXPERT_WEIGHTS, SwitchFeedForward


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each tensor in the state dict of a model.

    The state dict contains all experts, also if they are spread over ranks.
    """
    shapes = {name: tensor.shape for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    for name, module in model.named_modules():
        if isinstance(module, SwitchFeedForward):
            for weight in EXPERT_WEIGHTS:
                key = f"{name}.{weight}"
                shapes[key] = torch.Size([module.num_experts, *shapes[key][1:]])
    return shapes


def refuse_other_sizes(saved: Mapping[str, Tensor], own: Mapping[str, torch.Size]) -> None:
    """Raise SettingError if the tensors in a checkpoint, `saved`, do not fit a model with the shapes `own` (see
    `shapes_of`).
    """
    differing = [key for key in own if key in saved and saved[key].shape != own[key]]
    only_one_side = [*(own.keys() - saved.keys()), *(saved.keys() - own.keys())]
    if not differing and not only_one_side:
        return
    # If only the numbers of experts differ, tell the user which option or command solves the problem.
    if not only_one_side and all("mixture." in k and saved[k].shape[1:] == own[k][1:] for k in differing):
        num_saved, num_own = len(saved[differing[0]]), own[differing[0]][0]
        advice = f"add {num_own - num_saved} with alma-grow first" if num_saved < num_own else None
        raise SettingError(
            f"the checkpoint has {num_saved} experts in each mixture, but this model has {num_own}: "
            f"give --num-experts {num_saved}" + (f", or {advice}" if advice else "; experts cannot be removed")
        )
    found = [
        f"{key} has shape {list(saved[key].shape)} in the checkpoint, {list(own[key])} in this model"
        for key in differing
    ]
    found += [f"{key} is only in {'this model' if key in own else 'the checkpoint'}" for key in sorted(only_one_side)]
    raise SettingError(
        f"the checkpoint belongs to a model with other sizes ({'; '.join(found[:2])}{' ...' if found[2:] else ''}): "
        f"give the --arch and the sizes with which the checkpoint was trained"
    )
