"""The page explains terms by the words of docs/glossary.md."""

import pytest

from fairseq_alma.core.catalogue import label_of, learners
from fairseq_alma.report.page import FOLDER, glossary, key_of
from tests.commands import ROOT


def test_the_glossary_of_the_page_is_that_of_the_documentation():
    assert (FOLDER / "glossary.md").read_bytes() == (ROOT / "docs/glossary.md").read_bytes()


def test_explanations_are_plain_text():
    assert (
        glossary()["Wait"] == "w, the number of mega-batches that a learner gathers before it trains a stage (wait=). "
        "With wait=geometric, it grows with the stream; with wait=auto, it also depends on the validation errors so "
        "far. wait=[1,3,4] gives the arrivals of the stages."
    )
    assert glossary()["Prequential error"].endswith("Runs are ranked by the mean.")
    assert glossary()["Learner"] == "What trains, predicts and grows (learner=)."  # "See Learners" leads nowhere here
    for text in glossary().values():
        assert text[0].isalnum() or text[0] == "=", text
        assert not {"*", "`", "[", "]"} & set(text) or "[" in text, text


@pytest.mark.parametrize(
    "term",
    ["wait", "CER", "Mem", "Comp", "objective", "score", "average perplexity", "final validation error", "replay",
     "growth", "member", "seed", "stream", "Pareto front"],
)  # fmt: skip
def test_the_terms_of_the_page_have_an_explanation(term):
    assert key_of(term) in map(key_of, glossary())


def test_the_learners_of_the_paper_have_an_explanation():
    labels = [label_of(entry.name) for entry in learners()][:6]
    assert {label for label in labels if key_of(label) not in map(key_of, glossary())} == set()
