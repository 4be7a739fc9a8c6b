"""The Switch Transformer language model, a decoder in which every second layer contains a mixture of experts."""

from argparse import Namespace
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import (
    FairseqIncrementalDecoder,
    FairseqLanguageModel,
    register_model,
    register_model_architecture,
)
from omegaconf import II
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fairseq_alma.core.errors import SettingError
from fairseq_alma.models.numpy_step import NumpyStep
from fairseq_alma.modules.expert_parallel import ExpertGroup, keep_own_experts
from fairseq_alma.modules.key_value_cache import KeyValueCache, LayerCache
from fairseq_alma.modules.output_loss import summed_nll, token_nll
from fairseq_alma.modules.switch_feed_forward import EXPERT_WEIGHTS, MixtureOutput, SwitchFeedForward

# Dimensions: B sequences of L tokens, H attention heads, D model width, V words in the vocabulary. With a cache, S is
# the number of tokens so far, and the L tokens are the new ones.


@dataclass
class SwitchLanguageModelConfig(FairseqDataclass):
    """Options of the model. `--arch` sets the sizes. The default sizes are the sizes of switch_lm_base."""

    decoder_layers: int = field(default=6, metadata={"help": "number of layers; layers 2, 4, ... are mixtures"})
    decoder_embed_dim: int = field(default=512, metadata={"help": "model width"})
    decoder_ffn_embed_dim: int = field(
        default=2048, metadata={"help": "hidden width of a feed-forward network or of an expert"}
    )
    decoder_attention_heads: int = field(default=8, metadata={"help": "number of attention heads"})
    learned_positions: int = field(default=1024, metadata={"help": "maximum number of tokens in an input sequence"})
    dropout: float = field(
        default=0.1, metadata={"help": "dropout on the embeddings and on the output of each sublayer"}
    )
    attention_dropout: float = field(default=0.0, metadata={"help": "dropout on attention weights"})
    activation_dropout: float = field(default=0.0, metadata={"help": "dropout after the ReLU"})
    num_experts: int = field(default=4, metadata={"help": "number of experts in each mixture"})
    capacity_factor: float = field(
        default=1.0,
        metadata={
            "help": "in training, an expert processes at most capacity_factor x (tokens per rank / num_experts) tokens "
            "in a forward pass; 0: no limit"
        },
    )
    eval_capacity_factor: float = field(
        default=0.0,
        metadata={"help": "capacity factor in evaluation; with 0 (no limit), scores do not depend on the batching"},
    )
    router_jitter: float = field(
        default=0.0,
        metadata={"help": "in training, router inputs are multiplied by random factors from U(1 - jitter, 1 + jitter)"},
    )
    checkpoint_activations: bool = field(
        default=False,
        metadata={"help": "recompute each layer in the backward pass, which saves memory but needs more time"},
    )
    precision: ChoiceEnum(["float32", "bfloat16"]) = field(  # type: ignore[valid-type]
        default="float32",
        metadata={"help": "precision of matrix products and attention; parameters are float32 in both cases"},
    )
    expert_parallel: int = field(
        default=1,
        metadata={
            "help": "number of ranks over which the experts of each mixture are spread; the number of ranks must be a "
            "multiple of it. It does not change checkpoints"
        },
    )
    compile_batch: int = field(
        default=0,
        metadata={
            "help": "compile the layers with torch.compile, for training on batches of this many full sequences; 0: do "
            "not compile"
        },
    )
    tokens_per_sample: int = II("task.tokens_per_sample")


@register_model("switch_lm", dataclass=SwitchLanguageModelConfig)
class SwitchLanguageModel(FairseqLanguageModel):
    """A decoder-only language model with pre-norm, learned positions, tied embeddings and top-1 mixtures of experts."""

    @classmethod
    def build_model(cls, cfg: SwitchLanguageModelConfig, task: Any) -> "SwitchLanguageModel":
        """Return a new model, whose vocabulary is the source_dictionary of `task`.

        Raises:
            SettingError: if the sizes are invalid or do not fit together, or if the number of ranks is not a multiple
                of --expert-parallel.
        """
        if cfg.tokens_per_sample > cfg.learned_positions:
            raise SettingError(
                f"--tokens-per-sample {cfg.tokens_per_sample} is longer than --learned-positions "
                f"{cfg.learned_positions}: lower --tokens-per-sample or raise --learned-positions"
            )
        if cfg.decoder_embed_dim % cfg.decoder_attention_heads:
            raise SettingError(
                f"--decoder-embed-dim {cfg.decoder_embed_dim} must be a multiple of "
                f"--decoder-attention-heads {cfg.decoder_attention_heads}"
            )
        size = cfg.expert_parallel
        try:
            model = cls(SwitchDecoder(cfg, task.source_dictionary, ExpertGroup(size) if size > 1 else None))
        except ValueError as error:
            # SwitchFeedForward raises ValueError for an invalid size. Convert it to SettingError, because the commands
            # of this package print a SettingError as one message, without a traceback.
            raise SettingError(str(error)) from error
        if size > 1:
            keep_own_experts(model)
        return model

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Check that a state dict fits this model. fairseq calls this method before it loads the state dict.

        Without this check, torch would report an error that lists every tensor whose size differs. If the state dict
        has no `version` entry, it is added in place. Raise SettingError if layers, widths, vocabulary or experts
        differ.
        """
        super().upgrade_state_dict_named(state_dict, name)
        own = shapes_of(self)
        for key, buffer in self.named_buffers():
            # fairseq leaves `version` out of a moving average of the weights (option --store-ema). Add it, because
            # refuse_other_sizes would otherwise report it as missing. Compare only the end of the key, because the key
            # starts with names of modules, as in "decoder.version".
            if key.endswith("version"):
                state_dict.setdefault(key, buffer)
        refuse_other_sizes(state_dict, own)

    @property
    def mixtures(self) -> list[SwitchFeedForward]:
        """The mixtures, from the first layer to the last."""
        return [module for module in self.modules() if isinstance(module, SwitchFeedForward)]


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
    """Raise SettingError if the tensors in a checkpoint, `saved`, do not have the shapes of a model, `own`."""
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


class SwitchDecoder(FairseqIncrementalDecoder):
    """The network of the language model: embeddings, layers, final layer norm and output layer.

    Args:
        cfg: options of the model.
        dictionary: the fairseq dictionary, with V words.
        group: the ranks over which the experts are spread. None: this rank has all experts.
    """

    def __init__(self, cfg: SwitchLanguageModelConfig, dictionary: Any, group: ExpertGroup | None = None):
        super().__init__(dictionary)
        dim = cfg.decoder_embed_dim
        self.pad = dictionary.pad()
        self.dropout = cfg.dropout
        self.checkpoint_activations = cfg.checkpoint_activations
        self.precision = str(cfg.precision)
        # Multiply the embeddings by sqrt(D), as in fairseq's transformer. Otherwise, the attention output, which is
        # similar for all tokens of a sequence, is larger than the token's embedding. The untrained router then sends
        # half of all tokens to one expert. In a test of the tiny model with 150 updates, the perplexity was
        # 352 without the factor and 241 with it.
        self.embed_scale = dim**0.5
        self.embed_tokens = nn.Embedding(len(dictionary), dim, self.pad)
        self.embed_positions = nn.Embedding(cfg.learned_positions, dim)
        self.layers = nn.ModuleList(
            SwitchDecoderLayer(cfg, number % 2 == 0, group) for number in range(1, cfg.decoder_layers + 1)
        )
        self.compiled_shape = (cfg.compile_batch, cfg.tokens_per_sample) if cfg.compile_batch else None
        """Numbers of sequences and tokens of the batches for which the layers are compiled; None: they never are."""
        if cfg.compile_batch:
            # Layer by layer, because the layers have only two kinds of code: so the compiler runs twice, however many
            # layers there are.
            for layer in self.layers:
                layer.compile(dynamic=False)
        self.layer_norm = nn.LayerNorm(dim)
        # Version of the format in which checkpoints store expert weights. Version 1: tensors [E, ...] for E experts.
        self.register_buffer("version", torch.tensor([1.0]))
        nn.init.normal_(self.embed_tokens.weight, std=dim**-0.5)
        nn.init.zeros_(self.embed_tokens.weight[self.pad])
        nn.init.normal_(self.embed_positions.weight, std=dim**-0.5)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: None = None,
        incremental_state: dict[str, Any] | None = None,
        features_only: bool = False,
        nll_of: Tensor | None = None,
        per_token: bool = False,
        has_padding: bool | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the scores (logits) of the next word at each position, and the outputs of the mixtures.

        Args:
            prev_output_tokens: input tokens, int64 [B, L]. Padding may be anywhere, also between tokens, where text was
                masked: no token attends to it, and it does not count in the positions.
            encoder_out, unused: part of fairseq's interface; ignored.
            incremental_state: a dict in which the decoder keeps the keys and values of earlier calls; empty at the
                first call. `prev_output_tokens` contains all tokens so far, and only the new ones are computed and
                returned. Experts have no capacity limit then, so that the scores depend neither on the batch nor on
                the cache.
            features_only: whether to return features [B, L, D] instead of scores.
            nll_of: target words, int64 [B, L]. If given, the summed negative log-likelihood of the targets (a scalar,
                in nats, without padding) is returned instead of scores. It is computed here and not in the criterion,
                because fairseq's wrappers for several devices must see that `forward` uses the output layer.
            per_token: whether to return the negative log-likelihood of each target instead of the sum: float32 [B * L],
                0 for padding. Without gradients only.
            has_padding: whether `prev_output_tokens` contains padding. None: the tokens are searched for padding,
                which makes the host wait for a CUDA device.

        Returns:
            Scores [B, L, V], and a dict with three entries. "mixtures" is a list with the MixtureOutput of each
            mixture. "token_mask" is bool [B, L], False for padding, and None if there is no padding. The MixtureOutputs
            contain only the tokens that are not padding. "attn" is None; fairseq's generator needs it. With
            `incremental_state`, "mixtures" is empty.
        """
        with self._autocast(prev_output_tokens.device.type):
            x, extra = self._forward(prev_output_tokens, has_padding, incremental_state)
            if nll_of is not None:
                arguments = x.flatten(0, 1), self.embed_tokens.weight, nll_of.flatten(), self.pad
                if per_token:
                    x = token_nll(*arguments)
                else:
                    x = summed_nll(*arguments, compiled=self._is_compiled(prev_output_tokens, extra["token_mask"]))
            elif not features_only:
                x = self.output_layer(x)
            return x, extra

    def _autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Return a context manager that turns on autocast to bfloat16. With precision float32, it does nothing."""
        # Turn on autocast in the model, and not in the task or the criterion, for two reasons. First, training,
        # validation and alma-eval then compute with the same precision. Second, on a GPU, fairseq turns autocast off
        # before it calls the criterion.
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(device_type, dtype=torch.bfloat16)

    def _forward(
        self, prev_output_tokens: Tensor, has_padding: bool | None, incremental_state: dict[str, Any] | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the features [B, L, D] and the dict that `forward` returns, in the current autocast context."""
        cache = None if incremental_state is None else self._cache(incremental_state)
        past = 0 if cache is None else cache.length
        prev_output_tokens = prev_output_tokens[:, past:]
        # Do not send padding to the experts, because padding would use up their capacity and count in the balance loss.
        token_mask = None
        if has_padding is None or has_padding:
            token_mask = prev_output_tokens.ne(self.pad)
            if has_padding is None and token_mask.all():
                token_mask = None
        positions, attends = self._attended(prev_output_tokens, token_mask, cache)
        x = self.embed_scale * self.embed_tokens(prev_output_tokens) + self.embed_positions(positions)
        x = _dropped(x, self.dropout if self.training else 0.0)
        is_compiled = self._is_compiled(prev_output_tokens, token_mask)
        if is_compiled:
            for layer in self.layers:
                if isinstance(layer.mixture, SwitchFeedForward):
                    layer.mixture.router.splits()  # reads a tensor at the first call, which is not compiled
        mixtures: list[MixtureOutput] = []
        if cache is not None and past > 0 and x.size(1) == 1 and (step := self._numpy_step(cache, x)):
            return step(x, attends, cache.layers), {"mixtures": mixtures, "token_mask": token_mask, "attn": None}
        for number, layer in enumerate(self.layers):
            run = layer if is_compiled or self.compiled_shape is None else layer.forward
            if self.checkpoint_activations and self.training:
                x, mixture = checkpoint(run, x, token_mask, attends, use_reentrant=False)
            elif cache is not None:
                x, mixture = run(x, token_mask, attends, cache.layers[number])
            else:
                x, mixture = run(x, token_mask, attends)
            if mixture is not None:
                mixtures.append(mixture)
        return self.layer_norm(x), {"mixtures": mixtures, "token_mask": token_mask, "attn": None}

    def _numpy_step(self, cache: KeyValueCache, x: Tensor) -> NumpyStep | None:
        """Return what computes the layers for embeddings of single tokens, [B, 1, D]; None if the layers do."""
        if x.device.type != "cpu" or self.precision != "float32" or self.training or x.requires_grad:
            return None
        if cache.step is None:
            mixtures = [layer.mixture for layer in self.layers if isinstance(layer.mixture, SwitchFeedForward)]
            if not any(mixture.shard or mixture.router.splits() for mixture in mixtures):
                cache.step = NumpyStep(self.layers, self.layer_norm)
        return cache.step

    def _cache(self, incremental_state: dict[str, Any]) -> KeyValueCache:
        """Return the cache that `forward` keeps in `incremental_state`. The first call makes it."""
        found = self.get_incremental_state(incremental_state, "cache")
        if found is None:
            found = KeyValueCache(len(self.layers))
            self.set_incremental_state(incremental_state, "cache", found)
        return found

    def reorder_incremental_state(self, incremental_state: dict[str, Any], new_order: Tensor) -> None:
        """Replace the sequences in `incremental_state` by those with the indices `new_order`, int64 [B'].

        fairseq calls this method in a beam search. It also removes sequences.
        """
        self._cache(incremental_state).select(new_order)

    def _attended(
        self, tokens: Tensor, token_mask: Tensor | None, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the positions of new tokens, int64 [L] or [B, L], and the tokens to which they attend.

        These are a bool mask [L, S] or [B, 1, L, S], or None: each token attends to itself and to all earlier tokens.
        With padding on the right, no mask is needed, because no token attends to later ones.

        Args:
            tokens: the new tokens, int64 [B, L].
            token_mask: False for padding, bool [B, L]; None if there is none.
            cache: what is known of earlier tokens; None if there are none.
        """
        num_sequences, length = tokens.shape
        past, is_token = 0, None
        if cache is not None:
            past, is_token = cache.length, cache.extend(num_sequences, length, token_mask)
        elif token_mask is not None and bool((token_mask[:, 1:] & ~token_mask[:, :-1]).any()):
            is_token = token_mask  # padding on the left, or masked text
        positions = torch.arange(past, past + length, device=tokens.device)
        if is_token is None and (past == 0 or length == 1):
            return positions, None
        every = torch.arange(past + length, device=tokens.device)
        attends = every <= positions.unsqueeze(1)
        if is_token is None:
            return positions, attends
        # Padding attends to itself, because the softmax of nothing would not be a number.
        attends = attends & is_token.unsqueeze(1) | (every == positions.unsqueeze(1))
        return (is_token.cumsum(1) - 1).clamp(min=0)[:, past:], attends.unsqueeze(1)

    def _is_compiled(self, tokens: Tensor, token_mask: Tensor | None) -> bool:
        """Return whether the layers and the loss are computed by compiled code.

        Each shape would be compiled by itself. So batches of another shape, such as the last one of an epoch, and those
        of an evaluation are computed without.
        """
        return self.training and token_mask is None and tuple(tokens.shape) == self.compiled_shape

    def output_layer(self, features: Tensor) -> Tensor:
        """Return the scores [..., V] for features [..., D]. The weights are shared with the input embedding."""
        with self._autocast(features.device.type):
            return F.linear(features, self.embed_tokens.weight)

    def store_for_single_tokens(self) -> None:
        """Change the order in which the weights of the output layer are stored, but not the weights.

        On a CPU, the scores of a single token then take a third of the time if the weights are not in its cache
        (V = 8000, D = 128), and those of many tokens the same time.
        """
        self.embed_tokens.weight.data = self.embed_tokens.weight.data.t().contiguous().t()

    def max_positions(self) -> int:
        """Return the maximum number of tokens in an input sequence."""
        return self.embed_positions.num_embeddings


class SwitchDecoderLayer(nn.Module):
    """A decoder layer: self-attention, then a feed-forward network or a mixture of experts. Both are pre-norm and
    residual.

    Args:
        cfg: options of the model.
        is_mixture: whether the layer has a mixture of experts instead of a feed-forward network.
        group: the ranks over which the experts are spread. None: this rank has all experts.
    """

    def __init__(self, cfg: SwitchLanguageModelConfig, is_mixture: bool, group: ExpertGroup | None = None):
        super().__init__()
        dim, ffn_dim = cfg.decoder_embed_dim, cfg.decoder_ffn_embed_dim
        self.self_attn = CausalSelfAttention(dim, cfg.decoder_attention_heads, cfg.attention_dropout)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.final_layer_norm = nn.LayerNorm(dim)
        self.dropout = cfg.dropout
        self.mixture: SwitchFeedForward | None = None
        if is_mixture:
            self.mixture = SwitchFeedForward(
                dim,
                ffn_dim,
                cfg.num_experts,
                cfg.capacity_factor,
                cfg.eval_capacity_factor,
                cfg.router_jitter,
                cfg.activation_dropout,
                group,
            )
        else:
            self.fc1, self.fc2 = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
            self.activation_dropout = cfg.activation_dropout
            for linear in (self.fc1, self.fc2):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)

    def forward(
        self, x: Tensor, token_mask: Tensor | None, attends: Tensor | None = None, cache: LayerCache | None = None
    ) -> tuple[Tensor, MixtureOutput | None]:
        """Return the output of the layer [B, L, D] and the MixtureOutput (None without a mixture, or with a cache).

        `token_mask` is bool [B, L], False for padding; None if there is no padding. For `attends` and `cache`, see
        CausalSelfAttention.
        """
        dropout = self.dropout if self.training else 0.0
        x = x + _dropped(self.self_attn(self.self_attn_layer_norm(x), attends, cache), dropout)
        h = self.final_layer_norm(x)
        if self.mixture is None:
            h = self.fc2(_dropped(F.relu(self.fc1(h)), self.activation_dropout if self.training else 0.0))
            return x + _dropped(h, dropout), None
        x_TD = h.flatten(0, 1) if token_mask is None else h[token_mask]
        output = self.mixture(x_TD) if cache is None else None
        y_TD = self.mixture.predict(x_TD) if output is None else output.y_TD
        if token_mask is None:
            h = y_TD.view_as(h)
        else:
            h = torch.zeros_like(h, dtype=y_TD.dtype).masked_scatter(token_mask.unsqueeze(-1), y_TD)
        return x + _dropped(h, dropout), output


class CausalSelfAttention(nn.Module):
    """Multi-head self-attention of width D in which each token attends only to itself and to earlier tokens."""

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

    def forward(self, x: Tensor, attends: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """Return the attention output [B, L, D].

        Args:
            x: inputs of the tokens, [B, L, D].
            attends: the tokens to which each token attends, bool [L, S] or [B, 1, L, S]. None: itself and all earlier
                ones.
            cache: the keys and values of earlier tokens, to which those of `x` are added; None if there are none.
        """
        # Queries, keys and values: [B, 3, H, L, D/H].
        qkv = self.qkv_proj(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(0, 2, 3, 1, 4)
        if x.device.type == "cpu" and qkv.dtype != torch.float32:
            # On a CPU, compute attention in float32. In bfloat16, the backward pass would take three times as long for
            # sequences of 128 tokens, and only slightly less time for sequences of 512 tokens.
            with torch.autocast("cpu", enabled=False):
                y = self._attention(qkv.float(), attends, cache)
        else:
            y = self._attention(qkv, attends, cache)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def _attention(self, qkv: Tensor, attends: Tensor | None, cache: LayerCache | None) -> Tensor:
        """Return the weighted sums of the values, [B, H, L, D/H]. See `forward`."""
        is_causal = attends is None
        if cache is None:
            q, k, v = qkv.unbind(1)
        else:
            q, (k, v) = qkv[:, 0], cache.extend(qkv[:, 1:]).unbind(1)
            is_causal = is_causal and q.size(2) == k.size(2)  # otherwise there is one new token, which attends to all
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attends, dropout_p=dropout, is_causal=is_causal)


def _dropped(x: Tensor, dropout: float) -> Tensor:
    """Return `x` after dropout with the probability `dropout`. A call of nn.Dropout takes long where nothing drops."""
    return F.dropout(x, dropout) if dropout else x


def _set_sizes(args: Namespace, layers: int, dim: int, heads: int) -> None:
    """Set the model sizes that were not given on the command line."""
    sizes = {
        "decoder_layers": layers,
        "decoder_embed_dim": dim,
        "decoder_ffn_embed_dim": 4 * dim,
        "decoder_attention_heads": heads,
    }
    for name, size in sizes.items():
        setattr(args, name, getattr(args, name, size))


@register_model_architecture("switch_lm", "switch_lm_tiny")
def switch_lm_tiny(args: Namespace) -> None:
    """Set the sizes of the tiny model, which is meant for laptops and tests: 4 layers of width 128."""
    _set_sizes(args, layers=4, dim=128, heads=4)


@register_model_architecture("switch_lm", "switch_lm_base")
def switch_lm_base(args: Namespace) -> None:
    """Set the sizes of the base model, chosen as the closest to the base model of the paper.

    With a dictionary of 50k words, the model has 38.9M parameters outside the experts. One expert in each
    of the 3 mixtures, 3 experts together, has 6.30M parameters.
    """
    _set_sizes(args, layers=6, dim=512, heads=8)


@register_model_architecture("switch_lm", "switch_lm_large")
def switch_lm_large(args: Namespace) -> None:
    """Set the sizes of the large model, chosen as the closest to the large model of the paper.

    With a dictionary of 50k words, the model has 96.1M parameters outside the experts. One expert in each
    of the 6 mixtures, 6 experts together, has 28.34M parameters.
    """
    _set_sizes(args, layers=12, dim=768, heads=12)
