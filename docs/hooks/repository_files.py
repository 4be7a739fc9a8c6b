"""A MkDocs hook that puts files of the repository outside docs/ into the site.

The studies (results/), the benchmark tables (benchmarks/), CONTRIBUTING.md and CHANGELOG.md become pages. A link of a
page to a file of the repository is relative, so that it also works where the repository is browsed: the hook points it
at the page of that file, or keeps only its text where the site has no such page. A link to a Python file becomes a link
to the API page of its package.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
RENAMED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FOLDERS = ("results", "benchmarks")
SUFFIXES = (".md", ".png")
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
FENCED = re.compile(r"(```.*?```)", re.DOTALL)


def site_paths() -> dict[str, str]:
    """Return the path in the site of every file outside docs/ that the site shows, by its path in the repository."""
    paths = dict(RENAMED)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            inside = path.relative_to(ROOT)
            if path.suffix in SUFFIXES and "ledgers" not in inside.parts:
                paths[inside.as_posix()] = inside.as_posix()
    return paths


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files of the repository that the site shows."""
    for source, target in site_paths().items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def _api_page(path: str) -> str:
    """Return the API page of the package that contains a Python file."""
    return f"api/{'-'.join(PurePosixPath(path).parent.parts)}.md"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to files of the repository at the pages of those files."""
    own = page.file.src_uri
    sources = {target: source for source, target in site_paths().items()}
    source = PurePosixPath(sources.get(own, f"docs/{own}"))

    def link(match: re.Match[str]) -> str:
        image, text, address = match.groups()
        path, _, anchor = address.partition("#")
        if not path or ":" in path:
            return match[0]
        target = os.path.normpath(source.parent / path)
        if target.startswith("docs/"):
            inside = target.removeprefix("docs/")
        elif target in site_paths():
            inside = site_paths()[target]
        elif target.endswith(".py") and files.get_file_from_path(api_page := _api_page(target)):
            inside = api_page
        elif (ROOT / target).exists():
            return text if not image else ""
        else:
            return match[0]  # a dead link: MkDocs reports it
        relative = os.path.relpath(inside, PurePosixPath(own).parent)
        return f"{image}[{text}]({relative}{'#' * bool(anchor)}{anchor})"

    parts = FENCED.split(markdown)  # links inside a block of code are text
    return "".join(part if number % 2 else LINK.sub(link, part) for number, part in enumerate(parts))
