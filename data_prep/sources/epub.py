"""Read EPUB files: zip archives whose package document lists the chapters in reading order (the spine).

Only the chapters and the files that list them are unpacked, in memory. So a missing picture, font or table of contents
does not matter. A chapter that cannot be read is left out of the book and reported.
"""

import posixpath
import re
import unicodedata
import zipfile
from contextlib import suppress
from html.parser import HTMLParser
from urllib.parse import unquote

from data_prep.compression import BOMB_FLOOR_BYTES, BOMB_RATIO, DamagedFile
from data_prep.sources.base import MAX_DOCUMENT_BYTES, Skipped, SkippedUnits
from data_prep.sources.encodings import looks_like_utf16, marked_encoding
from data_prep.sources.text import TOO_LONG
from data_prep.sources.web_page import AS_IN_BROWSERS, as_html

_MAX_UNPACKED_BYTES = 4 * MAX_DOCUMENT_BYTES
"""Maximum number of bytes that are unpacked from an EPUB file."""
_PACKAGE = "application/oebps-package+xml"
_TEXT = {
    *("application/xhtml+xml", "text/html", "text/xml", "application/xml"),
    *("text/x-oeb1-document", "application/x-dtbook+xml"),  # of EPUB 2
}
"""Media types of chapters."""
_PICTURES_AND_SOUND = ("image/", "audio/", "video/")


def read_epub(path_and_name: tuple[str, str]) -> tuple[str, list[Skipped]]:
    """Return the text of an EPUB file, and what was skipped in it. Runs in the child process (see `bounded`).

    Raises:
        DamagedFile: if the file cannot be read or is too large.
    """
    path, name = path_and_name
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_book(_Archive(archive), name)
    except (DamagedFile, MemoryError):
        raise
    except Exception as error:  # catch all: zipfile raises many types of errors
        raise DamagedFile(
            f"damaged: the file is not readable as EPUB ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _read_book(archive: "_Archive", name: str) -> tuple[str, list[Skipped]]:
    """Return the text of the chapters in the order of the spine, and the chapters that were skipped.

    Items with linear="no", such as notes, are read where the spine lists them. A chapter that is listed several times
    is read once. The navigation document is left out. Pictures, sound and chapters outside the spine are counted.
    """
    package = archive.package()
    tags = _start_tags(archive.unpacked(package))
    items = [item for tag, item in tags if tag == "item"]
    manifest = {item.get("id", ""): item for item in items}
    spine = [itemref.get("idref", "") for tag, itemref in tags if tag == "itemref"]
    bad = SkippedUnits(name, "chapter")
    chapters: dict[str, tuple[int, zipfile.ZipInfo]] = {}
    for position, idref in enumerate(spine):
        item = _text_item(manifest, idref)
        href, media_type = item.get("href", ""), _media_type(item)
        found = archive.find(href, package.filename)
        if not item:
            bad.add("the manifest does not list the chapter", position, idref)
        elif _is_navigation(item):
            continue
        elif media_type.startswith(_PICTURES_AND_SOUND):
            bad.drop("a picture or sound")
        elif not _is_text(item):
            bad.add(f"the media type {media_type} is not text", position, href, damaged=False)
        elif found is None:
            bad.add("the EPUB file does not contain the chapter", position, href)
        else:
            chapters.setdefault(found.filename, (position, found))
    if not spine:
        raise DamagedFile("damaged: the file is not readable as EPUB (its package document lists no chapters)")
    if num_encrypted := len(archive.encrypted() & chapters.keys()):
        # The file is not damaged: it is what the shop delivers. A few chapters without encryption are not a book.
        why = f"encrypted (DRM): {num_encrypted} of {len(chapters)} chapters. Use a copy of the book without DRM"
        return "", [Skipped(name, why, damaged=False)]
    texts_of_items = [item for item in items if _is_text(item) and not _is_navigation(item)]
    others = {
        found.filename for item in texts_of_items if (found := archive.find(item.get("href", ""), package.filename))
    }
    bad.drop("not in the reading order of the book (its spine)", len(others - chapters.keys()))
    texts, length = [], 0
    for position, found in chapters.values():
        try:
            content = _decoded(archive.unpacked(found))
        except UnicodeDecodeError:
            bad.add("the text is not valid in the encoding that it declares, or in UTF-8", position, found.filename)
            continue
        except (DamagedFile, MemoryError):
            raise
        except Exception as error:  # catch all: zipfile raises many types of errors
            bad.add(f"the chapter cannot be unpacked ({type(error).__name__})", position, found.filename)
            continue
        texts.append(_plain_text(content))
        bad.drop("without text", int(not texts[-1]))
        length += len(texts[-1]) + 2
        if length > MAX_DOCUMENT_BYTES:
            raise DamagedFile(TOO_LONG)
    return "\n\n".join(filter(None, texts)), list(bad)


# The package


def _start_tags(content: bytes) -> list[tuple[str, dict[str, str]]]:
    """Return the start tags of an XML document, without prefixes and in lower case, with their attributes.

    HTMLParser continues after errors, loads no DTD, and replaces no entities that the document defines.
    """
    found: list[tuple[str, dict[str, str]]] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag.rpartition(":")[2], {name: (value or "").strip() for name, value in attrs}))

    parser = Parser()
    try:
        parser.feed(_decoded(content))
    except UnicodeDecodeError:  # only the metadata, such as the title, has characters that are not ASCII
        parser.feed(content.decode("utf-8", "replace"))
    parser.close()
    return found


def _media_type(item: dict[str, str]) -> str:
    """Return the media type of an item in lower case, without parameters such as a charset."""
    return item.get("media-type", "").partition(";")[0].strip().lower()


def _is_text(item: dict[str, str]) -> bool:
    """Return True if an item of the manifest is a chapter by its media type, or by its name if the type is wrong."""
    media_type, name = _media_type(item), item.get("href", "").partition("#")[0].lower()
    is_named = name.endswith((".xhtml", ".html", ".htm")) and not media_type.startswith(_PICTURES_AND_SOUND)
    return media_type in _TEXT or is_named


def _is_navigation(item: dict[str, str]) -> bool:
    """Return True if an item of the manifest is the table of contents."""
    return "nav" in item.get("properties", "").split()


def _text_item(manifest: dict[str, dict[str, str]], name: str) -> dict[str, str]:
    """Return the item with this id, or, if it is not text, its fallback that is text; {} if there is no such item."""
    first = item = manifest.get(name, {})
    for _ in manifest:  # not endless, because items can be fallbacks of each other
        if _is_text(item):
            return item
        item = manifest.get(item.get("fallback", ""), {})
    return first


class _Archive:
    """The files in an EPUB file."""

    def __init__(self, archive: zipfile.ZipFile):
        members = archive.infolist()
        unpacked = sum(member.file_size for member in members)
        packed = sum(member.compress_size for member in members)
        if unpacked > BOMB_FLOOR_BYTES + BOMB_RATIO * packed:
            raise DamagedFile(
                f"the file is a decompression bomb: its {packed:,} bytes would decompress to {unpacked:,} bytes"
            )
        self._archive, self._num_bytes = archive, 0
        exact = {member.filename: member for member in members}
        self._members = {_folded(member.filename): member for member in members} | exact

    def find(self, href: str, base: str = "") -> zipfile.ZipInfo | None:
        """Return the file that a file `base` links to, or None.

        Links are percent-encoded. Links that are not, or that differ from the name in capitals, are found too.
        """
        bare = href.partition("#")[0]
        names = [unquote(bare), bare, href] if bare else []
        for name in names:
            path = posixpath.join("/", posixpath.dirname(base.replace("\\", "/")), name.replace("\\", "/"))
            path = posixpath.normpath(path).lstrip("/")
            if found := self._members.get(path) or self._members.get(_folded(path)):
                return found
        return None

    def unpacked(self, member: zipfile.ZipInfo) -> bytes:
        """Return the content of a file."""
        # The size that the archive states can be wrong, so read at most one byte too many.
        with self._archive.open(member) as file:
            content = file.read(_MAX_UNPACKED_BYTES - self._num_bytes + 1)
        self._num_bytes += len(content)
        if self._num_bytes > _MAX_UNPACKED_BYTES:
            raise DamagedFile(
                f"the file is too large: its texts decompress to more than the {_MAX_UNPACKED_BYTES:,} bytes that "
                "are accepted"
            )
        return content

    def package(self) -> zipfile.ZipInfo:
        """Return the package document: the first one that the container names, or any if it names none."""
        container = self.find("META-INF/container.xml")
        tags = _start_tags(self.unpacked(container)) if container else []
        roots = [self.find(root.get("full-path", "")) for tag, root in tags if root.get("media-type") == _PACKAGE]
        others = [member for name, member in self._members.items() if name.lower().endswith(".opf")]
        for found in filter(None, [*roots, *others]):
            return found
        raise DamagedFile("damaged: the file is not readable as EPUB (it has no package document)")

    def encrypted(self) -> set[str]:
        """Return the names of the encrypted files. They include fonts that are only obfuscated."""
        names = {member.filename for member in self._members.values() if member.flag_bits & 1}
        if listed := self.find("META-INF/encryption.xml"):
            found = [self.find(data.get("uri", "")) for _, data in _start_tags(self.unpacked(listed))]
            names.update(member.filename for member in found if member)
        return names


def _folded(name: str) -> str:
    """Return the name of a file without the differences that programs make: capitals, backslashes, accents."""
    with suppress(UnicodeError):
        name = name.encode("cp437").decode("utf-8")  # UTF-8 that is not marked as such in the archive
    return unicodedata.normalize("NFC", posixpath.normpath(name.replace("\\", "/"))).lower()


# The chapters


_DECLARED = re.compile(rb"(?:<\?xml[^<>]*?\sencoding|<meta[^<>]*?charset)\s*=\s*(?:[\"']\s*)?([\w.:-]+)", re.I)


def _decoded(content: bytes) -> str:
    """Return the text of a document.

    A byte order mark counts most. Then comes UTF-8, because the declaration is often older than the last conversion,
    and text in another encoding is not valid UTF-8 by chance. Then come the encodings that are declared.
    """
    from resiliparse.parse.encoding import map_encoding_to_html5

    labels = [label.decode("ascii", "replace") for label in _DECLARED.findall(content[:4096])]
    declared = [AS_IN_BROWSERS.get(codec, codec) for label in labels if (codec := map_encoding_to_html5(label))]
    # The declaration is readable as ASCII, so the text is not in UTF-16.
    declared = [codec for codec in declared if not codec.startswith("utf-16")]
    # ASCII bytes can be another encoding, such as ISO-2022-JP.
    codecs = [*declared, "utf-8"] if content.isascii() else ["utf-8", *declared]
    for codec in (marked_encoding(content), looks_like_utf16(content), *codecs):
        try:
            if codec:
                return content.decode(codec)
        except UnicodeDecodeError as error:
            undecodable = error
    raise undecodable


# The elements that the parser leaves out, although books show their text.
_FIGURE = re.compile(r"(</?)(?:figure|figcaption|noscript)\b", re.I)


def _plain_text(chapter: str) -> str:
    """Return the text of a chapter in XHTML or HTML."""
    from resiliparse.extract.html2text import extract_plain_text

    chapter = _FIGURE.sub(r"\1div", as_html(chapter))
    return extract_plain_text(chapter, main_content=False, alt_texts=False).strip()
