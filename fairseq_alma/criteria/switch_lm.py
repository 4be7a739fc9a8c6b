"""The fairseq criterion switch_lm: next-token cross entropy plus the losses that balance the load of the experts."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor

from fairseq_alma.core.errors import SettingError
from fairseq_alma.modules.switch_feed_forward import MixtureOutput


@dataclass
class SwitchLanguageModelCriterionConfig(FairseqDataclass):
    """Options of the criterion switch_lm."""

    balance_loss_weight: float = field(
        default=0.01,
        metadata={"help": "weight of the load-balancing loss of each mixture (alpha in the Switch paper)"},
    )
    router_z_loss_weight: float = field(
        default=0.0, metadata={"help": "weight of the router z-loss (ST-MoE, equation 5) of each mixture"}
    )


@register_criterion("switch_lm", dataclass=SwitchLanguageModelCriterionConfig)
class SwitchLanguageModelCriterion(FairseqCriterion):
    """Cross entropy plus the weighted balance losses and router z-losses of all mixtures.

    The criterion logs these values:

    - `loss`: cross entropy plus balance losses and z-losses, in bits per token.
    - `nll_loss`: cross entropy in bits per token, as in fairseq.
    - `ppl`: perplexity, computed from the cross entropy only. Give fairseq-train the option
      `--best-checkpoint-metric ppl`. The default of this option is `loss`, which also contains the balance losses and
      z-losses.
    - `balance_loss`: mean of the balance losses of the mixtures. It is 1 if the load is even.
    - `router_z_loss`: mean of the z-losses of the mixtures.
    - `overflow_percent`: percentage of tokens that were dropped because their expert was full.
    - `load_entropy_bits`: entropy of the experts' load in bits, mean over the mixtures. It is log2(E) if the load
      of the E experts is even, and 0 if one expert gets all tokens.
    - Only if the experts are spread over ranks: `busiest_rank_load`, the number of tokens that the experts of the
      busiest rank process, divided by the mean over the ranks, mean over the mixtures; and `all_to_all_seconds`, the
      time that a rank spends in the exchange of tokens for each forward and backward pass, mean over the ranks.

    In validation, the loss of each token is added to the total of the expert that processed the token
    (SwitchFeedForward.charge_validation_loss). Growth copies the experts with the largest totals.

    Args:
        task: the fairseq task, which provides the dictionary.
        balance_loss_weight: weight of the balance loss (alpha in the Switch paper).
        router_z_loss_weight: weight of the router z-loss.

    Raises:
        SettingError: if a weight is negative.
    """

    def __init__(self, task: Any, balance_loss_weight: float, router_z_loss_weight: float):
        super().__init__(task)
        if balance_loss_weight < 0 or router_z_loss_weight < 0:
            raise SettingError("--balance-loss-weight and --router-z-loss-weight must not be negative")
        self.charge_experts = True
        """Whether to add the validation loss of each token to the total of the expert that processed the token. The
        task sets this to False for a batch that another rank (training process) scores too, which would count twice."""
        self.balance_loss_weight = balance_loss_weight
        self.router_z_loss_weight = router_z_loss_weight

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the loss (in nats, summed over tokens), the number of tokens, and the values to log.

        Args:
            model: a SwitchLanguageModel, possibly in a fairseq wrapper.
            sample: a batch of B sequences of L tokens. Its "target" is int64 [B, L].
            reduce: part of fairseq's interface; ignored.
        """
        target, num_tokens = sample["target"], sample["ntokens"]
        loss_T = None
        if self.training:
            nll, extra = model(**sample["net_input"], nll_of=target)
        else:
            loss_T, extra = model(**sample["net_input"], nll_of=target, per_token=True)
            nll = loss_T.sum()
        logging_output = {
            "nll_loss": nll.detach(),
            "ntokens": num_tokens,
            "nsentences": target.size(0),
            "sample_size": num_tokens,
        }
        loss = nll
        mixtures = extra.get("mixtures", [])
        if mixtures:
            balance = torch.stack([m.routing.balance_loss for m in mixtures]).sum()
            z_loss = torch.stack([m.routing.z_loss for m in mixtures]).sum()
            loss = nll + num_tokens * (self.balance_loss_weight * balance + self.router_z_loss_weight * z_loss)
            logging_output |= {
                "balance_loss": balance.detach() / len(mixtures) * num_tokens,
                "router_z_loss": z_loss.detach() / len(mixtures) * num_tokens,
                "routed": sum(m.routing.expert_T.numel() for m in mixtures),
                # Store tensors and not Python numbers, so that the host need not wait for the device. fairseq reads the
                # values only when it logs. Use float64, because it represents all these counts exactly, even after
                # reduce_metrics multiplies them by 100.
                "overflow": torch.stack([m.num_dropped for m in mixtures]).sum().double(),
                "load_entropy": sum(_entropy_bits(m.plan.load_E) for m in mixtures) / len(mixtures) * num_tokens,
            }
            if shard := _unwrapped(model).mixtures[0].shard:
                kept_ME = torch.stack([m.plan.load_E - m.plan.dropped_E for m in mixtures])
                logging_output |= {
                    "busiest": shard.group.busiest_rank_load(kept_ME) * num_tokens,
                    # The time of this forward pass and of the last backward pass.
                    "all_to_all_seconds": shard.group.take_seconds(),
                    "num_passes": 1,
                }
            if loss_T is not None and self.charge_experts:
                self._charge_experts(model, mixtures, loss_T.detach(), extra["token_mask"])
        logging_output["loss"] = loss.detach()
        return loss, num_tokens, logging_output

    @staticmethod
    def _charge_experts(model: Any, mixtures: list[MixtureOutput], loss_T: Tensor, token_mask: Tensor | None) -> None:
        """In every mixture, add the loss of each token to the total of the expert that processed the token."""
        if token_mask is not None:
            loss_T = loss_T[token_mask.flatten()]
        for module, output in zip(_unwrapped(model).mixtures, mixtures, strict=True):
            module.charge_validation_loss(output, loss_T)

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the metrics over all forward passes and ranks (training processes).

        `ppl` is not rounded, so that the best checkpoint is found even if two perplexities are almost equal.
        """

        def total(key: str) -> Any:
            return sum(log.get(key, 0) for log in logging_outputs)

        num_tokens = total("ntokens") or 1  # 0 if all text is masked
        metrics.log_scalar("loss", total("loss") / num_tokens / math.log(2), num_tokens, round=3)
        metrics.log_scalar("nll_loss", total("nll_loss") / num_tokens / math.log(2), num_tokens)
        metrics.log_derived("ppl", lambda meters: _perplexity(meters["nll_loss"].avg))
        routed = total("routed")
        if routed:
            metrics.log_scalar("balance_loss", total("balance_loss") / num_tokens, num_tokens, round=4)
            metrics.log_scalar("router_z_loss", total("router_z_loss") / num_tokens, num_tokens, round=4)
            metrics.log_scalar("overflow_percent", 100 * total("overflow") / routed, routed, round=2)
            metrics.log_scalar("load_entropy_bits", total("load_entropy") / num_tokens, num_tokens, round=3)
        num_passes = total("num_passes")
        if num_passes:
            metrics.log_scalar("busiest_rank_load", total("busiest") / num_tokens, num_tokens, round=3)
            metrics.log_scalar("all_to_all_seconds", total("all_to_all_seconds") / num_passes, num_passes, round=5)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True, so that fairseq sums the logging outputs over ranks."""
        return True


def _unwrapped(model: Any) -> Any:
    """Return the model without the wrappers that fairseq adds if several devices train it."""
    # Unwrap the model repeatedly, because fairseq uses two nested wrappers.
    while hasattr(model, "module"):
        model = model.module
    return model


def _perplexity(bits_per_token: Any) -> float:
    """Return the perplexity for a cross entropy in bits per token; infinity if it is too large for a float."""
    bits = float(bits_per_token)
    return 2.0**bits if bits < 1000 else math.inf


def _entropy_bits(load_E: Tensor) -> Tensor:
    """Return the entropy of the load of E experts in bits: log2(E) for even load, 0 if one expert gets all tokens."""
    share_E = load_E.float() / load_E.sum().clamp(min=1)
    return -torch.xlogy(share_E, share_E).sum() / math.log(2)
