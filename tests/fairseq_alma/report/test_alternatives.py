"""The alternatives to each run, and the commands of runs that are missing."""

import shlex
from dataclasses import replace

import pytest
import yaml
from fairseq_alma.report.alternatives import CHANGES, alternatives
from fairseq_alma.report.commands import ABOUT_EQUAL, size_of_one_network
from fairseq_alma.report.labels import group_label

from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.report.numbers import all_numbers
from tests.fairseq_alma.report.ledgers import only_comparison, vision_rows, write_run, write_text, write_vision
from vision.settings import VisionSettings

COMMAND = ("alma-vision", "dataset=mnist", "learner=sm", "width=4", "data_root=my data", "out=runs/mnist/a")
MLP = {4: 3210, 8: 6442, 16: 13002, 64: 55050}  # width -> parameters of one perceptron for MNIST


def found_in(folder):
    """Return label of a run -> decision -> labels of the alternatives, or the reason, or the command."""
    comparison = only_comparison(folder)
    labels = [group_label(group, comparison.varied_settings) for group in comparison.groups]
    return {
        label: {change: [labels[i] for i in one.runs] or one.reason or one.command for change, one in of_group.items()}
        for label, of_group in zip(labels, alternatives(comparison, all_numbers(comparison)), strict=True)
    }


def settings_of(command):
    """Check a proposed command, as alma-vision and alma-lm check it, and return its settings."""
    program, *words = shlex.split(command)
    values = {name: yaml.safe_load(value) for name, value in (word.split("=", 1) for word in words)}
    if program == "alma-vision":
        assert VisionSettings.from_mapping(values).learner == values["learner"]
    else:
        preset = {"updates": 99} if "updates" not in values and "updates_per_mega_batch" not in values else {}
        assert LanguageModelSettings.from_mapping({**preset, **values}).learner == values["learner"]
    return values


def test_every_finished_run_has_every_alternative_or_a_reason_or_a_command(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], command=COMMAND)
    write_vision(tmp_path / "b", [0.9, 0.9, 0.3], wait=2)
    write_vision(tmp_path / "c", [0.9, 0.4], mega_batches=2, width=8)
    found = found_in(tmp_path)
    assert found["SM, wait 1, width 8"] == {}  # unfinished
    first = found["SM, wait 1, width 4"]
    assert list(first) == list(CHANGES)
    assert first["wait_longer"] == ["SM, wait 2, width 4"]
    assert first["wait_less"] == "this run does not wait"
    assert first["same_size"] == "this run is one network that does not grow"
    second = found["SM, wait 2, width 4"]
    assert second["wait_less"] == ["SM, wait 1, width 4"]
    assert second["wait_longer"] == "this run waits for the whole stream"
    assert second["growth"] == "with one stage, nothing grows"
    assert second["replay"] == "with one stage, there is nothing to replay"


def test_growing_is_compared_with_not_growing_at_equal_cost_whatever_the_width(tmp_path):
    write_vision(tmp_path / "sm", [0.9, 0.5, 0.4], flops=100, width=16)
    write_vision(tmp_path / "same width, twice the cost", [0.9, 0.4, 0.3], flops=200, width=16, learner="gmoe")
    write_vision(tmp_path / "equal cost", [0.9, 0.45, 0.4], flops=round(100 * ABOUT_EQUAL), width=8, learner="gmoe")
    write_vision(tmp_path / "too dear", [0.9, 0.4, 0.3], flops=round(100 * ABOUT_EQUAL) + 1, width=64, learner="gmoe")
    write_vision(tmp_path / "too cheap", [0.9, 0.4, 0.3], flops=79, width=4, learner="gens")
    write_vision(tmp_path / "other wait", [0.9, 0.9, 0.3], flops=100, width=4, learner="gens", wait=2)
    found = found_in(tmp_path)
    assert found["SM, wait 1, width 16"]["growth"] == ["gMoE, wait 1, width 8"]
    assert found["gMoE, wait 1, width 8"]["growth"] == ["SM, wait 1, width 16"]
    # No fixed run costs 400. The first stage, of one network, costs 200: one network costs 400 in two stages.
    assert settings_of(found["gMoE, wait 1, width 16"]["growth"])["learner"] == "sm"


def test_the_fixed_model_of_the_same_size_has_as_many_parameters_on_average(tmp_path):
    write_vision(tmp_path / "grows", [0.9, 0.5, 0.4], params=[100, 100, 400], learner="gmoe")  # 200 on average
    write_vision(tmp_path / "sm", [0.9, 0.5, 0.4], params=230, width=16)
    write_vision(tmp_path / "small", [0.9, 0.5, 0.4], params=100, width=8)
    write_vision(tmp_path / "of the last size", [0.9, 0.5, 0.4], params=400, width=64)
    write_vision(tmp_path / "ens", [0.9, 0.5, 0.4], params=200, learner="ens")  # not one network
    assert found_in(tmp_path)["gMoE, width 4"]["same_size"] == ["SM, width 16"]


def test_more_members_are_of_the_same_kind_or_a_first_ensemble(tmp_path):
    write_vision(tmp_path / "sm", [0.9, 0.5], learner="sm")
    write_vision(tmp_path / "ens2", [0.9, 0.5], learner="ens", members=2)
    write_vision(tmp_path / "ens5", [0.9, 0.5], learner="ens", members=5)
    write_vision(tmp_path / "umix5", [0.9, 0.5], learner="umix", members=5)
    found = found_in(tmp_path)
    assert found["SM"]["more_members"] == ["Ens, members 2", "Ens, members 5", "UMix, members 5"]
    assert found["Ens, members 2"]["more_members"] == ["Ens, members 5", "UMix, members 5"]
    command = settings_of(found["UMix, members 5"]["more_members"])
    assert (command["learner"], command["members"]) == ("umix", 10)


def test_a_replay_of_another_share_is_an_alternative(tmp_path):
    for replay in (False, "all", 0.25):
        write_vision(tmp_path / str(replay), [0.9, 0.5, 0.4], replay=replay)
    found = found_in(tmp_path)
    assert found["SM"]["replay"] == ["SM, replay", "SM, replay 0.25"]
    assert found["SM, replay"]["replay"] == ["SM", "SM, replay 0.25"]


@pytest.mark.parametrize("learner", ["sm", "ens", "umix", "gens", "gmoe", "ff", "moe", "ens_moe", "gmoe_flat"])
def test_commands_of_vision_are_accepted_and_do_what_they_should(tmp_path, learner):
    more = {"moe": ["experts=4"], "ens_moe": ["experts=4"], "gmoe": ["grow_every=4"]}.get(learner, [])
    values = {name: int(value) for name, value in (word.split("=") for word in more)}
    command = [word.replace("learner=sm", f"learner={learner}") for word in COMMAND] + more
    if learner in ("gmoe", "gmoe_flat"):
        values["row_experts"] = [1, 1, 2, 3, 4]
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4, 0.3, 0.2], learner=learner, wait=1, command=command, **values)
    [found] = found_in(tmp_path).values()
    commands = {change: settings_of(text) for change, text in found.items() if text.startswith("alma-vision ")}
    # sm and moe have one network. How many parameters one has, a run of ens_moe alone does not show.
    without_size = {"same_size"} if learner in ("sm", "moe", "ens_moe") else set()
    assert set(commands) == set(CHANGES) - {"wait_less"} - without_size
    for change, settings in commands.items():
        assert (settings["dataset"], settings["data_root"]) == ("mnist", "my data")  # quoted for a shell
        assert settings["out"].startswith("runs/mnist/a_"), change
    assert (commands["wait_longer"]["wait"], commands["replay"]["replay"]) == (2, "all")
    if learner == "gmoe":
        assert commands["wait_longer"]["grow_every"] == 2  # after as many mega-batches as before
    expected = {"sm": "gens", "ens": "gens", "umix": "gens", "gens": "sm", "moe": "ens_moe", "ens_moe": "moe"}
    assert commands["growth"]["learner"] == expected.get(learner, "sm")


@pytest.mark.parametrize(
    ("learner", "given", "growth", "more"),
    [
        ("sm", {}, {"learner": "gmoe", "grow_experts": 2, "updates": 100}, {"learner": "ens", "members": 2}),
        ("ens", {"members": 3}, {"learner": "gmoe", "grow_experts": 2, "updates": 300}, {"members": 6}),
        ("gmoe", {"grow_experts": 2}, {"learner": "sm"}, {"learner": "ens", "members": 2}),
        ("gens", {}, {"learner": "sm"}, {"learner": "ens", "members": 2}),
    ],
)
def test_commands_of_language_models_keep_the_cost(tmp_path, learner, given, growth, more):
    words = [f"{name}={value}" for name, value in given.items()]
    command = ("alma-lm", "stream=S", f"learner={learner}", "updates=100", "seed=0", "out=runs/a/seed_0", *words)
    members = [1, 1, 2] if learner == "gens" else given.get("members", 1)
    write_text(tmp_path / "a", [900.0, 60.0, 50.0], learner=learner, command=command, row_members=members, **given)
    [found] = found_in(tmp_path).values()
    commands = {change: settings_of(text) for change, text in found.items() if text.startswith("alma-lm ")}
    assert growth.items() <= commands["growth"].items()
    assert more.items() <= commands["more_members"].items()
    waits = commands["wait_longer"]  # as many updates for each mega-batch
    assert (waits["wait"], waits["updates"], waits["updates_per_mega_batch"]) == (2, None, 100)
    assert waits["out"].startswith("runs/a_wait_2")


@pytest.mark.parametrize("given", [["wait=auto"], ["wait=geometric", "wait_ratio=0.3"]])
def test_commands_replace_a_wait_that_grows_by_a_number(tmp_path, given):
    """Its stages have two mega-batches each."""
    values = {name: yaml.safe_load(value) for name, value in (word.split("=") for word in given)}
    write_vision(tmp_path / "a", [0.9, 0.9, 0.4, 0.4, 0.2], command=(*COMMAND, *given), **values)
    [found] = found_in(tmp_path).values()
    assert settings_of(found["wait_longer"])["wait"] == 4
    assert settings_of(found["wait_less"])["wait"] == 1
    assert settings_of(found["replay"])["wait"] == values["wait"]


def test_commands_leave_out_what_the_other_learner_refuses(tmp_path):
    """A learner that adds networks takes no average, and replay=false takes no memory."""
    given = {"predict_with": "average", "average_power": 8.0, "replay": "uniform", "replay_memory": 50}
    command = (*COMMAND, *(f"{name}={value}" for name, value in given.items()))
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], command=command, **given)
    [found] = found_in(tmp_path).values()
    growth = settings_of(found["growth"])
    assert (growth["learner"], growth["predict_with"], growth["replay"]) == ("gens", "last", "uniform")
    replay = settings_of(found["replay"])
    assert (replay["replay"], replay["replay_memory"], replay["predict_with"]) == (False, None, "average")


def test_a_dense_model_grows_with_a_tree(tmp_path):
    """learner=gmoe refuses experts=1 with another router."""
    command = ("alma-lm", "stream=streams/a", "out=runs/a", "learner=sm", "experts=1", "updates=100")
    write_text(tmp_path / "a", [900.0, 60.0, 50.0], command=command, experts=1, updates=100)
    [found] = found_in(tmp_path).values()
    growth = settings_of(found["growth"])
    assert (growth["learner"], growth["experts"], growth["grow_router"]) == ("gmoe", 1, "tree")


def test_a_run_of_a_proposed_command_is_an_alternative(tmp_path):
    """A command also changes settings that the other learner, or replay=false, refuses."""
    given = {"predict_with": "average", "average_power": 8.0, "replay": "uniform", "replay_memory": 50}
    command = (*COMMAND, *(f"{name}={value}" for name, value in given.items()))
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], command=command, **given)
    (before,) = found_in(tmp_path).values()
    replay, growth = {**given, "replay": False, "replay_memory": None}, {"predict_with": "last", "average_power": 0.0}
    write_vision(tmp_path / "b", [0.9, 0.5, 0.4], command=command, **replay)
    write_vision(
        tmp_path / "c", [0.9, 0.5, 0.4], learner="gens", command=command, **{**given, **growth, "new_members": 1}
    )
    comparison = only_comparison(tmp_path)
    found = {group.folder.name: one for group, one in zip(
        comparison.groups, alternatives(comparison, all_numbers(comparison)), strict=True)}  # fmt: skip
    assert before["replay"].startswith("alma-vision") and before["growth"].startswith("alma-vision")
    names = [group.folder.name for group in comparison.groups]
    assert [names[i] for i in found["a"]["replay"].runs] == ["b"]
    assert [names[i] for i in found["a"]["growth"].runs] == ["c"]


def test_averages_of_both_learners_must_be_equal_where_both_take_them(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], predict_with="average", command=COMMAND)
    write_vision(tmp_path / "b", [0.9, 0.5, 0.4], learner="gmoe", command=COMMAND)
    comparison = only_comparison(tmp_path)
    assert [one["growth"].runs for one in alternatives(comparison, all_numbers(comparison))] == [[], []]


def test_waits_that_grow_are_longer_than_1_even_if_their_mean_is_1(tmp_path):
    errors = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]
    write_vision(tmp_path / "a", errors, wait="geometric", wait_ratio=0.3, command=COMMAND)
    [found] = found_in(tmp_path).values()
    assert settings_of(found["wait_less"])["wait"] == 1
    write_vision(tmp_path / "b", errors, command=COMMAND)
    comparison = only_comparison(tmp_path)
    runs = {g.folder.name: one for g, one in zip(
        comparison.groups, alternatives(comparison, all_numbers(comparison)), strict=True)}  # fmt: skip
    assert [comparison.groups[i].folder.name for i in runs["a"]["wait_less"].runs] == ["b"]
    assert runs["b"]["wait_less"].reason == "this run does not wait"


def test_without_a_recorded_command_it_is_composed_from_the_settings(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], command=(), lr=0.5, select_by="validation_loss")
    [found] = found_in(tmp_path).values()
    settings = settings_of(found["replay"])
    assert (settings["dataset"], settings["lr"], settings["replay"], settings["mega_batches"]) == (
        "mnist",
        0.5,
        "all",
        2,
    )
    assert settings["out"] == "runs/a_replay_all"


def test_the_command_of_a_sweep_gives_one_run(tmp_path):
    command = ("alma-vision", "-m", "dataset=mnist", "learner=sm,ens", "width=4,8", "out=runs/x", "hydra.job.num=1")
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], command=command, width=8, learner="ens")
    [found] = found_in(tmp_path).values()
    settings = settings_of(found["replay"])
    assert (settings["learner"], settings["width"], "hydra.job.num" in settings) == ("ens", 8, False)


def test_the_size_of_one_network_is_computed_from_the_sizes_that_are_known(tmp_path):
    for width in (4, 8, 16):
        write_vision(tmp_path / str(width), [0.9, 0.5], width=width, params=MLP[width])
    write_vision(tmp_path / "ens", [0.9, 0.5], learner="ens", width=8, params=5 * MLP[8])
    comparison = only_comparison(tmp_path)
    [ens] = [group for group in comparison.groups if group.learner == "ens"]
    # A polynomial through three widths is exact for a perceptron with two hidden layers.
    assert size_of_one_network(comparison, ens, MLP[64]) == 64
    assert (
        settings_of(found_in(tmp_path)["Ens, width 8"]["same_size"])["width"] == 39
    )  # 32,575 parameters; five have 32,210


def test_from_one_known_size_the_others_are_estimated(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5], width=10, params=100)
    write_vision(tmp_path / "b", [0.9, 0.5], width=10, params=100, dataset="cifar10")
    write_text(tmp_path / "c", [900.0, 50.0], experts=4, params=1000)
    for name, params, size in (("a", 300, 30), ("b", 900, 30), ("c", 2000, 8)):
        comparison = only_comparison(tmp_path / name)
        assert size_of_one_network(comparison, comparison.groups[0], params) == size


def test_a_learner_of_a_plugin_gets_commands_too(tmp_path):
    write_run(
        tmp_path / "a", vision_rows([0.9, 0.5, 0.4]), command=("alma-vision", "dataset=mnist", "learner=mine", "out=r"),
        learner="mine", mega_batches=2,
    )  # fmt: skip
    [found] = found_in(tmp_path).values()
    assert found["replay"] == "alma-vision dataset=mnist learner=mine out=r_replay_all replay=all"


@pytest.mark.parametrize(
    ("learner", "own", "flops", "updates", "expected"),
    [
        # With replay=all, updates become more in each stage, but a growing ensemble costs what one network does.
        ("gens", {"replay": "all"}, [10, 20, 30], [1, 2, 3], {"learner": "sm"}),
        ("gens", {"new_members": 3}, [30, 30, 30], [3, 3, 3], {"learner": "ens", "members": 3}),
        # The first stage has more updates (extra_epochs); later ones cost twice and three times as much per update.
        ("ff", {"extra_epochs": 20}, [100, 20, 30], [10, 1, 1], {"learner": "sm"}),
        ("ff", {}, [10, 20, 30], [1, 1, 1], {"learner": "ens", "members": 2}),
        ("ff", {}, [10, 15, 20], [1, 1, 1], None),  # one network costs 2/3 of it, and two 4/3
    ],
)
def test_a_fixed_learner_of_equal_cost_is_proposed(tmp_path, learner, own, flops, updates, expected):
    command = (*COMMAND, f"learner={learner}", *(f"{name}={value}" for name, value in own.items()))
    rows = vision_rows([0.9, 0.5, 0.4, 0.3])
    for row, cost, number in zip(rows[1:], flops, updates, strict=True):
        rows[row.t] = replace(row, spent=replace(row.spent, train_flops=cost, num_updates=number))
    write_run(tmp_path / "a", rows, command=command, mega_batches=3, learner=learner, **own)
    [found] = found_in(tmp_path).values()
    if expected is None:
        assert found["growth"] == ""
        return
    growth = settings_of(found["growth"])
    assert expected.items() <= growth.items()
    assert learner != "gens" or growth.get("members", 1) == own.get("new_members", 1)


def test_commands_of_a_continued_run_have_its_last_arrivals(tmp_path):
    command = (*COMMAND, "arrivals=1", "last_group=train")
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], command=command, arrivals=2, mega_batches=2, last_group=None)
    [group] = only_comparison(tmp_path).groups
    assert tuple(group.command) == (*COMMAND, "arrivals=2")
    [found] = found_in(tmp_path).values()
    assert settings_of(found["replay"])["arrivals"] == 2


def test_without_a_recorded_command_digests_are_left_out(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], command=(), backbone="mine:net", backbone_digest="abc")
    [found] = found_in(tmp_path).values()
    replay = settings_of(found["replay"])
    assert (replay["backbone"], "backbone_digest" in replay) == ("mine:net", False)


def test_nothing_is_proposed_for_data_that_no_command_can_name(tmp_path):
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], command=(), dataset="given:mine")
    [found] = found_in(tmp_path).values()
    assert (found["replay"], found["more_members"]) == ("", "")


def test_the_size_of_one_network_is_taken_from_a_network_before_it_grows(tmp_path):
    """At width 4 it has 100 parameters at first, and 200 on average: one network of this size has width 8."""
    write_vision(tmp_path / "a", [0.9, 0.5, 0.4], command=COMMAND, learner="ff", params=[100, 100, 400])
    [found] = found_in(tmp_path).values()
    same_size = settings_of(found["same_size"])
    assert (same_size["learner"], same_size["width"]) == ("sm", 8)
    write_vision(tmp_path / "b" / "c", [0.9, 0.5, 0.4], command=COMMAND, learner="gmoe", row_experts=[2, 2, 3])
    [found] = found_in(tmp_path / "b").values()
    assert found["same_size"] == ""
