"""The task that encodes passages: how it reads them."""

import numpy as np
import pytest

from data_prep.encoding.encode import EncodeTask
from data_prep.reading.index import ENTRY
from data_prep.reading.spool import text_path
from data_prep.running.heartbeat import Heartbeat
from data_prep.tokenization.tokenizers import TOKENIZERS, load_tokenizer
from fairseq_alma.core.files import sha256_of

TEXTS = [f"passage {number} of a small spool, naïve café {'and more ' * (number % 5)}" for number in range(40)]


@pytest.fixture
def encoding_task(tmp_path):
    """A task that encodes TEXTS. They are stored in three spool files, in another order."""
    rows = []
    for shard in range(3):
        offset = 0
        with open(text_path(tmp_path, shard), "wb") as file:
            for number in range(shard, len(TEXTS), 3):
                content = TEXTS[number].encode()
                rows.append((number, (b"", b"", offset, shard, len(content), len(TEXTS[number].split()), 0, 0, 0)))
                offset += file.write(content)
    np.save(tmp_path / "index.npy", np.array([row for _, row in sorted(rows)], ENTRY))
    kind = TOKENIZERS["byte-bpe"]
    (tmp_path / kind.file_name).write_bytes(kind.train(iter(TEXTS), 300))
    files = (tmp_path / kind.file_name, tmp_path / "index.npy")
    digests = [sha256_of(file) for file in files]
    place = (str(files[0]), digests[0], str(tmp_path), str(files[1]), digests[1])
    return EncodeTask(*place, 0, len(TEXTS), "uint16", len(load_tokenizer(files[0]).symbols()) + 4)


def test_a_task_beats_for_each_passage_that_it_reads(tmp_path, encoding_task, monkeypatch):
    with Heartbeat(tmp_path / "alive") as heartbeat:
        monkeypatch.setattr(heartbeat, "beat", lambda place: beats.append(place))
        beats: list[str] = []
        encoding_task.run(tmp_path / "out", heartbeat)
    assert beats == ["text encoding"] * len(TEXTS)
