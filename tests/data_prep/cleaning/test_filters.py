"""Filters of the user, and the sources to which Gopher's rules apply."""

import json
import subprocess
import sys

import pytest

from data_prep.cleaning.cleaner import Cleaner, Cleaning
from data_prep.cleaning.filters import filter_sha256
from data_prep.cli import main
from data_prep.encoding.stream_tokenizer import make_tokenizer
from data_prep.errors import PrepError
from data_prep.settings import PrepSettings
from data_prep.sources import Document, Source
from fairseq_alma.core.files import sha256_of
from tests.data_prep.cleaning.test_cleaner import ENGLISH, of_words

pytest.importorskip("datatrove", reason="needs the extra `corpora`")

PROSE = f"{ENGLISH} This is an old story of the sea."
FILTERS = """
import re

def no_lists(document):
    return not document.text.startswith("-")

def no_old_pages(document):
    return (False, "before 2000") if document.date < "2000" else True

def no_digits(document):
    return re.sub("[0-9]", "", document.text)

def of_page_7(document):
    if document.id == "7":
        raise KeyError("colour")
    return True

def of_no_use(document):
    return 3
"""


@pytest.fixture
def my_filters(tmp_path, monkeypatch):
    """A module in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("my_filters", None)
    (tmp_path / "my_filters.py").write_text(FILTERS)
    return tmp_path


def clean(text, identity="", date="", **cleaning):
    return Cleaner(Cleaning(**cleaning)).clean(Document(text, identity, date))


def test_gopher_applies_to_crawls_to_all_sources_or_to_none():
    def uses(kind, **more):
        return PrepSettings("out", (Source("books", "x"),), 1, **more).uses_gopher(kind)

    assert [uses(kind) for kind in ("text", "common-crawl")] == [False, True]
    assert uses("text", gopher="all")
    assert not uses("common-crawl", gopher="off")


def test_filters_of_the_user(my_filters):
    def by(name, text="- one 1", **more):
        return clean(text, filters=((f"my_filters:{name}", filter_sha256(f"my_filters:{name}")),), **more)[:2]

    assert by("no_lists") == ("- one 1", "my_filters:no_lists")
    assert by("no_lists", "one 1") == ("one 1", None)
    assert by("no_old_pages", date="1999-12-31")[1] == "my_filters:no_old_pages: before 2000"
    assert by("no_old_pages", date="2019-01-01")[1] is None
    assert by("no_digits") == ("- one ", None)
    assert by("no_digits", "42")[1] == "my_filters:no_digits: no text left"
    with pytest.raises(PrepError, match=r"my_filters:of_page_7 failed on the document 7: KeyError: 'colour'"):
        by("of_page_7", identity="7")
    with pytest.raises(PrepError, match=r"of_no_use returned '3' for the document"):
        by("of_no_use")


def write_pages(path, count=300):
    rows = [
        {
            "text": f"- {of_words(40, n)}" if n % 10 == 0 else f"Page {n} of joe@x{n}.org. {of_words(40, n)}",
            "id": f"http://{'spam.example' if n % 10 == 1 else 'good.example'}/{n}",
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_stream_with_filters_in_worker_processes(my_filters, alma_prep, capsys):
    write_pages(my_filters / "pages.jsonl")
    more = ["--filter", "my_filters:no_lists,my_filters:no_digits", "--duplicates", "keep"]
    assert alma_prep("out", "text:pages.jsonl", num_mega_batches=1, more=more) == 0
    stream = json.loads((my_filters / "out" / "stream.json").read_text())
    found = {row["step"]: row["documents"] for row in stream["cleaning"]}
    assert found == {"my_filters:no_lists": 30, "my_filters:no_digits: changed text": 270}
    assert sum(split["documents"] for split in stream["splits"].values()) == 270
    assert "--filter my_filters:no_lists,my_filters:no_digits" in stream["command"]
    capsys.readouterr()
    assert alma_prep("out", "text:pages.jsonl", num_mega_batches=1, more=more) == 0  # complete: only checked
    assert "nothing to do" in capsys.readouterr().err
    (my_filters / "my_filters.py").write_text(FILTERS + "\n")
    assert alma_prep("out", "text:pages.jsonl", num_mega_batches=1, more=more) == 2
    assert "my_filters:no_lists setting has changed" in capsys.readouterr().err


def write_new_pages(path, first):
    rows = [{"text": f"Page {n}. {of_words(40, n)}"} for n in range(first, first + 40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_an_extension_does_not_run_a_filter_that_only_the_stream_names(my_filters, alma_prep, capsys):
    """The stream may be somebody else's."""
    write_pages(my_filters / "pages.jsonl")
    assert alma_prep("out", "text:pages.jsonl", num_mega_batches=1, more=["--filter", "my_filters:no_lists"]) == 0
    (my_filters / "my_filters.py").write_text(f"open('canary', 'w').close()\n{FILTERS}")
    sys.modules.pop("my_filters")
    write_new_pages(my_filters / "new.jsonl", first=1000)
    assert main(["--extend", "out", "--source", "text:new.jsonl", "--workers", "1"]) == 2
    assert "the stream was made with --filter 'my_filters:no_lists'" in capsys.readouterr().err
    assert not (my_filters / "canary").exists()
    assert main(["--extend", "out", "--source", "text:new.jsonl", "--workers", "1", "--filter", ""]) == 0
    assert not (my_filters / "canary").exists()
    write_new_pages(my_filters / "new.jsonl", first=2000)
    named = ["--filter", "my_filters:no_lists"]
    assert main(["--extend", "out", "--source", "text:new.jsonl", "--workers", "1", *named]) == 0
    assert (my_filters / "canary").exists()


def test_the_digest_of_a_filter_covers_the_modules_beside_it(my_filters):
    alone = filter_sha256("my_filters:no_lists")
    assert alone == sha256_of(my_filters / "my_filters.py")
    (my_filters / "words.py").write_text("from lists import KNOWN\n")
    (my_filters / "lists.py").write_text("KNOWN = 1\n")
    (my_filters / "other.py").write_text("")
    (my_filters / "my_filters.py").write_text(f"import json\nimport words\n{FILTERS}")
    found = [filter_sha256("my_filters:no_lists")]
    for name in ("words.py", "lists.py", "my_filters.py"):  # `lists` is imported by `words`
        (my_filters / name).write_text((my_filters / name).read_text() + "\n")
        found.append(filter_sha256("my_filters:no_lists"))
    assert len({alone, *found}) == 5
    (my_filters / "other.py").write_text("\n")
    assert filter_sha256("my_filters:no_lists") == found[-1]


def test_a_filter_that_was_changed_during_the_run_is_refused(my_filters):
    """Each job of a cluster imports the filter anew."""
    (my_filters / "my_filters.py").write_text(f"import words\n{FILTERS}")
    (my_filters / "words.py").write_text("KNOWN = 1\n")
    cleaning = Cleaning(filters=(("my_filters:no_lists", filter_sha256("my_filters:no_lists")),))
    assert Cleaner(cleaning).clean(Document("- one")).reason == "my_filters:no_lists"
    (my_filters / "words.py").write_text("KNOWN = 2\n")
    with pytest.raises(PrepError, match=r"my_filters, or a file that it imports, was changed.*same command again"):
        Cleaner(cleaning)


def test_a_stream_records_the_filter_with_which_it_was_read(my_filters, alma_prep, monkeypatch, capsys):
    write_pages(my_filters / "pages.jsonl", 100)
    digest = sha256_of(my_filters / "my_filters.py")

    def change_it(*arguments):
        """All text has been read."""
        (my_filters / "my_filters.py").write_text(FILTERS + "\n")
        return make_tokenizer(*arguments)

    monkeypatch.setattr("data_prep.pipeline.make_tokenizer", change_it)
    more = ["--filter", "my_filters:no_lists", "--duplicates", "keep"]
    assert alma_prep("out", "text:pages.jsonl", num_mega_batches=1, more=more) == 0
    settings = json.loads((my_filters / "out" / "stream.json").read_text())["settings"]
    assert settings["sha256 of my_filters:no_lists"] == digest
    assert alma_prep("out", "text:pages.jsonl", num_mega_batches=1, more=more) == 2
    assert "my_filters:no_lists setting has changed" in capsys.readouterr().err


def test_a_filter_that_fails_is_named_and_the_mended_one_continues(my_filters, alma_prep, capsys):
    rows = [{"text": of_words(40, n), "id": str(n)} for n in range(60)]
    (my_filters / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"num_mega_batches": 1, "more": ["--filter", "my_filters:of_page_7", "--duplicates", "keep"]}
    assert alma_prep("out", "text:pages.jsonl", **arguments) == 2
    assert "--filter my_filters:of_page_7 failed on the document 7: KeyError" in capsys.readouterr().err
    (my_filters / "my_filters.py").write_text(FILTERS.replace('"7"', '"no"'))
    sys.modules.pop("my_filters", None)
    assert alma_prep("out", "text:pages.jsonl", **arguments) == 0
    missing = {"no_such:f": "no module no_such", "my_filters:f": "no function f", "f": "write MODULE:FUNCTION"}
    for name, why in missing.items():
        assert alma_prep("x", "text:pages.jsonl", num_mega_batches=1, more=["--filter", name]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.slow
def test_the_rules_download_nothing():
    code = "import socket\nsocket.socket.connect = None\n"
    code += "from data_prep.cleaning.cleaner import *\n"
    code += f"text = {PROSE!r}\n"
    code += "cleaner = Cleaner(Cleaning(language='en', gopher=True))\n"
    code += "print(cleaner.clean(Document(text)).reason)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "None", found.stderr
