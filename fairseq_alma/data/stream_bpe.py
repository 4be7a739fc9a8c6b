"""`--bpe alma_stream`: fairseq's commands read and write text with the tokenizer of the stream."""

from dataclasses import dataclass
from typing import Any, Optional

from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass
from omegaconf import II

from fairseq_alma.stream_tokenizer import StreamTokenizer


@dataclass
class StreamBPEConfig(FairseqDataclass):
    """Options of `--bpe alma_stream`: those of the task."""

    data: Optional[str] = II("task.data")


@register_bpe("alma_stream", dataclass=StreamBPEConfig)
class StreamBPE:
    """Converts between text and the names of its tokens in dict.txt, with spaces between them.

    fairseq calls this kind of class a BPE. Without it, each word of a text would become <unk>.

    Args:
        cfg: the options. `data` is the stream folder; see StreamTokenizer for the errors.
    """

    def __init__(self, cfg: Any):
        self.tokenizer = StreamTokenizer(cfg.data)

    def encode(self, x: str) -> str:
        """Return the names of the tokens of a text."""
        return " ".join(self.tokenizer.symbols[index] for index in self.tokenizer.encode(x))

    def decode(self, x: str) -> str:
        """Return the text of names of tokens. Special symbols, such as <unk>, have no text."""
        id_of = self.tokenizer.id_of
        return self.tokenizer.decode([id_of[name] for name in x.split() if name in id_of])
