"""dict.txt: the symbols of the tokenizer as a fairseq Dictionary. Tokenizer id i is fairseq id i + 4."""

EOS = 2
NUM_SPECIAL = 4
"""fairseq puts <s>, <pad>, </s> and <unk> before the first line of dict.txt."""
MULTIPLE = 8
"""fairseq pads its dictionaries to a multiple of 8, for which matrix products are fast."""

_FAIRSEQ_SPECIAL = {"<s>", "<pad>", "</s>", "<unk>"}


def dictionary_size(num_symbols: int) -> int:
    """Return fairseq's `len(dictionary)` for a tokenizer: special symbols, its symbols, and padding."""
    return -(-(NUM_SPECIAL + num_symbols) // MULTIPLE) * MULTIPLE


def dictionary_names(symbols: list[str]) -> list[str]:
    """Return a name for each symbol, and for the padding, that fairseq can read: without white space, and unique.

    White space inside a symbol is written as <U+000A>. A name that is taken already, or is one of fairseq's four
    special symbols, gets its number appended. Names are for people and for fairseq's reader: text is decoded by ids.
    """
    num_padding = dictionary_size(len(symbols)) - NUM_SPECIAL - len(symbols)
    padding = [f"madeupword{number:04d}" for number in range(num_padding)]
    taken, names = set(_FAIRSEQ_SPECIAL), []
    for number, symbol in enumerate(symbols + padding):
        name = "".join(f"<U+{ord(char):04X}>" if char.isspace() else char for char in symbol)
        while name in taken:
            name = f"{name}#{number}"
        taken.add(name)
        names.append(name)
    return names


def dictionary_text(names: list[str], counts: list[int]) -> str:
    """Return the content of dict.txt: one line `name count` per symbol, in the order of the ids."""
    return "".join(f"{name} {count}\n" for name, count in zip(names, counts, strict=True))
