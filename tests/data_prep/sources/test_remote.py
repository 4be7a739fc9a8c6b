"""Sources that are read through fsspec, and datasets of the Hugging Face Hub from a server on this machine."""

import gzip
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from data_prep.errors import Passing, PrepError
from data_prep.sources import Source, fingerprint, list_files, read_documents_of, split_into_parts
from data_prep.sources import remote as remote_module
from data_prep.sources.base import no_report
from tests.data_prep.cleaning.test_cleaner import of_words
from tests.data_prep.files import read_all, write_warc

pytest.importorskip("fsspec", reason="needs the extra `corpora`")

OPTIONS = {"text_field": "text", "id_field": "", "date_field": "date"}


def write_files(folder):
    """Lines in a plain and a compressed file, and in Parquet."""
    import pyarrow
    from pyarrow import parquet

    (folder / "sub").mkdir(parents=True)
    texts = [f"{of_words(30, number)} naïve {number}" for number in range(150)]
    (folder / "a.txt").write_text("\n".join(texts), encoding="utf-8")  # no line end at the end
    rows = "".join(json.dumps({"text": f"{text} b"}) + "\n" for text in texts)
    (folder / "sub" / "b.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    parquet.write_table(pyarrow.table({"text": [f"{text} c" for text in texts]}), folder / "sub" / "c.parquet")
    (folder / "readme.html").write_text("no text")
    return folder


def read_remote(source, folder, part_bytes):
    """Texts of a source, in order; every part must leave the folder empty."""
    folder.mkdir(exist_ok=True)
    texts = []
    for part in split_into_parts(source, list_files(source), part_bytes, OPTIONS):
        texts += [document.text for document in read_documents_of(part, folder, no_report)]
        assert not any(folder.iterdir())
    return texts


@pytest.mark.parametrize("part_bytes", [1 << 30, 5000, 97])
def test_a_remote_folder_gives_the_same_documents_as_a_local_one(tmp_path, part_bytes):
    folder = write_files(tmp_path / "files")
    wanted, _ = read_all(Source("text", str(folder)), part_bytes)
    assert len(wanted) == 450
    source = Source("text", f"file://{folder}")
    assert [file.name for file in list_files(source)] == ["a.txt", "sub/b.jsonl.gz", "sub/c.parquet"]
    assert read_remote(source, tmp_path / "work", part_bytes) == wanted


def test_files_patterns_and_other_kinds(tmp_path):
    folder = write_files(tmp_path / "files")
    assert [file.name for file in list_files(Source("text", f"file://{folder}/a.txt"))] == ["a.txt"]
    assert [file.name for file in list_files(Source("text", f"file://{folder}/sub/*.parquet"))] == ["c.parquet"]
    matched = [file.name for file in list_files(Source("text", f"file://{folder}/[as]*"))]
    assert matched == ["a.txt", "sub/b.jsonl.gz", "sub/c.parquet"]  # also the files in a folder that matches
    (folder / "wiki-articles1.xml-p1p41242.bz2").write_bytes(b"")
    source = Source("wikipedia", f"file://{folder}")
    assert [file.name for file in list_files(source)] == ["wiki-articles1.xml-p1p41242.bz2"]
    write_warc(folder / "x.warc.gz", [of_words(50, number) for number in range(3)])
    source = Source("common-crawl", f"file://{folder}")
    assert [file.name for file in list_files(source)] == ["x.warc.gz"]
    assert len(read_remote(source, tmp_path / "work", 1 << 20)) == 3
    before = fingerprint(list_files(source))
    write_warc(folder / "x.warc.gz", [of_words(51, number) for number in range(3)])
    assert fingerprint(list_files(source)) != before


def test_a_remote_file_with_an_unknown_ending_is_refused(tmp_path):
    folder = write_files(tmp_path / "files")
    (folder / "page.html").write_text("<p>text</p>")
    for path in ("page.html", "*.html", "*"):
        with pytest.raises(PrepError, match=r"it is unknown how to read page\.html.*\.jsonl"):
            list_files(Source("text", f"file://{folder}/{path}"))
    assert "page.html" not in {file.name for file in list_files(Source("text", f"file://{folder}"))}


@pytest.mark.slow
def test_a_stream_from_a_remote_folder_has_the_bytes_of_a_local_one(tmp_path, alma_prep, folder_bytes, capsys):
    folder = write_files(tmp_path / "files")
    for out, path in (("local", str(folder)), ("remote", f"file://{folder}")):
        more = ["--duplicates", "exact"]
        assert alma_prep(tmp_path / out, f"text:{path}", num_mega_batches=1, more=more) == 0, capsys.readouterr().err
    # The names of the sources differ.
    assert folder_bytes(tmp_path / "local", named=False) == folder_bytes(tmp_path / "remote", named=False)
    assert not list((tmp_path / "remote").rglob("download.*"))


def test_what_cannot_be_read_is_named(tmp_path, monkeypatch):
    for path, why in {
        "s3://bucket/x": "s3fs",
        "nosuch://x": "nosuch",
        f"file://{tmp_path}/none": "no files of this kind",
    }.items():
        with pytest.raises(PrepError, match=why):
            list_files(Source("text", path))
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    part = split_into_parts(Source("text", "x"), list_files(Source("text", f"file://{tmp_path}")), 100, OPTIONS)[0]
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(PrepError, match=r"a\.txt has become shorter"):
        list(read_documents_of(part, tmp_path, no_report))
    (tmp_path / "a.txt").unlink()
    monkeypatch.setattr(remote_module, "_WAIT_SECONDS", 0.01)
    with pytest.raises(Passing, match=r"a\.txt cannot be downloaded: FileNotFoundError.*Run the same command again"):
        list(read_documents_of(part, tmp_path, no_report))


def test_a_download_is_tried_again(tmp_path, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem

    (tmp_path / "a.txt").write_text("one\ntwo\n")
    part = split_into_parts(Source("text", "x"), list_files(Source("text", f"file://{tmp_path}")), 100, OPTIONS)[0]
    open_file, failures = LocalFileSystem.open, [OSError("connection reset"), TimeoutError()]

    def fail_twice(*arguments, **more):
        if failures:
            raise failures.pop()
        return open_file(*arguments, **more)

    monkeypatch.setattr(LocalFileSystem, "open", fail_twice)
    monkeypatch.setattr(remote_module, "_WAIT_SECONDS", 0.01)
    assert [document.text for document in read_documents_of(part, tmp_path, no_report)] == ["one", "two"]
    assert not failures


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's interface that reading needs: the list of files, and bytes of a file."""

    root = Path()

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        marker = "refs/convert/parquet"
        if path.startswith("/api/datasets/me/texts/") and marker in path:
            kind, rest = path.removeprefix("/api/datasets/me/texts/").split("/" + marker, 1)
            return self.answer(self.tree(rest.strip("/")) if kind == "tree" else {"id": "me/texts", "sha": "0" * 40})
        if path.startswith(f"/datasets/me/texts/resolve/{marker}/"):
            return self.file(self.root / path.split(marker + "/")[1])
        return self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def tree(self, under):
        base = self.root / under
        return [
            {"type": "file", "path": path.relative_to(self.root).as_posix(), "size": path.stat().st_size, "oid": "1"}
            if path.is_file()
            else {"type": "directory", "path": path.relative_to(self.root).as_posix(), "size": 0, "oid": "2"}
            for path in sorted(base.rglob("*") if "recursive=true" in self.path.lower() else base.glob("*"))
        ]

    def file(self, path):
        content, status = path.read_bytes(), 200
        headers = {"ETag": '"1"', "X-Repo-Commit": "0" * 40, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range")
        if wanted:
            first, last = wanted.removeprefix("bytes=").split("-")
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[int(first) : int(last or len(content)) + 1], 206
        self.answer(content, status, headers)

    def answer(self, content, status=200, headers=None):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server with the dataset me/texts, which has two configs."""
    pytest.importorskip("huggingface_hub", reason="needs the extra `corpora`")
    import pyarrow
    from pyarrow import parquet

    for name in ("en/train/0000", "en/train/0001", "en/test/0000", "de/partial-train/0000"):
        path = tmp_path / "hub" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.table({"text": [f"{of_words(20, f'{name}{n}')} {n}" for n in range(60)]}), path)
    monkeypatch.setattr(Hub, "root", tmp_path / "hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_dataset_of_the_hub(hub, tmp_path):
    import os

    def run(source):
        argv = [str(tmp_path / "out"), "--source", source, "--mega-batches", "1", "--vocab-size", "300"]
        environment = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "data_prep", *argv, "--duplicates", "exact", "--workers", "1"]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)

    assert "the dataset has the configs de, en: write hf:me/texts:CONFIG:train" in run("hf:me/texts").stderr
    assert "only the first 5 GB" in run("hf:me/texts:de").stderr
    assert "en has no split dev: use one of test, train" in run("hf:me/texts:en:dev").stderr
    found = run("hf:me/texts:en")
    assert found.returncode == 0, found.stderr
    stream = json.loads((tmp_path / "out" / "stream.json").read_text())
    assert (stream["sources"][0]["files"], stream["sources"][0]["documents"]) == (2, 120)
