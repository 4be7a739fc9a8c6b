"""Folders behind links, folders that lead back to themselves, and folders that cannot be read."""

import contextlib
import glob
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from data_prep.errors import PrepError
from data_prep.sources import Source, list_files
from data_prep.sources.walk import paths_matching

FILES = {"text": "a.txt", "books": "a.txt", "common-crawl": "a.warc.gz", "wikipedia": "a.xml.bz2"}


@pytest.fixture
def linked(tmp_path):
    """A folder with a link to a folder outside, links that lead back, and a link to a folder that it contains."""
    (tmp_path / "in/real/deep").mkdir(parents=True)
    (tmp_path / "outside/more").mkdir(parents=True)
    for name in FILES.values():
        for folder in ("in/real", "in/real/deep", "outside", "outside/more"):
            (tmp_path / folder / name).write_text("x")
    (tmp_path / "in/a_link").symlink_to("real")
    (tmp_path / "in/out").symlink_to(tmp_path / "outside")
    (tmp_path / "in/real/deep/back").symlink_to("../..")
    (tmp_path / "outside/back").symlink_to(tmp_path / "in")
    return tmp_path / "in"


@pytest.mark.parametrize("kind", FILES)
def test_folders_behind_links_are_read_once(linked, kind):
    name = FILES[kind]
    expected = [f"out/{name}", f"out/more/{name}", f"real/{name}", f"real/deep/{name}"]
    assert [file.name for file in list_files(Source(kind, str(linked)))] == expected
    if kind != "books":
        for pattern in (f"**/{name}", "**"):
            found = [file.name for file in list_files(Source(kind, f"{linked}/{pattern}"))]
            assert found == expected
        assert [file.name for file in list_files(Source(kind, f"{linked}/*"))] == expected


def test_patterns_match_what_the_shell_matches(tmp_path, monkeypatch):
    for name in ("a/x1.txt", "a/b/x2.txt", "a/.hidden/x3.txt", ".dot.txt", "x4.txt", "[c]/x5.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for pattern in ("*.txt", "a/*", "a/*/*.txt", "**/*.txt", "a/**/x?.txt", "*/x[12].txt", ".*.txt", "a/../*", "no*",
                    "*/b", "[[]c]/*", "x4.txt/*", "a/.hidden/*"):  # fmt: skip
        for one in (pattern, f"{tmp_path}/{pattern}"):
            assert paths_matching(one) == sorted(map(Path, glob.glob(one, recursive=True))), one  # noqa: PTH207


@contextlib.contextmanager
def ordinary_user():
    """The kernel lets root read everything."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("pattern", ["", "**/*.txt", "**", "*/closed/*.txt", "*/*/*.txt"])
def test_a_folder_that_cannot_be_read_is_named(pattern):
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    try:
        closed = root / "a" / "closed"
        closed.mkdir(parents=True)
        (root / "a" / "one.txt").write_text("x")
        (closed / "two.txt").write_text("x")
        closed.chmod(0)
        with ordinary_user(), pytest.raises(PrepError, match=r"a/closed cannot be read \(Permission denied\)"):
            list_files(Source("text", f"{root}/{pattern}".rstrip("/")))
    finally:
        closed.chmod(0o755)
        shutil.rmtree(root)


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to("gone")
    with pytest.raises(PrepError, match=r"b.txt cannot be read \(No such file"):
        list_files(Source("text", str(tmp_path)))
    (tmp_path / "b.txt").unlink()
    (tmp_path / "c.txt").symlink_to("c.txt")
    with pytest.raises(PrepError, match=r"c.txt cannot be read \(Too many levels"):
        list_files(Source("text", str(tmp_path)))


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(("make", "what"), [("pipe", "a named pipe"), ("socket", "a socket"), ("device", "a device")])
def test_what_is_no_file_is_named_and_never_opened(tmp_path, monkeypatch, kind, make, what):
    """Opening a named pipe would wait for ever, and /dev/zero has no end."""
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    name, link = Path("in") / FILES[kind], Path("linked") / FILES[kind]
    name.parent.mkdir()
    link.parent.mkdir()
    if make == "pipe":
        os.mkfifo(name)
    elif make == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(name))
    else:
        name.symlink_to("/dev/zero")
    link.symlink_to(name.absolute())
    for path in ("in", "linked", *(() if kind == "books" else (name, link, "in/*", "**"))):
        with pytest.raises(PrepError, match=rf"a\..* is {what}, not a file\. Remove it, or write its content"):
            list_files(Source(kind, str(path)))
