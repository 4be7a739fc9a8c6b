"""The study of all rows of the paper's Table 2, results/frontier/table2.py, and the claims of both studies of it."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fairseq_alma.lm.table2 import ROWS
from fairseq_alma.report.paper import TABLE2
from tests.streams import make_stream
from tests.studies import study_module


@pytest.fixture(scope="module")
def study():
    return study_module("frontier/table2.py")


def test_the_presets_are_in_the_order_of_the_papers_table(study):
    for settings, row in zip(ROWS.values(), TABLE2, strict=True):
        assert (settings["learner"], settings["wait"], settings["experts"]) == (row.learner, row.wait, row.experts[0])
        assert settings.get("members", 1) == (row.members[0] if row.learner == "ens" else 1)
        assert ("updates_per_mega_batch" in settings) == (row.steps > 1)
    assert list(study.LABELS) == list(ROWS)


def test_all_rows_of_table_2_have_what_was_chosen_for_sm_on_another_stream(study):
    tiny, base, large = study.STUDIES
    assert [one.selected_on.stream for one in study.STUDIES] == [
        "wikitext", "table2_base_settings", "table2_large_settings",
    ]  # fmt: skip
    chosen = {name: tiny.chosen(name) for name in tiny.recipes}
    assert None not in chosen.values()
    assert {tuple(chosen[name].items()) for name in ROWS} == {tuple(study.rivals.SELECTED_ON.chosen("sm").items())}
    assert tiny.recipes.keys() == base.recipes.keys() > large.recipes.keys()
    for one in (base, large):  # every row has a recipe on the stream of the selection, with the rates of its model
        for name, recipe in one.recipes.items():
            grid = one.selected_on.recipes[recipe.as_for or name].grid
            assert max(map(float, grid["lr"])) < 0.005


ARGUMENTS = {"what": "run", "only": "", "seeds": 1, "hours": 1.0, "side_by_side": 2, "data": None}


def small(study, kind, folder, monkeypatch, **other):
    """Return a study of `kind` of a small model on random text, whose ledgers come into a folder.

    A stage has 42 updates: the chosen warm-up has 40.
    """

    class Small(kind):
        common = ("arch=switch_lm_tiny", *kind.common[1:], "tokens_per_sample=32", "sequences_per_update=8")
        tokens_per_update = 256

    made = study._study(Small, "small", "", heading="small", **other)
    make_stream(folder / "small/stream", num_mega_batches=4, tokens=42 * 256)
    made = replace(made, ledgers=folder / "ledgers", passes=41.5 * 256 / tokens_of_largest(folder / "small/stream"))
    monkeypatch.setattr(study, "STUDIES", (made,))
    return made


def tokens_of_largest(stream):
    splits = json.loads((stream / "stream.json").read_text())["splits"]
    return max(one["tokens"] for name, one in splits.items() if name.startswith("mega_batch"))


def cells_of(table):
    """Return the cells of a table, row by row."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")][
        1:
    ]


def test_rows_that_wait_for_three_mega_batches_end_there(study, tmp_path, monkeypatch):
    tiny = small(study, study.TinyStudy, tmp_path, monkeypatch, selected_on=study.rivals.SELECTED_ON)
    names = ("sm_w1_4", "sm_w1_8", "sm_w3_3x")
    monkeypatch.setattr(type(tiny), "recipes", {name: tiny.recipes[name] for name in names})
    tiny.do(SimpleNamespace(**ARGUMENTS), tmp_path / "small")
    table = cells_of(study.tables()["small.md"])
    assert [row[0] for row in table] == [study.LABELS[name] for name in names]
    waiting = table[2]
    assert [bool(cell) for cell in waiting] == [True, False, False, True, False, True, True]
    assert float(waiting[6]) == pytest.approx(0.75, abs=0.05)  # of the FLOPs of SM with 4 experts
    (larger, waits) = cells_of(study.tables()["small_claims.md"])
    assert larger[:3] == ["SM with 8 experts against 4", "4", "+8.0, +6.4"]
    assert waits[1:3] == ["3", "+2.1, +5.9"] and waits[5] == "1 seed(s): not claimed"
    better, worse = (tiny.rows_by_seed(f"small_{name}")[0][3].scores for name in ("sm_w3_3x", "sm_w1_8"))
    assert waits[3] == f"{100 * (1 - better.perplexity / worse.perplexity):+.1f}"


@pytest.mark.slow
def test_all_rows_train(study, tmp_path, monkeypatch):
    """Slow because 18 rows have 60 stages together."""
    pytest.importorskip("schedulefree", reason="needs the package schedulefree")
    tiny = small(study, study.TinyStudy, tmp_path, monkeypatch, selected_on=study.rivals.SELECTED_ON)
    tiny.do(SimpleNamespace(**ARGUMENTS), tmp_path / "small")
    table = cells_of(study.tables()["small.md"])
    assert [row[0] for row in table] == [recipe.label for recipe in tiny.recipes.values()]
    assert len(cells_of(study.tables()["small_claims.md"])) == len(study.CLAIMS)


@pytest.mark.slow
def test_rates_are_chosen_on_another_stream_before_rows_run(study, tmp_path, monkeypatch, capsys):
    """Slow because it trains six models."""
    monkeypatch.setattr(study.rivals, "SELECTION", study.rivals.Choices(tmp_path / "chosen.json", "validation_loss"))
    settings = small(study, study.BaseSelection, tmp_path / "settings", monkeypatch)
    base = small(study, study.BaseStudy, tmp_path, monkeypatch, selected_on=settings)
    only = SimpleNamespace(**ARGUMENTS | {"only": "small_gmoe"})
    base.do(only, tmp_path / "small")
    assert "give `select` first" in capsys.readouterr().err and not base.ledgers.exists()
    settings.do(SimpleNamespace(**ARGUMENTS | {"what": "select", "only": "small_sm"}), tmp_path / "settings/small")
    assert [one["values"]["warmup"] for one in study.rivals.SELECTION.tried("small", "sm")] == ["10", "10", "10", "40"]
    base.do(only, tmp_path / "small")
    assert [path.name for path in base.ledgers.iterdir()] == ["small_gmoe_w1"]


def test_the_books_of_a_library_are_linked_with_their_authors(study, tmp_path):
    library, links = tmp_path / "library", tmp_path / "out/books"
    for name in ("README.md", "Austen/Emma.md", "Austen/cover.jpg", "Bronte/Emma.md", "one.txt"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(name)
    tiny, base, _ = study.STUDIES
    assert tiny.prepare(library, tmp_path / "out") == ["--source", f"books:{links}", *tiny.options]
    assert {link.name: link.read_text() for link in links.iterdir()} == {
        "Austen - Emma.md": "Austen/Emma.md", "Bronte - Emma.md": "Bronte/Emma.md", "one.txt": "one.txt",
    }  # fmt: skip
    (library / "one.txt").unlink()
    base.prepare(library, tmp_path / "out")
    assert len(list(links.iterdir())) == 2
    with pytest.raises(SystemExit, match="there is no folder"):
        tiny.prepare(tmp_path / "mistyped", tmp_path / "out")
    sources = base.selected_on.prepare(tmp_path, tmp_path / "out")[1:6:2]
    assert [source.split(":")[0] for source in sources] == ["wikipedia", "text", "text"]


def test_a_claim_is_reproduced_if_its_interval_excludes_zero(study):
    verdict = sys.modules["_claims"].verdict
    assert verdict([1.0, 2.0]) == "2 seed(s): not claimed"
    assert verdict([1.0, 2.0, 3.0]) == "undecided"  # 2 +- 4.30 * 0.577
    assert verdict([1.5, 2.0, 2.5]) == "reproduced"  # 2 +- 4.30 * 0.289
    assert verdict([-1.5, -2.0, -2.5]) == "the opposite"
    gains = [1.5, 2.0, 2.5]
    assert [verdict(gains, theirs) for theirs in ([9, 8], [-9, -8])] == ["reproduced", "the opposite"]
    assert verdict(gains, [9, -8]) == "the paper's models disagree"
    assert [verdict([-1.0, 0.0, 1.0], theirs) for theirs in ([3, 9], [-9, -3])] == ["not seen", "not seen"]
    assert verdict([-1.0, 0.0, 1.0], [9, 2]) == "undecided"  # 0 +- 2.48
