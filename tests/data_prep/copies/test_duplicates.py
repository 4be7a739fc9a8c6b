"""Copies and near copies: what is found, which one stays, and that no order shows."""

import hashlib
import itertools
import json
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from data_prep import characters
from data_prep.copies import candidates, deduplication
from data_prep.copies.candidates import Corpus, save_corpus
from data_prep.copies.deduplication import load_keys, remove_copies, save_keys
from data_prep.copies.near_copies import find_duplicates, removed_copies
from data_prep.errors import PrepError
from data_prep.reading.ngrams import ngram_hashes, unit_hashes, unit_hashes_of
from data_prep.reading.read import read_sources
from data_prep.reading.signatures import (
    NO_BAND,
    NUM_BANDS,
    SKETCH_BYTES,
    SignatureFiles,
    Signer,
    anchors,
    estimate_similarity,
    sign,
)
from data_prep.running.heartbeat import Heartbeat
from data_prep.running.tasks import run_task
from data_prep.running.work_folder import WorkFolder
from data_prep.settings import PrepSettings
from data_prep.sources import Source, list_files

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHINESE = [chr(0x4E00 + number) for number in range(3000)]


class Here:
    """Runs tasks in this process."""

    def run(self, step, numbers, threads, on_done):
        for number in numbers:
            on_done(run_task(str(step.folder), number, step.tasks[number].description()))


def english(rng, count):
    """Words with the frequencies of natural language, more or less."""
    numbers = [int(20_000 ** rng.random()) for _ in range(count)]
    return ["".join(LETTERS[number // 26**place % 26] for place in range(4)) for number in numbers]


def chinese(rng, count):
    return [CHINESE[int(3000 ** rng.random()) - 1] for _ in range(count)]


def changed(rng, words, count, maker):
    """The words with `count` of them, at random places, replaced."""
    words = list(words)
    for position in rng.sample(range(len(words)), count):
        words[position] = maker(rng, 1)[0]
    return words


def similarity(one, two, size=5):
    """Jaccard similarity of n-grams, computed without the code under test."""
    grams = [{tuple(words[start : start + size]) for start in range(len(words) - size + 1)} for words in (one, two)]
    return len(grams[0] & grams[1]) / len(grams[0] | grams[1])


class Copies:
    """Which of some texts `remove_copies` removes, and the files that it leaves for --extend."""

    def __init__(self, folder: Path, texts, files=1, known=None):
        (folder / "in").mkdir(parents=True)
        for number in range(files):
            lines = [json.dumps({"text": text}) + "\n" for text in texts[number::files]]
            (folder / "in" / f"{number}.jsonl").write_text("".join(lines))
        source = Source("text", str(folder / "in"))
        settings = PrepSettings(folder, (source,), 1)
        work = WorkFolder(folder / "work", executor=Here())
        for each in (work.folder, work.spool, work.stream):
            each.mkdir()
        spooled = read_sources(settings, 0, {source: list_files(source)}, work)
        keys_and_signatures = known or (np.empty(0, "V16"), [])
        _, self.found, self.rows = remove_copies(spooled, *keys_and_signatures, work)
        keys = spooled.documents["document"].tobytes()
        place = {keys[start : start + 16]: number for number, start in enumerate(range(0, len(keys), 16))}
        where = [place[hashlib.sha256(text.encode()).digest()[:16]] for text in texts]
        self.near, self.exact = self.found.near[where], self.found.exact.copy()
        self.kept = {text for text, near in zip(texts, self.near, strict=True) if not near}
        recorded = (~self.found.exact, self.found.near, spooled.signatures)
        save_keys(work.stream / "dedup", 0, spooled.documents["document"], *recorded)
        self.dedup = work.stream / "dedup"


@pytest.mark.parametrize(("maker", "space"), [(english, " "), (chinese, "")])
def test_planted_near_copies_are_found_and_others_are_not(tmp_path, maker, space):
    rng = random.Random(0)
    pairs = []
    while len(pairs) < 200:
        words = maker(rng, rng.choice((100, 300, 600)))
        other = changed(rng, words, max(1, int(len(words) * rng.uniform(0.002, 0.022))), maker)
        if 0.8 <= similarity(words, other) < 1:
            pairs.append((space.join(words), space.join(other)))
    others = [space.join(maker(rng, 200)) for _ in range(100)]
    near = Copies(tmp_path, [one for one, _ in pairs] + [two for _, two in pairs] + others).near
    assert (near[:200] ^ near[200:400]).sum() >= 198  # one of each pair stays
    assert not near[400:].any()


def test_pages_of_a_template_stay(tmp_path):
    """Linked in chains, they would be one group: each is like many others, but no two are near copies."""
    rng = random.Random(1)
    template = english(rng, 200)
    slots = rng.sample(range(4, 196), 9)
    pages, words = [], []
    for _ in range(1200):
        page = list(template)
        for slot in slots:
            page[slot] = english(rng, 1)[0]
        words.append(page)
        pages.append(" ".join(page))
    pairs = [rng.sample(words, 2) for _ in range(200)]
    assert 0.6 < np.mean([similarity(*pair) for pair in pairs]) < 0.7
    assert Copies(tmp_path, pages).near.mean() < 0.05


def test_a_document_stays_if_only_a_removed_document_is_similar_to_it(tmp_path):
    rng = random.Random(2)
    first = english(rng, 400)
    second = [*english(rng, 35), *first[35:398]]
    third = [*second[:360], *english(rng, 36)]
    assert min(similarity(first, second), similarity(second, third)) > 0.8 > similarity(first, third)
    assert Copies(tmp_path, [" ".join(words) for words in (first, second, third)]).near.tolist() == [False, True, False]
    better, worse = np.array([0, 1, 1, 2, 4]), np.array([1, 2, 3, 5, 6])
    removed, instead = removed_copies(better, worse)
    assert dict(zip(removed.tolist(), instead.tolist(), strict=True)) == {1: 0, 5: 2, 6: 4}


def test_a_page_inside_a_longer_page_is_removed(tmp_path):
    rng = random.Random(3)
    longer = [english(rng, 3000) for _ in range(20)]
    inside = [words[700 : 700 + 150 + number] for number, words in enumerate(longer)]
    half = [words[:100] + english(rng, 100) for words in longer]
    texts = [" ".join(words) for words in [*longer, *inside, *half]]
    near = Copies(tmp_path, texts).near
    assert near[20:40].sum() >= 19
    assert not near[:20].any()
    assert not near[40:].any()


def test_case_punctuation_spaces_and_width_do_not_hide_a_copy(tmp_path):
    rng = random.Random(4)
    text = " ".join(english(rng, 300))
    han = "".join(chinese(rng, 300))
    wide = "".join(f"{letter}，" if number % 9 == 0 else letter for number, letter in enumerate(han))
    texts = [text, text.upper().replace(" ", ",\n "), text.translate({97: 0xFF41}), han, wide]
    assert Copies(tmp_path, texts).near.sum() == 3


def test_the_longest_document_stays_and_no_order_shows(tmp_path):
    rng = random.Random(5)
    texts = [" ".join(english(rng, 200)) for _ in range(30)]
    longer = [f"{text} and some more words at its end" for text in texts[:10]]
    texts += [*longer, *(" ".join(changed(rng, text.split(), 3, english)) for text in texts[:10])]
    kept = []
    for seed, files in ((0, 1), (1, 3), (2, 1)):
        random.Random(seed).shuffle(texts)
        kept.append(Copies(tmp_path / str(seed), texts, files).kept)
    assert kept[0] == kept[1] == kept[2]
    assert set(longer) <= kept[0]
    assert len(kept[0]) == 30


def test_extending_finds_copies_of_the_stream_by_their_signatures_alone(tmp_path):
    rng = random.Random(6)
    words = [maker(rng, 400) for maker in (english, chinese) for _ in range(40)]
    old = [("" if word[0] in CHINESE else " ").join(word) for word in words]
    removed = " ".join(changed(rng, words[0], 6, english))
    before = Copies(tmp_path / "old", [*old, f"{removed} a b c d"])
    assert before.near.sum() == 1
    known = load_keys(before.dedup, 1, "near")
    new = [
        ("" if word[0] in CHINESE else " ").join(changed(rng, word, 3, chinese if word[0] in CHINESE else english))
        for word in words
    ]
    template = [" ".join(changed(rng, words[1], 28, english)) for _ in range(40)]  # similarity about 0.5 to old text
    near = Copies(tmp_path / "new", [*new, *template, *old[:3]], known=known).near
    assert near[:80].sum() >= 79
    assert not near[80:120].any()
    for name in ("bands", "sketches"):
        (before.dedup / f"0000.{name}").unlink()
    with pytest.raises(PrepError, match="made with --duplicates exact, so the signatures"):
        load_keys(before.dedup, 1, "near")
    assert len(load_keys(before.dedup, 1, "exact")[0]) == 81


def test_documents_of_the_stream_stay():
    keys = np.array([hashlib.sha256(bytes([number])).digest()[:16] for number in (0, 1, 1, 2)], "V16")

    def find_pairs(priority, by_priority):
        assert by_priority[0] in (0, 1)
        assert priority[2] == -1  # an exact copy of a known document
        return priority[[0, 1]].astype(np.int64), priority[[3, 3]].astype(np.int64)

    found = find_duplicates(keys, np.array([-1, -1, 0, 0]), np.array([9, 9, 9, 20]), find_pairs, num_known=2)
    assert found.exact.tolist() == [False, False, True, False]
    assert found.near.tolist() == [False, False, False, True]


def test_large_groups_of_copies_need_linear_time(tmp_path, monkeypatch):
    rng = random.Random(7)
    words = english(rng, 200)
    texts = [" ".join([*words, f"page {number} of many"]) for number in range(800)]
    counts = []
    read = Corpus.sketches
    monkeypatch.setattr(
        Corpus, "sketches", lambda self, *numbers: counts.append(len(numbers[0])) or read(self, *numbers)
    )
    assert Copies(tmp_path, texts).near.sum() == 799
    assert sum(counts) < 800 * 30 * 2 * 3  # bands, sketches per pair, comparisons


def test_short_texts_have_no_near_copies(tmp_path):
    assert set(sign(unit_hashes("one two three four"))[0]) == {NO_BAND}
    copies = Copies(tmp_path, ["one two three", "one two four", "One two three"])
    assert not copies.near.any()


def test_words_and_letters_are_units():
    for text, count in [
        ("don't stop—well-known 3.5", 5), ("我们使用Python编程。", 7), ("हिन्दी भाषा", 2), ("สวัสดี", 4), ("", 0),
        (" \n", 0),        ("ひらがな カタカナ", 8), ("한국어 문장", 2), ("zero\u200bwidth \ud800", 1),
    ]:  # fmt: skip
        assert len(unit_hashes(text)) == count, text
    assert (unit_hashes("Ab, c") == unit_hashes("ab\n\nC!")).all()
    assert len(set(unit_hashes("a b ab ba 是 时").tolist())) == 6
    assert len(ngram_hashes(unit_hashes("a b c"), 4)) == 0


def test_hashes_do_not_depend_on_the_texts_before():
    # The table of the kinds of characters is filled as texts need it.
    texts = ["naïve café—ok", "ひらがな カタカナ 是", "हिन्दी ສະບາຍດີ /", "𠀀𠀁 𝒳y \U0010ffff"]
    found = []
    for order in itertools.permutations(range(4)):
        characters._KIND[:] = characters._UNKNOWN
        hashes = {number: unit_hashes(texts[number]).tolist() for number in order}
        found.append([hashes[number] for number in range(4)])
    assert [len(each) for each in found[0]] == [3, 9, 7, 3]
    assert all(each == found[0] for each in found)


def test_texts_that_are_hashed_together_have_their_own_hashes():
    rng = random.Random(12)
    texts = [" ".join(english(rng, length)) for length in (0, 1, 7, 30)]
    # Texts without a unit, and texts whose first or last characters could change with their neighbours.
    texts += ["", " \n", "…", "ΑΣ", "\u0301a", "zero\u200bwidth", "\ud800", "\u1100", "\u1161x", "是时"]
    for _ in range(50):
        chosen = rng.choices(texts, k=rng.randint(1, 8))
        units, counts = unit_hashes_of(chosen)
        alone = [unit_hashes(text) for text in chosen]
        assert counts.tolist() == [len(each) for each in alone], chosen
        assert np.array_equal(units, np.concatenate(alone)), chosen


def test_hashes_do_not_depend_on_the_size_of_chunks(monkeypatch):
    text = " ".join(english(random.Random(8), 2000))
    whole = unit_hashes(text)
    monkeypatch.setattr("data_prep.reading.ngrams._CHUNK_CHARACTERS", 777)
    assert np.array_equal(unit_hashes(text), whole)


def test_the_estimate_is_as_exact_as_documented():
    rng = random.Random(9)
    errors = []
    for _ in range(100):
        words = english(rng, 1500)
        other = changed(rng, words, 32, english)
        sketches = [sign(unit_hashes(" ".join(each)))[1][None] for each in (words, other)]
        errors.append(float(estimate_similarity(*sketches)[0]) - similarity(words, other))
    assert abs(np.mean(errors)) < 0.01
    assert np.std(errors) < 0.025
    found = anchors(unit_hashes(" ".join(words)), 3)
    assert 50 < len(found) < 150
    assert (found["row"] == 3).all()
    assert (found["needed"] > 0).sum() == 4


def test_signature_files_are_read_band_by_band(tmp_path):
    files = SignatureFiles(tmp_path / "s")
    with Signer(files) as signer:
        for text in ("a b c d e f", "x"):
            signer.add(text)
    assert files.num_documents == 2
    assert files.load_band(3).tolist()[1] == NO_BAND
    assert not files.map_sketches()[1].any()
    with Signer(files):
        pass
    assert len(files.load_band(0)) == len(files.map_sketches()) == 0


@pytest.fixture
def random_signatures(tmp_path):
    """The signature files of 4 x 50 documents, the first of which are near copies of the last, and all sketches."""
    rng, files = np.random.default_rng(0), []
    sketches = rng.integers(1, 255, (200, SKETCH_BYTES), np.uint8)
    sketches[:80] = sketches[120:]
    sketches[:80, :5] ^= 1
    for number in range(4):
        files.append(SignatureFiles(tmp_path / f"{number}"))
        sketches[50 * number : 50 * (number + 1)].tofile(files[-1].sketches)
        rng.integers(1, 3, (NUM_BANDS, 50), np.uint32).tofile(files[-1].bands)
    return files, sketches


@pytest.fixture
def mapped(monkeypatch):
    """A list of the files with sketches that were mapped into memory."""
    mapped: list[str] = []
    map_sketches = SignatureFiles.map_sketches
    monkeypatch.setattr(
        SignatureFiles, "map_sketches", lambda self: mapped.append(self.prefix.name) or map_sketches(self)
    )
    return mapped


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_sketches_are_copied_file_by_file_and_sorted_block_by_block(
    tmp_path, monkeypatch, random_signatures, mapped, rows
):
    monkeypatch.setattr(deduplication, "_SORTED_ROWS", rows)
    files, sketches = random_signatures
    rng = np.random.default_rng(1)
    keys = np.frombuffer(rng.bytes(16 * 200), "V16")
    for number, is_recorded in enumerate((rng.random(200) < 0.7, np.zeros(200, bool))):
        mapped.clear()
        save_keys(tmp_path / "dedup", number, keys, is_recorded, np.zeros(200, bool), files)
        order = sorted(np.flatnonzero(is_recorded), key=lambda document: keys[document].tobytes())
        saved = (tmp_path / "dedup" / f"{number:04d}.sketches").read_bytes()
        assert saved == sketches[order].tobytes()
        assert mapped == ["0", "1", "2", "3"]


def test_a_file_with_sketches_is_opened_once_for_many_pairs(tmp_path, monkeypatch, random_signatures, mapped):
    files, _ = random_signatures
    numbers = np.arange(200, dtype=np.int32)
    found, opened = [], []
    for chunk, num_mapped in ((1, 256), (1 << 15, 256), (1 << 15, 1)):
        monkeypatch.setattr(candidates, "_CHUNK_PAIRS", chunk)
        monkeypatch.setattr(candidates, "_MAPPED_FILES", num_mapped)
        mapped.clear()
        save_corpus(tmp_path / "corpus", files, 0, numbers, numbers)
        with Heartbeat(tmp_path / "alive") as heartbeat:
            task = candidates.BandTask(str(tmp_path / "corpus"), f"{chunk} {num_mapped}", 0, 2, 0, 1)
            num_compared = task.run(tmp_path / "task", heartbeat)["compared"]
        found.append(np.load(tmp_path / "task.pairs.npy"))
        opened.append(len(mapped))
    assert len(found[0]) > 20 and num_compared > 2000
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
    assert opened[:2] == [4, 4]
    # Once for each search among representatives and neighbours in two bands.
    assert opened[2] <= 4 * 2 * (candidates.NUM_REPRESENTATIVES + candidates.NUM_NEIGHBOURS)


@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_anchors_are_sorted_and_a_task_reads_only_its_own(tmp_path, monkeypatch, num_parts):
    rng = random.Random(10)
    longer = [english(rng, 600) for _ in range(12)]
    files, expected = [], set()
    for number, texts in enumerate((longer, [words[100:400] for words in longer], [["short"]], [])):
        files.append(SignatureFiles(tmp_path / f"{number}"))
        with Signer(files[-1]) as signer:
            for row, words in enumerate(texts):
                signer.add(" ".join(words))
                of_text = anchors(unit_hashes(" ".join(words)), row)
                expected |= {(number, *anchor) for anchor in of_text.tolist()}
    numbers = np.arange(25, dtype=np.int32)
    save_corpus(tmp_path / "corpus", files, 0, numbers, numbers)
    read, load = [], SignatureFiles.load_anchors

    def record(self, lowest, highest):
        found = load(self, lowest, highest)
        assert (found["hash"][1:] >= found["hash"][:-1]).all()
        read.extend((int(self.prefix.name), *anchor) for anchor in found.tolist())
        return found

    monkeypatch.setattr(SignatureFiles, "load_anchors", record)
    matches = []
    for part in range(num_parts):
        with Heartbeat(tmp_path / "alive") as heartbeat:
            task = candidates.AnchorTask(str(tmp_path / "corpus"), f"{num_parts} anchor parts", part, num_parts)
            task.run(tmp_path / "task", heartbeat)
        matches.append(np.load(tmp_path / "task.matches.npy"))
    assert len(read) == len(expected) > 500 and set(read) == expected
    pairs = candidates.possible_containers(matches)
    assert list(zip(pairs["better"].tolist(), pairs["worse"].tolist(), strict=True)) == [(n, n + 12) for n in range(12)]


@pytest.mark.parametrize("least", [1, 50, 1 << 20])
def test_records_are_merged_in_few_steps(monkeypatch, least):
    monkeypatch.setattr(candidates, "_MIN_MERGED", least)
    rng = np.random.default_rng(0)
    arrays = [np.zeros(rng.integers(0, 60), candidates.MATCH) for _ in range(100)]
    for array in arrays:
        array["better"], array["worse"] = rng.integers(0, 40, (2, len(array)))
    sort, lengths = candidates.sorted_unique, []
    monkeypatch.setattr(candidates, "sorted_unique", lambda *given: lengths.append(len(given[0])) or sort(*given))
    found, counts = candidates.merged(iter(arrays), candidates.MATCH)
    expected, expected_counts = np.unique(np.concatenate(arrays), return_counts=True)
    assert found.tolist() == expected.tolist()
    assert counts.tolist() == expected_counts.tolist()
    assert sum(lengths) <= 2 * sum(map(len, arrays)) + len(expected)
    assert [len(each) for each in candidates.merged(iter([]), candidates.MATCH)] == [0, 0]


def test_memory_is_bounded_by_the_number_of_documents():
    count = 400_000
    rng = np.random.default_rng(0)
    keys = np.frombuffer(rng.bytes(16 * count), "V16")
    rank, words = np.zeros(count, np.int32), np.full(count, 100, np.int32)

    def find_pairs(priority, by_priority):
        better = np.arange(0, count, 2)
        return better, better + 1

    tracemalloc.start()
    found = find_duplicates(keys, rank, words, find_pairs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.near.sum() == count // 2
    assert peak / count < 72


def test_the_two_moby_dicks_are_one_book(tmp_path, shared_data):
    from data_prep.sources.books import without_gutenberg

    books = sorted((shared_data / "books").iterdir())
    texts = [without_gutenberg(path.read_text(encoding="utf-8")) for path in books]
    [out] = np.flatnonzero(Copies(tmp_path, texts).near)
    assert "moby" in books[out].name


def test_a_document_is_compared_again_if_its_sure_copies_are_removed_themselves(tmp_path):
    """Three revisions, each a sure copy of the others, are all similar to one longer document, but not surely."""
    rng = random.Random(7)
    longest = english(rng, 620)
    shorter = longest[30:590]
    revisions = [changed(rng, shorter, 4, english) for _ in range(3)]
    assert all(0.8 < similarity(longest, words) < 0.9 for words in revisions)
    texts = [" ".join(words) for words in (longest, *revisions)]
    assert Copies(tmp_path, texts).near.tolist() == [False, True, True, True]
