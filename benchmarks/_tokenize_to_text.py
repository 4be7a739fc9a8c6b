"""Tokenize texts to lines of symbols, as input for fairseq-preprocess. _lm_prep.py measures this script.

python benchmarks/_tokenize_to_text.py TOKENIZER OUT IN [IN ...]

Each file IN contains texts, each followed by a NUL character. For each file IN, the script writes a file with the same
name to the folder OUT, with one line of symbols per text. Then it prints its CPU seconds, without the time for imports
and for loading the tokenizer.
"""

import sys
import time
from pathlib import Path

from tokenizers import Tokenizer

TEXTS_AT_ONCE = 64


def main(tokenizer_file: str, out: str, *inputs: str) -> None:
    """Tokenize the files `inputs`, write the results to the folder `out`, and print the CPU seconds."""
    tokenizer = Tokenizer.from_file(tokenizer_file)
    index_of = tokenizer.get_vocab()
    symbol_of = sorted(
        index_of, key=index_of.__getitem__
    ).__getitem__  # needed because encode_batch_fast leaves `tokens` empty
    start = time.process_time()
    for name in inputs:
        texts = Path(name).read_bytes().decode("utf-8").split("\0")[:-1]
        with open(Path(out) / Path(name).name, "w", encoding="utf-8") as file:
            for first in range(0, len(texts), TEXTS_AT_ONCE):
                batch = texts[first : first + TEXTS_AT_ONCE]
                for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                    file.write(" ".join(map(symbol_of, encoding.ids)) + "\n")
    print(time.process_time() - start)


if __name__ == "__main__":
    main(*sys.argv[1:])
