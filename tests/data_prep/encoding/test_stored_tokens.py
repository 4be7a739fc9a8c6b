"""The tokens of documents in the cache: other streams with the same tokenizer take them, whatever their order."""

from pathlib import Path

import numpy as np
import pytest

from data_prep.encoding.stored_tokens import StoreTokensTask, TokenStore
from data_prep.errors import PrepError
from data_prep.running.heartbeat import Heartbeat
from fairseq_alma.core.files import read_json, sha256_of, write_json
from tests.data_prep.encoding.test_documents import prose, write_lines


@pytest.fixture
def corpus(tmp_path) -> str:
    """Short documents, and some that streams of this size cut into passages: below and above the smallest limit."""
    lengths = [30] * 700 + [700, 900, 1500]
    rows = [{"text": prose(length, seed)} for seed, length in enumerate(lengths)]
    return f"text:{write_lines(tmp_path / 'lines.jsonl', rows)}"


def entries(cache: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_ino for path in cache.glob("tokens/*/*/mark.json")}


def replace_tokens(entry: Path, is_noticed: bool) -> None:
    """Put each stored token into the place of the next one, also in the digests if the change shall not be noticed."""
    tokens = np.roll(np.fromfile(entry / "tokens", np.uint16), 1)
    (entry / "tokens").unlink()  # the finished stream may have a link to it
    tokens.tofile(entry / "tokens")
    if not is_noticed:
        mark = read_json(entry / "mark.json")
        mark["files"]["tokens"]["sha256"] = sha256_of(entry / "tokens")
        write_json(entry / "mark.json", mark)


def num_tokens(out: Path) -> int:
    return sum(path.stat().st_size for path in out.rglob("*.bin")) // 2


def num_different(out: Path, wanted: Path) -> int:
    """Return the number of tokens that differ in two streams."""
    names = [path.relative_to(wanted) for path in wanted.rglob("*.bin")]
    assert names
    return sum(int((np.fromfile(out / n, np.uint16) != np.fromfile(wanted / n, np.uint16)).sum()) for n in names)


def test_another_stream_takes_the_tokens_from_the_cache(tmp_path, corpus, alma_prep, folder_bytes):
    cache = tmp_path / "cache"
    cached = ["--cache", str(cache)]
    assert alma_prep(tmp_path / "plain", corpus, num_mega_batches=2) == 0
    assert alma_prep(tmp_path / "first", corpus, num_mega_batches=2, more=cached) == 0
    assert folder_bytes(tmp_path / "first") == folder_bytes(tmp_path / "plain")
    found = entries(cache)
    assert len(found) == 1
    other = ["--seed", "7", "--tokenizer", str(tmp_path / "first" / "tokenizer.json")]
    assert alma_prep(tmp_path / "wanted", corpus, num_mega_batches=3, more=other) == 0
    assert alma_prep(tmp_path / "second", corpus, num_mega_batches=3, more=[*other, *cached]) == 0
    assert folder_bytes(tmp_path / "second") == folder_bytes(tmp_path / "wanted")
    assert entries(cache) == found

    (entry,) = (path.parent for path in cache.glob("tokens/*/*/mark.json"))
    replace_tokens(entry, is_noticed=False)
    assert alma_prep(tmp_path / "third", corpus, num_mega_batches=3, more=[*other, *cached]) == 0
    # So the stored tokens were used.
    assert num_different(tmp_path / "third", tmp_path / "wanted") > 0.5 * num_tokens(tmp_path / "wanted")

    replace_tokens(entry, is_noticed=True)
    assert alma_prep(tmp_path / "fourth", corpus, num_mega_batches=3, more=[*other, *cached]) == 0
    assert folder_bytes(tmp_path / "fourth") == folder_bytes(tmp_path / "wanted")
    assert entries(cache).keys() == found.keys()


def test_documents_that_are_cut_are_encoded_as_passages(tmp_path, corpus, alma_prep):
    """Their tokens are not stored if they are longer than the limit, and not used if they are shorter."""
    cache = tmp_path / "cache"
    assert alma_prep(tmp_path / "out", corpus, num_mega_batches=2, more=["--cache", str(cache)]) == 0
    (places,) = cache.glob("tokens/*/*/places")
    offset, num_bytes, ends = np.fromfile(places, np.int64).reshape(3, -1)
    assert offset.tolist() == np.concatenate([[0], np.cumsum(num_bytes)[:-1]]).tolist()
    num_tokens = np.diff(ends, prepend=0)
    assert (num_tokens[:-1] > 0).all()
    assert num_tokens[-1] == 0  # 1500 words; the limit is 1024


def test_shares_store_no_tokens(tmp_path, alma_prep):
    rows = [{"text": prose(60, seed)} for seed in range(400)]
    sources = [
        f"text:{write_lines(tmp_path / name, part)}"
        for name, part in (("a.jsonl", rows[:200]), ("b.jsonl", rows[200:]))
    ]
    more = ["--cache", str(tmp_path / "cache")]
    assert alma_prep(tmp_path / "out", f"{sources[0]}@0.3", sources[1], num_mega_batches=2, more=more) == 0
    assert entries(tmp_path / "cache") == {}


def test_an_entry_is_found_by_the_text_and_the_tokenizer_also_with_a_smaller_limit(tmp_path):
    def keys(**changes) -> list[str]:
        fields = {
            "spool": "/a", "shard": 0, "text_sha256": "t", "documents_sha256": "d", "most_words": 8192, "code": "c",
            "tokenizer_file": "/a/tokenizer.json", "tokenizer_sha256": "k", "dtype": "uint16",
        }  # fmt: skip
        return TokenStore(tmp_path).keys(StoreTokensTask(**fields | changes))

    assert keys(spool="/b", shard=5, tokenizer_file="/b/tokenizer.json") == keys()
    assert keys(most_words=1024)[1:] == keys()
    for change in (
        {"text_sha256": "u"},
        {"documents_sha256": "e"},
        {"tokenizer_sha256": "l"},
        {"dtype": "uint32"},
        {"code": "d"},
    ):
        assert not set(keys(**change)) & set(keys())


def test_a_file_of_which_the_stream_uses_little_is_not_stored(tmp_path, alma_prep, folder_bytes):
    """Most documents of the second source are copies of those of the first one."""
    cache = tmp_path / "cache"
    rows = [{"text": prose(30, seed)} for seed in range(700)]
    sources = [
        f"text:{write_lines(tmp_path / name, part)}"
        for name, part in (("a.jsonl", rows[:600]), ("b.jsonl", rows[200:]))
    ]
    assert alma_prep(tmp_path / "wanted", *sources, num_mega_batches=2) == 0
    assert alma_prep(tmp_path / "out", *sources, num_mega_batches=2, more=["--cache", str(cache)]) == 0
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "wanted")
    assert len(entries(cache)) == 1
    assert len(list(cache.glob("??/*/mark.json"))) == 2  # the text of both


def test_tokens_that_a_killed_call_stored_with_another_tokenizer_are_not_used(tmp_path, alma_prep, monkeypatch):
    """The second source has longer versions of most documents of the first one, of which little is used then."""
    rows = [{"text": prose(120, seed)} for seed in range(400)]
    longer = [{"text": f"{row['text']} {prose(6, 9000 + n)}"} for n, row in enumerate(rows[:280])]
    more = [{"text": prose(120, seed)} for seed in range(1000, 1600)]
    sources = [
        f"text:{write_lines(tmp_path / name, part)}" for name, part in (("a.jsonl", rows), ("b.jsonl", more + longer))
    ]
    cached = ["--cache", str(tmp_path / "cache")]

    class Killed(BaseException):
        """Stands for kill -9."""

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("data_prep.encoding.encode.join_tokens", killed)
        alma_prep(tmp_path / "out", sources[0], num_mega_batches=2, more=cached)
    assert list((tmp_path / "out/.alma-prep/tokens").glob("*.tokens"))
    assert alma_prep(tmp_path / "out", *sources, num_mega_batches=2, more=cached) == 0
    assert alma_prep(tmp_path / "wanted", *sources, num_mega_batches=2) == 0
    assert num_different(tmp_path / "out", tmp_path / "wanted") == 0


def test_a_task_refuses_other_code_than_that_it_describes(tmp_path):
    task = StoreTokensTask("s", 0, "t", "d", "tokenizer.json", "k", 1024, "uint16", code="other")
    with Heartbeat(tmp_path / "alive") as heartbeat, pytest.raises(PrepError, match="has changed since this run was"):
        task.run(tmp_path / "000000", heartbeat)
