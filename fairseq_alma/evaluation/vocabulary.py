"""Let a model continue on a stream whose vocabulary `alma-prep grow-vocab` has made larger."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fairseq_alma.core.stream_description import STREAM_FILE, read_description

EMBEDDINGS = "decoder.embed_tokens.weight"


def earlier_vocabularies(stream: Path) -> dict[str, int]:
    """Return the vocabularies of the streams of which a stream is a copy: SHA-256 digest of dict.txt -> symbols."""
    if not (stream / STREAM_FILE).is_file():
        return {}
    return {one["dict_sha256"]: one["num_symbols"] for one in read_description(stream).get("grown_from", [])}


def with_new_symbols(weights: Mapping[str, Any], num_old: int, stream: Path) -> dict[str, Any]:
    """Return the weights of a switch_lm model with embeddings of the symbols that its stream has got since.

    The embedding of a new symbol is the mean of those of the old symbols that it replaces. Unused entries at the end of
    the dictionary have the embedding of the last unused one of the old dictionary, which training has made improbable.

    Args:
        weights: the weights by name.
        num_old: number of symbols of the vocabulary with which the model was trained.
        stream: the stream folder with the larger vocabulary.
    """
    # Imported here, because it imports libraries that are needed for this only.
    from data_prep.tokenization.growth import pieces_of_new_symbols
    from data_prep.tokenization.tokenizers import NUM_SPECIAL
    from fairseq_alma.stream_tokenizer import StreamTokenizer

    tokenizer, old_VD = StreamTokenizer(stream), weights[EMBEDDINGS]
    num_used = NUM_SPECIAL + num_old
    unused_D = old_VD[-1] if len(old_VD) > num_used else old_VD[NUM_SPECIAL:].mean(0)
    new_VD = unused_D.repeat(tokenizer.dictionary_size, 1)
    new_VD[:num_used] = old_VD[:num_used]
    for symbol, pieces in pieces_of_new_symbols(tokenizer.file.read_bytes(), num_old).items():
        new_VD[NUM_SPECIAL + symbol] = old_VD[NUM_SPECIAL + torch.tensor(pieces)].mean(0)
    return {**weights, EMBEDDINGS: new_VD}
