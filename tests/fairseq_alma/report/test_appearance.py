from fairseq_alma.report.appearance import APPEARANCES, appearance_of, matplotlib_dashes, plotly_dashes

from fairseq_alma.core.catalogue import learners


def test_the_table_has_every_learner_of_the_catalogue_and_no_other():
    assert set(APPEARANCES) == {entry.name for entry in learners()}


def test_no_two_learners_share_a_colour_or_a_symbol():
    for name in ("colour", "marker", "symbol"):
        assert len({getattr(appearance, name) for appearance in APPEARANCES.values()}) == len(APPEARANCES)


def test_a_learner_of_a_plugin_always_looks_the_same_and_like_none_of_ours():
    assert appearance_of("my_own") == appearance_of("my_own")
    assert appearance_of("my_own").colour not in {appearance.colour for appearance in APPEARANCES.values()}


def test_six_waits_have_different_dashes():
    waits = [1, 2, 5, 10, 50, 100]
    for dashes_of in (matplotlib_dashes, plotly_dashes):
        assert len({str(dashes_of(wait, waits)) for wait in waits}) == 6
