"""No source of ours runs code that a file contains or names, unless the user names it too (docs/security.md)."""

import ast
from collections.abc import Iterator

import pytest

from tests.commands import ROOT

PACKAGES = ("fairseq_alma", "vision", "data_prep", "launch")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

FORBIDDEN = (
    "eval", "exec", "__import__", "pickle.load", "pickle.loads", "marshal.loads", "shelve.open", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "runpy.run_path", "hydra.utils.instantiate",
    "instantiate", "joblib.load", "checkpoint_utils.load_model_ensemble", "load_model_ensemble_and_task",
    "checkpoint_utils.load_model_ensemble_and_task", "torch.hub.load", "torch.jit.load",
)  # fmt: skip
IMPORTING = {
    "fairseq_alma/__init__.py": "the modules in the list REGISTERED",
    "vision/__init__.py": "the modules in a table in the same file",
    "fairseq_alma/app/plugins.py": "plugin= and MODULE:FUNCTION of the user",
    "data_prep/cleaning/filters.py": "--filter of the user",
    "data_prep/running/tasks.py": "classes of tasks, which the same call of alma-prep has written to its work folder",
    "core/catalogue.py": "two modules that our code names",
    "fairseq_alma/programs.py": "the modules of our commands, in the same file",
    "fairseq_alma/fairseq_import.py": "the modules in the list POSTPONED",
    "launch/warm_server.py": "modules that our code names when it starts the server",
}
"""Files that import a module by a name that is computed, and where the name comes from."""
ARGUMENTS = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", None)}
"""Function -> a keyword argument, and the value that it must have (None: it must not be True)."""


def calls(path) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call in a file, with the function as it is written, for example "torch.load"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_contains_no_call_that_runs_code_from_a_file(path):
    for function, call in calls(path):
        assert function not in FORBIDDEN, f"{path}: line {call.lineno} calls {function}"
        given = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
        assert given.get("shell") is not True, f"{path}: line {call.lineno}"
        if function in ARGUMENTS:
            argument, value = ARGUMENTS[function]
            assert given.get(argument) is value or (value is None and not given.get(argument)), f"{path}: {call.lineno}"
        if function.endswith("import_module"):
            assert any(path.as_posix().endswith(one) for one in IMPORTING), f"{path}: line {call.lineno}"
