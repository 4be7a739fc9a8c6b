"""C4's and FineWeb's rules, lists of URLs, masked personal data, and filters of the user."""

import json
import subprocess
import sys
import time

import pytest

from data_prep.cleaning.cleaner import Cleaner, Cleaning
from data_prep.cleaning.filters import BlockedUrls, filter_sha256, mask_personal_data
from data_prep.cleaning.quality import RULES, parse_rules
from data_prep.cli import main
from data_prep.encoding.stream_tokenizer import make_tokenizer
from data_prep.errors import PrepError
from data_prep.settings import PrepSettings
from data_prep.sources import Document, Source
from fairseq_alma.core.files import sha256_of
from tests.data_prep.cleaning.test_cleaner import ENGLISH, of_words

pytest.importorskip("datatrove", reason="needs the extra `corpora`")

PROSE = f"{ENGLISH} This is an old story of the sea."
LINES = PROSE.replace(". ", ".\n")
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


@pytest.mark.parametrize(
    ("why", "text"),
    {
        "too_few_sentences": "The whale breathes air.\nThe sea is deep and wide.",
        "lorem_ipsum": f"{LINES}\nThen lorem ipsum dolor sit amet.",
        "curly_bracket": f"{LINES}\nThis line is code {{ of a program }}.",
    }.items(),
)
def test_every_rule_of_c4_removes_its_planted_document(why, text):
    assert clean(text, rules=("c4",)).reason == f"c4: {why}"


def test_c4_removes_lines_and_counts_their_words():
    menu = "Home About Contact"
    lines = ["Please enable Javascript in your browser.", "Read our privacy policy first of all.", "Too short."]
    cleaned = clean("\n".join([menu, LINES, *lines]), rules=("c4",))
    assert cleaned.reason is None
    assert cleaned.text == LINES
    num_bytes = sum(len(line) + 1 for line in (menu, *lines))  # and the ends of these lines
    assert cleaned.changes == (("c4: changed text", 3 + 6 + 7 + 2, num_bytes),)


@pytest.mark.parametrize(
    ("why", "text"),
    {
        "line_punct_ratio": "\n".join(of_words(20, n) for n in range(10)),
        "short_line_ratio": "\n".join(f"{of_words(4, n)}." for n in range(10)),
        "char_dup_ratio": "\n".join([f"{of_words(20, n)}." for n in range(10)] + [f"{of_words(20)}."]),
        "list_ratio": "\n\n\n".join(f"{of_words(7, n)} internationally." for n in range(10)),
    }.items(),
)
def test_every_rule_of_fineweb_removes_its_planted_document(why, text):
    assert clean(text, rules=("fineweb",)).reason == f"fineweb: {why}"


def test_rules_have_scopes_and_the_order_of_fineweb():
    assert parse_rules("c4, fineweb:all") == {"c4": "crawls", "fineweb": "all"}
    assert list(RULES) == ["gopher", "c4", "fineweb"]
    for wrong in ("c5", "c4:some", "c4,c4:all"):
        with pytest.raises(ValueError, match="rules="):
            parse_rules(wrong)

    def rules(kind, **more):
        return PrepSettings("out", (Source("books", "x"),), 1, **more).rules_for(kind)

    assert rules("text") == ()
    assert rules("common-crawl") == ("gopher",)
    assert rules("common-crawl", rules="fineweb,c4", gopher="off") == ("c4", "fineweb")
    assert rules("text", rules="fineweb:all,gopher:all") == ("gopher", "fineweb")


def test_a_list_of_urls_covers_subdomains_and_pages_below(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text(
        "# spam\nSpam.example\n\nhttps://forum.org/Bad/\nshop.net/item?id=3\nbücher.de\na.org/café\nb.org/caf%C3%A9\n",
        encoding="utf-8",
    )
    blocked = BlockedUrls(path)
    inside = (
        "http://spam.example http://www.spam.example:80/a?b#c https://forum.org/Bad https://www.forum.org/Bad/1?x=y "
    )
    inside += "http://shop.net/item?id=3 https://xn--bcher-kva.de/x https://bücher.de "
    inside += "http://a.org/café http://a.org/caf%C3%A9/1 http://b.org/caf%c3%a9 http://b.org/café"
    outside = "http://example http://notspam.example http://spam.example.com https://forum.org/Badge https://forum.org "
    outside += "http://shop.net/item http://shop.net/item?id=30 http://[broken http://"
    assert [url for url in inside.split() if not blocked.has(url)] == []
    assert [url for url in outside.split() if blocked.has(url)] == []
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    assert not BlockedUrls(empty).has("http://spam.example")


def test_lists_in_other_forms_are_used_and_what_is_no_domain_is_counted(tmp_path):
    lines = [
        "[Adblock Plus 2.0]", "! a comment", "# a comment", "", "0.0.0.0 a.example b.example # two", "::1 c.example",
        "||d.example^", "*.e.example", ".f.example", "G.example # spam", "https://user:pw@h.example:8080/x/",
        "https://*.i.example/*", "büCHER.example", "j.example.", "https://k.example/#top", "http://[2001:db8::1]/",
        "example.net##.ad", "@@||good.example^", "l*.example", "m.example,spam", "two words", "http://",
        "http:n.example", "||o.example^$third-party", "ö" * 70 + ".de",
    ]  # fmt: skip
    inside = [f"{name}.example" for name in "abcdefgijk"] + ["h.example/x/1", "xn--bcher-kva.example", "[2001:db8::1]"]
    outside = ["good.example", "example.net", "example", "h.example", "l1.example", "m.example", "o.example", "http"]
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        path = tmp_path / f"{encoding}.txt"
        path.write_bytes("\r\n".join(lines).encode(encoding))
        blocked = BlockedUrls(path)
        assert [name for name in inside if not blocked.has(f"https://www.{name}".replace("www.[", "["))] == []
        assert [name for name in outside if blocked.has(f"https://{name}")] == []
        assert (blocked.num_unusable, blocked.first_unusable) == (9, "line 17: 'example.net##.ad'")
    assert blocked.has("<https://a.example/1>")  # as some programs write the URL of a document
    assert (blocked.has("a.example/1"), blocked.has("https://[broken")) == (None, None)
    # A host name has at most 253 characters. The name of a user before it can be longer.
    assert blocked.has(f"https://{'ä' * 60_000}.example/") is blocked.has(f"https://{'a.' * 60_000}example/") is None
    assert blocked.has(f"https://{'ä' * 60_000}@a.example/{'b/' * 60_000}")


def test_a_list_without_any_domain_is_refused_and_unusable_lines_are_a_warning(tmp_path, alma_prep, capsys):
    write_pages(tmp_path / "pages.jsonl")
    for content, why in (
        (b"# nothing\n\n", "contains no domain and no URL. Write one per line"),
        (b"two words\n", "contains no domain and no URL; line 1: 'two words' cannot be used"),
        (
            "bad.example\n".encode("utf-16-le"),
            "looks like UTF-16LE, not UTF-8. Replace the file by the output of: iconv -f UTF-16LE",
        ),
    ):
        (tmp_path / "list.txt").write_bytes(content)
        more = ["--block-urls", tmp_path / "list.txt", "--duplicates", "keep"]
        assert alma_prep(tmp_path / "out", f"text:{tmp_path}/pages.jsonl", num_mega_batches=1, more=more) == 2
        assert why in capsys.readouterr().err
    (tmp_path / "list.txt").write_text("spam.example\ntwo words\n1 2 3\n")
    assert alma_prep(tmp_path / "out", f"text:{tmp_path}/pages.jsonl", num_mega_batches=1, more=more) == 0
    warning = "2 entries are not a domain or URL and block nothing, the first in line 2: 'two words'"
    assert warning in capsys.readouterr().err


def test_masking_does_not_depend_on_earlier_documents_and_takes_linear_time():
    text = "Write to jane.doe+x@mail.example.co.uk or <joe@x.org>, from 8.8.8.8 or 192.168.0.1, not a@b or @joe."
    masked = "Write to email@example.com or <email@example.com>, from 22.214.171.124 or 192.168.0.1, not a@b or @joe."
    assert mask_personal_data(text) == mask_personal_data(text) == masked
    start = time.process_time()
    attack = "a-" * 200_000
    assert mask_personal_data(f"{attack} joe@x.org a@b@{attack}").startswith(f"{attack} email@example.com")
    assert time.process_time() - start < 5
    assert clean("ask joe@x.org", mask_pii=True).changes == (
        ("masked personal data", 0, len("joe@x.org") - len("email@example.com")),
    )


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
    (my_filters / "spam.txt").write_text("spam.example\n")
    more = ["--filter", "my_filters:no_lists", "--block-urls", "spam.txt", "--mask-pii", "--duplicates", "keep"]
    assert alma_prep("out", "text:pages.jsonl", num_mega_batches=1, more=more) == 0
    stream = json.loads((my_filters / "out" / "stream.json").read_text())
    found = {row["step"]: row["documents"] for row in stream["cleaning"]}
    assert found == {"blocked URL": 30, "my_filters:no_lists": 30, "masked personal data": 240}
    assert sum(split["documents"] for split in stream["splits"].values()) == 240
    assert "--filter my_filters:no_lists" in stream["command"]
    assert stream["command"].count("--mask-pii") == 1
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
    for more in ([], ["--dry-run", "1"]):
        assert main(["--extend", "out", "--source", "text:new.jsonl", "--workers", "1", *more]) == 2
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


def test_a_stream_records_the_filter_and_the_list_with_which_it_was_read(my_filters, alma_prep, monkeypatch, capsys):
    write_pages(my_filters / "pages.jsonl", 100)
    (my_filters / "spam.txt").write_text("spam.example\n")
    digests = sha256_of(my_filters / "my_filters.py"), sha256_of(my_filters / "spam.txt")

    def change_them(*arguments):
        """All text has been read."""
        (my_filters / "my_filters.py").write_text(FILTERS + "\n")
        (my_filters / "spam.txt").write_text("good.example\n")
        return make_tokenizer(*arguments)

    monkeypatch.setattr("data_prep.pipeline.make_tokenizer", change_them)
    more = ["--filter", "my_filters:no_lists", "--block-urls", "spam.txt", "--duplicates", "keep"]
    assert alma_prep("out", "text:pages.jsonl", num_mega_batches=1, more=more) == 0
    settings = json.loads((my_filters / "out" / "stream.json").read_text())["settings"]
    assert (settings["sha256 of my_filters:no_lists"], settings["sha256 of block_urls"]) == digests
    assert alma_prep("out", "text:pages.jsonl", num_mega_batches=1, more=more) == 2
    assert "my_filters:no_lists setting has changed; a file of the block_urls setting has" in capsys.readouterr().err


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
def test_documents_without_a_url_are_reported(tmp_path, alma_prep, capsys):
    (tmp_path / "pages.txt").write_text("".join(f"{of_words(40, n)}\n" for n in range(60)))
    (tmp_path / "spam.txt").write_text("spam.example\n")
    more = ["--block-urls", tmp_path / "spam.txt", "--duplicates", "keep"]
    assert alma_prep(tmp_path / "out", f"text:{tmp_path / 'pages.txt'}", num_mega_batches=1, more=more) == 0
    assert "warning: 60 documents of source text:" in capsys.readouterr().err
    assert alma_prep(tmp_path / "x", "text:x", more=["--block-urls", tmp_path / "no.txt"]) == 2
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_the_rules_download_nothing():
    code = "import socket\nsocket.socket.connect = None\n"
    code += "from data_prep.cleaning.cleaner import *\n"
    code += f"text = {PROSE!r}\n"
    code += "cleaner = Cleaner(Cleaning(language='en', rules=('gopher', 'c4', 'fineweb'), mask_pii=True))\n"
    code += "print(cleaner.clean(Document(text)).reason)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == "None", found.stderr
