"""What is removed, and why: a planted document for each rule."""

import random

import pytest

from data_prep.cleaning.cleaner import TOO_SLOW, UNREADABLE, Cleaner, Cleaning, known_languages
from data_prep.reading.spool import Counts
from data_prep.sources import Document, Part
from tests.data_prep.languages import PARAGRAPHS, document

pytest.importorskip("datatrove", reason="needs the extra `corpora`")

ENGLISH = (
    "The whale is the largest animal of the sea, and it has to come up to breathe. That is why sailors "
    "have always seen it from afar with their glasses. In the old days they hunted it for oil, which lit "
    "the lamps of the cities until petroleum was found. Nowadays most countries protect whales, although "
    "some of them still allow a small hunt."
)
GERMAN = (
    "Der Wal ist das größte Tier des Meeres und muss zum Atmen auftauchen. Deshalb sehen ihn die Seeleute schon von "
    "weitem. Früher jagte man ihn wegen des Öls, das die Lampen der Städte erleuchtete, bis man Erdöl fand."
)
WORDS = [word.strip(".,").lower() for word in ENGLISH.split()]


def reason(text, **cleaning):
    return Cleaner(Cleaning(**cleaning)).clean(Document(text)).reason


def of_words(count, seed=0):
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def test_the_language_that_was_asked_for_is_kept():
    assert (reason(ENGLISH, language="en"), reason(GERMAN, language="en")) == (None, "language")
    assert (reason(ENGLISH, language="de"), reason(GERMAN, language="de")) == ("language", None)
    assert reason(GERMAN) is None
    # Of a long document the middle tells, and too little text tells nothing.
    assert reason("Startseite Über uns Kontakt\n" * 3 + ENGLISH * 30, language="en") is None
    assert reason("Guten Tag", language="en") is None


PLANTED = {
    "gopher quality: short_doc": "The whale and the sea that be with you.",
    "gopher quality: below_avg_threshold": "a b c of to be it is " * 20,
    "gopher quality: above_avg_threshold": "the and " + "internationalization " * 60,
    "gopher quality: too_many_hashes": of_words(60) + " #" * 10,
    "gopher quality: too_many_ellipsis": of_words(60) + " ..." * 10,
    "gopher quality: too_many_bullets": "\n".join(f"- {of_words(12, n)} the and" for n in range(10)),
    "gopher quality: too_many_end_ellipsis": "\n".join(f"{of_words(30, n)}..." for n in range(10)),
    "gopher quality: below_alpha_threshold": of_words(60) + " 1984" * 20,
    "gopher quality: enough_stop_words": "whale sea ship oil lamp city sailor glass hunt animal country days " * 6,
    "gopher repetition: dup_line_frac": "\n".join(
        [of_words(40), *["a line that comes again and again"] * 3, of_words(60, 1)]
    ),
    "gopher repetition: top_2_gram": " ".join(of_words(6, n) + " moby dick moby dick" for n in range(12)),
}


@pytest.mark.parametrize("why", PLANTED)
def test_every_rule_of_gopher_removes_its_planted_document(why):
    text, language = PLANTED[why], ""
    if "stop_words" in why:
        assert "stop_words" not in str(reason(text, gopher=True))  # of no language in particular
        language = "en"
    assert reason(text, language=language, gopher=True) == why
    assert reason(text) is None


def test_prose_passes():
    text = f"{ENGLISH} This is an old story of the sea."
    assert reason(text, language="en", gopher=True) is None
    assert reason(text.replace(". ", ".\n\n"), language="en", gopher=True) is None


def test_stop_words_are_required_only_of_english():
    assert reason(f"{GERMAN} {GERMAN.swapcase()}", language="de", gopher=True) is None
    assert {"en", "de", "bg"} <= known_languages()


def test_real_books_pass_and_real_pages_are_sorted_out(shared_data):
    cleaner = Cleaner(Cleaning(language="en", gopher=True))
    text = (shared_data / "books" / "jane_austen_emma.md").read_text(encoding="utf-8")
    chapters = [text[start : start + 8000] for start in range(0, len(text), 8000)]
    assert sum(cleaner.clean(Document(chapter)).reason is None for chapter in chapters) > 0.97 * len(chapters)


@pytest.mark.parametrize("language", sorted(PARAGRAPHS))
def test_prose_of_every_script_passes_the_rules(language):
    text = document(language, seed=0, num_words=200)
    cleaned = Cleaner(Cleaning(gopher=True)).clean(Document(text))
    assert (cleaned.reason, cleaned.text) == (None, text)


def test_documents_of_unreadable_characters_are_removed():
    for character in ("\0", "\ufffd", "\x1b", "\x90", "\ue000", "\U000f0000", "\u0378"):
        share_of_1_in_99 = ENGLISH[:98] + character
        assert reason(share_of_1_in_99) == UNREADABLE, repr(character)
        assert reason(ENGLISH[:100] + character) is None, repr(character)
    assert reason(ENGLISH.replace(" ", "\t\x0b\x0c\x85\u2028\ufeff")) is None


def test_a_document_whose_cleaning_takes_too_long_is_set_aside_by_name(monkeypatch):
    monkeypatch.setattr("data_prep.cleaning.cleaner.CLEANING_SECONDS", 0.01)
    cleaner = Cleaner(Cleaning(gopher=True))
    slow = Document("a\n" * 200_000, "https://slow.example/")
    assert cleaner.clean(slow).reason == TOO_SLOW
    assert cleaner.clean(Document(ENGLISH)).reason is None
    counts, part = Counts(), Part("text", "a.txt", "a.txt", 0, 9)
    counts.remove(part, slow, TOO_SLOW, 200_000, 400_000)
    [skipped] = counts.skipped
    assert (skipped.reason(), skipped.damaged) == (f"1 document: {TOO_SLOW} (the first is {slow.id})", False)
