"""How much the experts of a language model would gain from training: gradients of the validation loss."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fairseq_alma.core.errors import StageError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.devices import default_devices
from fairseq_alma.evaluation.flops import count_training_flops
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.scoring import batches_of
from fairseq_alma.modules.switch_feed_forward import EXPERT_WEIGHTS, SwitchFeedForward

# Dimensions: E experts.

TOKENS_PER_BATCH = 4096
"""Number of tokens in one forward and backward pass. It changes the result only by rounding."""


@dataclass(frozen=True)
class ExpertUtilities:
    """The utility of every expert of a model, and the cost of measuring it."""

    utilities: dict[str, Tensor]
    """Utility of each expert, float64 [E], by the key prefix of the mixture, such as "decoder.layers.1.mixture."."""
    flops: int
    """FLOPs of the forward and backward passes."""


def measure_utilities(checkpoint: Path, stream: Path, device: torch.device | None = None) -> ExpertUtilities:
    """Return the utility of each expert: the squared norm of the gradient of the validation loss.

    The loss is the mean negative log-likelihood of all validation tokens, in nats, without the balance loss and without
    dropout. The gradient is that with respect to all weights and biases of the expert. Only the tokens that an expert
    processes contribute to it, so the utility contains the load: an expert without tokens has utility 0.

    A training step with a small learning rate lowers the loss in proportion to the squared norm of the gradient. So the
    utility says which experts would lower the loss most if more experts could learn from their tokens. It is the
    gradient-based score of Expert Upcycling (Dwivedi et al., 2026, arXiv 2604.19835; `gradient_squared` in the code of
    the authors). The authors take the gradient of a training batch, and by default only that of the first layer of each
    expert. Here it is that of the validation set, like the loss by which the paper ranks experts, and of the complete
    expert.

    Args:
        checkpoint: a checkpoint of a switch_lm model.
        stream: the stream folder. Only its validation set is read.
        device: device that computes the gradients. By default the first GPU, or the CPU if there is none.

    Raises:
        StreamError: if the stream or the checkpoint is missing or damaged, or has another dictionary.
        StageError: if a gradient is not finite.
    """
    device = device or default_devices()[0]
    try:
        return _measure(checkpoint, StreamFolder.open(stream), device)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # free the GPU memory for the training, which runs in another process


def _measure(checkpoint: Path, folder: StreamFolder, device: torch.device) -> ExpertUtilities:
    """See `measure_utilities`. When this function returns, no tensor of it is left on the device."""
    model, task = load_member(checkpoint, folder, device)
    mixtures = {f"{name}.": module for name, module in model.named_modules() if isinstance(module, SwitchFeedForward)}
    num_tokens = num_pairs = 0
    for source, target in batches_of(task, "valid", TOKENS_PER_BATCH):
        loss, _ = model(source.to(device), nll_of=target.to(device))
        loss.backward()
        num_tokens += target.numel()
        num_pairs += target.numel() * target.size(1)
    utilities = {}
    for prefix, mixture in mixtures.items():
        squares = [getattr(mixture, name).grad.double().square().flatten(1).sum(1) for name in EXPERT_WEIGHTS]
        utilities[prefix] = torch.stack(squares).sum(0).cpu() / num_tokens**2
        if not bool(utilities[prefix].isfinite().all()):
            raise StageError(
                f"the gradient of the validation loss of {checkpoint} is not finite: train again with a lower "
                f"learning rate"
            )
    return ExpertUtilities(utilities, count_training_flops(model).total(num_tokens, num_pairs))
