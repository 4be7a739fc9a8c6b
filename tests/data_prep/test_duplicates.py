"""Copies and near copies: what is found, which one stays, and that no order shows."""

import hashlib
import random
import tracemalloc

import numpy as np
import pytest

from data_prep.duplicates import NO_SIGNATURE, NUM_BANDS, Signer, find_duplicates, load_band, save_signatures

pytest.importorskip("datatrove", reason="needs the extra `corpora`")


def word(number):
    """In letters: to datatrove all digits are alike."""
    return "".join(chr(97 + digit) for digit in (number // 676 % 26, number // 26 % 26, number % 26))


def text_of(num_words, seed):
    return " ".join(map(word, random.Random(seed).choices(range(5000), k=num_words)))


def changed(text, share, seed=0):
    """With that share of its words replaced, in one stretch: n-grams elsewhere stay."""
    words = text.split()
    count = round(share * len(words))
    rng = random.Random(seed)
    start = rng.randrange(len(words) - count)
    words[start : start + count] = [word(number) for number in rng.choices(range(6000, 17000), k=count)]
    return " ".join(words)


@pytest.fixture(scope="module")
def signer():
    return Signer()


def find(tmp_path, signer, texts, rank=None, num_known=0, shards=1):
    keys = np.array([hashlib.sha256(text.encode()).digest()[:16] for text in texts], "V16")
    signatures = np.array([signer.signature(text) for text in texts], np.uint64).reshape(-1, NUM_BANDS)
    paths = []
    for number, part in enumerate(np.array_split(signatures, shards)):
        save_signatures(tmp_path / f"{number}.signatures", part)
        paths.append(tmp_path / f"{number}.signatures")
    words = np.array([len(text.split()) for text in texts], np.int32)
    return find_duplicates(keys, np.array(rank or [0] * len(texts), np.int32), words, [paths], num_known)


def test_near_copies_are_found_and_others_are_not(tmp_path, signer):
    texts = [text_of(400, seed) for seed in range(40)]
    near = [changed(text, 0.05, seed) for seed, text in enumerate(texts)]
    far = [changed(text, 0.7, seed) for seed, text in enumerate(texts)]
    found = find(tmp_path, signer, [*texts, *near, *far])
    assert not found.exact.any()
    pairs = found.near[:40] ^ found.near[40:80]  # one of each pair stays
    assert pairs.sum() >= 39
    assert not found.near[80:].any()


def test_case_punctuation_and_spaces_do_not_hide_a_copy(tmp_path, signer):
    text = text_of(300, 1)
    found = find(tmp_path, signer, [text, text.upper().replace(" ", ",\n ")])
    assert found.near.sum() == 1
    assert not found.exact.any()


def test_the_longest_document_of_a_group_stays_and_among_equal_ones_the_first_key(tmp_path, signer):
    text = text_of(400, 2)
    longer = f"{text} and some more words at its end"
    found = find(tmp_path, signer, [text, longer, text])
    assert found.near.tolist() == [True, False, False] or found.near.tolist() == [False, False, True]
    assert found.exact.sum() == 1
    assert not found.exact[1]


def test_documents_of_the_stream_stay_and_then_those_of_the_first_snapshot(tmp_path, signer):
    text = text_of(400, 3)
    longer = f"{text} and some more words at its end"
    assert find(tmp_path, signer, [text, longer], rank=[-1, 0], num_known=1).near.tolist() == [False, True]
    assert find(tmp_path, signer, [longer, text], rank=[1, 0]).near.tolist() == [True, False]
    # Two that are near to each other and were let in before both stay.
    assert find(tmp_path, signer, [text, longer, text], rank=[-1, -1, 0], num_known=2).near.tolist()[:2] == [
        False,
        False,
    ]


def test_a_chain_of_near_copies_is_one_group(tmp_path, signer):
    chain = [text_of(600, 4)]
    for number in range(6):
        chain.append(changed(chain[-1], 0.04, number))
    found = find(tmp_path, signer, chain)
    assert (~(found.near | found.exact)).sum() == 1


@pytest.mark.parametrize("shards", [1, 3])
def test_neither_order_nor_shards_change_what_stays(tmp_path, signer, shards):
    texts = [text_of(200, seed) for seed in range(30)]
    texts += [changed(text, 0.04) for text in texts[:10]] + texts[:5]
    kept = set()
    for seed in range(3):
        random.Random(seed).shuffle(texts)
        found = find(tmp_path, signer, texts, shards=shards)
        kept.add(tuple(sorted(text for text, out in zip(texts, found.exact | found.near, strict=True) if not out)))
    assert len(kept) == 1


def test_short_texts_have_no_near_copies(tmp_path, signer):
    assert set(signer.signature("one two three four")) == {NO_SIGNATURE}
    found = find(tmp_path, signer, ["one two three", "one two four", "one two three"])
    assert found.exact.sum() == 1
    assert not found.near.any()


def test_a_signature_does_not_depend_on_the_number_of_n_grams_hashed_at_a_time(signer, monkeypatch):
    text = text_of(5000, 5)
    whole = signer.signature(text)
    monkeypatch.setattr("data_prep.duplicates._CHUNK_NGRAMS", 37)
    assert np.array_equal(signer.signature(text), whole)


def test_it_is_datatroves_signature(signer):
    """Bands meet exactly where datatrove's own signatures are equal in them."""
    minhash = signer._minhash
    base = text_of(500, 6)
    for share in (0.02, 0.1, 0.3):
        other = changed(base, share)
        theirs = [minhash.get_signature(minhash.get_shingles(text)) for text in (base, other)]
        ours = signer.signature(base) == signer.signature(other)
        assert ours.tolist() == [one == two for one, two in zip(*theirs, strict=True)]


def test_bands_are_read_one_by_one(tmp_path):
    signatures = np.arange(3 * NUM_BANDS, dtype=np.uint64).reshape(3, NUM_BANDS)
    save_signatures(tmp_path / "s", signatures)
    for band in range(NUM_BANDS):
        assert load_band(tmp_path / "s", band).tolist() == signatures[:, band].tolist()
    save_signatures(tmp_path / "empty", signatures[:0])
    assert len(load_band(tmp_path / "empty", 3)) == 0


def test_memory_is_bounded_by_the_number_of_documents(tmp_path):
    """Beside the 56 bytes of a document's entry: 128 bytes in all, keys and counts included."""
    count = 400_000
    rng = np.random.default_rng(0)
    keys = np.frombuffer(rng.bytes(16 * count), "V16")
    signatures = rng.integers(1, count * 20, (count, NUM_BANDS), np.uint64)  # some meet by chance
    save_signatures(tmp_path / "s", signatures)
    del signatures
    rank, words = np.zeros(count, np.int32), np.full(count, 100, np.int32)
    tracemalloc.start()
    found = find_duplicates(keys, rank, words, [[tmp_path / "s"]])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < found.near.sum() < count
    assert 56 + 16 + 8 + peak / count < 128


def test_the_two_moby_dicks_are_one_book(tmp_path, signer, shared_data):
    from data_prep.sources.books import without_gutenberg

    books = sorted((shared_data / "books").iterdir())
    texts = [without_gutenberg(path.read_text(encoding="utf-8")) for path in books]
    found = find(tmp_path, signer, texts)
    [out] = np.flatnonzero(found.near)
    assert "moby" in books[out].name
    assert not found.exact.any()
