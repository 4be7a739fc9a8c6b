"""The models that alma-export writes, for Hugging Face's transformers.

AlmaForCausalLM is a decoder with pre-norm, learned positions and tied embeddings, in which every second layer has a
mixture of experts instead of a feed-forward network. Each token is sent to one expert (top-1 routing). There is no
limit on the number of tokens of an expert, so an output depends neither on the batch nor on the cache.

AlmaEnsembleForCausalLM predicts the mean of the probabilities of several such models.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, GenerationMixin, OPTForCausalLM, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_alma import AlmaConfig, AlmaEnsembleConfig

CACHE_BEFORE = ("past_key_values", "5.40.0")
"""The earlier name of `cache`, and the version of transformers whose models no longer warn of it."""

# Dimensions: B sequences of L tokens, T tokens of all sequences, H attention heads, D model width, F hidden width of an
# expert, E experts, V words in the vocabulary.


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the attention output [B, L, H, D / H] and the attention weights [B, H, L, K], for K keys."""
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = F.dropout(scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype), dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class AlmaAttention(nn.Module):
    """Multi-head self-attention in which each token attends only to itself and to earlier tokens."""

    def __init__(self, config: AlmaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, cache: Cache | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, L, D] for inputs [B, L, D], and the attention weights if they were computed."""
        query, key, value = (
            proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.out_proj(output.flatten(2)), weights


class AlmaRouter(nn.Module):
    """Selects one expert for each token. It computes in float32.

    A flat router takes the expert with the largest of the E logits, and its softmax probability as the weight of the
    output. In a tree, an expert that was split from another one takes no part in the softmax. Instead, a token that is
    at the other expert moves to it if its logit is positive. Splits are applied in the order of the experts.
    """

    def __init__(self, config: AlmaConfig, split_from: list[int] | None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.splits = [(parent, new) for new, parent in enumerate(split_from or []) if parent >= 0]

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits [T, E], and weight and index of each token's expert, [T, 1], for inputs [T, D]."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            logits = F.linear(hidden_states.float(), self.weight.float())
            candidates = logits
            if self.splits:
                candidates = logits.clone()
                candidates[:, [new for _, new in self.splits]] = -torch.inf
            weight, index = candidates.softmax(dim=-1).max(dim=-1, keepdim=True)
        for parent, new in self.splits:
            index = torch.where((index == parent) & (logits[:, new : new + 1] > 0), new, index)
        return logits, weight, index


@use_experts_implementation(has_gate=False, has_bias=True)
class AlmaExperts(nn.Module):
    """The feed-forward networks of E experts, with stacked weights."""

    def __init__(self, config: AlmaConfig):
        super().__init__()
        self.num_experts = config.num_experts
        num_experts, dim, ffn_dim = config.num_experts, config.hidden_size, config.intermediate_size
        self.up_proj = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.up_proj_bias = nn.Parameter(torch.zeros(num_experts, ffn_dim))
        self.down_proj = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        self.down_proj_bias = nn.Parameter(torch.zeros(num_experts, dim))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted output of each token's experts, [T, D].

        Args:
            hidden_states: inputs [T, D].
            top_k_index: experts of each token, int64 [T, K] for K experts per token.
            top_k_weights: factors for the outputs of these experts, [T, K].
        """
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            hidden = self.act_fn(F.linear(hidden_states[token], self.up_proj[expert], self.up_proj_bias[expert]))
            hidden = F.linear(hidden, self.down_proj[expert], self.down_proj_bias[expert])
            hidden = hidden * top_k_weights[token, place, None].to(hidden.dtype)
            output.index_add_(0, token, hidden.to(output.dtype))
        return output


class AlmaMixture(nn.Module):
    """A router and its experts."""

    def __init__(self, config: AlmaConfig, split_from: list[int] | None):
        super().__init__()
        self.router = AlmaRouter(config, split_from)
        self.experts = AlmaExperts(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the outputs [B, L, D] for inputs [B, L, D]."""
        flat = hidden_states.flatten(0, 1)
        _, weights, index = self.router(flat)
        return self.experts(flat, index, weights).view_as(hidden_states)


class AlmaDecoderLayer(GradientCheckpointingLayer):
    """Self-attention, then a feed-forward network or a mixture of experts. Both are pre-norm and residual."""

    def __init__(self, config: AlmaConfig, layer_idx: int):
        super().__init__()
        self.dropout = config.dropout
        self.self_attn = AlmaAttention(config, layer_idx)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        # Layers 2, 4, ... have mixtures.
        self.mixture: AlmaMixture | None = None
        if layer_idx % 2:
            split_from = config.router_splits[layer_idx // 2] if config.router_splits else None
            self.mixture = AlmaMixture(config, split_from)
        else:
            self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
            self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
            self.act_fn, self.activation_dropout = ACT2FN[config.hidden_act], config.activation_dropout

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the output [B, L, D] for inputs [B, L, D]."""
        attended, _ = self.self_attn(self.self_attn_layer_norm(hidden_states), **kwargs)
        hidden_states = hidden_states + F.dropout(attended, self.dropout, self.training)
        hidden = self.final_layer_norm(hidden_states)
        if self.mixture is None:
            hidden = self.fc2(F.dropout(self.act_fn(self.fc1(hidden)), self.activation_dropout, self.training))
        else:
            hidden = self.mixture(hidden)
        return hidden_states + F.dropout(hidden, self.dropout, self.training)


class AlmaPreTrainedModel(PreTrainedModel):
    """Base class of the models."""

    config: AlmaConfig
    config_class = AlmaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AlmaDecoderLayer"]  # noqa: RUF012
    _supports_attention_backend = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": AlmaDecoderLayer,
        "attentions": AlmaAttention,
        "router_logits": OutputRecorder(AlmaRouter, index=0),
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, AlmaExperts):
            for weight in (module.up_proj, module.down_proj):
                init.normal_(weight, std=std)
            for bias in (module.up_proj_bias, module.down_proj_bias):
                init.zeros_(bias)
        elif isinstance(module, AlmaRouter):
            init.normal_(module.weight, std=std)


class AlmaModel(AlmaPreTrainedModel):
    """Embeddings, layers and the final layer norm."""

    def __init__(self, config: AlmaConfig):
        super().__init__(config)
        self.embed_scale = config.hidden_size**0.5
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(AlmaDecoderLayer(config, number) for number in range(config.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    @deprecate_kwarg(*CACHE_BEFORE, new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the features [B, L, D] of tokens [B, L].

        Args:
            input_ids: tokens, int64 [B, L].
            attention_mask: 0 for padding, otherwise 1, [B, number of earlier tokens in the cache + L].
            position_ids: position of each token, int64 [B, L]. By default, the first token that is not padding has
                position 0.
            cache: keys and values of earlier tokens.
            inputs_embeds: embeddings [B, L, D] instead of `input_ids`. They are multiplied by sqrt(D).
            use_cache: whether to return a cache.
            kwargs: arguments of the attention function.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            start = cache.get_seq_length() if cache is not None else 0
            if attention_mask is not None and attention_mask.dim() == 2:
                position_ids = attention_mask.long().cumsum(dim=1)[:, start:] - 1
            else:
                position_ids = torch.arange(inputs_embeds.size(1), device=inputs_embeds.device)[None] + start
        mask = create_causal_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask, cache=cache
        )
        # Padding on the left has the position -1, for which there is no embedding. Its output is not used.
        positions = self.embed_positions(position_ids.clamp(min=0))
        hidden_states = self.embed_scale * inputs_embeds + positions
        hidden_states = F.dropout(hidden_states, self.config.dropout, self.training)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, attention_mask=mask, position_ids=position_ids, cache=cache, use_cache=use_cache,
                **kwargs,
            )  # fmt: skip
        return BaseModelOutputWithPast(last_hidden_state=self.final_layer_norm(hidden_states), cache=cache)


class AlmaForCausalLM(AlmaPreTrainedModel, GenerationMixin):
    """The model with an output layer, whose weights are shared with the input embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: AlmaConfig):
        super().__init__(config)
        self.model = AlmaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg(*CACHE_BEFORE, new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits [B, L, V] of the next token; with `labels`, also the mean loss in nats per token.

        `labels` are tokens [B, L], which are shifted here; -100 is ignored. `logits_to_keep` is the number of last
        positions whose logits are returned; 0: all. For the other arguments, see AlmaModel. The loss does not contain
        a loss that balances the experts.
        """
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=cache,
            inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, cache=outputs.cache, hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )  # fmt: skip


MEMBERS: dict[str, type[PreTrainedModel]] = {"alma": AlmaForCausalLM, "opt": OPTForCausalLM}
"""The class of a member of an ensemble, by the `model_type` of its configuration."""


class AlmaEnsembleForCausalLM(PreTrainedModel, GenerationMixin):
    """Predicts the mean of the probabilities of its members. The logits are the logarithms of this mean.

    Load it with `from_pretrained`, which loads each member from its own folder.
    """

    config: AlmaEnsembleConfig
    config_class = AlmaEnsembleConfig
    base_model_prefix = "members"
    _supports_attention_backend = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True

    def __init__(self, config: AlmaEnsembleConfig, members: list[Any]):
        super().__init__(config)
        self.members = nn.ModuleList(members)
        self.eval()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, subfolder: str = "", **kwargs: Any
    ) -> "AlmaEnsembleForCausalLM":
        """Load the ensemble. The arguments are those of `PreTrainedModel.from_pretrained`, for each member."""
        source = pretrained_model_name_or_path
        if not isinstance(config, AlmaEnsembleConfig):
            config = AlmaEnsembleConfig.from_pretrained(source, subfolder=subfolder)
        kwargs.pop("adapter_kwargs", None)
        members = [
            MEMBERS[kind].from_pretrained(source, *args, subfolder=str(Path(subfolder, f"member_{number}")), **kwargs)
            for number, kind in enumerate(config.member_types, start=1)
        ]
        ensemble = cls(config, members)
        # The members have none: it is that of the ensemble which says what is never chosen.
        names = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
        places = {name: kwargs[name] for name in names if name in kwargs}
        ensemble.generation_config = GenerationConfig.from_pretrained(source, subfolder=subfolder, **places)
        return ensemble

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Not supported: copy the folder from which the ensemble was loaded."""
        raise NotImplementedError("copy the folder of the ensemble, or call save_pretrained of each of its members")

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding of the first member. Each member has its own."""
        return self.members[0].get_input_embeddings()  # type: ignore[operator]

    @deprecate_kwarg(*CACHE_BEFORE, new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logarithms [B, L, V] of the mean probabilities. For the arguments, see AlmaForCausalLM."""
        if inputs_embeds is not None:
            raise ValueError("each member has embeddings of its own: give input_ids, not inputs_embeds")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None and cache.layer_class_to_replicate is not None:  # it gets its layers when they are used
            num_missing = self.config.num_hidden_layers - len(cache.layers)
            cache.layers += [cache.layer_class_to_replicate() for _ in range(num_missing)]
        parts: list[Tensor] = []
        first = 0
        for member in self.members:
            # The cache has the layers of all members, one member after the other.
            end: int = first + member.config.num_hidden_layers  # type: ignore[operator, union-attr, assignment]
            own = None if cache is None else Cache(layers=cache.layers[first:end])
            first = end
            output = member(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, cache=own,
                use_cache=use_cache, logits_to_keep=logits_to_keep, **kwargs,
            )  # fmt: skip
            parts.append(output.logits.log_softmax(dim=-1, dtype=torch.float32))
        logits = functools.reduce(torch.logaddexp, parts) - math.log(len(parts))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)


__all__ = ["AlmaEnsembleForCausalLM", "AlmaForCausalLM", "AlmaModel", "AlmaPreTrainedModel"]
