"""Configurations of the models that alma-export writes, for Hugging Face's transformers."""

from typing import Any

from transformers import PreTrainedConfig


class AlmaConfig(PreTrainedConfig):
    """Configuration of a decoder in which every second layer is a mixture of experts with top-1 routing.

    `router_splits` describes the routers that are trees: for each mixture, the expert from which each expert was split,
    or -1. None: all routers are flat.
    """

    model_type = "alma"
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012

    vocab_size: int = 50264
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    max_position_embeddings: int = 512
    num_experts: int = 4
    num_experts_per_tok: int = 1
    router_splits: list[list[int]] | None = None
    hidden_act: str = "relu"
    layer_norm_eps: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = 2
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = True


class AlmaEnsembleConfig(PreTrainedConfig):
    """Configuration of an ensemble, whose members are in the folders member_1, member_2, ...

    The sizes are those of all members together, as far as a cache of keys and values depends on them.
    """

    model_type = "alma_ensemble"
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012

    member_types: list[str] | None = None
    """`model_type` of each member: "alma", or "opt" for a member without mixtures."""
    vocab_size: int = 50264
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 512
    use_cache: bool = True
    bos_token_id: int | None = 2
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any):
        self.member_types = self.member_types or []
        super().__post_init__(**kwargs)
