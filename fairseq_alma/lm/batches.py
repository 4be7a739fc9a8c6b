"""How an update is divided among devices and forward passes, if the setting `batch_size` leaves it to alma-lm."""

from typing import Any

from fairseq_alma.core.errors import SettingError
from fairseq_alma.lm.settings import LanguageModelSettings

TOKENS_PER_PASS_ON_CPU = 4096
"""Maximum number of tokens in a forward pass on a CPU. More tokens need more memory and are not faster."""

SHARE_OF_MEMORY = 0.8
"""Part of a GPU's memory that a training may fill, according to the estimate of `bytes_of_training`."""


def usable_devices(settings: LanguageModelSettings, num_devices: int) -> int:
    """Return the largest number of devices, at most `num_devices`, among which an update can be divided evenly.

    Raises:
        SettingError: if an update is not a multiple of the setting `batch_size`.
    """
    batch_size = settings.batch_size or 1
    for number in range(num_devices, 0, -1):
        if settings.sequences_per_update % (batch_size * number) == 0:
            return number
    raise SettingError(
        f"sequences_per_update={settings.sequences_per_update} must be a multiple of batch_size={batch_size}: change "
        f"batch_size=, or set it to null"
    )


def sequences_per_pass(
    settings: LanguageModelSettings, model: Any, vocabulary: int, num_devices: int, memory: int | None
) -> int:
    """Return the number of sequences in a forward pass on one device.

    This is the setting `batch_size` if it is given. Otherwise, it is the largest number for which the estimated memory
    is available and which divides the update evenly.

    Args:
        settings: settings of the run.
        model: fairseq's configuration of the model, with the sizes.
        vocabulary: number of words in the dictionary.
        num_devices: number of devices that train the member, as `usable_devices` returned it.
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
                fits = bytes_of_training(model, vocabulary, tokens) <= SHARE_OF_MEMORY * memory
            if fits:
                return sequences
    return 1


def bytes_of_training(model: Any, vocabulary: int, tokens: int) -> int:
    """Return an estimate of the memory that a training needs, in bytes, with `tokens` tokens in a forward pass.

    A parameter needs 18 bytes: weight, gradient and two averages of Adam in float32, and a copy in bfloat16. A layer of
    width D needs about 80 D bytes for a token, if its feed-forward network has width 4 D: about 20 D numbers of two
    bytes, and the residual stream, norms and gradients in float32. In float32, it needs twice as much. The logits are
    computed in chunks, for which 1 GB is added.
    """
    dim, ffn_dim, layers = model.decoder_embed_dim, model.decoder_ffn_embed_dim, model.decoder_layers
    feed_forward = 2 * dim * ffn_dim
    num_mixtures = layers // 2
    parameters = (vocabulary + model.learned_positions) * dim + layers * (4 * dim * dim)
    parameters += (layers - num_mixtures + num_mixtures * model.num_experts) * feed_forward
    bytes_per_number = 2 if model.precision == "bfloat16" else 4
    activations = layers * bytes_per_number * (24 * dim + 4 * ffn_dim) * tokens
    if model.checkpoint_activations:
        activations = layers * 4 * dim * tokens + activations // layers
    return 18 * parameters + activations + 2**30
