"""Makes `import fairseq` three times as fast: scikit-learn, scipy.stats and wandb are loaded when they are first used.
Leaves the logging of other libraries as it was: one of fairseq's models lets all of them log each detail.

fairseq imports all its tasks and criteria. Some for audio and for classification import these libraries, of which a
language model needs nothing. They take 2.9 of the 4.4 seconds of CPU time for which `import fairseq` needs.
"""

import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

POSTPONED = ("sklearn", "sklearn.metrics", "scipy.stats", "wandb")
"""The modules that are loaded when fairseq first uses them."""


class _Postponed(ModuleType):
    """Stands for a module while fairseq is imported, and where fairseq keeps a reference to it."""

    importing = True
    """Whether fairseq is being imported. `from MODULE import NAME` then gets a function that loads the module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if not self.importing:
            return getattr(importlib.import_module(self.__name__), name)
        return sys.modules.get(f"{self.__name__}.{name}") or _postponed_function(self.__name__, name)


def _postponed_function(module: str, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


class _Finder(MetaPathFinder, Loader):
    """Finds fairseq, and puts `_Postponed` modules into the place of others while fairseq is being imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "fairseq":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        # What is loaded already stays. What is not installed must be missing, because fairseq can do without wandb.
        postponed = {
            name: _Postponed(name)
            for name in POSTPONED
            if name not in sys.modules and PathFinder.find_spec(name.partition(".")[0])
        }
        sys.modules.update(postponed)
        level, handlers = logging.root.level, logging.root.handlers[:]
        try:
            # fairseq and fairscale use functions that later versions of torch call deprecated.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._loader.exec_module(module)
        finally:
            logging.root.setLevel(level)
            logging.root.handlers[:] = handlers
            for name, placeholder in postponed.items():
                placeholder.importing = False
                if sys.modules.get(name) is placeholder:
                    del sys.modules[name]


def postpone_imports_of_fairseq() -> None:
    """Let the first import of fairseq be a quick one. Nothing happens if fairseq is already imported."""
    if "fairseq" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
