"""Add symbols to a byte-level BPE tokenizer, learned from new text, without changing the old ones."""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile

Words = Mapping[tuple[str, ...], int]
"""Words, each as the tuple of symbols into which a tokenizer divides it -> how often they occur."""


def words_as_symbols(tokenizer: bytes, counts: Mapping[str, int]) -> Words:
    """Return counted words (see `word_counts`) as the symbols into which a tokenizer divides them.

    Args:
        tokenizer: the content of its tokenizer.json.
        counts: words in the alphabet of byte-level BPE, and how often they occur.
    """
    from tokenizers import Tokenizer

    model = Tokenizer.from_str(tokenizer.decode("utf-8")).model
    return {tuple(token.value for token in model.tokenize(word)): counts[word] for word in sorted(counts)}


def with_more_symbols(tokenizer: bytes, words: Words, num_new: int) -> bytes:
    """Add symbols to a tokenizer in the way in which BPE is trained, with the ids that come after the old ones.

    The most frequent pair of neighbouring symbols in `words` becomes a symbol, again and again. The new merges come
    after the old ones, so a text is divided as before, and then symbols are joined.

    Args:
        tokenizer: the content of its tokenizer.json.
        words: the words of the new text.
        num_new: number of symbols to add. If no pair of symbols occurs twice, fewer are added.

    Returns:
        The content of the new tokenizer.json.
    """
    from tokenizers import Tokenizer

    grown = json.loads(
        Tokenizer.from_str(tokenizer.decode("utf-8")).to_str()
    )  # older files write merges in another way
    vocab, merges = grown["model"]["vocab"], grown["model"]["merges"]
    first = next_id = max(vocab.values()) + 1
    parts, counts = [list(word) for word in words], list(words.values())
    numbers: Counter[tuple[str, str]] = Counter()
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for place, word in enumerate(parts):
        for pair in pairwise(word):
            numbers[pair] += counts[place]
            places[pair].add(place)
    queue = [(-number, pair) for pair, number in numbers.items()]
    heapq.heapify(queue)
    while queue and next_id < first + num_new:
        number, pair = heapq.heappop(queue)
        if number != -numbers[pair]:
            continue  # an old entry: the number of the pair has changed since, and there is a newer entry
        if number > -2:
            break
        merges.append(list(pair))
        if (symbol := "".join(pair)) not in vocab:  # another pair may have given the same symbol
            vocab[symbol], next_id = next_id, next_id + 1
        changed = set()
        for place in places.pop(pair):
            word = parts[place]
            parts[place] = merged = _merged(word, pair)
            for sign, symbols in ((-1, word), (1, merged)):
                for other in pairwise(symbols):
                    numbers[other] += sign * counts[place]
                    places[other].add(place)
                    changed.add(other)
        for other in changed:
            heapq.heappush(queue, (-numbers[other], other))
    return json.dumps(grown, ensure_ascii=False).encode("utf-8")


def _merged(word: Sequence[str], pair: tuple[str, str]) -> list[str]:
    """Return the symbols of a word after the pair was merged wherever it occurs, from left to right."""
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] = "".join(pair)
        else:
            merged.append(symbol)
    return merged


def pieces_of_new_symbols(tokenizer: bytes, num_old: int) -> dict[int, list[int]]:
    """Return, for each symbol that `with_more_symbols` has added, the ids of the old symbols that it replaces.

    Args:
        tokenizer: the content of the new tokenizer.json.
        num_old: number of ids of the old one.
    """
    from tokenizers import Tokenizer

    old = json.loads(tokenizer)
    vocab = old["model"]["vocab"]
    new = {symbol: index for symbol, index in vocab.items() if index >= num_old}
    old["model"]["vocab"] = {symbol: index for symbol, index in vocab.items() if index < num_old}
    old["model"]["merges"] = list(takewhile(lambda pair: "".join(pair) not in new, old["model"]["merges"]))
    model = Tokenizer.from_str(json.dumps(old)).model
    return {index: [token.id for token in model.tokenize(symbol)] for symbol, index in new.items()}
