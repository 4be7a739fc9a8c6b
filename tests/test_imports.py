"""Imports point one way, without cycles. Importing does nothing unasked, and registers everything in either order."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("fairseq_alma", "vision", "data_prep", "launch")

ORDER = (
    ("fairseq_alma.core", "fairseq_alma.fairseq_import"),  # the standard library only
    ("launch",),
    ("data_prep.errors", "data_prep.characters", "data_prep.compression"),
    ("data_prep.tokenization",),
    ("fairseq_alma.stream_tokenizer",),
    ("fairseq_alma.app", "fairseq_alma.modules", "fairseq_alma.checkpoints", "fairseq_alma.data"),
    ("fairseq_alma.report",),
    ("fairseq_alma.models",),
    ("fairseq_alma.tasks",),
    ("fairseq_alma.criteria", "fairseq_alma.optim"),
    ("fairseq_alma",),  # the package itself, whose register() imports models, tasks and criteria by name
    ("fairseq_alma.evaluation",),
    ("fairseq_alma.growth", "fairseq_alma.api"),
    ("fairseq_alma.evaluation.harness", "fairseq_alma.evaluation.documents"),
    ("fairseq_alma.lm", "fairseq_alma.evaluation.cli", "fairseq_alma.generate", "vision"),
    ("data_prep.words",),
    ("data_prep.sources",),
    ("data_prep.cleaning",),
    ("data_prep.settings",),
    ("data_prep.running",),
    ("data_prep.reading",),
    ("data_prep.accounts",),
    ("data_prep.copies", "data_prep.dividing"),
    ("data_prep.encoding",),
    ("data_prep.leakage",),
    ("data_prep",),  # the modules beside these packages
    ("fairseq_alma.huggingface",),
    ("fairseq_alma.deploy",),
    ("fairseq_alma.forget",),
    ("fairseq_alma.demo", "fairseq_alma.python", "fairseq_alma.programs"),
)
"""Our packages from the lowest to the highest. A module may import from its own package and from lower lines only."""

FAIRSEQ = ("fairseq_alma.models", "fairseq_alma.tasks", "fairseq_alma.criteria", "fairseq_alma.data",
           "fairseq_alma.optim", "fairseq_alma.evaluation.members", "fairseq_alma.lm.fairseq_config",
           "fairseq_alma.lm.train_member", "fairseq_alma.lm.training_loop", "fairseq_alma.lm.updates",
           "fairseq_alma.api")  # fmt: skip
"""Packages and modules that may import fairseq."""

TORCH = (*FAIRSEQ, "fairseq_alma.modules", "fairseq_alma.growth", "fairseq_alma.checkpoints", "fairseq_alma.evaluation",
         "fairseq_alma.lm", "fairseq_alma.huggingface", "vision")  # fmt: skip
"""Packages and modules that may import torch."""


def run_fresh(code):
    """Run `code` in a fresh process and return the words that it printed."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


def run_after_torch(*codes):
    """Run each code in a fork of one fresh process that has imported torch and none of our modules, which saves
    seconds. Return the words that each of them printed.
    """
    process = """
import os, sys, torch
assert not {"fairseq", "fairseq_alma", "torchvision", "vision"} & sys.modules.keys()
for code in sys.argv[1:]:
    sys.stdout.flush()
    if not os.fork():
        exec(code)
        print("end")
        sys.exit()
    assert os.wait()[1] == 0
"""
    command = [sys.executable, "-W", "ignore", "-c", process, *codes]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return [words.split() for words in done.stdout.split("end\n")[: len(codes)]]


REGISTERED = """
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
archs = [name for name in ARCH_MODEL_REGISTRY if name.startswith("switch_lm_")]
print("alma_lm" in TASK_REGISTRY, "switch_lm" in CRITERION_REGISTRY, *sorted(archs))
"""
EVERYTHING = ["True", "True", "switch_lm_base", "switch_lm_large", "switch_lm_tiny"]


@pytest.mark.parametrize("name", ["fairseq_alma", "fairseq_alma.core.run_record", "launch.local"])
def test_the_core_and_the_launcher_need_neither_torch_nor_fairseq(name):
    heavy = "{'torch', 'numpy', 'fairseq', 'hydra'}"
    assert run_fresh(f"import sys, {name}; print(len({heavy} & sys.modules.keys()))") == ["0"]


def test_the_settings_of_alma_vision_need_neither_torch_nor_numpy():
    heavy = "{'torch', 'numpy', 'torchvision'}"
    assert run_fresh(f"import sys, vision.settings; print(len({heavy} & sys.modules.keys()))") == ["0"]


def test_alma_lm_checks_its_settings_before_it_imports_torch_or_fairseq():
    heavy = "{'torch', 'fairseq'}"
    assert run_fresh(f"import sys, fairseq_alma.lm.run; print(len({heavy} & sys.modules.keys()))") == ["0"]


WITHOUT_FAIRSEQ = """
import sys, fairseq_alma.growth.checkpoint, fairseq_alma.evaluation.cli
print("fairseq" in sys.modules)
"""
CORE_FIRST = """
import fairseq_alma.core, fairseq, fairseq_alma
fairseq_alma.register()
from fairseq.tasks import TASK_REGISTRY
before = TASK_REGISTRY["alma_lm"]
fairseq_alma.register()
print(TASK_REGISTRY["alma_lm"] is before)
"""


VISION = """
import sys, vision.cli
from vision.datasets import load_dataset
load_dataset("digits")
print(*({"fairseq", "torchvision"} & sys.modules.keys()))
"""


@pytest.fixture(scope="module")
def after_torch():
    fairseq_first = "import fairseq, fairseq_alma\n" + REGISTERED
    return run_after_torch(WITHOUT_FAIRSEQ, CORE_FIRST + REGISTERED, fairseq_first, VISION)


def test_alma_vision_runs_without_fairseq_and_digits_are_loaded_without_torchvision(after_torch):
    assert after_torch[3] == []


def test_alma_grow_and_alma_eval_start_without_fairseq(after_torch):
    assert after_torch[0] == ["False"]


def test_core_first_and_fairseq_later_still_registers_everything_and_twice_is_harmless(after_torch):
    assert after_torch[1] == ["True", *EVERYTHING]


def test_fairseq_first_registers_everything_on_import(after_torch):
    assert after_torch[2] == EVERYTHING


@cache
def our_modules() -> dict[str, Path]:
    """Return the path of each of our modules, by its dotted name."""
    found = {}
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_in(source: str, name: str, is_package: bool, modules) -> set[str]:
    """Return the dotted names of all modules that the source of module `name` imports, inside functions too.

    `from package import name` counts as an import of package.name if that is one of `modules`, otherwise of package.
    What only type checkers see, under `if TYPE_CHECKING:`, does not count.
    """
    found = set()
    tree = ast.parse(source)
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= {imported if imported in modules else module for imported in names}
    return found


@cache
def imports_of(name: str) -> set[str]:
    """Return the dotted names of all modules that one of our modules imports."""
    path = our_modules()[name]
    return imports_in(path.read_text(encoding="utf-8"), name, path.name == "__init__.py", our_modules()) - {name}


def is_inside(module, *packages):
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def is_standard(module):
    return module.split(".")[0] in sys.stdlib_module_names


def importers(*packages):
    """Return our modules that import from one of these packages."""
    return {name for name in our_modules() if any(is_inside(imported, *packages) for imported in imports_of(name))}


def package_of(module):
    """Return the entry of ORDER to which one of our modules belongs, and its line."""
    found = [(entry, line) for line, entries in enumerate(ORDER) for entry in entries if is_inside(module, entry)]
    entry, line = max(found, key=lambda entry_and_line: len(entry_and_line[0]))  # the innermost package
    assert module == "fairseq_alma" or entry != "fairseq_alma", f"{module} belongs to no entry of ORDER"
    return entry, line


def test_every_import_points_to_the_same_package_or_to_a_lower_one():
    upward = set()
    for name in our_modules():
        package, line = package_of(name)
        for imported in imports_of(name) & our_modules().keys():
            other, other_line = package_of(imported)
            if other != package and other_line >= line:
                upward.add((name, imported))
    assert upward == set()


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that reach each other; an empty list if the graph has no cycle."""

    def reachable_from(node):
        seen, queue = set(), list(graph[node])
        while queue:
            if (other := queue.pop()) not in seen:
                seen.add(other)
                queue += graph[other]
        return seen

    reach = {node: reachable_from(node) for node in graph}
    groups = {
        frozenset(other for other in reach[node] if node in reach[other]) for node in graph if node in reach[node]
    }
    return [sorted(group) for group in groups]


def test_no_import_cycle():
    """Imports inside functions count: a cycle that is hidden in a function is a cycle."""
    assert cycles({name: imports_of(name) & our_modules().keys() for name in our_modules()}) == []


def test_the_core_and_the_launcher_import_the_standard_library_and_core_only():
    for name in our_modules():
        if is_inside(name, "fairseq_alma.core", "launch"):
            own = package_of(name)[0]
            assert {
                module
                for module in imports_of(name)
                if not is_standard(module) and not is_inside(module, own, "fairseq_alma.core")
            } == set()


def test_only_these_modules_import_fairseq():
    assert {name for name in importers("fairseq", "fairseq_cli") if not is_inside(name, *FAIRSEQ)} == set()


def test_only_these_modules_import_torch():
    assert {name for name in importers("torch") if not is_inside(name, *TORCH)} == set()


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("vision", ("fairseq_alma.core", "fairseq_alma.app", "fairseq_alma.report")),
        ("data_prep", ("fairseq_alma.core", "launch.slurm", "launch.warm")),
        ("fairseq_alma.app", ("fairseq_alma.core", "launch.slurm")),
        ("fairseq_alma.report", ("fairseq_alma.core", "fairseq_alma.app")),
    ],
)
def test_these_packages_import_no_others_of_ours(package, others):
    for name in our_modules():
        if is_inside(name, package):
            assert {m for m in imports_of(name) if is_inside(m, *OURS) and not is_inside(m, package, *others)} == set()


def test_nothing_of_ours_imports_tests_or_benchmarks():
    assert importers("tests", "benchmarks") == set()
