"""Imports the scripts of studies in results/. Several have the same file name, so they cannot be imported by name."""

import importlib.util
import sys
from types import ModuleType

from tests.commands import ROOT


def study_module(path: str) -> ModuleType:
    """Return the module of a script, such as "frontier/rivals.py"."""
    name = "study_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / "results" / path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
