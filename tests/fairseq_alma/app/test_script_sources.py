"""What a function of a notebook or script uses of it."""

import importlib
import linecache
import sys
from functools import partial
from types import ModuleType

import pytest

from fairseq_alma.app.plugins import load_function, source_digest
from fairseq_alma.app.script_sources import sources_in_script
from fairseq_alma.core.errors import SettingError

SCRIPT = """
import math
WIDTH = 3
KINDS = (int, "a", {2, 1}, [WIDTH])
OPTIONS = {"depth": 4}
UNUSED = 5
class Base:
    rate = 0.5
class Net(Base):
    depth = WIDTH
    def forward(self, x):
        return helper(x, OPTIONS) * math.pi
def helper(x, options, WIDTH=2):
    UNUSED = 7
    return [number for number in KINDS], WIDTH, UNUSED
def make(width):
    return Net()
class Instance:
    def __call__(self):
        return 1
instance = Instance()
def uses_instance():
    net = 1
    return instance(), net
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function that runs a script as the module `a_script`, and returns this module."""

    def run(text):
        path = tmp_path / f"script_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        module = ModuleType("a_script")
        monkeypatch.setitem(sys.modules, "a_script", module)
        module.__file__ = str(path)
        exec(compile(text, str(path), "exec"), vars(module))
        return module

    return run


def names(function):
    return {one.partition("=")[0] for one in sources_in_script(function)}


def test_what_is_used_is_found_and_nothing_else(script):
    module = script(SCRIPT)
    assert names(module.make) == {"make", "Net", "Base", "helper", "OPTIONS", "KINDS", "WIDTH", "math"}
    assert names(module.uses_instance) == {"uses_instance", "instance"}


@pytest.mark.parametrize(
    ("old", "new", "is_noticed"),
    [
        ("math.pi", "math.e", True),
        ("rate = 0.5", "rate = 0.6", True),
        ('{"depth": 4}', '{"depth": 5}', True),
        ('(int, "a"', '(float, "a"', True),
        ("{2, 1}", "{1, 2}", False),
        ("UNUSED = 5", "UNUSED = 6", False),
        ("UNUSED = 7", "UNUSED = 8", True),
        ("net = 1", "net = 2", False),
    ],
)
def test_changes(script, old, new, is_noticed):
    first, second = (sources_in_script(script(text).make) for text in (SCRIPT, SCRIPT.replace(old, new)))
    assert (first != second) == is_noticed


CELLS = """
import functools
class Base:
    rate = 0.5
class Net(Base):
    depth = 3
    @functools.cached_property
    def size(self):
        return 7
    @staticmethod
    def half(x):
        return x / 2
    def forward(self, x):
        return helper(self.half(x))
def helper(x):
    return x + 1
def make():
    return Net()
"""


@pytest.mark.parametrize(
    ("old", "new"), [("x + 1", "x + 2"), ("x / 2", "x / 3"), ("depth = 3", "depth = 4"), ("rate = 0.5", "rate = 0.6")]
)
def test_changes_of_a_class_of_a_notebook(monkeypatch, old, new):
    """As in IPython: the lines of a cell are in linecache, and the module has no file."""

    def cell(text):
        name = f"<ipython-input-{len(linecache.cache)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        module = ModuleType("a_notebook")
        monkeypatch.setitem(sys.modules, "a_notebook", module)
        exec(compile(text, name, "exec"), vars(module))
        return module

    first, second = (sources_in_script(cell(text).make) for text in (CELLS, CELLS.replace(old, new)))
    assert {one.partition("=")[0] for one in first} >= {"make", "Net", "Base", "helper"}
    assert first != second
    assert sources_in_script(cell(CELLS).Net)[0].startswith("Base=class Base(object):")


def test_a_module_that_makes_a_function_of_another_module_is_part_of_its_digest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, digits in enumerate(("3", "4")):
        name = f"module_with_a_partial_{number}"
        (tmp_path / f"{name}.py").write_text(f"from functools import partial\nmake = partial(int, base={digits})\n")
    functions = [load_function("backbone", f"module_with_a_partial_{number}:make") for number in (0, 1)]
    assert all(isinstance(one, partial) for one in functions)
    digests = {source_digest(one, "backbone", f"module_with_a_partial_{n}:make") for n, one in enumerate(functions)}
    assert len(digests) == 2 and "" not in digests


def test_a_module_that_has_changed_since_its_import_is_refused_until_it_is_reloaded(tmp_path, monkeypatch):
    """The old code would run, and the run would have the digest of the new one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "module_that_changes.py"
    path.write_text("def make():\n    return 1\n")
    assert load_function("backbone", "module_that_changes:make")() == 1
    path.write_text("def make():\n    return 'two'\n")
    with pytest.raises(SettingError, match="module module_that_changes has changed since it was imported"):
        load_function("backbone", "module_that_changes:make")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.reload(sys.modules["module_that_changes"])
    assert load_function("backbone", "module_that_changes:make")() == "two"
