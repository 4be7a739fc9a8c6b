"""The source code of a function of a notebook or script, and of what the function uses of the notebook or script."""

import dis
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType
from typing import Any


def sources_in_script(function: Callable[..., Any]) -> list[str]:
    """Return the source of a function or class, and of the functions, classes and constants of its module that it uses.

    The result does not depend on the order in which they were defined. It is the same in each process. A constant is a
    number, a text, or a tuple, list, set or dictionary of constants.

    Raises:
        OSError, TypeError: if the source of `function` cannot be read. What cannot be read of the rest is left out.
    """
    variables = vars(sys.modules[function.__module__])
    found = {function.__qualname__: _source_of(function)}
    waiting = [found[function.__qualname__]]
    while waiting:
        for name in sorted(_globals_in(waiting.pop()) & variables.keys() - found.keys()):
            value = variables[name]
            found[name] = _text_of(value, function.__module__)
            if _is_of(value, function.__module__):
                waiting.append(found[name])
    return [f"{name}={found[name]}" for name in sorted(found)]


def _is_of(value: Any, module: str) -> bool:
    """Return True for a function or class that is defined in the module."""
    return (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module


def _source_of(value: Any) -> str:
    """Return the source of a function or class. Raise OSError or TypeError if it cannot be read.

    Before Python 3.13, inspect does not find the source of a class of a notebook, but that of its methods. Then the
    result is made of the methods and of the constants of the class.
    """
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        if not inspect.isclass(value):
            raise
    lines: list[str] = []
    for name, member in sorted(vars(value).items()):
        of_property = [member.fget, member.fset] if isinstance(member, property) else [member]
        for method in filter(None, (getattr(one, "__func__", one) for one in of_property)):
            if inspect.isfunction(method):
                with suppress(OSError):  # a method that was generated, such as that of a dataclass
                    lines.append(textwrap.dedent(inspect.getsource(method)))
            elif not name.startswith("__") and isinstance(method, str | int | float | bool | tuple):
                lines.append(f"{name} = {method!r}\n")
    if not lines:
        raise OSError(f"no source of class {value.__qualname__}")
    bases = ", ".join(base.__name__ for base in value.__bases__)
    return f"class {value.__name__}({bases}):\n" + textwrap.indent("".join(lines), "    ")


def _text_of(value: Any, module: str) -> str:
    """Return the source of a function or class of the module, or the value of a constant; otherwise the type's name."""
    if _is_of(value, module):
        try:
            return _source_of(value)
        except (OSError, TypeError):
            return value.__qualname__
    if inspect.isfunction(value) or inspect.isclass(value):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, str | int | float | bool | None):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(_text_of(one, module) for one in value)})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_text_of(one, module) for one in value))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_text_of(one, module)}' for key, one in value.items())}}}"
    return type(value).__name__


def _globals_in(source: str) -> set[str]:
    """Return the names of the global variables that a source reads."""
    try:
        code = compile(textwrap.dedent(source), "<source>", "exec")
    except SyntaxError:
        return set()  # a part of a line, such as that of a lambda
    names = set()
    for part in _parts_of(code):
        read = {one.argval for one in dis.get_instructions(part) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        names |= read - {one.argval for one in dis.get_instructions(part) if one.opname == "STORE_NAME"}
    return {name for name in names if not name.startswith("__")}


def _parts_of(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all code objects within it: those of functions, classes and comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts_of(constant)
