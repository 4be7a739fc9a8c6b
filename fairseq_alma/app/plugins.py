"""Plugins: Python modules of the user that register learners, given as `plugin=MODULE`."""

import hashlib
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from fairseq_alma.core.errors import SettingError


def load_plugin(name: str) -> None:
    """Import a plugin from the current folder or from the installed packages.

    Raises:
        SettingError: there is no such module.
    """
    sys.path.insert(0, str(Path.cwd()))
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise SettingError(
            f"plugin={name}: {error}. Plugins are searched in the current folder and in the installed packages."
        ) from error
    finally:
        sys.path.pop(0)


def plugin_digest(name: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 digest of a loaded plugin's source.

    A plugin that is a package counts with all its Python files. Other modules that it imports do not count.
    """
    file = sys.modules[name].__file__
    if file is None:  # a namespace package: it has no source of its own
        return ""
    path = Path(file)
    sources = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.relative_to(path.parent)}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def plugin_named_by(arguments: Sequence[str]) -> str | None:
    """Return the plugin that a command line names: by `plugin=MODULE`, or in the preset of its `--config-dir`."""
    values = dict(argument.split("=", 1) for argument in arguments if "=" in argument and argument[0] != "-")
    if "plugin" in values:
        return None if values["plugin"] in ("", "null") else values["plugin"]
    folders = [
        argument.partition("=")[2] or following
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True)
        if argument.partition("=")[0] in ("--config-dir", "-cd")
    ]
    for folder in folders:
        path = Path(folder) / "preset" / f"{values.get('preset', '')}.yaml"
        if not path.is_file():
            continue
        try:
            preset = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            continue  # Hydra reports what is wrong with it
        if isinstance(preset, dict) and isinstance(preset.get("plugin"), str):
            return preset["plugin"]
    return None
