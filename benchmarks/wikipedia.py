"""Compare the text that alma-prep reads from Wikipedia dumps with the text of other readers of wiki markup.

ALMA_DATA=DATA python benchmarks/wikipedia.py              printed, in about ten minutes
ALMA_DATA=DATA python benchmarks/wikipedia.py --write      also written to benchmarks/wikipedia.md

DATA contains wikipedia/. `--before FOLDER` adds a column for another checkout of alma-prep. The others are read if they
are installed: `pip install pypandoc_binary wikitextparser wikiextractor`. The HTML that Wikipedia showed for these
revisions is not available offline. So there are two comparisons: with pandoc, which knows no templates, and with a list
of what a reader sees of templates in 20 pages, which was written by hand from the markup.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from _common import ROOT, provenance, table, write_part

from data_prep.sources.base import Part, SkippedUnits, no_report
from data_prep.sources.wikipedia import _articles, _pieces

ALMA_PREP = """
import json, sys
from data_prep.sources import Document, Source, list_files, read_documents, split_into_parts
if __name__ == "__main__":
    source = Source("wikipedia", sys.argv[1])
    parts = split_into_parts(source, list_files(source), 1 << 40, {})
    print(json.dumps([one.text for part in parts for one in read_documents(part) if isinstance(one, Document)]))
"""
# The first four templates in sentences, without those for editors and sources, in articles 1, 6, 11, ..., 96 of the
# English dump, as Wikipedia shows them. 8 of the 20 articles have none.
SEEN = {
    "Anarchism": ["the Greek ἀναρχία,", "(from ἄναρχος,", "and ἀρχός, archos"],
    "Achilles": ["əˈkɪliːz", "Ἀχιλλεύς", "akʰilːéu̯s", "combination of ἄχος"],
    "Academy Awards": ["5,783 as of 2012"],
    "Ayn Rand": ["ˈaɪn ˈrænd", "Али́са Зино́вьевна", "February 2 [O.S. January 20] 1905", "(Russian: Али́са Зиновьевна"],
    "Anthropology": ["Latin anthropologia derived", "French anthropologie, by"],
    "ASCII": ["ˈæski", "ASS-kee", " – early typewriters", "computers—following"],
    "Austroasiatic languages": ["except for *ʄ.", "*ʄ is better preserved"],
    "Animal Farm": ["called César,", "as Napoléon.", "15 September 1972"],
    "Alkali metal": ["M+C8−"],
    "Andrei Tarkovsky": [
        "Андре́й Арсе́ньевич",
        "ɐnˈdrʲej ɐrˈsʲenʲjɪvʲɪtɕ",
        "Alexander Tarkowski",
        "Концентрат",
        "отлично",
    ],
    "Adobe": ["əˈdoʊbi", "əˈdoʊb/", "aˈðoβe", "əˈdoʊbiː"],
    "Actinopterygii": ["ˌæktɨnˌɒptəˈrɪdʒi.aɪ", "at 8 mm", "at 2,300 kg", "at 11 m"],
}
# Elements of pandoc's documents that are not running text.
NO_TEXT = ("Note", "Table", "Image", "Figure", "RawInline", "RawBlock", "Math", "CodeBlock")


def words_of_pandoc(node: Any) -> str:
    """Return the running text of a document of pandoc."""
    if isinstance(node, list):
        return "".join(map(words_of_pandoc, node))
    if not isinstance(node, dict) or node["t"] in NO_TEXT:
        return ""
    inside = node.get("c", "")
    if node["t"] == "Str":
        return inside
    if node["t"] in ("Code", "Link", "Span", "Div", "Header"):  # the other parts are attributes and addresses
        inside = inside[2 if node["t"] == "Header" else 1]
    end = "\n" if node["t"] in ("Para", "Plain", "Header", "LineBreak") else " " * (node["t"] in ("Space", "SoftBreak"))
    text = inside if node["t"] == "Code" else words_of_pandoc(inside)
    return "" if node["t"] == "Link" and re.match("Category:|Категория:", text) else text + end


def with_pandoc(markup: str) -> str | None:
    command = [importlib.import_module("pypandoc").get_pandoc_path(), "--from=mediawiki", "--to=json"]
    found = subprocess.run(command, input=markup, capture_output=True, text=True)
    return None if found.returncode else words_of_pandoc(json.loads(found.stdout)["blocks"])


TOOLS = {
    "mwparserfromhell": lambda markup: importlib.import_module("mwparserfromhell").parse(markup).strip_code(),
    "wikitextparser": lambda markup: importlib.import_module("wikitextparser").parse(markup).plain_text(),
    "pandoc": with_pandoc,
}


def read_markup(data: Path) -> dict[str, str]:
    """Return the markup of each article, by title."""
    parts = (Part("wikipedia", str(path), path.name, 0, path.stat().st_size) for path in sorted(data.iterdir()))
    dumps = (_articles(_pieces(part), SkippedUnits("", "page"), no_report) for part in parts)
    return {article.title: article.markup.markup for dump in dumps for article in dump}


def read_with_alma_prep(root: Path, data: Path) -> dict[str, str]:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        print(ALMA_PREP, file=script, flush=True)
        environment = os.environ | {"PYTHONPATH": str(root)}
        found = subprocess.run([sys.executable, script.name, data], env=environment, stdout=subprocess.PIPE, check=True)
    return {text.partition("\n")[0]: text.partition("\n")[2] for text in json.loads(found.stdout)}


def read_with_wikiextractor(data: Path) -> dict[str, str]:
    found = {}
    for path in sorted(data.iterdir()):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "wikiextractor.WikiExtractor", "--json", "-q", "-o", folder, str(path)]
            subprocess.run(command, capture_output=True)
            for written in Path(folder).rglob("wiki_*"):
                rows = map(json.loads, written.read_text().splitlines())
                found.update({row["title"]: row["text"] for row in rows if row["text"]})
    return found


def difference(found: dict[str, str], wanted: dict[str, str]) -> tuple[int, int]:
    """Return the number of characters in words of `wanted` that are not in `found`, and the reverse, page by page."""
    lost = invented = 0
    for title in wanted.keys() & found.keys():
        ours, theirs = (Counter(re.findall(r"\w+", texts[title])) for texts in (found, wanted))
        lost += sum(len(word) for word in (theirs - ours).elements())
        invented += sum(len(word) for word in (ours - theirs).elements())
    return lost, invented


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, help="another checkout of alma-prep to compare with")
    parser.add_argument("--write", action="store_true", help="write benchmarks/wikipedia.md")
    options = parser.parse_args()
    load, data = os.getloadavg()[0], Path(os.environ["ALMA_DATA"]) / "wikipedia"
    markup = read_markup(data)
    found = {"alma-prep": read_with_alma_prep(ROOT, data)}
    if options.before:
        found["alma-prep before"] = read_with_alma_prep(options.before, data)
    notes = []
    if importlib.util.find_spec("wikiextractor"):
        found["wikiextractor"] = read_with_wikiextractor(data)
    for name, tool in TOOLS.items():
        try:
            texts = {title: tool(text) for title, text in markup.items()}
            found[name] = {title: text for title, text in texts.items() if text is not None}
        except ImportError as error:
            notes.append(f"{name} is not measured: {error}.")
    rows = []
    for name, texts in found.items():
        seen = sum(
            sight in " ".join(texts.get(title, "").split()) for title, sights in SEEN.items() for sight in sights
        )
        lost, invented = difference(texts, found["pandoc"]) if "pandoc" in found else ("", "")
        length = sum(len("".join(re.findall(r"\w+", text))) for text in texts.values())
        rows.append((name, len(texts), f"{length:,}", f"{lost:,}", f"{invented:,}", seen))
    head = ("reader", "pages", "characters", "lost", "invented", f"seen, of {sum(map(len, SEEN.values()))}")
    about = (
        f"Characters in words, of {len(markup)} articles. Lost and invented: in words that only pandoc has, or that "
        "pandoc has not, page by page, without the pages that pandoc cannot read. pandoc shows no templates, so what "
        "others show of them counts as invented, and so do tables, references and captions, which are removed from "
        "pandoc's text. What pandoc shows of galleries and timelines counts as lost. Seen: what a reader sees of "
        "templates in 20 pages (see the script). The HTML that Wikipedia showed of these revisions is not available "
        "offline."
    )
    lines = [about, "", *table(head, rows), "", *notes, *provenance(load)]
    print("\n".join(lines))
    if options.write:
        intro = "# Text of Wikipedia\n\nWritten by `benchmarks/wikipedia.py --write`."
        write_part(intro, {}, "What is lost and what is invented", lines)


if __name__ == "__main__":
    main()
