"""alma-lm from settings to ledger, as real processes: finished runs, refused settings, killed runs."""

import gc
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch
import yaml

from fairseq_alma.checkpoints import read_checkpoint
from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.cli import main as alma_eval
from fairseq_alma.evaluation.evaluator import PerplexityEvaluator
from fairseq_alma.evaluation.flops import count_forward_flops, count_training_flops
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.lm import run as alma_lm
from fairseq_alma.lm.learners import make_learner
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.commands import RUN, run_command
from tests.fairseq_alma.app.test_scalars import scalars_in
from tests.fairseq_alma.killing import rows_without_seconds, same_ledger, start_fork, wait_until
from tests.fairseq_alma.lm.test_learners import ForkedProcesses
from tests.fairseq_alma.processes import NoProcesses
from tests.fairseq_alma.tasks.test_alma_lm import batches, make_task
from tests.fairseq_alma.test_fairseq_commands import records

CPU = torch.device("cpu")

SETTINGS = (*RUN, "wait=2", "updates=12", "dropout=0.1", "validations=4")


@pytest.mark.parametrize(("stored", "seeds"), [(".", 3), ("seed_0", 1)])
def test_one_seed_and_several_do_not_share_a_folder(tmp_path, stored, seeds):
    (tmp_path / stored).mkdir(exist_ok=True)
    (tmp_path / stored / "settings.json").write_text("{}")
    result = run_command("alma-lm", "stream=S", f"out={tmp_path}", "updates=1", f"seeds={seeds}")
    assert result.returncode == 2
    assert f"{tmp_path} contains a run of other seeds ({tmp_path / stored}).\n" in result.stderr


@pytest.fixture(scope="module")
def run(stream, tmp_path_factory) -> Path:
    """A run of SM at wait 2 over 3 mega-batches, without interruption."""
    out = tmp_path_factory.mktemp("run") / "sm"
    result = run_command("alma-lm", f"stream={stream}", f"out={out}", *SETTINGS)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "perplexity" in result.stdout  # the table
    assert "mega-batch 3/3" in result.stderr  # the display
    return out


def test_the_ledger_has_a_row_for_each_arrival(run):
    rows = Ledger(run / "ledger.jsonl").rows()
    assert [(row.t, row.stage, row.updated) for row in rows] == [
        (0, 0, False),
        (1, 0, False),
        (2, 1, True),
        (3, 2, True),
    ]
    assert [row.spent.num_updates for row in rows] == [0, 0, 12, 12]  # the last group is smaller, and is trained on too
    perplexity = [row.scores.perplexity for row in rows]
    assert perplexity[0] == perplexity[1] > perplexity[2]
    assert rows[0].scores.num_experts == 4
    assert rows[0].scores.num_members == 1
    assert rows[2].scores.overflow == 0
    assert all(sum(layer) == pytest.approx(1, abs=1e-3) for layer in rows[2].scores.expert_load)


def test_the_recorded_command_is_the_one_to_run_again_not_the_path_of_a_module(run, stream):
    recorded = json.loads((run / "provenance.json").read_text())["command"]
    assert recorded == ["alma-lm", f"stream={stream}", f"out={run}", *SETTINGS]


def test_tensorboard_shows_the_ledger_and_the_inside_of_stages(run):
    found = scalars_in(run)
    rows = Ledger(run / "ledger.jsonl").rows()
    changed = [row for row in rows if row.t == 0 or row.updated]
    assert found["test/perplexity"] == [(row.t, pytest.approx(row.scores.perplexity, rel=1e-6)) for row in changed]
    assert found["cost/updates"][-1] == (3, 24.0)
    # Four validations in each stage; steps are thousandths of a stage.
    assert [step for step, _ in found["during_stage/validation_perplexity"]] == [
        250, 500, 750, 1000, 1250, 1500, 1750, 2000,
    ]  # fmt: skip
    assert len(found["during_stage/training_perplexity"]) >= 2


def test_what_a_run_spent_equals_the_closed_form(run, stream):
    """The expected FLOPs come from torch's counter, row by row of the batches of 12 updates."""
    model, _ = load_member(run / "stages/stage_001/member_1/checkpoint_best.pt", StreamFolder.open(stream), CPU)
    flops = count_training_flops(model)
    rows = Ledger(run / "ledger.jsonl").rows()
    for row, mega_batches in ((rows[2], "1-2"), (rows[3], "3")):
        task = make_task(stream, "--mega-batches", mega_batches)
        task.load_dataset("train")
        epochs = [batches(task, "train", epoch) for epoch in (1, 2, 3)]
        seen = [batch["target"].shape for epoch in epochs for batch in epoch][:12]
        assert row.spent.train_flops == sum(num_rows * flops.of_row(length) for num_rows, length in seen)
    assert rows[0].scores.forward_flops == count_forward_flops(model).of_row(32)
    assert rows[2].scores.num_params == sum(p.numel() for p in model.parameters())


def test_the_summary_follows_from_the_rows(run):
    rows = Ledger(run / "ledger.jsonl").rows()
    summary = json.loads((run / "summary.json").read_text())
    perplexity = [row.scores.perplexity for row in rows]
    assert summary["average_perplexity"] == pytest.approx(sum(perplexity[1:]) / 3)
    assert summary["average_perplexity_after_first_stage"] == pytest.approx(sum(perplexity[2:]) / 2)
    assert summary["final"] == perplexity[3]
    assert summary["mem"] == 4 * rows[0].scores.num_params
    assert summary["comp"] == rows[2].spent.train_flops + rows[3].spent.train_flops
    assert summary["wall_seconds"] > 0


def test_the_run_names_its_predictor_and_alma_eval_scores_it(run, capsys):
    predictor = json.loads((run / "predictor.json").read_text())
    assert [c["path"] for c in predictor["checkpoints"]] == ["stages/stage_002/member_1/checkpoint_best.pt"]
    assert alma_eval([str(run), "--json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert scored["perplexity"] == pytest.approx(rows_without_seconds(run)[3]["perplexity"], rel=1e-9)


def test_a_stage_keeps_its_best_checkpoint_and_nothing_it_does_not_need(run):
    for k in (1, 2):
        folder = run / "stages" / f"stage_{k:03d}" / "member_1"
        assert {path.name for path in folder.iterdir()} == {"checkpoint_best.pt", "config.yaml", "done.json", "log.txt"}
        assert "last_optimizer_state" not in read_checkpoint(folder / "checkpoint_best.pt")


def test_the_second_stage_starts_from_the_first_ones_best(run):
    log = (run / "stages/stage_002/member_1/log.txt").read_text()
    assert "loading pretrained model from" in log
    assert "stage_001/member_1/checkpoint_best.pt" in log


def test_a_finished_run_is_skipped(run, stream):
    before = (run / "ledger.jsonl").read_bytes()
    result = run_command("alma-lm", f"stream={stream}", f"out={run}", *SETTINGS)
    assert result.returncode == 0
    assert "mega-batch" not in result.stderr
    assert (run / "ledger.jsonl").read_bytes() == before


def test_other_settings_are_refused_by_name_and_nothing_is_touched(run, stream):
    before = {path: path.read_bytes() for path in run.glob("*.json*")}
    result = run_command("alma-lm", f"stream={stream}", f"out={run}", *SETTINGS, "updates=13", "seed=4")
    assert result.returncode == 2
    assert "seed: was 0, is 4" in result.stderr
    assert "updates: was 12, is 13" in result.stderr
    assert {path: path.read_bytes() for path in run.glob("*.json*")} == before


def test_a_stream_that_moved_is_the_same_stream(run, own_stream):
    result = run_command("alma-lm", f"stream={own_stream}", f"out={run}", *SETTINGS)
    assert result.returncode == 0, result.stderr


def test_each_subcommand_says_what_it_does():
    for name, text in (
        ("status", "the ledger, jobs"),
        ("logs", "until the run ends"),
        ("cancel", "end the run"),
    ):
        result = run_command("alma-lm", name, "--help")
        assert (result.returncode, result.stdout.splitlines()[0]) == (
            0,
            f"usage: alma-lm {name} RUN" + " [--json]" * (name == "status"),
        )
        assert text in result.stdout
        result = run_command("alma-lm", name, "--all")
        assert (result.returncode, f"usage: alma-lm {name} RUN" in result.stderr) == (2, True)


def test_a_mistyped_option_of_status_names_the_nearest_one():
    result = run_command("alma-lm", "status", "run", "--jason")
    assert result.returncode == 2
    assert "usage: alma-lm status RUN [--json] (unrecognized arguments: --jason: did you mean --json?)" in result.stderr


def test_a_mistyped_setting_is_the_only_error(stream, tmp_path):
    """The setting that was meant does not count as missing."""
    result = run_command("alma-lm", f"stream={stream}", f"out={tmp_path / 'out'}", *RUN, "update=5")
    assert result.returncode == 2
    expected = "alma-lm: unknown settings update: did you mean updates? --help lists all settings\n"
    assert result.stderr.endswith(expected) and "errors:" not in result.stderr


def test_folders_of_any_name_are_trained_on_scored_and_grown(stream, tmp_path):
    folder = tmp_path / "Zürich, 'x' #1; a & b"
    shutil.copytree(stream, folder / "stream")
    words = [f"stream={folder}/stream", f"out={folder}/run\\", *RUN, "updates=2", "validations=1", "mega_batches=1"]
    result = run_command("alma-lm", *words)
    assert result.returncode == 0, result.stderr[-2000:]
    run = folder / "run\\"
    assert json.loads((run / "provenance.json").read_text())["command"] == ["alma-lm", *words]
    assert "nothing was left to do" in run_command("alma-lm", *words).stdout
    assert run_command("alma-eval", run).returncode == 0
    best = run / "stages/stage_001/member_1/checkpoint_best.pt"
    assert run_command("alma-grow", best, folder / "grown.pt", "--experts", 1).returncode == 0


def test_status_shows_how_far_a_run_is(run, tmp_path):
    result = run_command("alma-lm", "status", run)
    assert result.returncode == 0
    assert "finished" in result.stdout
    result = run_command("alma-lm", "status", tmp_path)
    assert result.returncode != 0
    assert "no run at" in result.stderr


def reachable(root: object) -> Iterator[object]:
    """Yield every object that can be reached from `root`, also through closures, but not through modules and classes.

    The global names of a function are left out: they are code.
    """
    seen: set[int] = set()
    queue = [root]
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType):
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, FunctionType):
            queue += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__]
        else:
            queue += gc.get_referents(thing)


def test_a_learner_can_reach_no_test_data(run, stream, tmp_path):
    """Nothing that a learner can reach is, names or opens the test set.

    It knows the stream folder, which fairseq-train needs. The task that reads it there refuses the test set for
    training and validation (tests/fairseq_alma/tasks/test_alma_lm.py).
    """
    settings = json.loads((run / "settings.json").read_text())
    settings = {k: v for k, v in settings.items() if k not in ("evaluated_on", "dictionary")}
    folder = StreamFolder.open(stream)
    view = folder.without_test()
    learner = make_learner(LanguageModelSettings.from_mapping(settings), view, NoProcesses())
    learner.load(run / "stages/stage_002/train")
    PerplexityEvaluator(folder, tmp_path)(learner)  # the environment has read the test set
    with pytest.raises(StreamError, match="no access to split 'test'"):
        view.digest("test")
    things = list(reachable(learner))
    assert any(thing is view for thing in things)
    forbidden = [str(folder.path / "test"), folder.digest("test")]
    for thing in things:
        assert not isinstance(thing, StreamFolder | np.ndarray | torch.Tensor | io.IOBase), thing
        if isinstance(thing, str | Path):
            assert not any(word in str(thing) for word in forbidden), thing
    # The walk finds what it looks for: with the whole folder, the path of the test set is one call away.
    leaking = make_learner(LanguageModelSettings.from_mapping(settings), folder, NoProcesses())
    assert any(thing is folder for thing in reachable(leaking))


def test_killed_inside_a_stage_and_between_stages_the_same_command_continues(run, stream, tmp_path):
    for attempt in range(3):  # on a busy machine the stage may end before the kill; then another run is killed
        out = tmp_path / f"killed_{attempt}"
        stage_1 = out / "stages/stage_001"
        process = start_fork(stream, out, SETTINGS)
        wait_until(lambda: list((stage_1 / "member_1").glob("checkpoint_last.pt")), process)  # noqa: B023
        process.kill()  # only the driver: its fairseq-train, if there is one, must end with it
        process.wait()
        if not (stage_1 / "member_1/done.json").exists():
            break
    assert not (stage_1 / "member_1/done.json").exists()  # killed inside stage 1

    process = start_fork(stream, out, SETTINGS)
    wait_until((stage_1 / "train.done.json").exists, process)  # between training and its evaluation
    process.kill()
    process.wait()
    assert "Loaded checkpoint" in (stage_1 / "member_1/log.txt").read_text()  # it continued and did not start again

    result = run_command("alma-lm", f"stream={stream}", f"out={out}", *SETTINGS)
    assert result.returncode == 0, result.stderr[-3000:]
    same_ledger(out, run)
    # The curves of the stages are whole, and each point is there once.
    found, whole = scalars_in(out), scalars_in(run)
    for name in ("during_stage/validation_perplexity", "during_stage/training_perplexity"):
        assert [step for step, _ in found[name]] == [step for step, _ in whole[name]]


@pytest.mark.slow
def test_a_run_whose_loss_is_not_finite_continues_with_another_learning_rate(stream, tmp_path):
    out = tmp_path / "run"
    first = (f"stream={stream}", f"out={out}", *RUN, "learner=gmoe", "grow_experts=2", "updates=6", "validations=2")
    assert run_command("alma-lm", *first, "mega_batches=1").returncode == 0
    kept = (out / "stages/stage_001/member_1/checkpoint_best.pt").read_bytes()
    result = run_command("alma-lm", *first, "lr=1e18", "fairseq=--clip-norm 0")
    assert result.returncode == 2
    assert "To continue this run with the new settings from stage 2 on, add fork=true." in result.stderr
    result = run_command("alma-lm", *first, "lr=1e18", "fairseq=--clip-norm 0", "fork=true")
    assert result.returncode == 2
    assert "FloatingPointError" in result.stderr
    assert "and add fork=true to continue from this stage" in result.stderr
    result = run_command("alma-lm", *first, "lr=0.001", "fork=true")
    assert result.returncode == 0, result.stderr[-3000:]
    rows = rows_without_seconds(out)
    assert [row.get("changed_settings") for row in rows] == [None, None, {"lr": [0.005, 0.001]}, None]
    assert [row["num_experts"] for row in rows] == [4, 4, 6, 8]
    settings = json.loads((out / "settings.json").read_text())
    assert settings["lr"] == 0.001
    assert settings["forks"] == {"2": {"lr": [0.005, 0.001]}}
    assert (out / "stages/stage_001/member_1/checkpoint_best.pt").read_bytes() == kept
    before = (out / "ledger.jsonl").read_bytes()
    assert run_command("alma-lm", *first, "lr=0.001").returncode == 0  # the run now has these settings
    assert (out / "ledger.jsonl").read_bytes() == before
    for more in ("experts=8", "lr=0.1"):  # not for a fork; the run is finished
        result = run_command("alma-lm", *first, "lr=0.001", more, "fork=true")
        assert result.returncode == 2
        assert "other settings" in result.stderr
        assert "add fork=true" not in result.stderr
    assert json.loads((out / "settings.json").read_text())["forks"] == settings["forks"]


def test_a_run_in_use_is_not_entered(run, stream, tmp_path):
    out = tmp_path / "busy"
    settings = (*SETTINGS, "updates=100000")  # so that it still runs when the second command starts
    process = start_fork(stream, out, settings)
    try:
        wait_until((out / "settings.json").exists, process)
        result = run_command("alma-lm", f"stream={stream}", f"out={out}", *settings)
        assert result.returncode == 2
        assert f"in use by process {process.pid}" in result.stderr
    finally:
        process.kill()
        process.wait()


def test_a_loss_that_is_not_finite_ends_the_stage_with_advice(stream, tmp_path):
    out = tmp_path / "nan"
    arguments = (f"stream={stream}", f"out={out}", *RUN, "wait=3", "updates=20", "lr=1e18", "fairseq=--clip-norm 0")
    result = run_command("alma-lm", *arguments)
    assert result.returncode == 2
    assert "FloatingPointError" in result.stderr
    assert "lower lr=1e+18" in result.stderr
    assert "log.txt" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (out / "stages/stage_001/train.done.json").exists()
    assert len((out / "ledger.jsonl").read_text().splitlines()) == 3  # t = 0, 1, 2: no row is missing and none is added


def test_the_untrained_learner_is_scored_on_a_sample_which_no_metric_uses(stream, tmp_path, monkeypatch):
    monkeypatch.setattr(alma_lm, "UNTRAINED_TOKENS", 96)
    monkeypatch.setattr(alma_lm, "LocalProcesses", ForkedProcesses)
    given = {key: yaml.safe_load(value) for key, value in (one.split("=", 1) for one in RUN)}
    given |= {"stream": str(stream), "out": f"{tmp_path}/out", "mega_batches": 1, "updates": 3, "validations": 1}
    alma_lm.run(LanguageModelSettings.from_mapping(given))
    rows = rows_without_seconds(tmp_path / "out")
    assert [row.get("scored_tokens") for row in rows] == [96, None]
    assert "word_perplexity" not in rows[0]
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["average_perplexity"] == summary["final"] == rows[1]["perplexity"]


@pytest.mark.parametrize(("wait", "expected"), [(1, 10_000), (2, None)])
def test_an_untrained_learner_that_the_average_charges_is_scored_in_full(stream, tmp_path, monkeypatch, wait, expected):
    class ReachedError(Exception):
        pass

    def evaluator(*_, untrained_tokens, **__):
        raise ReachedError(untrained_tokens)

    monkeypatch.setattr("fairseq_alma.evaluation.evaluator.PerplexityEvaluator", evaluator)
    values = {"stream": str(stream), "out": str(tmp_path), "arch": "switch_lm_tiny", "tokens_per_sample": 32}
    values |= {"updates": 5, "wait": wait}
    with pytest.raises(ReachedError) as caught:
        alma_lm.run(LanguageModelSettings.from_mapping(values))
    assert caught.value.args == (expected,)


@pytest.mark.slow
def test_a_sweep_is_ordered_by_validation(stream, tmp_path):
    result = run_command(
        "alma-lm", "-m", f"stream={stream}", f"out={tmp_path}/sweep", *RUN[:-1], "wait=3", "updates=10",
        "lr=0.0001,0.01",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    runs = json.loads((tmp_path / "sweep/sweep.json").read_text())
    assert len(runs) == 2
    assert runs[0]["prequential_perplexity"] < runs[1]["prequential_perplexity"]
    assert "lr=0.01" in runs[0]["run"]
    assert result.stdout.rindex("lr=0.01") < result.stdout.rindex("lr=0.0001")


BAD = [
    (("wait=4", "updates=5"), "wait=4 must lie between 1 and 3"),
    ((), "exactly one of updates= "),
    (("updates=5", "fairseq='--no-such-option 1'"), "no-such-option"),
    (("updates=5", "arch=switch_lm_huge"), "switch_lm_huge"),
    (("updates=5", "lr=fast"), "lr='fast' must be a number"),
    (("updates=5", "fairseq='--disable-validation'"), "--disable-validation is refused"),
    (("updates=5", "colour=red"), "colour"),
    (
        ("preset=table2/gmoe",),
        "preset=table2/gmoe does not exist: did you mean table2/gmoe_w1? They are anytime, paper",
    ),
    (("launch=slrm",), "launch=slrm does not exist: did you mean slurm?"),
]
MORE_BAD = [  # each is refused at the same place as one of those above
    (("learner=foo", "updates=5"), "learner='foo' is not one of sm, ens, gens, gmoe"),
    (("updates=5", "updates_per_mega_batch=5"), "exactly one of updates= "),
    (("updates=5", "replay=1.5"), "replay=1.5 must be false, all, uniform, or a share"),
    (("updates=5", "mega_batches=9"), "9 mega-batches are requested"),
    (("updates=5", "batch_size=3"), "must be a multiple of batch_size=3"),
    (("updates=5", "fairseq='--save-dir elsewhere'"), "--save-dir is set by alma-lm"),
    (("updates=5", "experts=0"), "experts=0 must be an integer"),
    (("updates=5", "wait=1.5"), "wait=1.5 must be an integer"),
    (("updates=5", "warmup_updates=-1"), "warmup_updates=-1"),
    (("stream=a:b", "updates=5"), "stream=a:b: fairseq cannot use a path that contains :"),
]


@pytest.mark.parametrize(
    ("settings", "message"), [*BAD, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BAD)]
)
def test_bad_settings_are_refused_before_anything_is_written(stream, tmp_path, settings, message):
    out = tmp_path / "out"
    result = run_command("alma-lm", f"stream={stream}", f"out={out}", *RUN, *settings)
    assert result.returncode != 0
    assert message in result.stderr
    assert "table2/sm_w4_4x" in result.stderr or "preset" not in message
    assert "Traceback" not in result.stderr
    assert not out.exists() or list(out.iterdir()) == []


def test_a_run_that_failed_before_its_first_step_takes_better_settings(stream, tmp_path):
    arguments = (f"stream={stream}", f"out={tmp_path}/out", *RUN, "wait=3", "updates=4", "validations=1")
    result = run_command("alma-lm", *arguments, "fairseq='--learned-positions 16'")
    assert result.returncode == 2
    assert "--tokens-per-sample 32 is longer than --learned-positions 16" in result.stderr
    result = run_command("alma-lm", *arguments, "fairseq='--learned-positions 64'")
    assert result.returncode == 0, result.stderr[-2000:]


def test_every_validation_takes_place_at_epoch_ends_too(run):
    # 12 updates, 4 validations; mega-batch 3 has 12 batches an epoch, so that the last one ends the epoch.
    for k in (1, 2):
        log = (run / "stages" / f"stage_{k:03d}" / "member_1/log.txt").read_text()
        assert [int(r["valid_num_updates"]) for r in records(log, "valid")] == [3, 6, 9, 12]
        assert "score None" not in log


def test_bad_streams_are_refused_before_anything_is_written(own_stream, tmp_path):
    out = tmp_path / "out"

    def refusal() -> str:
        result = run_command("alma-lm", f"stream={own_stream}", f"out={out}", *RUN, "updates=5")
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
        assert not out.exists() or list(out.iterdir()) == []
        return result.stderr

    train = own_stream / "mega_batch_2/train"
    whole = {suffix: train.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")}
    train.with_suffix(".bin").write_bytes(whole[".bin"][:-10])
    assert "truncated" in refusal()
    train.with_suffix(".bin").write_bytes(whole[".bin"])
    train.with_suffix(".idx").unlink()
    assert "train.idx is missing" in refusal()
    train.with_suffix(".idx").write_bytes(whole[".idx"])
    dictionary = (own_stream / "dict.txt").read_text()
    (own_stream / "dict.txt").write_text(dictionary.replace("w1 ", "v1 "))
    assert "not the dictionary" in refusal()
    (own_stream / "dict.txt").write_text(dictionary)
    shutil.rmtree(own_stream)
    assert "run `alma-prep" in refusal()


def test_a_missing_argument_is_reported_with_the_usage(stream, tmp_path):
    expected = {(): "stream= is missing", ("lr=0",): "\n- stream= is missing", ("status",): "usage:"}
    for arguments, message in expected.items():
        result = run_command("alma-lm", *arguments)
        assert result.returncode != 0
        assert message in result.stderr
        assert "Traceback" not in result.stderr
    assert "a sweep, sorted by validation score" in run_command("alma-lm", "--help").stdout
