"""Imports point one way, importing does nothing that was not asked for, and both orders register everything."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("fairseq_alma", "vision", "data_prep", "launch")


def run_fresh(code):
    """Run `code` in a fresh process; what it printed."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


REGISTERED = """
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
archs = [name for name in ARCH_MODEL_REGISTRY if name.startswith("switch_lm_")]
print("alma_lm" in TASK_REGISTRY, "switch_lm" in CRITERION_REGISTRY, *sorted(archs))
"""
EVERYTHING = ["True", "True", "switch_lm_base", "switch_lm_large", "switch_lm_tiny"]


def test_alma_vision_runs_without_fairseq():
    assert run_fresh("import sys, vision.run; print('fairseq' in sys.modules)") == ["False"]


@pytest.mark.parametrize("name", ["fairseq_alma", "fairseq_alma.core", "launch.local"])
def test_the_core_and_the_launcher_need_neither_torch_nor_fairseq(name):
    heavy = "{'torch', 'numpy', 'fairseq', 'hydra'}"
    assert run_fresh(f"import sys, {name}; print(len({heavy} & sys.modules.keys()))") == ["0"]


def test_core_first_and_fairseq_later_still_registers_everything_and_twice_is_harmless():
    code = """
import fairseq_alma.core, fairseq, fairseq_alma
fairseq_alma.register()
from fairseq.tasks import TASK_REGISTRY
before = TASK_REGISTRY["alma_lm"]
fairseq_alma.register()
print(TASK_REGISTRY["alma_lm"] is before)
"""
    assert run_fresh(code + REGISTERED) == ["True", *EVERYTHING]


def test_fairseq_first_registers_everything_on_import():
    assert run_fresh("import fairseq, fairseq_alma\n" + REGISTERED) == EVERYTHING


def modules_of(package):
    """Dotted name and path of every module of a package of ours."""
    for path in sorted((ROOT / package.replace(".", "/")).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(name, source, is_package=False):
    """Dotted names of all modules that the source of module `name` imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from fairseq_alma import core`: the names may be modules.
            found |= {f"{module}.{alias.name}" for alias in node.names} if module in OURS else {module}
    return found


def is_inside(module, *packages):
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_standard(module):
    return module.split(".")[0] in sys.stdlib_module_names


def test_this_file_sees_every_kind_of_import():
    source = (
        "import os.path\nfrom fairseq_alma import core\ndef f():\n    from ..launch import local\n    from . import x"
    )
    assert imports_of("vision.data.sets", source) == {"os.path", "fairseq_alma.core", "vision.launch", "vision.data"}
    assert imports_of("vision.data", "from .sets import A", is_package=True) == {"vision.data.sets"}


def strangers(package, allowed):
    """(module, what it imports) for every import that is not allowed."""
    modules = list(modules_of(package))
    assert modules, f"no {package}"
    return {
        (name, imported)
        for name, path in modules
        for imported in imports_of(name, path.read_text(encoding="utf-8"), path.name == "__init__.py")
        if not allowed(imported)
    }


def test_core_imports_the_standard_library_and_itself():
    assert strangers("fairseq_alma.core", lambda m: is_standard(m) or is_inside(m, "fairseq_alma.core")) == set()


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("vision", ("fairseq_alma.app", "fairseq_alma.report")),
        ("data_prep", ()),
        ("launch", ()),
        ("fairseq_alma.app", ()),
        ("fairseq_alma.report", ()),
    ],
)
def test_the_other_rooms_import_core_and_themselves_of_ours(package, others):
    allowed = ("fairseq_alma.core", package, *others)
    assert strangers(package, lambda m: not is_inside(m, *OURS) or is_inside(m, *allowed)) == set()


def test_the_launcher_needs_the_standard_library_only():
    assert strangers("launch", lambda m: is_standard(m) or is_inside(m, *OURS)) == set()


@pytest.mark.parametrize("package", ["vision", "data_prep", "fairseq_alma.app", "fairseq_alma.report"])
def test_vision_and_data_prep_never_import_fairseq(package):
    assert strangers(package, lambda m: not is_inside(m, "fairseq", "fairseq_cli")) == set()


def test_the_mixture_modules_import_torch_and_themselves():
    found = strangers("fairseq_alma.modules", lambda m: is_standard(m) or is_inside(m, "torch", "fairseq_alma.modules"))
    assert found == set()


def test_of_the_fairseq_parts_only_the_driver_imports_another_room():
    # run.py hands the launcher to the learner: the one place where the two meet.
    found = strangers("fairseq_alma", lambda m: not is_inside(m, "vision", "data_prep", "launch"))
    assert found == {("fairseq_alma.lm.stage_processes", "launch.local")}


@pytest.mark.parametrize("package", OURS)
def test_nothing_of_ours_imports_tests_or_benchmarks(package):
    assert strangers(package, lambda m: not is_inside(m, "tests", "benchmarks")) == set()
