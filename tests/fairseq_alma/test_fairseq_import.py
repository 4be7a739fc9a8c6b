"""`import fairseq` after `import fairseq_alma` loads scikit-learn, scipy.stats and wandb only when they are used."""

import pytest

from tests.test_imports import run_after_torch

LOADED = "print([name for name in ('sklearn', 'scipy.stats', 'wandb') if name in sys.modules])\n"

CALLS = f"""
import sys, fairseq_alma, fairseq
{LOADED}
from fairseq.criterions import sentence_prediction
print(round(sentence_prediction.f1_score([1, 1], [1, 0]), 3))
from fairseq.tasks import audio_classification
print(audio_classification.sklearn_metrics.accuracy_score([1, 1], [1, 0]))
import sklearn.metrics, scipy.stats
x, y = [1, 2, 3], [1, 2, 4]
print(sentence_prediction.pearsonr(x, y) == scipy.stats.pearsonr(x, y))
print(sklearn.metrics.__file__ is not None, fairseq.__spec__.loader is fairseq.__loader__, sys.meta_path[0])
"""
WITHOUT_WANDB = """
import sys
from importlib.machinery import PathFinder
found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name == "wandb" else found(name, *more)
import fairseq_alma
from fairseq.logging import progress_bar
print(progress_bar.wandb)
"""
LOGGING = """
import logging, fairseq_alma, fairseq
print(logging.root.level == logging.WARNING, logging.root.handlers)
"""


def after(first: str) -> str:
    return f"import sys\n{first}\nimport fairseq_alma, fairseq\n{LOADED}"


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the codes of four tests print."""
    return [" ".join(words) for words in run_after_torch(CALLS, after("import fairseq"), WITHOUT_WANDB, LOGGING)]


def test_fairseq_gets_the_real_functions_when_it_calls_them(printed):
    """F1 of the predictions 1, 0 for the labels 1, 1: precision 1, recall 1/2, so 2/3."""
    assert printed[0].startswith("[] 0.667 0.5 True True True ") and "fairseq_alma" not in printed[0]


def test_what_is_loaded_before_stays(printed):
    """After `import fairseq`, as by fairseq-train, there is nothing to postpone."""
    pytest.importorskip("wandb")
    assert printed[1] == "['sklearn', 'scipy.stats', 'wandb']"


@pytest.mark.slow
def test_one_that_is_loaded_before_stays():
    assert run_after_torch(after("import scipy.stats")) == [["['scipy.stats']"]]


def test_wandb_is_missing_for_fairseq_where_it_is_not_installed(printed):
    assert printed[2] == "None"


def test_fairseq_does_not_change_the_logging_of_others(printed):
    assert printed[3] == "True []"
