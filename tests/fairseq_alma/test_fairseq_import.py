"""`import fairseq` after `import fairseq_alma` loads scikit-learn, scipy.stats and wandb only when they are used."""

import subprocess
import sys

import pytest


def in_a_new_process(code: str) -> list[str]:
    """Run Python code and return the lines that it prints."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


LOADED = "print([name for name in ('sklearn', 'scipy.stats', 'wandb') if name in sys.modules])\n"


def test_fairseq_gets_the_real_functions_when_it_calls_them():
    """F1 of the predictions 1, 0 for the labels 1, 1: precision 1, recall 1/2, so 2/3."""
    lines = in_a_new_process(
        f"import sys, fairseq_alma, fairseq\n{LOADED}"
        "from fairseq.criterions import sentence_prediction\n"
        "print(round(sentence_prediction.f1_score([1, 1], [1, 0]), 3))\n"
        "from fairseq.tasks import audio_classification\n"
        "print(audio_classification.sklearn_metrics.accuracy_score([1, 1], [1, 0]))\n"
        "import sklearn.metrics, scipy.stats\n"
        "x, y = [1, 2, 3], [1, 2, 4]\n"
        "print(sentence_prediction.pearsonr(x, y) == scipy.stats.pearsonr(x, y))\n"
        "print(sklearn.metrics.__file__ is not None, fairseq.__spec__.loader is fairseq.__loader__, sys.meta_path[0])\n"
    )
    assert lines[:4] == ["[]", "0.667", "0.5", "True"]
    assert lines[4].startswith("True True") and "fairseq_alma" not in lines[4]


@pytest.mark.parametrize(
    ("before", "loaded"),
    [
        pytest.param("import scipy.stats", "['scipy.stats']", marks=pytest.mark.slow),
        ("import fairseq", "['sklearn', 'scipy.stats', 'wandb']"),
    ],
)
def test_what_is_loaded_before_stays(before, loaded):
    """After `import fairseq`, as by fairseq-train, there is nothing to postpone."""
    pytest.importorskip("wandb")
    assert in_a_new_process(f"import sys\n{before}\nimport fairseq_alma, fairseq\n{LOADED}") == [loaded]


def test_wandb_is_missing_for_fairseq_where_it_is_not_installed():
    hidden = "import sys; from importlib.machinery import PathFinder; found = PathFinder.find_spec\n"
    hidden += "PathFinder.find_spec = lambda name, *more: None if name == 'wandb' else found(name, *more)\n"
    code = f"{hidden}import fairseq_alma\nfrom fairseq.logging import progress_bar\nprint(progress_bar.wandb)"
    assert in_a_new_process(code) == ["None"]
