"""The plugins in results/rivals, and the study that compares them."""

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fairseq_alma.app.plugins import load_plugin
from fairseq_alma.checkpoints import require_checkpoint
from fairseq_alma.core import catalogue
from fairseq_alma.core.errors import SettingError
from fairseq_alma.lm import learners
from tests.commands import ROOT, run_command
from tests.streams import make_stream
from tests.studies import study_module

SETTINGS = (
    "arch=switch_lm_tiny", "precision=float32", "tokens_per_sample=32", "sequences_per_update=8", "batch_size=8",
    "lr=0.005", "updates=4", "warmup_updates=0", "mega_batches=2", "validations=1", "dropout=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    return make_stream(tmp_path_factory.mktemp("streams") / "markov")


@pytest.fixture
def rivals(monkeypatch):
    """A function that imports one of the plugins. Their learners are removed at the end of the test."""
    monkeypatch.chdir(ROOT)
    before = set(learners.LEARNERS)

    def imported(name: str):
        load_plugin(f"results.rivals.{name}")
        return sys.modules[f"results.rivals.{name}"]

    yield imported
    for name in set(learners.LEARNERS) - before:
        del learners.LEARNERS[name]
        catalogue.remove_learner(name)


def run(stream, out, plugin, *settings):
    """Run alma-lm with a plugin on two mega-batches. Return the checkpoints of both stages and the ledger's rows."""
    result = run_command(
        "alma-lm", f"stream={stream}", f"out={out}", *SETTINGS, f"plugin=results.rivals.{plugin}", *settings
    )
    assert result.returncode == 0, result.stderr[-3000:]
    stages = [require_checkpoint(out / f"stages/stage_00{k}/member_1/checkpoint_best.pt") for k in (1, 2)]
    return stages, [json.loads(line) for line in (out / "ledger.jsonl").read_text().splitlines()]


class Optimizer:
    """Keeps the learning rate that a schedule sets."""

    def set_lr(self, lr):
        self.lr = lr

    def get_lr(self):
        return self.lr


def rates(schedule, **options):
    """Return the rates after 0 to 10 updates of the second of two stages of 10 updates, with a maximum of 1."""
    values = {"first_update": 10, "warmup_updates": 5, "cooldown_share": 0.4, "max_update": 10, "lr": [1.0]}
    made = schedule.__new__(schedule)
    made.cfg, made.optimizer = SimpleNamespace(**(values | options)), Optimizer()
    return [made.step_update(update) for update in range(11)]


def test_wsd_is_constant_and_falls_as_1_minus_sqrt_at_the_end_of_a_stage(rivals):
    schedule = rivals("schedules").WarmupStableDecay
    falling = [1 - 0.25**0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0.0]  # after 1 to 4 of the 4 updates of the cooldown
    assert rates(schedule) == pytest.approx([1.0] * 7 + falling)
    assert rates(schedule, cooldown_share=0.0) == [1.0] * 11


def test_the_warm_up_of_a_continued_schedule_may_be_longer_than_a_stage(rivals):
    schedule = rivals("schedules").WarmupStableDecay
    # The second stage begins after 10 of 20 warm-up updates.
    assert rates(schedule, warmup_updates=20, cooldown_share=0.0) == pytest.approx([0.5 + 0.05 * u for u in range(11)])


def test_rsqrt_falls_with_the_updates_of_all_stages_and_linearly_in_the_cooldown(rivals):
    schedule = rivals("schedules").InverseSquareRoot
    expected = [(5 / (10 + u)) ** 0.5 * min(1, (10 - u) / 4) for u in range(11)]
    assert rates(schedule) == pytest.approx(expected)
    assert rates(schedule, first_update=0, cooldown_share=0.0)[:6] == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_the_ar_meta_schedule_takes_the_maxima_of_its_rounds_from_longer_and_longer_cosines(rivals):
    plugin = rivals("tic_lm")
    learner = plugin.TicLM.__new__(plugin.TicLM)
    learner.settings = SimpleNamespace(lr=0.01)
    learner.learner_settings = plugin.TicLMSettings(later_lr_ratio=0.41)
    # Rounds 0 to 2 are stages 2 to 4, at 0, 1/2 and 2/3 of a cosine from 0.0041 to 0.0001: 1, 1/2 and 1/4 of the way.
    assert [learner.maximum(k, 0.0001) for k in (1, 2, 3, 4)] == pytest.approx([0.01, 0.0041, 0.0021, 0.0011])


def test_the_distance_from_the_teacher_is_a_kl_divergence_of_softened_predictions(rivals):
    distance = rivals("lwf").distance
    # At temperature 2, the teacher says 2 : 1 and the model 1 : 1, so KL = 2/3 ln(4/3) + 1/3 ln(2/3).
    teacher = torch.tensor([[[2 * torch.log(torch.tensor(2.0)), 0.0], [5.0, 0.0]]])
    is_token = torch.tensor([[True, False]])
    expected = 2 / 3 * torch.log(torch.tensor(4 / 3)) + 1 / 3 * torch.log(torch.tensor(2 / 3))
    torch.testing.assert_close(distance(torch.zeros(1, 2, 2), teacher, is_token, 2.0), expected)
    torch.testing.assert_close(distance(teacher, teacher, is_token, 2.0), torch.tensor(0.0))


def extra_loss(out, stage_index):
    """Return what the training loss has beside the cross entropy, at the end of a stage, in bits per token."""
    log = (out / f"stages/stage_00{stage_index}/member_1/log.txt").read_text().splitlines()
    line = json.loads([one for one in log if "train_inner" in one][-1].partition("| train_inner | ")[2])
    return float(line["loss"]) - float(line["nll_loss"])


def test_lwf_learns_from_the_last_predictor_and_is_charged_for_it(stream, tmp_path):
    options = "fairseq=--criterion lwf --distillation-weight 100"
    stages, rows = run(stream, tmp_path, "lwf", "learner=lwf", options)
    assert stages[0]["cfg"]["criterion"]["teacher"] is None
    assert stages[1]["cfg"]["criterion"]["teacher"] == str(tmp_path / "stages/stage_001/member_1/checkpoint_best.pt")
    # The balance losses of two mixtures are about 0.02 nats.
    assert extra_loss(tmp_path, 1) < 0.1 < extra_loss(tmp_path, 2)
    # A forward pass takes a third of the FLOPs of an update.
    assert rows[2]["train_flops"] == pytest.approx(4 / 3 * rows[1]["train_flops"])


def test_gstack_repeats_the_layers_in_their_order(rivals):
    weights = {"decoder.embed_tokens.weight": torch.tensor(0.0)}
    weights |= {f"decoder.layers.{i}.fc1.weight": torch.tensor(float(i)) for i in range(2)}
    grown = rivals("gstack").stacked(weights, 3)
    layers = [grown[f"decoder.layers.{i}.fc1.weight"].item() for i in range(6)]
    assert layers == [0, 1, 0, 1, 0, 1] and len(grown) == 7 and len(weights) == 3


@pytest.mark.slow
def test_gstack_trains_the_stacked_model_in_the_second_stage(stream, tmp_path):
    stages, rows = run(stream, tmp_path, "gstack", "learner=gstack")
    assert [stage["cfg"]["model"]["decoder_layers"] for stage in stages] == [4, 8]
    started = require_checkpoint(tmp_path / "stages/stage_002/grow/member_1/checkpoint_grown.pt")["model"]
    for layer in range(4):
        name = f"decoder.layers.{layer}.self_attn.out_proj.weight"
        assert torch.equal(started[f"decoder.layers.{layer + 4}.self_attn.out_proj.weight"], stages[0]["model"][name])
    assert rows[2]["train_flops"] > 1.2 * rows[1]["train_flops"]


def test_gstack_refuses_to_stack_the_untrained_model(stream, tmp_path):
    command = ("alma-lm", f"stream={stream}", f"out={tmp_path / 'run'}", *SETTINGS, "plugin=results.rivals.gstack")
    result = run_command(*command, "learner=gstack", "stack_at=1")
    assert result.returncode == 2 and "stack_at=1 and stack_factor=2 must be at least 2" in result.stderr


def test_settings_with_which_lifelong_moe_would_train_something_else_are_refused(rivals):
    settings = rivals("lifelong_moe").LifelongMixtureSettings(grow_experts=2)
    given = {"learner": "lifelong_moe", "experts": 4, "weight_decay": 0.0, "from_scratch": False, "expert_parallel": 1}
    settings.check_run(SimpleNamespace(**given))
    for name, value in (("weight_decay", 0.1), ("from_scratch", True), ("expert_parallel", 2)):
        with pytest.raises(SettingError, match=name):
            settings.check_run(SimpleNamespace(**given | {name: value}))


@pytest.mark.slow
def test_lifelong_moe_changes_new_experts_and_shared_layers_only(stream, tmp_path):
    options = "fairseq=--criterion lifelong_moe --distillation-weight 100"
    stages, rows = run(stream, tmp_path, "lifelong_moe", "learner=lifelong_moe", "experts=2", "grow_experts=1", options)
    old, new = (stage["model"] for stage in stages)
    started = require_checkpoint(tmp_path / "stages/stage_002/grow/member_1/checkpoint_grown.pt")["model"]
    for part in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "router.weight"):
        name = f"decoder.layers.1.mixture.{part}"
        assert torch.equal(new[name][:2], old[name])
        assert not torch.equal(new[name][2], started[name][2])
    name = "decoder.layers.0.fc1.weight"
    assert not torch.equal(new[name], old[name])
    assert extra_loss(tmp_path, 1) < 0.1 < extra_loss(tmp_path, 2)
    assert rows[2]["train_flops"] == pytest.approx(4 / 3 * rows[1]["train_flops"], rel=0.01)


def test_the_fisher_information_is_the_mean_of_squared_gradients(rivals):
    class Line(torch.nn.Module):
        """A model whose loss is slope * input - 3 * slope, so that its gradient is the input minus 3."""

        def __init__(self):
            super().__init__()
            self.slope = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, source, nll_of):
            return (self.slope * (source - nll_of)).sum(), {}

    batches = [(torch.tensor([x]), torch.tensor([3.0])) for x in (4.0, 6.0)]
    fisher = rivals("ewc").fisher_information(Line(), batches)
    assert fisher == {"slope": torch.tensor(5.0)}  # (1 + 9) / 2


def test_the_penalty_of_ewc_weighs_squared_changes_by_the_fisher_information(rivals):
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 3.0)
    torch.nn.init.constant_(model.bias, 1.0)
    fisher = {"weight": torch.tensor([[2.0]]), "bias": torch.tensor([10.0])}
    old = {"weight": torch.tensor([[1.0]]), "bias": torch.tensor([0.5])}
    assert rivals("ewc").penalty(model, fisher, old).item() == 2 * 2**2 + 10 * 0.5**2


@pytest.mark.slow
def test_ewc_has_a_penalty_from_the_second_stage_on_and_is_charged_for_it(stream, tmp_path):
    _, rows = run(stream, tmp_path, "ewc", "learner=ewc", "fairseq=--criterion ewc --ewc-weight 1e4")
    assert extra_loss(tmp_path, 1) < 0.1 < extra_loss(tmp_path, 2)
    # A stage has 4 updates of 8 sequences of 32 tokens. The first mega-batch has less than 100 sequences.
    tokens = json.loads((stream / "stream.json").read_text())["splits"]["mega_batch_1"]["tokens"]
    assert rows[2]["train_flops"] == pytest.approx((1 + tokens / 1024) * rows[1]["train_flops"], rel=0.01)


@pytest.mark.slow
def test_shrink_and_perturb_starts_a_stage_from_a_sum_of_old_and_untrained_weights(stream, tmp_path):
    out = tmp_path / "run"
    (old, _), _ = run(stream, out, "shrink", "learner=shrink", "shrink=0.5", "noise=0.25")
    new = require_checkpoint(out / "stages/stage_002/scratch/member_2/checkpoint_untrained.pt")["model"]
    started = require_checkpoint(out / "stages/stage_002/grow/member_1/checkpoint_grown.pt")["model"]
    name = "decoder.layers.1.mixture.fc1_weight"
    torch.testing.assert_close(started[name], 0.5 * old["model"][name] + 0.25 * new[name])
    assert torch.equal(started["decoder.version"], old["model"]["decoder.version"])
    first = require_checkpoint(out / "stages/stage_000/member_1/checkpoint_untrained.pt")["model"]
    assert not torch.equal(first[name], new[name])


def test_a_missing_package_is_named_with_the_command_that_installs_it(rivals, monkeypatch):
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with pytest.raises(SettingError, match="pip install schedulefree"):
        rivals("schedule_free")


@pytest.mark.slow
def test_schedule_free_predicts_with_its_average_and_continues(stream, tmp_path):
    pytest.importorskip("schedulefree", reason="needs the package schedulefree")
    settings = ("schedule=constant", "optimizer_state=keep", "fairseq=--optimizer schedule_free")
    stages, rows = run(stream, tmp_path / "run", "schedule_free", *settings)
    assert stages[1]["cfg"]["optimizer"]["_name"] == "schedule_free"
    assert rows[2]["perplexity"] < rows[1]["perplexity"]


@pytest.fixture(scope="module")
def study():
    return study_module("frontier/rivals.py")


def test_rows_use_what_was_chosen_on_another_stream(study, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "SELECTION", study.Choices(tmp_path / "selection.json", "validation_loss"))
    tried = [{"values": {"lr": "1"}, "validation_loss": 2.5}, {"values": {"lr": "2"}, "validation_loss": 2.25}]
    (tmp_path / "selection.json").write_text(json.dumps({"wikitext": {"anytime": tried}}))
    assert study.SELECTED_ON.stream not in {one.stream for one in study.STUDIES}
    anytime = study.RECIPES["anytime"]
    monkeypatch.setitem(study.RECIPES, "anytime", replace(anytime, grid={"lr": ("1", "2")}))
    assert study.SELECTED_ON.chosen("no_replay") == study.SELECTED_ON.chosen("anytime") == {"lr": "2"}
    monkeypatch.setitem(study.RECIPES, "anytime", replace(anytime, grid={"lr": ("1", "2", "3")}))
    assert study.SELECTED_ON.chosen("anytime") is None  # not everything was tried


def test_a_grid_is_searched_name_by_name_and_nothing_twice(study, tmp_path):
    losses = {("1", "a"): 3.0, ("2", "a"): 2.0, ("3", "a"): 4.0, ("2", "b"): 2.5}
    measured: list[tuple[str, ...]] = []

    def measure(values):
        measured.append(tuple(values.values()))
        return losses[measured[-1]] if len(measured) != 2 else None  # the second run does not finish

    choices, grid = study.Choices(tmp_path / "selection.json", "loss"), {"lr": ("1", "2", "3"), "warmup": ("a", "b")}
    assert choices.search("stream", "recipe", grid, measure) is None
    assert choices.best("stream", "recipe", grid) is None
    assert choices.search("stream", "recipe", grid, measure) == {"lr": "2", "warmup": "a"}
    assert measured == [("1", "a"), ("2", "a"), ("3", "a"), ("2", "a"), ("2", "b")]
    assert choices.best("stream", "recipe", grid) == {"lr": "2", "warmup": "a"}
    assert [one["loss"] for one in choices.tried("stream", "recipe")] == [3.0, 4.0, 2.0, 2.5]


def test_a_choice_is_found_again_where_the_last_value_was_better_with_an_earlier_one(study, tmp_path):
    """b was chosen with x, and is not tried with y again."""
    losses = {("a", "x"): 2.0, ("b", "x"): 1.0, ("b", "y"): 0.5}
    choices, grid = study.Choices(tmp_path / "selection.json", "loss"), {"one": ("a", "b"), "two": ("x", "y")}
    found = choices.search("stream", "recipe", grid, lambda values: losses[tuple(values.values())])
    assert found == choices.best("stream", "recipe", grid) == {"one": "b", "two": "y"}


def test_rivals_with_more_work_have_fewer_updates(study):
    """The teacher of LwF adds a third to nine of ten stages, and the Fisher information 12.5 updates before each."""
    values = {"weight": "1", "lr": "1", "warmup": "1"}
    times = {name: study.STUDIES[0].row(name, values, 100).times for name in ("anytime", "lwf", "ewc")}
    assert times == pytest.approx({"anytime": 1, "lwf": 1 / 1.3, "ewc": 1 - 0.125 * 0.9})


def test_searches_at_the_same_time_lose_nothing(study, tmp_path):
    choices, grid = study.Choices(tmp_path / "selection.json", "loss"), {"lr": tuple("123456")}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: choices.search("stream", name, grid, lambda values: int(values["lr"])), "abcdefgh"))
    assert [len(choices.tried("stream", name)) for name in "abcdefgh"] == [6] * 8


def test_the_averages_of_the_table_begin_at_the_second_arrival(study):
    periods = [{"test": {"tokens": 1, "bytes": 2}}] * 3
    rows = [
        SimpleNamespace(t=t, scores=SimpleNamespace(period_perplexities=[2.0**n for n in bits], bits_per_byte=bits[0]))
        for t, bits in ((0, [9, 9, 9]), (1, [8, 8, 8]), (2, [2, 4, 6]), (3, [3, 3, 6]))
    ]
    # Half of: (3 + 4) / 2; (4 + 6) / 2; 6; 4.
    assert study.parts_of(rows, periods) == pytest.approx({"arrived": 1.75, "newest": 2.5, "next": 3.0, "last": 2.0})
    assert study.parts_of(rows, None) == pytest.approx({"arrived": 2.5, "last": 3.0})


@pytest.mark.slow
def test_every_recipe_of_the_study_trains(study, stream, tmp_path):
    """Slow because about 20 recipes train two stages each."""
    for name, recipe in study.RECIPES.items():
        if name == "schedule_free" and importlib.util.find_spec("schedulefree") is None:
            continue
        row = study.STUDIES[0].row(name, {key: values[0] for key, values in recipe.grid.items()}, 100)
        steps = [one for one in SETTINGS if not one.startswith(("updates=", "lr=", "warmup_updates="))]
        steps += ["updates=12"]  # not fewer than the warm-up
        result = run_command("alma-lm", f"stream={stream}", f"out={tmp_path / name}", *steps, *row.settings)
        assert result.returncode == 0, result.stderr[-3000:]
