"""Any language model of fairseq, with the part of switch_lm's interface that training and evaluation use."""

from typing import Any

import torch
from fairseq.models import FairseqLanguageModel
from torch import Tensor
from torch.nn import functional as F

from fairseq_alma.core.errors import SettingError
from fairseq_alma.models.switch_lm import SwitchLanguageModel

SCORES_AT_ONCE = 1 << 27
"""Largest number of scores (of a word at a position) that an evaluation has in memory, unless one sequence has more."""


class _ScoresTargets:
    """Adds the arguments `nll_of` and `per_token` of `SwitchDecoder.forward` to the forward pass of another model."""

    mixtures: tuple[()] = ()

    def forward(
        self, src_tokens: Tensor, nll_of: Tensor | None = None, per_token: bool = False,
        has_padding: bool | None = None, **arguments: Any,
    ) -> Any:  # fmt: skip
        if nll_of is None:
            return super().forward(src_tokens, **arguments)  # type: ignore[misc]
        dictionary = self.decoder.dictionary  # type: ignore[attr-defined]
        arguments.pop("src_lengths", None)
        rows = len(src_tokens)
        if not torch.is_grad_enabled():
            rows = max(1, SCORES_AT_ONCE // (src_tokens.size(1) * len(dictionary)))
        nll = []
        for tokens, target in zip(src_tokens.split(rows), nll_of.split(rows), strict=True):
            scores, *_ = super().forward(tokens, **arguments)  # type: ignore[misc]
            scores = scores.flatten(0, 1).float()
            nll.append(F.cross_entropy(scores, target.flatten(), ignore_index=dictionary.pad(), reduction="none"))
        nll_T = torch.cat(nll)
        return nll_T if per_token else nll_T.sum(), {"mixtures": [], "token_mask": None}


def with_targets(model: Any) -> Any:
    """Let a language model of fairseq compute the negative log-likelihood of targets, as switch_lm models do.

    Its class becomes a subclass of its class, so its weights keep their names, and fairseq finds what it expects.

    Raises:
        SettingError: if it is not a language model that scores all words.
    """
    if isinstance(model, SwitchLanguageModel | _ScoresTargets):
        return model
    if not isinstance(model, FairseqLanguageModel):
        raise SettingError(f"{type(model).__name__} is no FairseqLanguageModel: choose another arch=")
    if getattr(model.decoder, "adaptive_softmax", None) is not None:
        raise SettingError("an adaptive softmax does not score all words, which a perplexity needs: leave it out")
    model.__class__ = type(type(model).__name__, (_ScoresTargets, type(model)), {})
    return model
