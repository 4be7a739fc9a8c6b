"""Filters whose rules the user provides: a list of domains and URLs, and functions. Also the masking of personal data.

These are the options --block-urls, --filter and --mask-pii. The rules for quality that have a name are in `quality`.
"""

import ast
import functools
import hashlib
import importlib
import importlib.util
import re
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from data_prep.errors import PrepError
from data_prep.sources.base import Document
from data_prep.sources.encodings import HEAD_BYTES, how_to_convert, looks_like_utf16, marked_encoding
from fairseq_alma.core.files import sha256_of

_MAX_FOLDERS = 50
"""Maximum number of folders of a URL that are compared with the list of URLs."""
_MAX_PATH_CHARACTERS = 1 << 12
"""Number of characters of the path, and of the query, of a URL that are compared with the list of URLs."""
_MAX_HOST_CHARACTERS = 253
"""Maximum length of a host name in DNS. A URL with a longer one leads nowhere, and encoding the name takes a time that
grows with the square of its length."""
_DOMAIN = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_HOST = re.compile(rf"{_DOMAIN.pattern}|(?=[^:]*:)[0-9a-f:.]+")  # also an IP address of version 6
_UNUSABLE = re.compile(r"^@@|#[@?$]*#|\*|\^|^\W*(?:https?|ftp):?$|^(?:https?|ftp):(?!//)", re.IGNORECASE)
"""Rules for parts of pages and exceptions of ad blockers, wildcards inside a name, and schemes without a host."""
_HOSTS_LINE = re.compile(r"(?:\d+\.\d+\.\d+\.\d+|(?=\S*::)[0-9A-Fa-f:]+)\s+(\S.*)")
# A URL or a domain that need not be parsed by urllib, which takes ten times as long.
_USUAL_URL = re.compile(r"(?:[A-Za-z]+://)?([A-Za-z0-9._-]+)(?::\d*)?(/(?!/)[^?#]*)?(?:\?([^#]*))?(?:#.*)?")
# The parts of any URL: the user, the host with the port, and the rest.
_URL = re.compile(r"(?:[^/?#]*://)?(?:[^/?#]*@)?([^/?#]*)(.*)", re.DOTALL)
_FILTER_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class BlockedUrls:
    """A list of domains and URLs. It stores a hash of 8 bytes for each, so that 5 million domains take 40 MB.

    A domain also covers its subdomains. A URL also covers the pages below it: `example.com/forum` covers
    `https://www.example.com/forum/1.html`. A URL with a question mark covers only this URL.

    The lines of hosts files (`0.0.0.0 bad.example`), of ad blockers (`||bad.example^`), and `*.bad.example` are read as
    domains.

    Args:
        path: a text file with one domain or URL per line. Empty lines and comments (after # or !) are skipped.

    Raises:
        PrepError: if the file is in UTF-16 without a byte order mark.
    """

    def __init__(self, path: Path):
        self.num_unusable = 0
        """Number of entries that are not a domain or URL."""
        self.first_unusable = ""
        """The first of these entries, with the number of its line."""
        hashes = array("Q")
        with open(path, encoding=_encoding_of(path), errors="replace") as file:
            for number, line in enumerate(file, start=1):
                line = line.strip()
                if _DOMAIN.fullmatch(line):  # most lines; the general way takes several times as long
                    hashes.append(_hash(line.lower()))
                    continue
                for entry in _entries_in(line):
                    name = None if _UNUSABLE.search(entry) else next(_names_of(entry), None)
                    if name is not None:
                        hashes.append(_hash(name))
                    else:
                        self.num_unusable += 1
                        self.first_unusable = self.first_unusable or f"line {number}: {entry[:100]!r}"
        self._hashes = np.unique(np.frombuffer(hashes, np.uint64)) if hashes else np.empty(0, np.uint64)

    def __len__(self) -> int:
        return len(self._hashes)

    def has(self, url: str) -> bool | None:
        """Return True if the URL is covered by the list, False if not, and None if the text is not a URL."""
        wanted = np.array([_hash(name) for name in _names_of(url)] if "://" in url else [], np.uint64)
        if not len(wanted) or not len(self._hashes):
            return False if len(wanted) else None
        places = np.minimum(np.searchsorted(self._hashes, wanted), len(self._hashes) - 1)
        return bool((self._hashes[places] == wanted).any())


def _encoding_of(path: Path) -> str:
    """Return the codec of a list. Raise PrepError if it is in UTF-16 without a byte order mark."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if marked_encoding(head) is None and (encoding := looks_like_utf16(head)):
        raise PrepError(f"{path} looks like {encoding}, not UTF-8. {how_to_convert(encoding)}")
    return marked_encoding(head) or "utf-8"


def _entries_in(line: str) -> list[str]:
    """Return the domains and URLs in a line of a list: one, or several in a hosts file, or none in a comment."""
    line = re.split(r"(?:^|\s)#|^!|^\[Adblock", line, maxsplit=1)[0].strip()
    if of_host := _HOSTS_LINE.fullmatch(line):
        return of_host[1].split()
    if line.startswith("||"):
        line = line[2:].removesuffix("^")
    return [line.removesuffix("/*").replace("://*.", "://", 1).removeprefix("*.").removeprefix(".")] if line else []


def _names_of(url: str) -> Iterator[str]:
    """Yield the most exact name of a URL or a domain, and then the names of everything that contains it.

    For https://www.example.com/a/b?c: www.example.com/a/b?c, www.example.com/a/b, www.example.com/a, www.example.com,
    example.com, com, and the same pages for example.com.
    """
    host, path, query = _split(url)
    if not host:
        return
    folders = path.split("/")[1 : _MAX_FOLDERS + 1]
    labels = host.split(".")
    for domain in (".".join(labels[start:]) for start in range(len(labels))):
        if query:
            yield f"{domain}{path}?{query}"
        for end in range(len(folders), 0, -1):
            yield "/".join([domain, *folders[:end]])
        yield domain


def _split(url: str) -> tuple[str, str, str]:
    """Return the host, the path and the query of a URL or a domain. The host is empty if there is none."""
    url = url.strip().removeprefix("<").removesuffix(">")
    found = _USUAL_URL.fullmatch(url)
    if found:
        host, path, query = found[1].lower(), found[2] or "", found[3] or ""
    else:
        host, rest = _URL.fullmatch(url).groups()  # type: ignore[union-attr]  # it matches every text
        if len(host) > _MAX_HOST_CHARACTERS + len(":65535"):
            return "", "", ""
        try:
            parts = urlsplit(f"//{host}{rest}")
            host, path, query = parts.hostname or "", parts.path, parts.query
            host = host if host.isascii() else host.encode("idna").decode()
        except ValueError:  # for example, brackets that are not closed, or no valid name of a host
            return "", "", ""
    host = host.rstrip(".")
    if len(host) > _MAX_HOST_CHARACTERS or not _HOST.fullmatch(host):
        return "", "", ""
    path = unquote(path) if "%" in path else path
    return host, path[:_MAX_PATH_CHARACTERS].rstrip("/"), query[:_MAX_PATH_CHARACTERS]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=1)
def blocked_urls(path: str, sha256: str) -> BlockedUrls:
    """Return the list in this file. Later calls return the same list. A change of the digest makes it be read again.

    Raises:
        PrepError: if the file has another digest, because it was changed while alma-prep was running.
    """
    if sha256_of(Path(path)) != sha256:
        raise PrepError(f"{path} was changed while alma-prep was running. Run the same command again.")
    return BlockedUrls(Path(path))


_EMAIL_CHARACTERS = 320
"""Number of characters before and after an @ in which the rest of an email address is searched for."""
_EMAIL, _IP_ADDRESS = "email@example.com", "22.214.171.124"
"""What email addresses and public IP addresses are replaced with: the first of datatrove's replacements. datatrove
would use several in turn, and then the result would depend on the documents that were masked before."""


@functools.lru_cache(maxsize=1)
def _formatters() -> tuple:
    from datatrove.pipeline.formatters import PIIFormatter

    one = {"email_replacement": _EMAIL, "ip_replacement": _IP_ADDRESS}
    return PIIFormatter(remove_ips=False, **one), PIIFormatter(remove_emails=False, **one)


def mask_personal_data(text: str) -> str:
    """Return the text with email addresses and public IP (version 4) addresses replaced, by datatrove."""
    emails, addresses = _formatters()
    # datatrove's pattern for email addresses takes time that grows with the square of the length of a text without
    # spaces. Therefore only search around each @.
    pieces, done, at = [], 0, text.find("@")
    while at >= 0:
        start = max(done, at - _EMAIL_CHARACTERS)
        end = at + _EMAIL_CHARACTERS
        while 0 <= (at := text.find("@", at + 1)) <= end + _EMAIL_CHARACTERS:
            end = at + _EMAIL_CHARACTERS
        pieces += [text[done:start], emails.format(text[start:end])]
        done = min(end, len(text))
    return addresses.format("".join([*pieces, text[done:]]))


def parse_filters(text: str) -> list[str]:
    """Return the names MODULE:FUNCTION in a text such as `my_filters:no_lists,my_filters:no_code`.

    Raises:
        ValueError: if a name has another form, or is given twice.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if not _FILTER_NAME.fullmatch(name):
            raise ValueError(f"filters={name}: write MODULE:FUNCTION, for example my_filters:is_prose")
        if names.count(name) > 1:
            raise ValueError(f"filters={text}: {name} is given twice")
    return names


def filter_sha256(name: str) -> str:
    """Return the SHA-256 digest of the source of a filter MODULE:FUNCTION.

    The source is the file of the module, and the files in the same folder that it imports, directly or through others.
    If it imports none, the digest is that of the file.

    Raises:
        PrepError: if there is no such module.
    """
    module = name.partition(":")[0]
    _make_current_folder_importable()
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        raise PrepError(
            f"--filter {name}: there is no module {module} in the current folder {Path.cwd()} or in this Python "
            "environment. Check the name, or run the command in the folder of the module."
        )
    paths = _with_imported_neighbours(Path(spec.origin))
    if len(paths) == 1:
        return sha256_of(paths[0])
    return hashlib.sha256("".join(f"{path.name} {sha256_of(path)}\n" for path in paths).encode()).hexdigest()


def _with_imported_neighbours(path: Path) -> list[Path]:
    """Return the path of a module, and the paths of the modules in the same folder that it imports, sorted."""
    found, waiting = {path}, [path]
    while waiting:
        try:
            tree = ast.parse(waiting.pop().read_bytes())
        except (SyntaxError, ValueError):  # a library without source, or an error that the import will report
            continue
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {node.module} if node.module else {alias.name for alias in node.names}
        neighbours = {path.parent / f"{name.partition('.')[0]}.py" for name in names}
        new = {neighbour for neighbour in neighbours if neighbour.is_file()} - found
        found |= new
        waiting += new
    return sorted(found)


def load_filter(name: str, sha256: str | None = None) -> Callable[[Document], object]:
    """Import the function of a filter MODULE:FUNCTION.

    Args:
        name: the name of the filter.
        sha256: the digest that the source of the filter must have (see `filter_sha256`); None: any.

    Raises:
        PrepError: if the module cannot be imported, has no such function, or has another digest, because it was changed
            while alma-prep was running.
    """
    module, _, function = name.partition(":")
    _make_current_folder_importable()
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # whatever the user's code raises
        raise PrepError(
            f"--filter {name}: the module {module} cannot be imported ({type(error).__name__}: {error}). Mend it and "
            "run the same command again."
        ) from error
    if not callable(found):
        raise PrepError(f"--filter {name}: the module {module} has no function {function}. Check the name.")
    # After the import, so that a change just before it is noticed, too.
    if sha256 is not None and filter_sha256(name) != sha256:
        raise PrepError(
            f"--filter {name}: the module {module}, or a file that it imports, was changed while alma-prep was "
            "running. Run the same command again: it reads again what was read with the old one."
        )
    return found


def _make_current_folder_importable() -> None:
    """Add the current folder to the folders from which modules are imported, as the last one."""
    # As the last one, so that a file such as json.py in the current folder does not hide a module of Python.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()


def apply_filter(name: str, function: Callable[[Document], object], document: Document) -> tuple[str, str | None]:
    """Return the text of a document after a filter, and the reason to remove the document or None to keep it.

    Args:
        name: the name of the filter, MODULE:FUNCTION.
        function: the user's function. It returns True to keep the document, False or (False, reason) to remove it, or
            a new text.
        document: the document with its text, id and date.

    Raises:
        PrepError: if the function fails, or returns something else. The message names the function and the document.
    """
    try:
        result = function(document)
    except Exception as error:  # whatever the user's code raises
        raise PrepError(
            f"--filter {name} failed on the document {document.id}: {type(error).__name__}: {error}. Mend the function "
            "and run the same command again."
        ) from error
    if isinstance(result, bool | np.bool_):
        return document.text, None if result else name
    if isinstance(result, tuple) and len(result) == 2 and result[0] is False and isinstance(result[1], str):
        return document.text, f"{name}: {result[1]}"
    if isinstance(result, str):
        text = result.encode("utf-8", "replace").decode("utf-8")
        return text, None if text.strip() else f"{name}: no text left"
    raise PrepError(
        f"--filter {name} returned {str(result)[:100]!r} for the document {document.id}. It must return True (keep the "
        "document), False or (False, reason) to remove it, or a new text."
    )
