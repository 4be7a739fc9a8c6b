from dataclasses import replace

import pytest

from fairseq_alma.core.catalogue import learners
from fairseq_alma.core.presets import anytime_settings
from fairseq_alma.report.numbers import all_numbers
from fairseq_alma.report.reading import read_runs
from fairseq_alma.report.runs import learner_position
from tests.fairseq_alma.report.ledgers import only_comparison, write_text, write_vision

ERRORS = [0.9, 0.5, 0.4, 0.3, 0.2]
PERPLEXITIES = [900.0, 50.0, 40.0, 30.0, 20.0]


def labels_of(comparison):
    return [comparison.label_of(group) for group in comparison.groups]


def test_the_seeds_of_one_setting_are_one_group_in_whichever_folders_they_are(tmp_path):
    write_vision(tmp_path / "a/seed_0", ERRORS, seed=0, out="a")
    write_vision(tmp_path / "a/seed_1", ERRORS, seed=1, out="a")
    write_vision(tmp_path / "elsewhere", ERRORS, seed=2, out="b", device="cuda")
    [group] = only_comparison(tmp_path).groups
    assert [run.seed for run in group.runs] == [0, 1, 2]
    assert group.folder == tmp_path
    assert group.is_finished and not group.is_running


def test_a_setting_that_the_learner_does_not_take_makes_no_other_group(tmp_path):
    write_vision(tmp_path / "a", ERRORS, seed=0, members=5, grow_every=3)
    write_vision(tmp_path / "b", ERRORS, seed=1, members=7, grow_every=1)
    assert len(only_comparison(tmp_path).groups) == 1


def test_runs_whose_stages_were_trained_on_other_mega_batches_are_no_seeds_of_one_setting(tmp_path):
    from fairseq_alma.core.ledger import Ledger

    def change(run, t, **values):
        rows = [replace(row, **values) if row.t == t else row for row in Ledger(run / "ledger.jsonl").rows()]
        (run / "ledger.jsonl").unlink()
        Ledger(run / "ledger.jsonl").append(*rows)

    for seed, name in enumerate(("whole", "skipped", "late")):
        write_text(tmp_path / name, PERPLEXITIES, seed=seed)
    change(tmp_path / "skipped", 2, updated=False, is_skipped=True)
    change(tmp_path / "late", 2, updated=False)
    assert sorted(labels_of(only_comparison(tmp_path))) == [
        "SM",
        "SM, skip_mega_batches 2",
        "SM, stages_at 1+3+4",
    ]


def test_the_number_of_experts_distinguishes_all_language_models(tmp_path):
    write_text(tmp_path / "a", PERPLEXITIES, experts=4)
    write_text(tmp_path / "b", PERPLEXITIES, experts=8)
    assert labels_of(only_comparison(tmp_path)) == ["SM, experts 4", "SM, experts 8"]


def test_labels_leave_out_options_that_are_off_and_what_has_no_effect_without_them(tmp_path):
    off = {"average": None, "schedule": "per_stage"}
    on = {"average": "power:8", "schedule": "constant"}
    write_text(tmp_path / "a", PERPLEXITIES, **off)
    write_text(tmp_path / "b", PERPLEXITIES, **on)
    assert sorted(labels_of(only_comparison(tmp_path))) == ["SM", "SM, average power:8, schedule constant"]
    write_text(tmp_path / "c", PERPLEXITIES, **{**on, "average": "power:4"})
    assert sorted(labels_of(only_comparison(tmp_path))) == [
        "SM",
        "SM, average power:4, schedule constant",
        "SM, average power:8, schedule constant",
    ]


@pytest.mark.parametrize("program", ["language model", "vision"])
def test_a_run_with_exactly_the_settings_of_the_recipe_is_called_anytime(tmp_path, program):
    """Its name replaces the settings of the preset. Another setting follows it, and a changed one brings all back."""
    recipe = dict(anytime_settings(program))
    write, values = (write_text, PERPLEXITIES) if program == "language model" else (write_vision, ERRORS)
    write(tmp_path / "sm", values)
    write(tmp_path / "anytime", values, preset="anytime", **recipe)
    write(tmp_path / "by hand", values, seed=1, **recipe)
    write(tmp_path / "waits", values, wait=4)
    comparison = only_comparison(tmp_path)
    assert "anytime" in labels_of(comparison)
    [group] = [group for group in comparison.groups if comparison.label_of(group) == "anytime"]
    assert [run.seed for run in group.runs] == [0, 1]
    other = "lr" if program == "language model" else "width"
    write(tmp_path / "other", values, **recipe, preset="anytime", **{other: 8})
    assert f"anytime, {other} 8" in labels_of(only_comparison(tmp_path))
    write(tmp_path / "changed", values, preset="anytime", **recipe | {"average": "power:4"})
    [changed] = [label for label in labels_of(only_comparison(tmp_path)) if "average power:4" in label]
    assert changed.startswith("SM, wait 1, replay ")


def test_the_same_seed_in_two_folders_is_a_repeat_and_the_same_folder_twice_is_not(tmp_path):
    write_vision(tmp_path / "a", ERRORS)
    write_vision(tmp_path / "b", ERRORS)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    comparison = only_comparison(tmp_path / "a", tmp_path / "a", tmp_path / "link", tmp_path / "b")
    assert labels_of(comparison) == ["SM", "SM, again (2)"]


def test_runs_of_different_kind_data_or_b_are_in_different_comparisons(tmp_path):
    write_vision(tmp_path / "mnist", ERRORS)
    write_vision(tmp_path / "shorter", ERRORS[:4])
    write_vision(tmp_path / "digits", ERRORS, dataset="digits")
    write_vision(tmp_path / "first", ERRORS[:3], mega_batches=4, arrivals=2)
    write_vision(tmp_path / "v1", ERRORS, cer_from=0)
    write_vision(tmp_path / "given order", ERRORS, order="random")
    write_vision(tmp_path / "classes", ERRORS, order="classes")
    write_text(tmp_path / "books", PERPLEXITIES)
    write_text(tmp_path / "other books", PERPLEXITIES, evaluated_on=["c", "d"])
    names = [comparison.name for comparison in read_runs([tmp_path]).comparisons]
    assert sorted(names) == [
        "books (2), B = 4", "books, B = 4", "digits, B = 4", "mnist in order of classes, B = 4",
        "mnist, B = 3", "mnist, B = 4",
        "mnist, B = 4, CER from t = 0", "mnist, first 2 of B = 4",
    ]  # fmt: skip


def test_the_first_arrivals_of_a_larger_b_are_a_comparison_of_their_own(tmp_path):
    write_vision(tmp_path / "a", ERRORS[:3], mega_batches=None, arrivals=2)
    write_vision(tmp_path / "b", ERRORS[:3], mega_batches=2)
    names = [comparison.name for comparison in read_runs([tmp_path]).comparisons]
    assert names == ["mnist, B = 2", "mnist, first 2 of B = 500"]


def test_no_two_comparisons_share_a_folder(tmp_path):
    write_text(tmp_path / "a", [900.0, 50.0], stream="/s/docs-2", evaluated_on=["a"])
    write_text(tmp_path / "b", [900.0, 50.0], stream="/s/docs_2", evaluated_on=["b"])
    slugs = [comparison.slug for comparison in read_runs([tmp_path]).comparisons]
    assert sorted(slugs) == ["docs_2_B1", "docs_2_B1_2"]


def test_runs_whose_last_mega_batches_wait_are_a_group_of_their_own(tmp_path):
    """Whatever the setting says: it may change when a run is continued, and its default depends on the stream."""
    write_vision(tmp_path / "a", ERRORS, wait=3, last_group="train")
    write_vision(tmp_path / "b", ERRORS, wait=3, seed=1, last_group="wait")
    write_vision(tmp_path / "c", ERRORS, wait=3, seed=2)
    comparison = only_comparison(tmp_path)
    seeds = [[run.seed for run in group.runs] for group in comparison.groups]
    assert dict(zip(labels_of(comparison), seeds, strict=True)) == {"SM": [0, 2], "SM, last_group wait": [1]}


def test_the_wall_time_is_that_of_all_seeds_only_if_one_process_trained_them(tmp_path):
    for seed in (0, 1):
        write_vision(tmp_path / f"a/seed_{seed}", ERRORS, seed=seed, seeds=2, wall_seconds=8.0)
    [group] = only_comparison(tmp_path / "a").groups
    assert group.is_trained_together
    [numbers] = all_numbers(only_comparison(tmp_path / "a"))
    assert numbers.wall_seconds == 8
    write_vision(tmp_path / "b", ERRORS, seed=2, seeds=1, wall_seconds=7.0)
    [group] = only_comparison(tmp_path).groups
    assert not group.is_trained_together
    [numbers] = all_numbers(only_comparison(tmp_path))
    assert numbers.wall_seconds == (4 + 4 + 7) / 3


def test_runs_on_another_test_set_of_the_same_name_are_compared_apart(tmp_path):
    """The file data.npz was replaced between the runs."""
    for name, seed, digest in (("a", 0, "old"), ("b", 1, "old"), ("c", 0, "new"), ("d", 2, "new"), ("e", 3, None)):
        more = {"test_digest": digest} if digest else {}
        write_vision(tmp_path / name, ERRORS, dataset="data.npz", seed=seed, **more)
    comparisons = read_runs([tmp_path]).comparisons
    assert [comparison.name for comparison in comparisons] == [
        "data.npz, B = 4", "data.npz (2), B = 4", "data.npz (3), B = 4",
    ]  # fmt: skip
    assert [[run.seed for run in group.runs] for one in comparisons for group in one.groups] == [[0, 1], [0, 2], [3]]


def test_runs_without_a_digest_and_with_another_image_size_are_compared_with_the_others(tmp_path):
    write_vision(tmp_path / "old", ERRORS, seed=0)
    write_vision(tmp_path / "new", ERRORS, seed=1, test_digest="a")
    write_vision(tmp_path / "large", ERRORS, seed=0, test_digest="b", image_size=32)
    groups = only_comparison(tmp_path).groups
    assert sorted([run.seed for run in group.runs] for group in groups) == [[0], [0, 1]]


def test_the_own_setting_of_a_plugins_learner_is_not_given_to_other_learners(tmp_path):
    write_vision(tmp_path / "a", ERRORS)
    write_vision(tmp_path / "b", ERRORS, learner="my_own", factor=0.5)
    assert [group.settings.get("factor") for group in only_comparison(tmp_path).groups] == [None, 0.5]


def test_an_unfinished_seed_is_not_counted_beside_finished_ones(tmp_path):
    write_vision(tmp_path / "a", ERRORS, seed=0)
    write_vision(tmp_path / "b", ERRORS[:3], seed=1, mega_batches=4)
    [group] = only_comparison(tmp_path).groups
    assert [run.seed for run in group.counted_runs] == [0]
    assert group.last_t == 4


def test_labels_name_what_differs_and_nothing_else(tmp_path):
    write_vision(tmp_path / "a", ERRORS, wait=1, width=4)
    write_vision(tmp_path / "b", ERRORS, wait=2, width=4, replay="all")
    write_vision(tmp_path / "c", ERRORS, learner="gmoe", grow_every=2, width=16)
    write_vision(tmp_path / "d", ERRORS, learner="gmoe", grow_every=4, width=16)
    assert labels_of(only_comparison(tmp_path)) == [
        "SM, wait 1, width 4", "SM, wait 2, replay, width 4", "gMoE, wait 1, width 16, grow_every 2",
        "gMoE, wait 1, width 16, grow_every 4",
    ]  # fmt: skip


def test_waits_that_grow_are_named_and_sorted_by_the_mean_size_of_their_stages(tmp_path):
    write_vision(tmp_path / "a", ERRORS, wait=4)
    write_vision(tmp_path / "b", ERRORS, wait="auto")  # two stages at four arrivals
    write_vision(tmp_path / "c", ERRORS, wait=1)
    groups = only_comparison(tmp_path).groups
    assert labels_of(only_comparison(tmp_path)) == ["SM, wait 1", "SM, wait auto", "SM, wait 4"]
    assert [group.wait for group in groups] == [1, 2, 4]


def test_learners_of_plugins_are_reported_and_sorted_after_ours(tmp_path):
    write_vision(tmp_path / "a", ERRORS, learner="my_own", knob=3)
    write_vision(tmp_path / "b", ERRORS, learner="my_own", knob=4)
    write_vision(tmp_path / "c", ERRORS, learner="ens")
    assert labels_of(only_comparison(tmp_path)) == ["Ens", "my_own, knob 3", "my_own, knob 4"]
    assert learner_position("my_own") == len(learners())


def test_runs_of_a_stream_that_has_grown_are_compared_apart(tmp_path):
    write_text(tmp_path / "six", [900.0, *[50.0] * 6], mega_batches=None)
    write_text(tmp_path / "eight", [900.0, *[50.0] * 6, 40.0, 40.0], mega_batches=None)
    assert [comparison.name for comparison in read_runs([tmp_path]).comparisons] == ["books, B = 6", "books, B = 8"]


def test_the_command_of_a_continued_run_has_its_last_number_of_arrivals(tmp_path):
    command = ["alma-vision", "dataset=mnist", "arrivals=2", "last_group=wait"]
    write_vision(tmp_path / "a", ERRORS, command=command, arrivals=4, last_group=None)
    [group] = only_comparison(tmp_path).groups
    assert group.command == ["alma-vision", "dataset=mnist", "arrivals=4", "out=runs/a"]


def test_a_setting_of_some_learners_is_in_the_labels_only_if_it_differs_within_a_learner(tmp_path):
    """Members mean something else in an ensemble that grows: the learner already names the difference."""
    write_vision(tmp_path / "a", ERRORS, learner="ens", members=5)
    write_vision(tmp_path / "b", ERRORS, learner="gens", members=1)
    assert labels_of(only_comparison(tmp_path)) == ["Ens", "gEns"]
    write_vision(tmp_path / "c", ERRORS, learner="ens", members=3)
    assert labels_of(only_comparison(tmp_path))[:2] == ["Ens, members 3", "Ens, members 5"]


def test_runs_on_other_training_text_with_the_same_held_out_text_are_no_seeds_of_one_setting(tmp_path):
    digests = list("pqrs")
    write_text(tmp_path / "a", PERPLEXITIES, seed=0, digests=digests)
    write_text(tmp_path / "moved", PERPLEXITIES, seed=1, digests=digests, stream="/elsewhere/copy")
    write_text(tmp_path / "committed", PERPLEXITIES, seed=2)
    assert labels_of(only_comparison(tmp_path)) == ["SM"]
    write_text(tmp_path / "cleaned", PERPLEXITIES, seed=3, digests=["p", "other", "r", "s"], stream="/x/cleaned/stream")
    assert sorted(labels_of(only_comparison(tmp_path))) == ["SM", "SM, stream books", "SM, stream cleaned"]


def test_an_unfinished_seed_counts_as_its_finished_ones_if_the_last_group_waits(tmp_path):
    for seed, errors in enumerate((ERRORS, ERRORS[:4])):
        write_vision(tmp_path / str(seed), errors, seed=seed, wait=3, last_group="wait", mega_batches=4)
    [group] = only_comparison(tmp_path).groups
    assert len(group.runs) == 2
