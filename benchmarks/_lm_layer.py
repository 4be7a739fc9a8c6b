"""The layers that lm_layer.py compares: the dense network, our mixture, and mixtures of other libraries.

Each maker takes a Case and returns a function from the inputs x [T, D] to (outputs [T, D], balance loss or None), and
the module with the parameters. It raises ImportError if the library is not installed.
"""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairseq_alma.modules.dispatch import Way
from fairseq_alma.modules.switch_feed_forward import SwitchFeedForward

SEQUENCE = 512
"""Number of tokens in a sequence, for layers that limit the capacity of each sequence."""

Layer = tuple[Callable[[Tensor], tuple[Tensor, Tensor | None]], nn.Module]


@dataclass(frozen=True)
class Case:
    """One comparison."""

    device: str
    precision: str
    model_dim: int
    num_experts: int
    num_tokens: int

    @property
    def ffn_dim(self) -> int:
        """Hidden width of the dense network and of each expert."""
        return 4 * self.model_dim


def dense(case: Case) -> Layer:
    """Return a feed-forward network with the size of one expert."""
    layer = nn.Sequential(nn.Linear(case.model_dim, case.ffn_dim), nn.ReLU(), nn.Linear(case.ffn_dim, case.model_dim))
    return lambda x: (layer(x), None), layer


def ours(factor: float, way: Way | None = None) -> Callable[[Case], Layer]:
    """Return the maker of our mixture with a capacity factor and a way to lay out the rows (None: the default)."""

    def make(case: Case) -> Layer:
        layer = SwitchFeedForward(case.model_dim, case.ffn_dim, case.num_experts, factor)
        layer.way = way

        def run(x_TD: Tensor) -> tuple[Tensor, Tensor]:
            output = layer(x_TD)
            return output.y_TD, output.routing.balance_loss

        return run, layer

    return make


def one_hot_einsum(case: Case) -> Layer:
    """Return a mixture that moves the tokens by products with one-hot tensors [T, E, C], as GShard does.

    The tokens are divided into groups of SEQUENCE tokens, because the size of the one-hot tensors and the time of the
    products are quadratic in the number of tokens of a group. The weights are stacked as in our mixture.
    """
    layer = SwitchFeedForward(case.model_dim, case.ffn_dim, case.num_experts)
    capacity = -(-SEQUENCE // case.num_experts)

    def run(x_TD: Tensor) -> tuple[Tensor, Tensor]:
        routing = layer.router(x_TD)
        x_GSD = x_TD.view(-1, SEQUENCE, case.model_dim)
        one_hot_GSE = F.one_hot(routing.expert_T, case.num_experts).view(len(x_GSD), SEQUENCE, -1)
        rank_GSE = one_hot_GSE.cumsum(1) * one_hot_GSE - 1  # -1: not this expert
        move_GSEC = F.one_hot(rank_GSE.clamp(0, capacity - 1), capacity)
        move_GSEC = (move_GSEC * ((rank_GSE >= 0) & (rank_GSE < capacity)).unsqueeze(-1)).to(x_TD.dtype)
        rows = torch.einsum("gsec,gsd->egcd", move_GSEC, x_GSD).flatten(1, 2)
        h = torch.baddbmm(layer.fc1_bias.unsqueeze(1), rows, layer.fc1_weight.transpose(1, 2)).relu()
        y = torch.baddbmm(layer.fc2_bias.unsqueeze(1), h, layer.fc2_weight.transpose(1, 2))
        weighted = move_GSEC * routing.probability_T.view(len(x_GSD), SEQUENCE, 1, 1)
        y_GSD = torch.einsum("gsec,egcd->gsd", weighted, y.unflatten(1, (-1, capacity)).to(weighted.dtype))
        return y_GSD.flatten(0, 1), routing.balance_loss

    return run, layer


def transformers_layer(case: Case) -> Layer:
    """Return the mixture of Hugging Face's Switch Transformer, top-1, with capacity factor 1 in each sequence."""
    # transformers imports torchaudio if it finds it, and fails if that was built for another CUDA version.
    sys.modules.setdefault("torchaudio", None)  # type: ignore[arg-type]
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    layer = SwitchTransformersSparseMLP(
        SwitchTransformersConfig(
            d_model=case.model_dim,
            d_ff=case.ffn_dim,
            num_experts=case.num_experts,
            expert_capacity=-(-SEQUENCE // case.num_experts),
            dropout_rate=0.0,
            router_jitter_noise=0.0,
        )
    )

    def run(x_TD: Tensor) -> tuple[Tensor, None]:
        y = layer(x_TD.view(-1, SEQUENCE, case.model_dim))
        return (y[0] if isinstance(y, tuple) else y).flatten(0, 1), None

    return run, layer


def fairscale_layer(case: Case) -> Layer:
    """Return the mixture of fairscale. Its only gate is top-2, so it computes two experts for each token."""
    from fairscale.nn import MOELayer, Top2Gate

    if not torch.distributed.is_initialized():
        backend, store = ("nccl" if case.device == "cuda" else "gloo"), tempfile.mkstemp()[1]
        torch.distributed.init_process_group(backend, init_method=f"file://{store}_", rank=0, world_size=1)
    experts = nn.ModuleList(dense(case)[1] for _ in range(case.num_experts))
    layer = MOELayer(Top2Gate(case.model_dim, case.num_experts), experts)

    def run(x_TD: Tensor) -> tuple[Tensor, Tensor]:
        y = layer(x_TD.view(-1, SEQUENCE, case.model_dim))
        return y.flatten(0, 1), layer.l_aux

    return run, layer


def scattermoe_layer(case: Case) -> Layer:
    """Return the mixture of ScatterMoE, dropless, with our router."""
    from scattermoe.mlp import MLP

    from fairseq_alma.modules.router import Router

    router = Router(case.model_dim, case.num_experts)
    layer = MLP(case.model_dim, case.ffn_dim, case.num_experts, top_k=1, activation=nn.ReLU())

    def run(x_TD: Tensor) -> tuple[Tensor, Tensor]:
        routing = router(x_TD)
        # Its kernels need inputs and weights of one type, so autocast must have cast both.
        y = layer(x_TD, routing.probability_T.unsqueeze(1), routing.expert_T.unsqueeze(1))
        return y, routing.balance_loss

    return run, nn.ModuleList([router, layer])


def megablocks_layer(case: Case) -> Layer:
    """Return the mixture of MegaBlocks, dropless, top-1, which computes in bfloat16."""
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    layer = dMoE(
        Arguments(
            hidden_size=case.model_dim,
            ffn_hidden_size=case.ffn_dim,
            moe_num_experts=case.num_experts,
            moe_top_k=1,
            bf16=case.precision == "bfloat16",
            fp16=False,
            device=case.device,
        )
    )

    def run(x_TD: Tensor) -> tuple[Tensor, None]:
        y: Any = layer(x_TD.view(-1, SEQUENCE, case.model_dim))
        return (y[0] if isinstance(y, tuple) else y).flatten(0, 1), None

    return run, layer


LAYERS: dict[str, Callable[[Case], Layer]] = {
    "ours, capacity 1": ours(1.0),
    "ours, dropless": ours(0.0),
    "HF SwitchTransformersSparseMLP, capacity 1": transformers_layer,
    "fairscale MOELayer (top-2), capacity 2": fairscale_layer,
    "one-hot einsum, capacity 1": one_hot_einsum,
}
CUDA_LAYERS: dict[str, Callable[[Case], Layer]] = {
    "ours, capacity 1, split": ours(1.0, "split"),
    "ours, dropless, split": ours(0.0, "split"),
    "ours, dropless, grouped": ours(0.0, "grouped"),
    "ScatterMoE, dropless": scattermoe_layer,
    "MegaBlocks dMoE, dropless": megablocks_layer,
}
