"""Build dict.txt, the file from which fairseq reads the tokenizer's symbols.

The symbol with id i in the tokenizer has id i + 4 in fairseq, because fairseq puts four special symbols first.
"""

EOS = 2
"""The fairseq id of </s>, the symbol that ends a sequence."""
NUM_SPECIAL = 4
"""Number of fairseq's special symbols <s>, <pad>, </s> and <unk>. Their ids are 0 to 3. dict.txt does not list them."""
MULTIPLE = 8
"""fairseq adds unused symbols to a dictionary until its size is a multiple of this number, for fast matrix products."""

_FAIRSEQ_SPECIAL = {"<s>", "<pad>", "</s>", "<unk>"}


def dictionary_size(num_symbols: int) -> int:
    """Return the size of a tokenizer's fairseq dictionary, including fairseq's special symbols and padding entries.

    Args:
        num_symbols: number of symbols of the tokenizer.
    """
    return -(-(NUM_SPECIAL + num_symbols) // MULTIPLE) * MULTIPLE  # -(-a // b) is a / b, rounded up


def dictionary_names(symbols: list[str]) -> list[str]:
    """Return a name for each symbol and padding entry (unused symbol) of dict.txt.

    fairseq needs unique names without white space.

    Each white space character in a symbol is replaced by its code, such as <U+000A>. If an earlier symbol or one of
    fairseq's four special symbols already has the resulting name, `#` and the symbol's position in this list are
    appended. The names do not affect decoded text, because text is decoded from ids.
    """
    num_padding = dictionary_size(len(symbols)) - NUM_SPECIAL - len(symbols)
    # Padding entries are unused symbols that make the dictionary size a multiple of MULTIPLE. Use fairseq's names.
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
    """Return the content of dict.txt, with one line `name count` per symbol. `names` and `counts` are sorted by id."""
    return "".join(f"{name} {count}\n" for name, count in zip(names, counts, strict=True))
