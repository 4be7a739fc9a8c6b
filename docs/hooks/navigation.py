"""A MkDocs hook that replaces each entry of the navigation that ends in "/" by the pages of that folder."""

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the entries, once all other hooks have added their pages."""
    paths = [file.src_uri for file in files.documentation_pages()]
    config.nav = [_with_pages(entry, paths) for entry in config.nav or []]
    return files


def _with_pages(entry: Any, paths: list[str]) -> Any:
    if not isinstance(entry, dict):
        return entry
    pages = {}
    for title, value in entry.items():
        if isinstance(value, list):
            pages[title] = [_with_pages(one, paths) for one in value]
        elif value.endswith("/"):
            found = [path for path in paths if path.startswith(value)]
            pages[title] = sorted(found, key=lambda path: (not path.endswith("index.md"), path.removesuffix(".md")))
        else:
            pages[title] = value
    return pages
