"""The tasks that encode passages: how many there are, and how they read."""

from pathlib import Path

import numpy as np
import pytest

from data_prep.encoding import encode
from data_prep.encoding.encode import EncodeTask
from data_prep.reading import spool
from data_prep.reading.index import ENTRY, Texts
from data_prep.reading.spool import text_path
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.tasks import Step
from data_prep.tokenization.tokenizers import EOS, NUM_SPECIAL, TOKENIZERS, load_tokenizer
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
    texts = Texts(str(files[1]), digests[1], str(tmp_path), 0, len(TEXTS))
    return EncodeTask(str(files[0]), digests[0], texts, "uint16")


def test_a_task_beats_for_each_passage_that_it_reads(tmp_path, encoding_task, monkeypatch):
    with Heartbeat(tmp_path / "alive") as heartbeat:
        monkeypatch.setattr(heartbeat, "beat", lambda place: beats.append(place))
        beats: list[str] = []
        encoding_task.run(tmp_path / "out", heartbeat)
    assert beats == ["text encoding"] * (len(TEXTS) + 1)  # and for the batch that is encoded


def test_passages_are_read_in_the_order_of_the_spool(tmp_path, encoding_task, monkeypatch):
    opened, found, open_shard = [], [], spool._open_shard
    monkeypatch.setattr(spool, "_open_shard", lambda *place: opened.append(place[1]) or open_shard(*place))
    monkeypatch.setattr(encode, "BATCH_BYTES", 120)
    for num_bytes in (1, 500, 1 << 20):
        monkeypatch.setattr(encode, "READ_BYTES", num_bytes)
        opened.clear()
        with Heartbeat(tmp_path / "alive") as heartbeat:
            encoding_task.run(tmp_path / "out", heartbeat)
        found.append((tmp_path / "out.tokens").read_bytes())
    assert found[0] == found[1] == found[2]
    assert opened == sorted(opened) and set(opened) == {0, 1, 2}
    tokens = np.frombuffer(found[0], np.uint16).tolist()
    tokenizer = load_tokenizer(Path(encoding_task.tokenizer_file))
    expected = [[*(ids + NUM_SPECIAL).tolist(), EOS] for ids in tokenizer.encode(TEXTS)]
    assert tokens == [token for ids in expected for token in ids]


def test_tasks_grow_with_the_corpus(tmp_path, books, alma_prep, monkeypatch, folder_bytes):
    num_tasks: list[int] = []

    def step(folder, tasks):
        if folder.name == "encode":
            num_tasks.append(len(tasks))
        return Step(folder, tasks)

    monkeypatch.setattr(encode, "Step", step)
    monkeypatch.setattr(encode, "TASK_BYTES", 8_000)
    for number, most in enumerate((4000, 5)):
        monkeypatch.setattr(encode, "_MAX_TASKS", most)
        assert alma_prep(tmp_path / str(number), f"books:{books}") == 0
    assert num_tasks[0] > 10
    assert num_tasks[1] <= 5 + 5 + 1
    assert folder_bytes(tmp_path / "0") == folder_bytes(tmp_path / "1")
