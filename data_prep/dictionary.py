"""dict.txt: the tokenizer's symbols as a fairseq Dictionary, tokenizer id i at fairseq id i + 4."""

EOS = 2
NUM_SPECIAL = 4
"""fairseq puts <s>, <pad>, </s> and <unk> before the first line of dict.txt."""
MULTIPLE = 8
"""fairseq pads its dictionaries to a multiple of 8, which fast matrix products like."""

_FAIRSEQ_OWN = {"<s>", "<pad>", "</s>", "<unk>"}


def dictionary_size(num_pieces: int) -> int:
    """fairseq's `len(dictionary)`: special symbols, pieces and padding."""
    return -(-(NUM_SPECIAL + num_pieces) // MULTIPLE) * MULTIPLE


def symbols(pieces: list[str]) -> list[str]:
    """A name for each piece, and for the padding, that fairseq can read: no white space, each of them once.

    White space inside a piece is written as <U+000A>; a name already taken, or one of fairseq's four special
    symbols, gets its number added. Names are for people and for fairseq's reader: text is decoded by ids.
    """
    padding = [f"madeupword{number:04d}" for number in range(dictionary_size(len(pieces)) - NUM_SPECIAL - len(pieces))]
    taken, names = set(_FAIRSEQ_OWN), []
    for number, piece in enumerate(pieces + padding):
        name = "".join(f"<U+{ord(char):04X}>" if char.isspace() else char for char in piece)
        while name in taken:
            name = f"{name}#{number}"
        taken.add(name)
        names.append(name)
    return names


def dictionary_text(names: list[str], counts: list[int]) -> str:
    """The content of dict.txt: `symbol count` per line, in the order of the ids, whatever the counts."""
    return "".join(f"{name} {count}\n" for name, count in zip(names, counts, strict=True))
