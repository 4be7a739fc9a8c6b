"""Count the text that a user's tokenizer loses: unknown tokens, and characters that its tokens do not give back.

The tokens of each passage are decoded, without the unknown symbol, and the characters are compared. White space is left
out, because many decoders add and remove it: `changed_passages` counts the passages in which anything differs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from data_prep.characters import codes_of

if TYPE_CHECKING:
    from data_prep.tokenization.tokenizers import Tokenizer

_RECORDED = 50
"""Number of the most frequent lost characters that are recorded."""
_SHOWN = 5
"""Number of them that the warning shows."""
_WHITE_SPACE = np.array([code for code in range(0x3001) if chr(code).isspace()])


def losses(tokenizer: "Tokenizer", texts: Sequence[str], ids: Iterable[np.ndarray]) -> dict:
    """Return what the tokens of texts lose, as stream.json records it for a split; {} if nothing can be lost.

    Args:
        tokenizer: the tokenizer that gave the token ids.
        texts: the texts.
        ids: the token ids of each text.
    """
    if tokenizer.is_lossless:
        return {}
    literal = tokenizer.unknown_in_text
    unknown_tokens, known = 0, []
    for text, tokens in zip(texts, ids, strict=True):
        is_unknown = tokens == tokenizer.unknown_id
        # A text may contain the name of the unknown symbol, such as [UNK].
        unknown_tokens += max(0, int(is_unknown.sum()) - (text.count(literal) if literal else 0))
        known.append(tokens[~is_unknown].tolist())
    wanted = [text.replace(literal, "") if literal else text for text in texts]
    changed = [pair for pair in zip(wanted, tokenizer.decode_all(known), strict=True) if pair[0] != pair[1]]
    lost = Counter[str]()
    if changed:
        missing = _character_counts(text for text, _ in changed) - _character_counts(given for _, given in changed)
        missing[_WHITE_SPACE] = 0
        lost.update({f"U+{code:04X}": int(missing[code]) for code in np.flatnonzero(missing > 0).tolist()})
    return {
        "unknown_tokens": unknown_tokens,
        "characters": lost.total(),
        "of_characters": sum(map(len, texts)),
        "changed_passages": len(changed),
        "most_frequent": dict(lost),
    }


def _character_counts(texts: Iterable[str]) -> np.ndarray:
    """Return how often each code point occurs in texts: int64 [number of code points]."""
    return np.bincount(codes_of("".join(texts)), minlength=0x110000)


def added_losses(parts: Iterable[Mapping]) -> dict:
    """Return the sum of several results of `losses`. Only the most frequent characters are kept."""
    total, frequent = Counter[str](), Counter[str]()
    for part in parts:
        total.update({name: count for name, count in part.items() if name != "most_frequent"})
        frequent.update(part.get("most_frequent", {}))
    return {**total, "most_frequent": dict(frequent.most_common(_RECORDED))} if total else {}


def losses_summary(splits: Mapping[str, Mapping]) -> list[str]:
    """Return a line about what the tokenizer loses of the text of all splits; [] if it loses nothing."""
    lost = added_losses(split.get("lost", {}) for split in splits.values())
    if not lost or not lost["unknown_tokens"] + lost["characters"]:
        return []
    return [
        f"lost by the tokenizer: {lost['characters']:,} of {lost['of_characters']:,} characters; unknown tokens: "
        f"{lost['unknown_tokens']:,}"
    ]


def losses_text(splits: Mapping[str, Mapping]) -> str:
    """Return a warning about the text that the tokenizer loses in splits; "" if it loses nothing.

    Args:
        splits: the entries of splits in stream.json, by name.
    """
    lost = added_losses(split.get("lost", {}) for split in splits.values())
    if not lost or not lost["changed_passages"] + lost["unknown_tokens"]:
        return ""
    passages = sum(split["passages"] for split in splits.values())
    changed = f"{lost['changed_passages']:,} of {passages:,} passages"
    if not lost["unknown_tokens"] and not lost["characters"]:
        return f"the tokenizer does not keep all white space: {changed} are not exactly the same when they are decoded"
    tokens = sum(split["tokens"] - split["sequences"] for split in splits.values())
    shown = ", ".join(
        f"{name} {_shown(name)}{count:,} times" for name, count in list(lost["most_frequent"].items())[:_SHOWN]
    )
    return (
        f"warning: the tokenizer loses text. {lost['unknown_tokens']:,} of {tokens:,} tokens "
        f"({lost['unknown_tokens'] / max(1, tokens):.2%}) are its unknown symbol, and {lost['characters']:,} of "
        f"{lost['of_characters']:,} characters ({lost['characters'] / max(1, lost['of_characters']):.2%}) are lost or "
        f"replaced by others{f' (most often {shown})' if shown else ''}, in {changed}. To keep all text, use "
        "--tokenizer byte-bpe, or a tokenizer with byte fallback"
    )


def _shown(name: str) -> str:
    """Return a character that can be printed with a space after it, else ""."""
    character = chr(int(name[2:], 16))
    return f"{character} " if character.isprintable() else ""
