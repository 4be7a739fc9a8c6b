"""The presets for the paper's Tables 1 and 2, composed as alma-lm composes them; nothing is trained."""

from functools import cache
from itertools import pairwise

import pytest
from hydra import compose, initialize_config_dir

from fairseq_alma.app.command import setting_values
from fairseq_alma.core.presets import is_anytime
from fairseq_alma.lm.learners import LEARNERS
from fairseq_alma.lm.run import CONFIGS, OTHER_KEYS
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.table2 import PRESETS

STAGE, MEGA_BATCH = "updates", "updates_per_mega_batch"
UPDATES = {"switch_lm_tiny": 300, "switch_lm_base": 120_000, "switch_lm_large": 120_000}

# The paper's Table 2: learner, wait, experts before each stage, members, what 120 000 updates are counted for.
ROWS = {
    "sm_w1_4": ("sm", 1, [4, 4, 4, 4], None, STAGE),
    "sm_w1_8": ("sm", 1, [8, 8, 8, 8], None, STAGE),
    "sm_w1_12": ("sm", 1, [12, 12, 12, 12], None, STAGE),
    "sm_w3": ("sm", 3, [8], None, STAGE),
    "sm_w3_3x": ("sm", 3, [8], None, MEGA_BATCH),
    "sm_w4": ("sm", 4, [12], None, STAGE),
    "sm_w4_4x": ("sm", 4, [12], None, MEGA_BATCH),
    "ens_w1_4at2": ("ens", 1, [4, 4, 4, 4], 2, STAGE),
    "ens_w1_4at4": ("ens", 1, [4, 4, 4, 4], 4, STAGE),
    "ens_w3": ("ens", 3, [4], 2, STAGE),
    "ens_w3_3x": ("ens", 3, [4], 2, MEGA_BATCH),
    "ens_w4": ("ens", 4, [4], 2, STAGE),
    "ens_w4_4x": ("ens", 4, [4], 2, MEGA_BATCH),
    "gens_w1": ("gens", 1, [4, 4, 4, 4], 1, STAGE),
    "gmoe_w1": ("gmoe", 1, [4, 6, 8, 12], None, STAGE),
}


@cache  # composing takes a quarter of a second
def settings_of(*overrides: str) -> LanguageModelSettings:
    with initialize_config_dir(str(CONFIGS.absolute()), version_base="1.1"):
        config = compose("alma_lm", ["stream=S", "out=O", *overrides])
    return LanguageModelSettings.from_mapping(setting_values(config, OTHER_KEYS), given=[])


def mega_batches_of_stages(settings: LanguageModelSettings, num_mega_batches: int) -> list[int]:
    """How many mega-batches each stage trains on, over a stream of so many."""
    stream = settings.stream_settings(min(num_mega_batches, settings.mega_batches or num_mega_batches))
    return [end - start for start, end in pairwise([0, *stream.arrivals_of_stages])]


def experts_of_stages(settings: LanguageModelSettings, num_stages: int) -> list[int]:
    experts = [settings.experts]
    for k in range(2, num_stages + 1):
        experts.append(experts[-1] + (settings.learner_settings.added_at(k) if settings.learner == "gmoe" else 0))
    return experts


def total_updates(settings: LanguageModelSettings, num_mega_batches: int) -> int:
    """Of all members, over a stream of so many mega-batches."""
    stages = mega_batches_of_stages(settings, num_mega_batches)
    return (getattr(settings.learner_settings, "members", None) or 1) * sum(
        settings.updates_of_stage(n) for n in stages
    )


def test_every_row_has_one_preset():
    assert sorted(f"table2/{row}" for row in ROWS) == PRESETS


# Composing the other architectures takes most of the time, and the test of Table 1 below does it for some rows.
ARCHS = [
    "switch_lm_tiny",
    *(pytest.param(arch, marks=pytest.mark.slow) for arch in UPDATES if arch != "switch_lm_tiny"),
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("row", ROWS)
def test_a_preset_is_its_row_at_any_arch(row, arch):
    learner, wait, experts, members, counted_for = ROWS[row]
    settings = settings_of(f"preset=table2/{row}", f"arch={arch}")
    assert (settings.preset, settings.arch) == (f"table2/{row}", arch)
    assert (settings.learner, settings.wait, settings.replay) == (learner, wait, False)
    assert getattr(settings.learner_settings, "members", None) == members
    assert learner in LEARNERS
    assert {STAGE: settings.updates, MEGA_BATCH: settings.updates_per_mega_batch} == {
        STAGE: None,
        MEGA_BATCH: None,
        counted_for: UPDATES[arch],
    }
    stages = mega_batches_of_stages(settings, num_mega_batches=4)
    assert stages == [wait] * len(experts)  # so that w = 3 ends with its third mega-batch
    assert experts_of_stages(settings, len(stages)) == experts


@pytest.mark.parametrize("arch", ARCHS)
def test_a_preset_changes_no_more_than_its_row(arch):
    """The optimizer, dropout and validations are the paper preset's, sizes are the arch's."""
    of_row = {"preset", "learner", "wait", "mega_batches", "experts", "members", "grow_experts", STAGE, MEGA_BATCH}
    paper = settings_of("preset=paper", f"arch={arch}", "updates=1").to_json()
    for row in ROWS:
        settings = settings_of(f"preset=table2/{row}", f"arch={arch}").to_json()
        assert {key for key in paper if settings[key] != paper[key]} <= of_row, row


@pytest.mark.parametrize("arch", UPDATES)
@pytest.mark.parametrize(("k", "iid"), [(3, "ens_w3_3x"), (4, "ens_w4_4x")])
def test_in_sequence_and_iid_spend_equal_updates_on_equal_models(arch, k, iid):
    """Table 1."""
    in_sequence, at_once = (settings_of(f"preset=table2/{row}", f"arch={arch}") for row in ("ens_w1_4at2", iid))
    assert mega_batches_of_stages(at_once, num_mega_batches=4) == [k]
    assert (
        (in_sequence.experts, in_sequence.learner_settings.members)
        == (at_once.experts, at_once.learner_settings.members)
        == (4, 2)
    )
    # In sequence the ledger of one run over all four says both: what was spent when k had arrived is k stages.
    assert total_updates(in_sequence, k) == total_updates(at_once, k) == 2 * k * UPDATES[arch]


def test_a_preset_and_an_arch_may_be_given_in_any_order():
    tiny_first = settings_of("arch=switch_lm_tiny", "preset=table2/gmoe_w1")
    assert tiny_first == settings_of("preset=table2/gmoe_w1", "arch=switch_lm_tiny")


def test_what_is_given_beside_a_preset_wins():
    assert settings_of("preset=table2/sm_w1_4", "updates=7").updates == 7
    assert settings_of("preset=table2/sm_w3_3x", "mega_batches=null").mega_batches is None
    assert settings_of("preset=table2/sm_w3_3x", "table_updates=7").updates_per_mega_batch == 7
    instead = settings_of("preset=table2/sm_w1_4", "updates=null", "updates_per_mega_batch=7")
    assert instead.updates_of_stage(2) == 14


@pytest.mark.parametrize(
    ("row", "both"), [("sm_w1_4", "updates_per_mega_batch=7"), ("sm_w3_3x", "updates=7"), ("gmoe_w1", "updates=null")]
)
def test_two_ways_to_count_updates_or_none_are_refused(row, both):
    with pytest.raises(ValueError, match="exactly one of updates="):
        settings_of(f"preset=table2/{row}", both)


def test_quickstart_is_tiny_unless_an_arch_is_given():
    assert settings_of("preset=quickstart", "updates=1").arch == "switch_lm_tiny"
    for overrides in (("preset=quickstart", "arch=switch_lm_base"), ("arch=switch_lm_base", "preset=quickstart")):
        assert settings_of(*overrides, "updates=1").arch == "switch_lm_base"


def test_anytime_predicts_with_an_average_of_a_training_that_continues():
    paper, anytime = (settings_of(f"preset={name}", "updates=1").to_json() for name in ("paper", "anytime"))
    assert is_anytime("language model", anytime) and not is_anytime("language model", paper)
    assert {name: value for name, value in anytime.items() if value != paper[name]} == {
        "preset": "anytime", "replay": "auto", "schedule": "constant", "optimizer_state": "keep",
        "average": "power:8",
    }  # fmt: skip
    given = settings_of("preset=anytime", "average=decay:0.99", "updates=9")
    assert (given.schedule, given.average) == ("constant", "decay:0.99")


def test_the_default_is_the_papers_base_model():
    settings = settings_of("updates=1")
    assert (settings.preset, settings.arch) == ("paper", "switch_lm_base")
