"""Translate the tokenizer of a stream to that of transformers, and back.

In transformers, the ids of a tokenizer are those of the model. fairseq's dictionary has its four special symbols before
the symbols of the tokenizer, so each id is larger by 4 than in the tokenizer file of the stream.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL, AnyTokenizer, load_tokenizer
from fairseq_alma.core.errors import SettingError, StreamError

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
"""fairseq's special symbols. Their ids are 0 to 3."""
SPACE = "\u2581"
"""Character that sentencepiece shows instead of a space."""
_OTHER_SPECIAL = ("<alma_s>", "<alma_pad>", "<alma_/s>", "<alma_unk>")
"""Their names in a tokenizer that has a symbol with one of these names, or that could make one of a text."""


def exported_tokenizer(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the content of tokenizer.json and tokenizer_config.json for the tokenizer file of a stream.

    The tokenizer begins each text with </s>, the symbol that ends a document, because a model has seen it before each
    document.

    Raises StreamError for a tokenizer that cannot be translated.
    """
    tokenizer = load_tokenizer(file)
    described = tokenizer.described() if isinstance(tokenizer, AnyTokenizer) else _of_sentencepiece(file)
    model, added = described["model"], described["added_tokens"]
    # Only a BPE without ignore_merges makes no symbol that is not the result of a merge.
    is_safe = model["type"] == "BPE" and not model.get("ignore_merges") and not set(SPECIAL) & set(tokenizer.symbols())
    names = SPECIAL if is_safe else _OTHER_SPECIAL
    if isinstance(model["vocab"], dict):
        shifted = {symbol: number + NUM_SPECIAL for symbol, number in model["vocab"].items()}
        model["vocab"] = {**{name: number for number, name in enumerate(names)}, **shifted}
    else:  # Unigram: a list of symbols with scores
        lowest = min((score for _, score in model["vocab"]), default=0.0)
        model["vocab"] = [*([name, lowest - 100] for name in names), *model["vocab"]]
        if model.get("unk_id") is not None:
            model["unk_id"] += NUM_SPECIAL
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    described["added_tokens"] = [{"id": number, "content": name, **flags} for number, name in enumerate(names)]
    # The special symbols of the user's tokenizer stay symbols that a text can contain, as in the stream. Those of
    # fairseq cannot be written in a text: split_special_tokens, below.
    described["added_tokens"] += [{**one, "id": one["id"] + NUM_SPECIAL, "special": False} for one in added]
    eos = names[EOS]
    start = {"SpecialToken": {"id": eos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    described["post_processor"] = {
        "type": "TemplateProcessing", "single": [start, first], "pair": [start, first, second],
        "special_tokens": {eos: {"id": eos, "ids": [EOS], "tokens": [eos]}},
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": eos, "eos_token": eos, "pad_token": names[1],
        "unk_token": names[3], "padding_side": "left", "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    return described, config


def _of_sentencepiece(file: Path) -> dict[str, Any]:
    """Return the content of a tokenizer.json that is equal to a sentencepiece model of alma-prep.

    Raise StreamError for another kind of model.
    """
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    size, probe = model.vocab_size(), "  \ufb01 A\u030a "
    pieces = [model.id_to_piece(number) for number in range(size)]
    normal = [n for n in range(size) if not (model.is_byte(n) or model.is_unknown(n) or pieces[n] == "\n")]
    # The scores of BPE are those of an order, and text is not changed, but that spaces are shown as U+2581.
    is_bpe = [model.get_score(number) for number in normal] == [-float(rank) for rank in range(len(normal))]
    if not (
        is_bpe and model.is_byte(model.piece_to_id("<0x00>")) and model.normalize(probe) == probe.replace(" ", SPACE)
    ):
        raise StreamError(
            f"{file} is not a sentencepiece model as alma-prep trains it, and other ones are not exported: make the "
            f"stream with the tokenizer.json of the same model"
        )
    known = {pieces[number] for number in normal}
    # Of two neighbours, those are merged first that make the piece with the smallest id.
    merges = [
        [pieces[number][:cut], pieces[number][cut:]]
        for number in normal
        for cut in range(1, len(pieces[number]))
        if pieces[number][:cut] in known and pieces[number][cut:] in known
    ]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: number for number, piece in enumerate(pieces)},
            [(one, two) for one, two in merges],
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return json.loads(tokenizer.to_str())


def stream_tokenizer(content: bytes, file: Path) -> bytes:
    """Return the tokenizer.json with which a stream has the ids of a model.

    It is the inverse of `exported_tokenizer`: fairseq's four special symbols are removed.

    Args:
        content: the tokenizer.json of the model.
        file: its path, for error messages.

    Raises:
        SettingError: if the ids 0 to 3 are not these symbols.
    """
    described = json.loads(content)
    model, added = described["model"], described["added_tokens"]
    vocabulary = model["vocab"] if isinstance(model["vocab"], dict) else {}
    by_id = {number: symbol for symbol, number in vocabulary.items()}
    by_id |= {one["id"]: one["content"] for one in added}
    names = tuple(by_id.get(number) for number in range(NUM_SPECIAL))
    if names not in (SPECIAL, _OTHER_SPECIAL):
        raise SettingError(
            f"{file} has the symbols {', '.join(map(str, names))} with the ids 0 to 3, expected {', '.join(SPECIAL)}, "
            f"as in OPT: the model cannot be used with a stream of alma-prep"
        )
    model["vocab"] = {symbol: number - NUM_SPECIAL for symbol, number in vocabulary.items() if number >= NUM_SPECIAL}
    described["added_tokens"] = [{**one, "id": one["id"] - NUM_SPECIAL} for one in added if one["id"] >= NUM_SPECIAL]
    if model.get("unk_token") in names:
        model["unk_token"] = None
    described["post_processor"] = described["truncation"] = described["padding"] = None
    # The form in which the library writes it, and alma-prep too.
    return Tokenizer.from_str(json.dumps(described)).to_str(pretty=False).encode()
