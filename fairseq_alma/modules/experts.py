"""Compute the feed-forward networks of the experts, in each of the ways in which a plan lays out their rows."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fairseq_alma.modules.dispatch import Plan

# Dimensions: S rows, E experts, C rows of each expert, D model width, F hidden width of an expert.


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of E feed-forward networks with hidden width F, stacked. All have one type."""

    fc1_weight: Tensor
    """[E, F, D]"""
    fc1_bias: Tensor
    """[E, F]"""
    fc2_weight: Tensor
    """[E, D, F]"""
    fc2_bias: Tensor
    """[E, D]"""


def run_experts(x_SD: Tensor, plan: Plan, weights: ExpertWeights, dropout: float = 0.0) -> Tensor:
    """Return the outputs of the experts for their rows, [S, D].

    Args:
        x_SD: inputs of the experts (see to_rows), of the type of the weights.
        plan: the return value of plan_dispatch.
        weights: the weights of the experts.
        dropout: dropout probability after the ReLU.
    """
    if plan.way == "slots":
        return _run_slots(x_SD, weights, dropout)
    if plan.way == "grouped":
        return _run_grouped(x_SD, plan.load_E, weights, dropout)
    assert plan.counts is not None
    # Use unbind instead of w[e], because the backward pass of unbind writes each gradient once. The backward pass of
    # w[e] would add E tensors of the full size that are mostly zeros.
    stacked = (weights.fc1_weight, weights.fc1_bias, weights.fc2_weight, weights.fc2_bias)
    parts = [
        F.linear(F.dropout(F.relu(F.linear(x, fc1, b1)), dropout), fc2, b2)
        for x, fc1, b1, fc2, b2 in zip(x_SD.split(plan.counts), *(w.unbind(0) for w in stacked), strict=True)
        if len(x)
    ]
    return torch.cat(parts) if parts else x_SD  # torch.cat needs a tensor even if there is no row


def _run_slots(x_SD: Tensor, weights: ExpertWeights, dropout: float) -> Tensor:
    """Return the outputs [S, D] of experts that have S / E rows each, with one batched matrix product per layer."""
    num_experts = len(weights.fc1_weight)
    x_ECD = x_SD.view(num_experts, len(x_SD) // num_experts, x_SD.size(1))
    h_ECF = torch.baddbmm(weights.fc1_bias.unsqueeze(1), x_ECD, weights.fc1_weight.transpose(1, 2)).relu()
    h_ECF = F.dropout(h_ECF, dropout)
    return torch.baddbmm(weights.fc2_bias.unsqueeze(1), h_ECF, weights.fc2_weight.transpose(1, 2)).flatten(0, 1)


def _run_grouped(x_SD: Tensor, load_E: Tensor, weights: ExpertWeights, dropout: float) -> Tensor:
    """Return the outputs [S, D] of experts that have `load_E` rows each, with one grouped product per layer."""
    end_E = load_E.cumsum(0).to(torch.int32)
    # The bias of each row is selected by a product with a matrix of zeros and ones, [S, E]. The gradient of such a
    # product is fast, whereas S additions at only E indices would have to wait for each other.
    row_S = torch.arange(len(x_SD), device=x_SD.device).unsqueeze(1)
    is_expert_SE = ((row_S < end_E) & (row_S >= end_E - load_E)).to(x_SD.dtype)
    h_SF = F.grouped_mm(x_SD, weights.fc1_weight.transpose(1, 2), offs=end_E) + is_expert_SE @ weights.fc1_bias
    h_SF = F.dropout(h_SF.relu(), dropout)
    return F.grouped_mm(h_SF, weights.fc2_weight.transpose(1, 2), offs=end_E) + is_expert_SE @ weights.fc2_bias
