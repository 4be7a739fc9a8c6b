"""A MkDocs hook that generates the API reference: one page per package, with every public name that has a docstring."""

import ast
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PACKAGES = ("fairseq_alma", "vision", "data_prep", "launch")


def packages() -> dict[str, list[str]]:
    """Return the modules of each package, the package itself first."""
    found: dict[str, list[str]] = {}
    for top in PACKAGES:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            package = ".".join(parts[:-1])
            module = package if parts[-1] == "__init__" else ".".join(parts)
            found.setdefault(package, []).append(module)
    return {package: sorted(modules) for package, modules in sorted(found.items())}


def page_paths() -> dict[str, str]:
    """Return the packages, by the path of their page in the site."""
    return {f"api/{package.replace('.', '-')}.md": package for package in packages()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for path, package in page_paths().items():
        parts = [f"# {package}\n"]
        for module in packages()[package]:
            if ast.get_docstring(ast.parse(_source_of(module).read_text(encoding="utf-8"))):
                parts.append(f"## {module}\n\n::: {module}\n    options:\n      show_root_heading: false\n")
        files.append(File.generated(config, path, content="\n".join(parts)))
    return files


def _source_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
