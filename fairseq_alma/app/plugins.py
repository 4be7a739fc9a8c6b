"""Plugins and functions of the user.

A plugin is a Python module that the user adds with `plugin=MODULE`, for example to register a learner. Some settings
name a function of the user, as MODULE:FUNCTION.
"""

import hashlib
import importlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fairseq_alma.app.script_sources import sources_in_script
from fairseq_alma.core.errors import AlmaError, SettingError

Result = TypeVar("Result")


def load_plugin(name: str) -> None:
    """Import a plugin from the current folder or from the installed packages.

    Raise SettingError if the module, or one that it imports, is not found, or if its source has changed since this
    process has imported it.
    """
    _imported(f"plugin={name}", name)


def _imported(setting: str, module: str) -> ModuleType:
    """Import a module that a setting names. See `load_plugin`."""
    try:
        with _current_folder_first():
            found = importlib.import_module(module)
        _check_unchanged(module)
    except ModuleNotFoundError as error:
        raise SettingError(
            f"{setting}: {error}. Modules are searched for in the current folder and in the installed packages."
        ) from error
    return found


def _check_unchanged(module: str) -> None:
    """Raise SettingError if the source of a module has changed since this process has imported it.

    The old code would run, and the run would be recorded with the digest of the new one. A later version of the code is
    imported after importlib.reload, or in a new process. The source of a module that was imported before the first call
    of this function is taken to be unchanged until then.
    """
    loaded = sys.modules[module]
    spec, file = loaded.__spec__, getattr(loaded, "__file__", None)
    if spec is None or file is None or _is_installed(file):  # the running script, or a namespace package
        return
    now = plugin_digest(module)
    # A reloaded module has another spec.
    if (before := vars(spec).setdefault("_alma_digest", now)) != now:
        raise SettingError(
            f"the module {module} has changed since it was imported (its digest was {before} and is {now}), so the old "
            f"code would run: restart the notebook or the program, or reload the module by importlib.reload"
        )


def _is_installed(file: str) -> bool:
    """Return True if a source file belongs to Python or to an installed package."""
    return any(Path(file).is_relative_to(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib"))


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Search for modules in the current folder first, inside a `with` block. The block may add other folders."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


def load_function(setting: str, text: str) -> Callable[..., Any]:
    """Return the function that `setting` names as MODULE:FUNCTION, for example `dataset=my_module:load`.

    Its module is imported first, from the current folder or the installed packages.

    Raises:
        SettingError: if the text has another form, if the module or the function is not found, or if the source of the
            module has changed since this process has imported it.
    """
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), name)):
        raise SettingError(
            f"{setting}={text!r} must have the form MODULE:FUNCTION, for example {setting}=my_module:load"
        )
    function = getattr(_imported(f"{setting}={text}", module), name, None)
    if not callable(function):
        hint = ". Define it in this notebook or script first" if module == "__main__" else ""
        raise SettingError(f"{setting}={text}: the module {module} has no function {name}{hint}")
    return function


def call_own_function(what: str, function: Callable[..., Result], *arguments: Any, **more: Any) -> Result:
    """Call a function of the user and return its result. `what` is the setting that names the function.

    If it raises an error other than an AlmaError, raise a SettingError whose message names the line.
    """
    try:
        return function(*arguments, **more)
    except AlmaError:
        raise
    except Exception as error:
        # Catch every error, because the code of the user may raise any.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise SettingError(
            f"{what}: {getattr(function, '__name__', 'the function')} failed with {type(error).__name__}: {error} "
            f"(line {frame.lineno} of {frame.filename})"
        ) from error


def function_name(setting: str, function: Callable[..., Any]) -> str:
    """Return the text MODULE:FUNCTION that names a function or a class of the user, as the value of `setting`.

    Raise SettingError if it is not defined at the top level of a module, a script or a notebook, and so cannot be
    found.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if name is None or getattr(sys.modules.get(module or ""), name, None) is not function:
        raise SettingError(
            f"{setting}: {name or function!r} cannot be found again by its name, as is needed to continue a run: give "
            f"a function or class that is defined at the top level of a module, a script or a notebook"
        )
    return f"{module}:{name}"


def plugin_digest(name: str) -> str:
    """Return a digest of the source code of a loaded plugin: the first 16 hexadecimal digits of its SHA-256 hash.

    If the plugin is a package, the digest includes all Python files of the package. Other modules that the plugin
    imports are not included. For a namespace package, which has no source file, the digest is the empty string.
    """
    file = sys.modules[name].__file__
    if file is None:  # the plugin is a namespace package, which has no source file
        return ""
    path = Path(file)
    sources = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.relative_to(path.parent)}\0".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def source_digest(function: Callable[..., Any], setting: str, value: str) -> str:
    """Return a digest of the source code of a function or class of the user.

    It is the digest of its module (see `plugin_digest`), and of the module that the setting names, if that is another
    one. For a function of a notebook or of the script that is running, it is the digest of the function, of the
    functions and classes of the script that it uses, and of the numbers and texts of the script that it uses. For an
    installed package, it is the empty string: the version of the package takes its place.

    Args:
        function: the function or class.
        setting: name of the setting that names it.
        value: value of the setting, a registered name or MODULE:FUNCTION.

    Raises:
        SettingError: if the source code cannot be read, as that of a function typed at the Python prompt.
    """
    names = [function.__module__]
    if ":" in value and value.partition(":")[0] not in names:
        names.append(value.partition(":")[0])
    digests = []
    for name in names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if name == "__main__" or file is None:
            try:
                parts = sources_in_script(function)
            except (OSError, TypeError) as error:
                raise SettingError(
                    f"{setting}={value}: the source code cannot be read, as is needed to recognise the run later: "
                    f"define the function or class in a file or in a cell of a notebook"
                ) from error
            digests.append(hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16])
        elif not _is_installed(file):
            digests.append(plugin_digest(name))
    return "+".join(digests)
