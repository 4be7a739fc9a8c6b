"""The Switch Transformer language model: a decoder whose every other layer is a mixture of experts."""

from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import (
    FairseqDecoder,
    FairseqLanguageModel,
    register_model,
    register_model_architecture,
)
from omegaconf import II
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_alma.core.errors import SettingError
from fairseq_alma.modules.output_loss import summed_nll
from fairseq_alma.modules.switch_feed_forward import MixtureOutput, SwitchFeedForward

# B sequences of L tokens, H heads, D model width, V words.


@dataclass
class SwitchLanguageModelConfig(FairseqDataclass):
    """Sizes belong to the arch; the defaults here are those of switch_lm_base."""

    decoder_layers: int = field(default=6, metadata={"help": "number of layers; layers 2, 4, ... are mixtures"})
    decoder_embed_dim: int = field(default=512, metadata={"help": "model width"})
    decoder_ffn_embed_dim: int = field(default=2048, metadata={"help": "hidden width of a feed-forward network"})
    decoder_attention_heads: int = field(default=8, metadata={"help": "attention heads"})
    learned_positions: int = field(default=1024, metadata={"help": "longest input, in tokens"})
    dropout: float = field(default=0.1, metadata={"help": "dropout on embeddings and on what each sublayer adds"})
    attention_dropout: float = field(default=0.0, metadata={"help": "dropout on attention weights"})
    activation_dropout: float = field(default=0.0, metadata={"help": "dropout after the ReLU"})
    num_experts: int = field(default=4, metadata={"help": "experts in each mixture"})
    capacity_factor: float = field(
        default=1.0,
        metadata={
            "help": "training: an expert takes this times an even share of the tokens of a forward pass on one rank; "
            "0: no limit"
        },
    )
    eval_capacity_factor: float = field(
        default=0.0,
        metadata={"help": "the same in evaluation; 0, no limit, makes scores independent of the batch"},
    )
    router_jitter: float = field(
        default=0.0, metadata={"help": "training: router inputs are multiplied by U(1 - jitter, 1 + jitter)"}
    )
    checkpoint_activations: bool = field(
        default=False, metadata={"help": "recompute each layer in the backward pass: less memory, more time"}
    )
    tokens_per_sample: int = II("task.tokens_per_sample")


@register_model("switch_lm", dataclass=SwitchLanguageModelConfig)
class SwitchLanguageModel(FairseqLanguageModel):
    """Decoder-only, pre-norm, learned positions, tied embeddings, top-1 experts."""

    @classmethod
    def build_model(cls, cfg: SwitchLanguageModelConfig, task) -> "SwitchLanguageModel":
        if cfg.tokens_per_sample > cfg.learned_positions:
            raise SettingError(
                f"--tokens-per-sample {cfg.tokens_per_sample} is longer than --learned-positions "
                f"{cfg.learned_positions}: shorten the first or raise the second"
            )
        if cfg.decoder_embed_dim % cfg.decoder_attention_heads:
            raise SettingError(
                f"--decoder-embed-dim {cfg.decoder_embed_dim} must be a multiple of "
                f"--decoder-attention-heads {cfg.decoder_attention_heads}"
            )
        try:
            return cls(SwitchDecoder(cfg, task.source_dictionary))
        except ValueError as error:  # sizes that the mixtures refuse
            raise SettingError(str(error)) from error

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Bring a saved model to this form, and tell one of other sizes before torch lists every tensor of it.

        Raises:
            SettingError: layers, widths, words or experts differ from this model's.
        """
        super().upgrade_state_dict_named(state_dict, name)
        own = self.state_dict()
        for key in own.keys() - state_dict.keys():
            rows = key.removesuffix("split_E") + "weight"
            if key.endswith("router.split_E") and rows in state_dict:  # saved before routers had trees: they were flat
                state_dict[key] = torch.full((len(state_dict[rows]),), -1.0)
            elif key.endswith("version"):  # fairseq's average of the weights (--store-ema) leaves it out
                state_dict[key] = own[key]
        _refuse_other_sizes(state_dict, own)

    @property
    def mixtures(self) -> list[SwitchFeedForward]:
        """The mixtures, from the first layer to the last."""
        return [module for module in self.modules() if isinstance(module, SwitchFeedForward)]


def _refuse_other_sizes(saved: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    differing = [key for key in own if key in saved and saved[key].shape != own[key].shape]
    only_one_side = [*(own.keys() - saved.keys()), *(saved.keys() - own.keys())]
    if not differing and not only_one_side:
        return
    if not only_one_side and all("mixture." in k and saved[k].shape[1:] == own[k].shape[1:] for k in differing):
        there, here = len(saved[differing[0]]), len(own[differing[0]])
        raise SettingError(
            f"the checkpoint has {there} experts in each mixture, this model {here}: give --num-experts {there}"
            + (f", or add {here - there} with alma-grow first" if there < here else "; experts cannot be taken away")
        )
    found = [f"{key} is {list(saved[key].shape)} there, {list(own[key].shape)} here" for key in differing]
    found += [f"{key} is only {'here' if key in own else 'there'}" for key in sorted(only_one_side)]
    raise SettingError(
        f"the checkpoint is of a model of other sizes ({'; '.join(found[:2])}{' ...' if found[2:] else ''}): "
        f"give the --arch and the sizes it was trained with"
    )


class SwitchDecoder(FairseqDecoder):
    """Embeddings, layers, final norm, output words."""

    def __init__(self, cfg: SwitchLanguageModelConfig, dictionary):
        super().__init__(dictionary)
        dim = cfg.decoder_embed_dim
        self.pad = dictionary.pad()
        self.dropout = nn.Dropout(cfg.dropout)
        self.checkpoint_activations = cfg.checkpoint_activations
        # As in fairseq's transformer: without it what attention adds, alike for all tokens of a sequence, drowns a
        # token's own embedding; the untrained router then sends half of all tokens to one expert, and the tiny
        # model's perplexity after 150 updates was 352 in place of 241.
        self.embed_scale = dim**0.5
        self.embed_tokens = nn.Embedding(len(dictionary), dim, self.pad)
        self.embed_positions = nn.Embedding(cfg.learned_positions, dim)
        self.layers = nn.ModuleList(
            SwitchDecoderLayer(cfg, is_mixture=number % 2 == 0) for number in range(1, cfg.decoder_layers + 1)
        )
        self.layer_norm = nn.LayerNorm(dim)
        # Version of the layout of the expert weights in checkpoints: stacked [E, ...] per layer.
        self.register_buffer("version", torch.tensor([1.0]))
        nn.init.normal_(self.embed_tokens.weight, std=dim**-0.5)
        nn.init.zeros_(self.embed_tokens.weight[self.pad])
        nn.init.normal_(self.embed_positions.weight, std=dim**-0.5)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out=None,
        features_only: bool = False,
        nll_of: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Scores of the next word at each position.

        Args:
            prev_output_tokens: [B, L], padded on the right.
            features_only: return features [B, L, D] in place of scores [B, L, V].
            nll_of: [B, L] target words; return their summed negative log-likelihood (nats, padding left out)
                in place of scores. Here, not in the criterion, so that wrappers which shard or synchronise
                parameters see the output layer used inside forward.

        Returns:
            scores, and {"mixtures": one MixtureOutput a mixture layer, "token_mask": bool [B, L] of
            the tokens the mixtures saw, None when all}.
        """
        positions = torch.arange(prev_output_tokens.size(1), device=prev_output_tokens.device)
        x = self.embed_scale * self.embed_tokens(prev_output_tokens) + self.embed_positions(positions)
        x = self.dropout(x)
        # Padding must not take the place of a token in an expert, nor count in the balance loss.
        is_token = prev_output_tokens.ne(self.pad)
        token_mask = None if is_token.all() else is_token
        mixtures: list[MixtureOutput] = []
        for layer in self.layers:
            if self.checkpoint_activations and self.training:
                x, mixture = checkpoint(layer, x, token_mask, use_reentrant=False)
            else:
                x, mixture = layer(x, token_mask)
            if mixture is not None:
                mixtures.append(mixture)
        x = self.layer_norm(x)
        if nll_of is not None:
            x = summed_nll(x.flatten(0, 1), self.embed_tokens.weight, nll_of.flatten(), self.pad)
        elif not features_only:
            x = self.output_layer(x)
        return x, {"mixtures": mixtures, "token_mask": token_mask}

    def output_layer(self, features: Tensor) -> Tensor:
        """[..., D] to [..., V] with the tied embedding."""
        return F.linear(features, self.embed_tokens.weight)

    def max_positions(self) -> int:
        return self.embed_positions.num_embeddings


class SwitchDecoderLayer(nn.Module):
    """Pre-norm attention, then a feed-forward network or a mixture of them, each around a residual."""

    def __init__(self, cfg: SwitchLanguageModelConfig, is_mixture: bool):
        super().__init__()
        dim, ffn_dim = cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim
        self.self_attn = CausalSelfAttention(dim, cfg.decoder_attention_heads, cfg.attention_dropout)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.final_layer_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(cfg.dropout)
        self.mixture = None
        if is_mixture:
            self.mixture = SwitchFeedForward(
                dim,
                ffn_dim,
                cfg.num_experts,
                cfg.capacity_factor,
                cfg.eval_capacity_factor,
                cfg.router_jitter,
                cfg.activation_dropout,
            )
        else:
            self.fc1, self.fc2 = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
            self.activation_dropout = nn.Dropout(cfg.activation_dropout)
            for linear in (self.fc1, self.fc2):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, token_mask: Tensor | None) -> tuple[Tensor, MixtureOutput | None]:
        """x: [B, L, D]; token_mask: bool [B, L], None when every position is a token."""
        x = x + self.dropout(self.self_attn(self.self_attn_layer_norm(x)))
        h = self.final_layer_norm(x)
        if self.mixture is None:
            h = self.fc2(self.activation_dropout(F.relu(self.fc1(h))))
            return x + self.dropout(h), None
        if token_mask is None:
            output = self.mixture(h.flatten(0, 1))
            h = output.y_TD.view_as(h)
        else:
            output = self.mixture(h[token_mask])
            h = torch.zeros_like(h, dtype=output.y_TD.dtype).masked_scatter(token_mask.unsqueeze(-1), output.y_TD)
        return x + self.dropout(h), output


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token sees itself and what came before."""

    def __init__(self, dim: int, num_heads: int, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        for weight in self.qkv_proj.weight.chunk(3):
            nn.init.xavier_uniform_(weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.qkv_proj.bias)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, L, D/H]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out_proj(y.transpose(1, 2).flatten(2))


def _set_sizes(args, layers: int, dim: int, heads: int) -> None:
    sizes = {
        "decoder_layers": layers,
        "decoder_embed_dim": dim,
        "decoder_ffn_embed_dim": 4 * dim,
        "decoder_attention_heads": heads,
    }
    for name, size in sizes.items():
        setattr(args, name, getattr(args, name, size))


@register_model_architecture("switch_lm", "switch_lm_tiny")
def switch_lm_tiny(args) -> None:
    """For laptops and tests: 4 layers, width 128."""
    _set_sizes(args, layers=4, dim=128, heads=4)


@register_model_architecture("switch_lm", "switch_lm_base")
def switch_lm_base(args) -> None:
    """Nearest config to the paper's base model: 38.9M parameters and 6.30M more an expert at 50k words."""
    _set_sizes(args, layers=6, dim=512, heads=8)


@register_model_architecture("switch_lm", "switch_lm_large")
def switch_lm_large(args) -> None:
    """Nearest config to the paper's large model: 96.1M parameters and 28.34M more an expert at 50k words."""
    _set_sizes(args, layers=12, dim=768, heads=12)
