"""Use the language model of a run from Python: `fairseq_alma.load` returns a predictor that scores and continues texts.

import fairseq_alma as alma

predictor = alma.load("runs/sm_w1")
print(predictor.generate("It was", max_tokens=20, temperature=0)[0].text)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_alma.core.errors import SettingError, StreamError
from fairseq_alma.core.settings import nearest_key
from fairseq_alma.evaluation.devices import default_tokens_per_batch, parse_devices
from fairseq_alma.evaluation.members import find_members, load_model
from fairseq_alma.stream_tokenizer import StreamTokenizer

# Dimensions: B sequences, L tokens, T tokens of a text, V ids of the dictionary.

_LEAST_TEMPERATURE = 1e-30
"""A division of scores by less could overflow. With less, the most likely token is as good as certain."""
SEQUENCES_AT_ONCE = 32
"""Number of prompts that are continued together."""


@dataclass(frozen=True, repr=False)
class TextScore:
    """How well a text is predicted."""

    nats: np.ndarray
    """Negative log-likelihood of each token, in nats. float64 [T]."""
    num_bytes: int
    """Number of bytes of the text in UTF-8."""

    def __repr__(self) -> str:
        values = f"perplexity={self.perplexity:.6g}, bits_per_byte={self.bits_per_byte:.4g}"
        return f"TextScore({values}, num_tokens={self.num_tokens}, num_bytes={self.num_bytes})"

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return len(self.nats)

    @property
    def perplexity(self) -> float:
        """Perplexity per token; NaN for an empty text."""
        return float(np.exp(self.nats.mean())) if len(self.nats) else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Negative log-likelihood in bits, per byte of the text; NaN for an empty text. Tokenizers do not change it."""
        return float(self.nats.sum()) / math.log(2) / self.num_bytes if self.num_bytes else math.nan


@dataclass(frozen=True)
class Continuation:
    """What a model has written after a prompt."""

    prompt: str
    text: str
    """The text after the prompt."""
    ids: list[int]
    """The ids of its tokens. The last one is that of </s> if the model has ended the document."""


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen. For the values and the errors, see `LanguagePredictor.generate`."""

    max_tokens: int = 100
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    beam: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("max_tokens", self.max_tokens >= 1, "1 or more"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens={self.max_tokens}"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (the most probable token) or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, and at most 1 (all tokens)"),
            ("beam", self.beam >= 1, "1 or more"),
            ("seed", self.seed is None or self.seed >= 0, "0 or more"),
        ):
            if not is_valid:
                raise SettingError(f"{name}={getattr(self, name)}: give a number that is {expected}")
        if self.beam > 1 and (self.temperature, self.top_k, self.top_p) not in ((1.0, 0, 1.0), (0.0, 0, 1.0)):
            raise SettingError("beam= searches for the most probable text: leave out temperature, top_k and top_p")


class LanguagePredictor:
    """The models of a run, which predict together: the probability of a token is the mean of their probabilities.

    Args:
        members: the models, of the class SwitchLanguageModel.
        tokenizer: the tokenizer of the stream with which they were trained.
        window: number of tokens of the longest context that the models have seen in training (tokens_per_sample).
    """

    def __init__(self, members: Sequence[Any], tokenizer: StreamTokenizer, window: int):
        self.members = [member.eval() for member in members]
        self.tokenizer = tokenizer
        self.window = window
        for member in self.members if self.device.type == "cpu" else ():
            if hasattr(member.decoder, "store_for_single_tokens"):
                member.decoder.store_for_single_tokens()

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        return next(self.members[0].parameters()).device

    @torch.inference_mode()
    def logits(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Return scores whose softmax is the probability of the next token at each position, float32 [..., L, V].

        With several members, they are the logarithms of the mean probabilities.

        Args:
            ids: int [L] or [B, L], from 1 to `window` tokens, as given: a text begins with `tokenizer.eos`.

        Raises:
            SettingError: if there is no token, or if there are more than `window` tokens.
        """
        tokens = torch.as_tensor(ids, device=self.device)
        if not 0 < tokens.size(-1) <= self.window:
            raise SettingError(f"{tokens.size(-1)} tokens: give 1 to {self.window}, the context of the models")
        scores = [member(torch.atleast_2d(tokens))[0].float() for member in self.members]
        mean = scores[0] if len(scores) == 1 else _mean([one.log_softmax(-1) for one in scores])
        return mean.view(*tokens.shape, -1)

    @torch.inference_mode()
    def score(self, texts: str | Sequence[str], end_of_document: bool = False) -> list[TextScore]:
        """Return how well each text is predicted, as a document by itself.

        As in alma-eval, a text is cut into blocks of `window` tokens, and the input of a block begins with the last
        token of the block before. The input of the first block begins with </s>.

        Args:
            texts: the texts. The perplexity of an empty text is NaN.
            end_of_document: whether to score </s> at the end of each text, too, as alma-eval does.
        """
        texts = _list_of_texts(texts)
        eos, end = self.tokenizer.eos, [self.tokenizer.eos] if end_of_document else []
        tokens = [self.tokenizer.encode(text) + end for text in texts]
        blocks = [
            (number, start, ([eos, *ids[:-1]][start : start + self.window], ids[start : start + self.window]))
            for number, ids in enumerate(tokens)
            for start in range(0, len(ids), self.window)
        ]
        blocks.sort(key=lambda block: len(block[2][1]))  # so that a batch contains little padding
        size = max(1, default_tokens_per_batch([self.device]) // self.window)
        nats = [np.empty(len(ids)) for ids in tokens]
        for first in range(0, len(blocks), size):
            batch = blocks[first : first + size]
            source, target = (self._padded([texts[part] for _, _, texts in batch], left=False) for part in (0, 1))
            losses = [member(source, nll_of=target, per_token=True)[0].double() for member in self.members]
            nll = -_mean([-loss for loss in losses]).view_as(target).cpu().numpy()
            for row, (number, start, (_, ids)) in enumerate(batch):
                nats[number][start : start + len(ids)] = nll[row, : len(ids)]
        return [TextScore(one, len(text.encode(errors="replace"))) for one, text in zip(nats, texts, strict=True)]

    def generate(self, prompts: str | Sequence[str], max_tokens: int = 100, **options: Any) -> list[Continuation]:
        """Continue each prompt until the model ends the document, or until `max_tokens` tokens are written.

        A continuation does not depend on the other prompts, but with a seed, it depends on its place among them. If
        prompt and continuation are longer than `window`, the beginning of the context is left out whenever it is full,
        so that there is room for what may still follow, but at most half of it.

        Args:
            prompts: the prompts. An empty one begins a document.
            max_tokens: largest number of tokens of a continuation.
            **options: `min_tokens`, the smallest number of tokens (0); `temperature`, by which scores are divided
                before a token is drawn (1), with 0 for the most probable token; `top_k`, to draw from the k most
                probable tokens only (0: from all); `top_p`, to draw from the smallest set of tokens with at least this
                probability (1: from all); `beam`, to search for the most probable continuation with this number of
                candidates (1: no search); `seed` of the draws (by default another one in each call). Prompts draw
                separately, so equal prompts have different continuations.

        Raises:
            SettingError: if an option is invalid, or if with `beam` a prompt and its continuation may be longer than
                `window`.
        """
        choice = self._choice(max_tokens, options)
        prompts = _list_of_texts(prompts)
        encoded = [self.tokenizer.encode(prompt) for prompt in prompts]
        new: list[list[int]] = [[] for _ in prompts]
        if choice.beam > 1:
            longest = max(map(len, encoded), default=0)
            if 1 + longest + max_tokens > self.window:
                raise SettingError(
                    f"beam={choice.beam} needs the whole text in the context of {self.window} tokens, but a prompt has "
                    f"{longest} tokens, and {max_tokens} may follow: let at most {self.window - longest - 1} follow"
                    if longest + 2 <= self.window
                    else f"a prompt has {longest} tokens, more than the context of {self.window} tokens, which beam "
                    f"search needs: give a shorter prompt, or search with no beam"
                )
            new = [self._beam_search(ids, choice) for ids in encoded]
        else:
            random = _random_numbers(choice.seed, len(prompts))
            for first in range(0, len(prompts), SEQUENCES_AT_ONCE):
                part = slice(first, first + SEQUENCES_AT_ONCE)
                for tokens in self._next_tokens(encoded[part], choice, random[part]):
                    for number, token in tokens.items():
                        new[first + number].append(token)
        texts = [self._text_after(before, ids) for before, ids in zip(encoded, new, strict=True)]
        return [Continuation(*one) for one in zip(prompts, texts, new, strict=True)]

    def generate_pieces(self, prompt: str, max_tokens: int = 100, **options: Any) -> Iterator[str]:
        """Yield the continuation of one prompt piece by piece, as soon as its tokens are known.

        Together, the pieces are the text that `generate` returns for the same options. A piece ends where a character
        ends, so it may come from several tokens. For the arguments and the errors, see `generate`; `beam` is refused.
        """
        choice = self._choice(max_tokens, options)
        if choice.beam > 1:
            raise SettingError("a beam search knows its text only at the end: call generate, or leave out beam=")
        return self._pieces(self.tokenizer.encode(prompt), choice)

    def _choice(self, max_tokens: int, options: dict[str, Any]) -> Choice:
        """Return the options of `generate`, checked. Raise SettingError if the models cannot continue a text."""
        from fairseq_alma.models.switch_lm import SwitchDecoder  # imports fairseq, which takes seconds

        if not all(isinstance(member.decoder, SwitchDecoder) for member in self.members):
            raise SettingError("only switch_lm models continue texts here: use fairseq-interactive for other models")
        names = [one.name for one in fields(Choice)]
        if unknown := [name for name in options if name not in names]:
            near = nearest_key(unknown[0], names)
            hint = f": did you mean {near}?" if near else f". The options are {', '.join(names)}"
            raise SettingError(f"generate has no option {unknown[0]}{hint}")
        return Choice(max_tokens, **options)

    def _pieces(self, ids: list[int], choice: Choice) -> Iterator[str]:
        """See `generate_pieces`."""
        # The text of a token can depend on many tokens before (a space between words; some tokenizers decode only whole
        # runs of bytes). So decode all of them, and return what is new.
        new: list[int] = []
        text, num_shown = "", 0
        for tokens in self._next_tokens([ids], choice, _random_numbers(choice.seed, 1)):
            new.append(tokens[0])
            text = self._text_after(ids, new)
            if text[num_shown:] and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[num_shown:]
                num_shown = len(text)
        if text[num_shown:]:
            yield text[num_shown:]

    def _text_after(self, before: list[int], new: list[int]) -> str:
        """Return the text of the tokens `new` after the tokens `before`."""
        return self.tokenizer.decode([*before, *new])[len(self.tokenizer.decode(before)) :]

    def _next_tokens(
        self, prompts: Sequence[list[int]], choice: Choice, random: Sequence[np.random.Generator]
    ) -> Iterator[dict[int, int]]:
        """Yield, step by step, the next token of each prompt that has not ended: number of the prompt -> id.

        Args:
            prompts: the ids of the prompts.
            choice: how a token is chosen.
            random: the random numbers of each prompt.
        """
        contexts = {number: [self.tokenizer.eos, *ids] for number, ids in enumerate(prompts)}
        tokens, states = torch.empty(0), list[dict]()
        never = {with_eos: self._never_chosen(with_eos) for with_eos in (False, True)}
        for step in range(choice.max_tokens):
            if not states or any(len(context) > self.window for context in contexts.values()):
                for number, context in contexts.items():
                    if len(context) > self.window:
                        num_left = choice.max_tokens - step
                        contexts[number] = context[-max(1, self.window // 2, self.window - num_left) :]
                tokens, states = self._padded(list(contexts.values()), left=True), [{} for _ in self.members]
            scores = self._next_scores(tokens, states, choice.temperature or 1.0, never[step < choice.min_tokens])
            if choice.temperature == 0:
                chosen = scores.argmax(1)
            else:
                draws = [random[number].random() for number in contexts]
                chosen = _draw(scores, choice.top_k, choice.top_p, torch.tensor(draws, device=scores.device))
            found = dict(zip(contexts, chosen.tolist(), strict=True))
            yield found
            for number, token in found.items():
                contexts[number].append(token)
            going_on = [row for row, token in enumerate(found.values()) if token != self.tokenizer.eos]
            if not going_on:
                return
            tokens = torch.cat([tokens, chosen.unsqueeze(1)], dim=1)
            if len(going_on) < len(found):
                contexts = {number: contexts[number] for number in found if found[number] != self.tokenizer.eos}
                order = torch.tensor(going_on, device=tokens.device)
                tokens = tokens[order]
                for member, state in zip(self.members, states, strict=True):
                    member.decoder.reorder_incremental_state(state, order)

    @torch.inference_mode()
    def _next_scores(self, tokens: Tensor, states: list[dict], temperature: float, never: Tensor) -> Tensor:
        """Return a score for each next token, whose softmax is its probability, float32 [B, V].

        Args:
            tokens: all tokens so far, padded on the left, int64 [B, L].
            states: for each member, the keys and values of the tokens that it has processed.
            temperature: number by which the scores are divided.
            never: ids that must not be chosen, int64; their score is -inf.
        """
        parts = []
        for member, state in zip(self.members, states, strict=True):
            # Only the first call can contain padding. To search for padding would make the host wait for a GPU.
            has_padding = None if not state else False
            features, _ = member(tokens, incremental_state=state, features_only=True, has_padding=has_padding)
            parts.append(member.decoder.output_layer(features[:, -1]).float())
        scores = parts[0] if len(parts) == 1 else _mean([part.log_softmax(-1) for part in parts])
        if temperature < _LEAST_TEMPERATURE:
            scores = (scores - scores.amax(-1, keepdim=True)) / _LEAST_TEMPERATURE
        elif temperature != 1:
            scores = scores / temperature
        return scores.index_fill_(1, never, -math.inf)

    def _never_chosen(self, with_eos: bool) -> Tensor:
        """Return the ids that are never chosen, int64: those without text, and </s> if `with_eos`."""
        used = self.tokenizer.token_ids
        ids = [*range(used.start), *range(used.stop, self.tokenizer.dictionary_size)]
        return torch.tensor([index for index in ids if with_eos or index != self.tokenizer.eos], device=self.device)

    @torch.inference_mode()
    def _beam_search(self, ids: list[int], choice: Choice) -> list[int]:
        """Return the continuation of a prompt that fairseq's beam search finds, by mean log-probability of the text."""
        from fairseq.sequence_generator import SequenceGenerator

        last = len(ids) + choice.max_tokens
        generator = SequenceGenerator(
            self.members, self.members[0].decoder.dictionary, beam_size=choice.beam, max_len_b=last, max_len=last + 1,
            min_len=len(ids) + choice.min_tokens,
        )  # fmt: skip
        generator.token_indices_to_suppress = self._never_chosen(with_eos=False)
        prefix = torch.tensor([ids], dtype=torch.int64, device=self.device)
        source = torch.tensor([[self.tokenizer.eos, *ids]], device=self.device)
        (found,) = generator.generate(self.members, {"net_input": {"src_tokens": source}}, prefix_tokens=prefix)
        # After the last token, fairseq forces a </s>, which is cut off. Its probability does not count either.
        best = max(found, key=lambda one: float(one["positional_scores"][:last].mean()))
        return best["tokens"].tolist()[len(ids) :][: choice.max_tokens]

    def _padded(self, rows: Sequence[Sequence[int]], left: bool) -> Tensor:
        """Return rows of ids as a tensor [B, L], padded on the left or on the right."""
        padded = np.full((len(rows), max(map(len, rows))), self.members[0].decoder.dictionary.pad())
        for target, ids in zip(padded, rows, strict=True):
            target[len(target) - len(ids) if left else 0 :][: len(ids)] = ids
        return torch.from_numpy(padded).to(self.device)


def load(
    run: str | Path | Sequence[str | Path],
    stage: int | None = None,
    device: str | torch.device = "cpu",
    stream: str | Path | None = None,
    arch: str | None = None,
) -> LanguagePredictor:
    """Return a predictor with the models of a run after its last finished stage, or after an earlier stage.

    The run may be somebody else's: no code that its files name is run.

    Args:
        run: a run folder of alma-lm, or a checkpoint file, or the checkpoint files of an ensemble.
        stage: index of a finished stage, from 1. By default that of the current predictor: the last stage, or with
            `gate` the last one that has passed.
        device: cpu, cuda or cuda:N.
        stream: the stream folder with which the models were trained, or another folder with its dict.txt and the file
            of its tokenizer; the text is not needed. By default the stream that the run recorded. Checkpoint files
            need it.
        arch: the architecture, if it is not one of ours: another language model of fairseq, or one that a module of
            yours registers, which you have imported. Such models score texts, but do not continue them here.

    Raises:
        StreamError: if a file is missing or damaged, or if the models were trained with another dictionary.
        RunError: if the folder is not a run with a finished stage, or a checkpoint has changed since the run wrote it.
        SettingError: if a checkpoint is not that of a switch_lm model, or if there is no such device.
    """
    paths = [run] if isinstance(run, str | Path) else run
    found = find_members([Path(path) for path in paths], None if stream is None else Path(stream), stage)
    place = parse_devices(device)[0] if isinstance(device, str) else device
    try:
        tokenizer = StreamTokenizer(found.stream)
    except StreamError as error:
        if not found.settings:
            raise
        raise StreamError(f"{error}; if the stream was moved, give --stream (in Python: stream=)") from error
    loaded = [load_model(checkpoint, tokenizer, place, arch) for checkpoint in found.checkpoints]
    return LanguagePredictor([model for model, _ in loaded], tokenizer, min(length for _, length in loaded))


def _list_of_texts(texts: str | Sequence[str]) -> list[str]:
    """Return one text, or several, as a list. Raise SettingError if something else was given."""
    texts = [texts] if isinstance(texts, str) else list(texts)
    if others := [text for text in texts if not isinstance(text, str)]:
        raise SettingError(f"give a text or a list of texts, not {others[0]!r}")
    return texts


def _mean(log_probabilities: Sequence[Tensor]) -> Tensor:
    """Return the logarithm of the mean of the members' probabilities."""
    if len(log_probabilities) == 1:
        return log_probabilities[0]
    return torch.stack(tuple(log_probabilities)).logsumexp(0) - math.log(len(log_probabilities))


def _random_numbers(seed: int | None, count: int) -> list[np.random.Generator]:
    """Return a generator of random numbers for each of several prompts. They depend on the seed and the number only."""
    known = np.random.SeedSequence().entropy if seed is None else seed
    return [np.random.default_rng([known, number]) for number in range(count)]  # type: ignore[list-item, arg-type]


def _draw(scores: Tensor, top_k: int, top_p: float, random: Tensor) -> Tensor:
    """Return a token for each sequence, drawn with its probability. int64 [B].

    Args:
        scores: scores whose softmax is the probability of each token, [B, V].
        top_k: number of the most probable tokens from which to draw; 0 for all.
        top_p: draw from the smallest set of tokens that has at least this share of the probability.
        random: a random number between 0 and 1 for each sequence, [B].
    """
    p, ids = scores.double().softmax(1).sort(descending=True)
    if top_k:
        p[:, top_k:] = 0
    total = p.cumsum(1)
    p[total - p >= top_p * total[:, -1:]] = 0  # the most probable token always stays
    total = p.cumsum(1)
    rank = torch.searchsorted(total, random.double().unsqueeze(1) * total[:, -1:], right=True)
    return ids.gather(1, rank.clamp(max=p.size(1) - 1)).squeeze(1)
