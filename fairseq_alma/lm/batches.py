"""Functions that divide the sequences of an update among devices and forward passes.

They choose the number of sequences in a forward pass if the setting `batch_size` is not given.
"""

from typing import Any

from fairseq_alma.core.errors import SettingError
from fairseq_alma.lm.settings import LanguageModelSettings

TOKENS_PER_PASS_ON_CPU = 4096
"""Maximum number of tokens in a forward pass on a CPU. More tokens need more memory and are not faster."""

SHARE_OF_MEMORY = 0.8
"""Largest fraction of a GPU's memory that training may need, according to the estimate of `bytes_of_training`."""


def usable_devices(settings: LanguageModelSettings, num_devices: int, num_nodes: int = 1) -> int:
    """Return the largest number of devices, at most `num_devices`, among which an update can be divided evenly.

    Args:
        settings: settings of the run.
        num_devices: number of devices on all machines together.
        num_nodes: number of machines that train the member. Each of them uses the same number of devices.

    Raises:
        SettingError: if the number of sequences in an update is not a multiple of the setting `batch_size`, or cannot
            be divided evenly among the machines, or among a number of devices that is a multiple of the setting
            `expert_parallel`.
    """
    batch_size, expert_parallel = settings.batch_size or 1, settings.expert_parallel
    for number in range(num_devices, 0, -num_nodes):
        if settings.sequences_per_update % (batch_size * number) == 0 and number % expert_parallel == 0:
            return number
    if expert_parallel > 1:
        devices = f"{num_devices} device{'s' * (num_devices > 1)}"
        if num_devices < expert_parallel:
            raise SettingError(
                f"expert_parallel={expert_parallel} needs at least {expert_parallel} devices for each member, but a "
                f"member is trained on {devices}: lower expert_parallel=, or use more devices"
            )
        raise SettingError(
            f"expert_parallel={expert_parallel}: an update must be divided evenly among {expert_parallel} devices, or "
            f"a multiple of this number (a member is trained on {devices}), but sequences_per_update="
            f"{settings.sequences_per_update} is not a multiple of {expert_parallel} x batch_size={batch_size}: change "
            f"batch_size= or sequences_per_update="
        )
    if num_nodes > 1 and settings.sequences_per_update % batch_size == 0:
        raise SettingError(
            f"sequences_per_update={settings.sequences_per_update} must be a multiple of {num_nodes} nodes times "
            f"batch_size={batch_size}: change sequences_per_update=, batch_size= or the number of nodes"
        )
    raise SettingError(
        f"sequences_per_update={settings.sequences_per_update} must be a multiple of batch_size={batch_size}: change "
        f"batch_size=, or set it to null"
    )


def sequences_per_pass(
    settings: LanguageModelSettings, model: Any, vocabulary: int, num_devices: int, memory: int | None
) -> int:
    """Return the number of sequences in a forward pass on one device.

    This is the setting `batch_size` if it is given. Otherwise, it is the largest number that meets two conditions:

    - All forward passes of an update have the same number of sequences.
    - On a GPU, the memory that `bytes_of_training` estimates is at most the fraction SHARE_OF_MEMORY of `memory`. On a
      CPU, a forward pass has at most TOKENS_PER_PASS_ON_CPU tokens.

    If no number meets both conditions, the result is 1.

    Args:
        settings: settings of the run.
        model: fairseq's configuration of the model. It contains the sizes of the layers.
        vocabulary: number of entries in the dictionary.
        num_devices: number of devices that train the member, as returned by `usable_devices`.
        memory: memory of the smallest of the devices, in bytes; None for a CPU.
    """
    if settings.batch_size is not None:
        return settings.batch_size
    on_device = settings.sequences_per_update // num_devices
    for sequences in range(on_device, 1, -1):
        if on_device % sequences == 0:
            tokens = sequences * settings.tokens_per_sample
            if memory is None:
                fits = tokens <= TOKENS_PER_PASS_ON_CPU
            else:
                needed = bytes_of_training(
                    model, vocabulary, tokens, settings.expert_parallel, settings.average is not None, num_devices
                )
                fits = needed <= SHARE_OF_MEMORY * memory
            if fits:
                return sequences
    return 1


def bytes_of_training(
    model: Any,
    vocabulary: int,
    tokens: int,
    expert_parallel: int = 1,
    averages: bool = False,
    num_devices: int = 1,
) -> int:
    """Return an estimate of the memory, in bytes, that the training of a model needs on each device.

    A parameter needs 18 bytes: the weight, the gradient and two Adam averages in float32, and a copy of the weight in
    bfloat16. An average of the weights needs 4 bytes more. On several devices, a parameter that all of them have needs
    4 bytes more for the sum of its gradients. With precision=bfloat16, a layer of width D needs about 80 D bytes for
    each token if its feed-forward network has width 4 D: about 20 D bfloat16 numbers, and the residual stream,
    normalized values and gradients in float32. With precision=float32, a layer needs twice as much. The logits
    are computed in chunks, for which 1 GB is added.

    Args:
        model: fairseq's configuration of the model. It contains the sizes of the layers.
        vocabulary: number of entries in the dictionary.
        tokens: number of tokens in a forward pass.
        expert_parallel: number of devices over which the experts are spread.
        averages: whether the weights are averaged (the setting `average`).
        num_devices: number of devices that train the model.
    """
    dim, ffn_dim, layers = model.decoder_embed_dim, model.decoder_ffn_embed_dim, model.decoder_layers
    feed_forward = 2 * dim * ffn_dim
    num_mixtures = layers // 2
    parameters = (vocabulary + model.learned_positions) * dim + layers * (4 * dim * dim)
    num_experts = -(-model.num_experts // expert_parallel)
    parameters += (layers - num_mixtures) * feed_forward
    in_experts = num_mixtures * num_experts * feed_forward
    summed = 0 if num_devices == 1 else parameters + (in_experts if expert_parallel == 1 else 0)
    parameters += in_experts
    bytes_per_number = 2 if model.precision == "bfloat16" else 4
    # With a capacity factor above 1, the layout of the experts' rows has that many times the rows on a GPU.
    ffn_rows = layers - num_mixtures + num_mixtures * max(1.0, model.capacity_factor)
    # If the number of experts is not a multiple of the number of devices, some devices process more rows.
    ffn_rows *= expert_parallel * num_experts / model.num_experts
    activations = int(bytes_per_number * (layers * 24 * dim + ffn_rows * 4 * ffn_dim) * tokens)
    if model.checkpoint_activations:
        activations = layers * 4 * dim * tokens + activations // layers
    return (22 if averages else 18) * parameters + 4 * summed + activations + 2**30
