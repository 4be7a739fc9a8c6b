"""Ens, gEns and gMoE over a stream: which members train, which predict, and what they cost."""

import functools
import gc
import json
import logging
import multiprocessing
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fairseq_alma
from fairseq_alma.checkpoints import read_checkpoint
from fairseq_alma.core.errors import SettingError, StageError
from fairseq_alma.core.files import read_json, sha256_of
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.core.protocol import Stage
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation import evaluator
from fairseq_alma.evaluation.cli import main as alma_eval
from fairseq_alma.evaluation.evaluator import PerplexityEvaluator
from fairseq_alma.evaluation.flops import count_forward_flops, count_training_flops
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.perplexity import combine
from fairseq_alma.evaluation.scoring import score_tokens
from fairseq_alma.evaluation.stored_scores import key_of_scores
from fairseq_alma.growth.experts import EXPERT_WEIGHTS, experts_with_largest_loss
from fairseq_alma.lm import run as alma_lm
from fairseq_alma.lm.learners import make_learner
from fairseq_alma.lm.settings import LanguageModelSettings
from tests.fairseq_alma.evaluation.test_perplexity import plain_loop
from tests.fairseq_alma.models.test_switch_lm import closed_form
from tests.fairseq_alma.processes import NoProcesses
from tests.fairseq_alma.tasks.test_alma_lm import batches, make_task

CPU = torch.device("cpu")
MIXTURES = [f"decoder.layers.{layer}.mixture." for layer in (1, 3)]
UPDATES = 14  # a mega-batch has 12 batches: into the second epoch, past the batch that is not full
SECOND_SEED = 10_000_000


def fairseq_train_in_a_fork(arguments, log: Path) -> int:
    """Run fairseq-train with these arguments, its output in `log`, and return its exit status."""
    fairseq_alma.register()  # in this process, so that the fork finds the task

    def train():
        sys.argv = ["fairseq-train", *map(str, arguments), "--cpu"]
        from fairseq_cli.train import cli_main

        cli_main()

    return in_a_fork(train, log)


def train_member_in_a_fork(command, log: Path) -> int:
    """Run a command of a stage, its output in `log`, and return its exit status."""

    def train():
        from fairseq_alma.lm.train_member import main

        main(command[3:])

    return in_a_fork(train, log)


def in_a_fork(train, log: Path) -> int:
    """Call `train` with its output in `log`, and return the exit status.

    It runs in a fork of this process, which has imported fairseq: a new process needs 7 seconds for that.
    """

    def run_there():
        gc.freeze()  # do not copy the memory of all objects of the parent when this process collects its garbage
        log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1) for descriptor in (1, 2))
        form = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"  # as in fairseq
        logging.basicConfig(force=True, level=logging.INFO, stream=sys.stdout, format=form)
        for logger in logging.root.manager.loggerDict.values():  # an earlier test may have turned some off
            if isinstance(logger, logging.Logger):
                logger.disabled = False
                logger.setLevel(logging.NOTSET)
        torch.set_num_threads(1)  # threads that existed before the fork do not exist after it
        train()

    process = multiprocessing.get_context("fork").Process(target=run_there)
    process.start()
    process.join(timeout=300)
    process.kill()
    process.join()
    return process.exitcode


class ForkedProcesses:
    """Replaces LocalProcesses: runs the jobs one after the other, each in a fork. Those in `failing` are not run."""

    def __init__(self, *_):
        self.asked: list[tuple[list[int], int]] = []
        self.failing: dict[int, int | None] = {}

    kind, memory, num_nodes = "cpu", None, 1

    def check_free(self, stage):
        pass

    def num_devices(self, num_jobs):
        return 1

    def run(self, stage, jobs, num_jobs, updates):
        self.asked.append((list(jobs), num_jobs))
        trained = {n: train_member_in_a_fork(c, log) for n, (c, log) in jobs.items() if n not in self.failing}
        return {number: trained.get(number, self.failing.get(number)) for number in jobs}


def settings_of(stream, out, learner, **other) -> LanguageModelSettings:
    small = {"arch": "switch_lm_tiny", "tokens_per_sample": 32, "sequences_per_update": 8, "batch_size": 8}
    options = {"updates": UPDATES, "lr": 0.005, "dropout": 0.0, "validations": 2, "precision": "float32"}
    values = {"stream": str(stream), "out": str(out), "learner": learner, **small, **options, **other}
    return LanguageModelSettings.from_mapping(values)


def run(settings: LanguageModelSettings, processes=ForkedProcesses) -> list[Path]:
    """Run alma-lm, with its own processes if `processes` is None. Return the scored checkpoints, in order."""
    scored = []
    with pytest.MonkeyPatch.context() as patch:
        # Without GPUs: a process that has used one cannot fork, and scores are compared.
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(evaluator, "load_member", lambda path, *more: (scored.append(path), load_member(path, *more))[1])
        if processes is not None:
            patch.setattr(alma_lm, "LocalProcesses", processes)
        alma_lm.run(settings)
    return scored


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("learners")


@pytest.fixture(scope="module")
def ens(stream, folder) -> Path:
    """A run of two members at wait 2."""
    out = folder / "ens"
    run(settings_of(stream, out, "ens", members=2, wait=2))
    return out


@pytest.fixture(scope="module")
def gens(stream, folder) -> Path:
    out = folder / "gens"
    scored = run(settings_of(stream, out, "gens"))
    (out / "scored.json").write_text(json.dumps([str(path.relative_to(out)) for path in scored]))
    return out


@pytest.fixture(scope="module")
def gmoe(stream, folder) -> Path:
    """A run with 4, then 5, then 7 experts."""
    out = folder / "gmoe"
    run(settings_of(stream, out, "gmoe", grow_experts=[1, 2]))
    return out


@pytest.fixture(scope="module")
def runs(ens, gens, gmoe) -> dict[str, Path]:
    return {"ens": ens, "gens": gens, "gmoe": gmoe}


def rows_of(out: Path):
    return Ledger(out / "ledger.jsonl").rows()


def best(out: Path, stage: int, member: int) -> Path:
    return out / "stages" / f"stage_{stage:03d}" / f"member_{member}" / "checkpoint_best.pt"


def load(checkpoint: Path, stream: Path):
    return load_member(checkpoint, StreamFolder.open(stream), CPU)


@pytest.mark.parametrize(
    ("learner", "members", "experts", "updates"),
    [
        ("ens", [2, 2, 2, 2], [4, 4, 4, 4], [0, 0, 2 * UPDATES, 2 * UPDATES]),  # at wait 2; summed over members
        ("gens", [1, 1, 2, 3], [4, 4, 4, 4], [0, UPDATES, UPDATES, UPDATES]),  # frozen members cost nothing more
        ("gmoe", [1, 1, 1, 1], [4, 4, 5, 7], [0, UPDATES, UPDATES, UPDATES]),
    ],
)
def test_each_row_of_the_ledger_has_the_size_of_the_learner(runs, learner, members, experts, updates):
    rows = rows_of(runs[learner])
    assert [row.t for row in rows] == [0, 1, 2, 3]
    assert [row.scores.num_members for row in rows] == members
    assert [row.scores.num_experts for row in rows] == experts
    assert [row.spent.num_updates for row in rows] == updates
    assert [row.scores.num_params for row in rows] == [
        m * closed_form(4, 128, 24, e) for m, e in zip(members, experts, strict=True)
    ]
    for row, m, e in zip(rows, members, experts, strict=True):
        assert [len(layer) for layer in row.scores.expert_load] == [e] * 2 * m
        assert [sum(layer) for layer in row.scores.expert_load] == pytest.approx([1.0] * 2 * m, abs=1e-3)
    perplexity = [row.scores.perplexity for row in rows]
    assert perplexity[-1] < 0.7 * perplexity[0]  # it has learned
    mem = json.loads((runs[learner] / "summary.json").read_text())["mem"]
    assert mem == sum(row.scores.num_params for row in rows)


@functools.cache
def task_of(stream: Path, mega_batches: str):
    task = make_task(stream, "--mega-batches", mega_batches)
    task.load_dataset("train")
    return task


@functools.cache
def shapes_of_batches(stream: Path, mega_batches: str, seed: int) -> list[tuple[int, int]]:
    """Return (rows, tokens in a row) of each batch of a stage."""
    epochs = [batches(task_of(stream, mega_batches), "train", epoch, seed) for epoch in (1, 2)]
    return [batch["target"].shape for epoch in epochs for batch in epoch][:UPDATES]


@pytest.mark.parametrize(
    ("learner", "trained"),
    [  # of each stage: arrival, mega-batches, member and its seed
        ("ens", [(2, "1-2", ((1, 0), (2, SECOND_SEED))), (3, "3", ((1, 0), (2, SECOND_SEED)))]),
        ("gens", [(1, "1", ((1, 0),)), (2, "2", ((2, SECOND_SEED),)), (3, "3", ((3, 2 * SECOND_SEED),))]),
        ("gmoe", [(1, "1", ((1, 0),)), (2, "2", ((1, 0),)), (3, "3", ((1, 0),))]),
    ],
)
def test_what_each_row_spent_equals_the_closed_form(runs, stream, learner, trained):
    """The expected FLOPs come from the batches that each member got, and from its model at that time."""
    rows, flops = rows_of(runs[learner]), {}
    for stage, (t, mega_batches, members) in enumerate(trained, start=1):
        expected = forward = 0
        for number, seed in members:
            checkpoint = best(runs[learner], stage, number)
            state = read_checkpoint(checkpoint)
            assert state["cfg"]["common"]["seed"] == seed
            assert state["cfg"]["task"]["mega_batches"] == mega_batches
            experts = len(state["model"][MIXTURES[0] + "fc1_weight"])
            if experts not in flops:
                model, _ = load(checkpoint, stream)
                flops[experts] = count_training_flops(model), count_forward_flops(model).of_row(32)
            training, of_row = flops[experts]
            shapes = shapes_of_batches(stream, mega_batches, seed)
            assert len(shapes) == UPDATES
            expected += sum(num_rows * training.of_row(length) for num_rows, length in shapes)
            forward += of_row
        assert rows[t].spent.train_flops == expected
        frozen = rows[t].scores.num_members // len(members)
        assert rows[t].scores.forward_flops == frozen * forward  # of all that predict
    assert (
        sum(row.spent.train_flops for row in rows) == json.loads((runs[learner] / "summary.json").read_text())["comp"]
    )


def test_growth_costs_no_training_flops(gmoe):
    for stage in (2, 3):
        grow, train = (
            read_json(gmoe / f"stages/stage_{stage:03d}/{step}.done.json")["result"][0] for step in ("grow", "train")
        )
        assert (grow["train_flops"], grow["validation_flops"], grow["num_updates"]) == (0, 0, 0)
        assert train["train_flops"] == rows_of(gmoe)[stage].spent.train_flops > 0


def same_models(a: Path, b: Path, **tolerance) -> None:
    a, b = (read_checkpoint(path)["model"] for path in (a, b))
    assert a.keys() == b.keys()
    for name in a:
        if tolerance:
            torch.testing.assert_close(a[name], b[name], **tolerance)
        else:
            assert torch.equal(a[name], b[name]), name


def test_the_first_member_equals_that_of_every_learner_with_the_same_seed(gens, gmoe):
    same_models(best(gens, 1, 1), best(gmoe, 1, 1))
    assert rows_of(gens)[1].scores == rows_of(gmoe)[1].scores


@pytest.mark.slow
def test_a_model_from_scratch_is_in_each_stage_the_new_member_of_the_growing_ensemble(gens, stream, tmp_path):
    """Both have random weights, drawn with the same seed, and train on the new mega-batch."""
    run(settings_of(stream, tmp_path, "sm", from_scratch=True, mega_batches=2))
    for stage in (1, 2):
        same_models(best(tmp_path, stage, 1), best(gens, stage, stage))
    rows = rows_of(tmp_path)
    assert [row.scores.num_members for row in rows] == [1, 1, 1]
    assert [row.spent.train_flops for row in rows] == [row.spent.train_flops for row in rows_of(gens)[:3]]


@pytest.mark.slow
def test_a_growing_ensemble_can_have_several_new_members_in_each_stage(gens, stream, tmp_path):
    run(settings_of(stream, tmp_path, "gens", members=2, mega_batches=2))
    rows = rows_of(tmp_path)
    assert [row.scores.num_members for row in rows] == [2, 2, 4]
    assert [row.spent.num_updates for row in rows] == [0, 2 * UPDATES, 2 * UPDATES]
    deployed = json.loads((tmp_path / "predictor.json").read_text())["checkpoints"]
    paths = [best(tmp_path, stage, member) for stage, member in ((1, 1), (1, 2), (2, 3), (2, 4))]
    assert [tmp_path / entry["path"] for entry in deployed] == paths
    same_models(paths[0], best(gens, 1, 1))
    seeds = [read_checkpoint(path)["cfg"]["common"]["seed"] for path in paths]
    assert seeds == [0, SECOND_SEED, 2 * SECOND_SEED, 3 * SECOND_SEED]


@pytest.mark.slow
def test_members_train_at_the_same_time_as_real_processes(gens, stream, tmp_path):
    out = tmp_path / "ens"
    run(settings_of(stream, out, "ens", members=2, mega_batches=1, parallel=2), processes=None)
    same_models(best(out, 1, 1), best(gens, 1, 1), atol=1e-4, rtol=1e-4)  # the number of threads may differ
    logs = [(out / f"stages/stage_001/member_{m}/log.txt").read_text() for m in (1, 2)]
    times = [re.findall(r"^([\d-]+ [\d:]+) \|", log, flags=re.MULTILINE) for log in logs]
    assert max(begin for begin, *_ in times) < min(end for *_, end in times)
    alone, together = rows_of(gens)[1], rows_of(out)[1]
    assert (together.scores.num_members, together.spent.num_updates) == (2, 2 * UPDATES)
    assert together.scores.perplexity < alone.scores.perplexity
    assert alone.spent.train_flops < together.spent.train_flops <= 2.1 * alone.spent.train_flops


def test_members_differ_from_the_start(ens, gens):
    untrained = [read_checkpoint(ens / f"stages/stage_000/member_{m}/checkpoint_untrained.pt")["model"] for m in (1, 2)]
    untrained.append(read_checkpoint(gens / "stages/stage_003/grow/member_3/checkpoint_untrained.pt")["model"])
    for name in ("decoder.embed_tokens.weight", MIXTURES[0] + "fc1_weight", MIXTURES[0] + "router.weight"):
        drawn = [state[name] for state in untrained]
        for i, j in ((0, 1), (0, 2), (1, 2)):
            assert (drawn[i] - drawn[j]).abs().mean() > 0.5 * drawn[i].abs().mean()


def test_an_ensemble_averages_probabilities_and_is_better_than_its_members(ens, stream):
    folder = StreamFolder.open(stream)
    paths = [ens / entry["path"] for entry in json.loads((ens / "predictor.json").read_text())["checkpoints"]]
    loaded = [load(path, stream) for path in paths]
    task = loaded[0][1]
    task.load_dataset("test")
    blocks = task.dataset("test")
    tokens = [t for i in range(len(blocks)) for t in blocks[i]["target"].tolist()]
    with torch.no_grad():
        nll = plain_loop([model for model, _ in loaded], tokens, 32)
    together = rows_of(ens)[-1].scores.perplexity
    assert together == pytest.approx(torch.tensor(nll / len(tokens), dtype=torch.float64).exp().item(), rel=1e-4)
    alone = [
        combine([score_tokens(model, task, "test").log_probability_T], folder.counts("test")["words"]).perplexity
        for model, task in loaded
    ]
    assert together < sum(alone) / 2


@pytest.mark.parametrize(
    ("learner", "checkpoints"), [("ens", [(2, 1), (2, 2)]), ("gens", [(1, 1), (2, 2), (3, 3)]), ("gmoe", [(3, 1)])]
)
def test_the_run_names_what_it_would_deploy_and_alma_eval_scores_it(runs, learner, checkpoints, capsys):
    out = runs[learner]
    predictor = read_json(out / "predictor.json")
    paths = [best(out, stage, member) for stage, member in checkpoints]
    assert predictor == {
        "combine": "mean of probabilities",
        "checkpoints": [{"path": str(path.relative_to(out)), "sha256": sha256_of(path)} for path in paths],
    }
    for split, key in (("test", "perplexity"), ("valid", "validation_perplexity")):
        assert alma_eval([str(out), "--split", split, "--json"]) == 0
        scored = json.loads(capsys.readouterr().out)
        assert scored["num_members"] == len(checkpoints)
        assert scored["perplexity"] == pytest.approx(getattr(rows_of(out)[-1].scores, key), rel=1e-6)


def test_a_member_of_gens_is_frozen_and_scored_once(gens, stream):
    for stage in (1, 2, 3):  # as the files were when the stage was done
        then = json.loads((gens / f"stages/stage_{stage:03d}/train/learner.json").read_text())
        assert len(then["predictor"]) == stage
        assert then["continuations"] == []
        for entry in then["predictor"]:
            assert sha256_of(gens / entry["path"]) == entry["sha256"]
    untrained = "stages/stage_000/member_1/checkpoint_untrained.pt"
    members = [str(best(gens, k, k).relative_to(gens)) for k in (1, 2, 3)]
    assert json.loads((gens / "scored.json").read_text()) == [untrained, *members]
    kept = {path.name for path in (gens / "evaluated").iterdir()}
    folder = StreamFolder.open(stream)
    splits = {split: folder.digest(split) for split in ("valid", "test")}
    # The untrained one never predicts together with others.
    assert kept == {key_of_scores(gens / path, splits, folder.dictionary_digest, None) for path in members}


def test_a_new_member_of_gens_does_not_predict_before_it_is_trained(gens):
    grown = json.loads((gens / "stages/stage_002/grow/learner.json").read_text())
    assert [entry["path"] for entry in grown["predictor"]] == ["stages/stage_001/member_1/checkpoint_best.pt"]
    (continuation,) = grown["continuations"]
    assert (continuation["member"], continuation["path"]) == (
        2,
        "stages/stage_002/grow/member_2/checkpoint_untrained.pt",
    )


def test_only_growing_ensembles_keep_outputs(ens, gmoe):
    assert not (ens / "evaluated").exists()
    assert not (gmoe / "evaluated").exists()


def test_a_stage_of_gmoe_starts_from_copies_of_the_experts_with_the_largest_loss(gmoe):
    noise = []
    for stage, num_new in ((2, 1), (3, 2)):
        before = read_checkpoint(best(gmoe, stage - 1, 1))["model"]
        path = gmoe / f"stages/stage_{stage:03d}/grow/member_1/checkpoint_grown.pt"
        grown = read_checkpoint(path)["model"]
        for prefix in MIXTURES:
            parents = experts_with_largest_loss(before[prefix + "valid_loss_E"], num_new)
            rows = [*range(len(before[prefix + "fc1_weight"])), *parents]
            for name in EXPERT_WEIGHTS:
                assert torch.equal(grown[prefix + name], before[prefix + name][rows])
            row = grown[prefix + "router.weight"][-1] - before[prefix + "router.weight"][parents[-1]]
            noise.append(row / row.norm())
        # It was trained from there, and the earlier checkpoint predicted until then.
        state = json.loads((gmoe / f"stages/stage_{stage:03d}/grow/learner.json").read_text())
        assert [entry["path"] for entry in state["predictor"]] == [str(best(gmoe, stage - 1, 1).relative_to(gmoe))]
        assert [entry["path"] for entry in state["continuations"]] == [str(path.relative_to(gmoe))]
        log = (gmoe / f"stages/stage_{stage:03d}/member_1/log.txt").read_text()
        assert str(path) in log
    # Each mixture and each growth has its own noise. Random rows of 128 numbers are nearly orthogonal.
    similarity = torch.stack(noise) @ torch.stack(noise).t()
    assert (similarity - torch.eye(4)).abs().max() < 0.5


def test_a_run_that_lost_its_last_stage_computes_the_same_again(gmoe, stream, tmp_path):
    out = shutil.copytree(gmoe, tmp_path / "gmoe")
    shutil.rmtree(out / "stages/stage_003")
    lines = (out / "ledger.jsonl").read_text().splitlines(keepends=True)
    (out / "ledger.jsonl").write_text("".join(lines[:3]))
    scored = run(settings_of(stream, out, "gmoe", grow_experts=[1, 2]))
    assert scored == [best(out, 3, 1)]
    again, before = rows_of(out)[-1], rows_of(gmoe)[-1]
    assert again.scores == before.scores
    assert again.spent.train_flops == before.spent.train_flops
    same_models(best(out, 3, 1), best(gmoe, 3, 1))


def test_a_finished_run_starts_no_process(runs, stream):
    for learner, options in (("gens", {}), ("gmoe", {"grow_experts": [1, 2]})):
        events = {path: path.read_bytes() for path in runs[learner].glob("tensorboard/*")}
        assert run(settings_of(stream, runs[learner], learner, **options), lambda *_: NoProcesses()) == []
        assert {path: path.read_bytes() for path in runs[learner].glob("tensorboard/*")} == events != {}


def test_when_one_member_fails_the_others_are_kept(stream, tmp_path):
    processes, folder = ForkedProcesses(), StreamFolder.open(stream)
    options = {"members": 2, "updates": 2, "validations": 1}
    learner = make_learner(settings_of(stream, tmp_path, "ens", **options), folder.without_test(), processes)
    stage = Stage(1, tuple(folder.stream())[:1], (), False, tmp_path / "stages/stage_001")
    processes.failing = {1: 1, 2: None}
    with pytest.raises(StageError) as caught:
        learner.train(stage)
    assert "the training process ended with status 1" in str(caught.value)
    assert str(stage.folder / "member_1/log.txt") in str(caught.value)
    assert "member_2" not in str(caught.value)  # it was not started, so there is nothing to report
    processes.failing = {1: -9}
    with pytest.raises(StageError) as caught:
        learner.train(stage)
    assert "the training process was killed by signal 9" in str(caught.value)
    assert "give a batch_size= below 8" in str(caught.value)
    second = best(tmp_path, 1, 2)
    before = second.stat().st_mtime_ns
    processes.failing = {}
    (spent,) = learner.train(stage)
    # Each time the machine is divided among two, so that a resumed member gets the same share.
    assert processes.asked == [([1, 2], 2), ([1, 2], 2), ([1], 2)]
    assert second.stat().st_mtime_ns == before
    assert spent.num_updates == 4
    assert learner.predictor == [best(tmp_path, 1, 1), second]


def settings(**values) -> LanguageModelSettings:
    return LanguageModelSettings.from_mapping({"stream": "s", "out": "o", "updates": 9, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learner": "ens"}, "learner=ens needs members=, e.g. members=2"),
        ({"learner": "ens", "members": 0}, "members=0 must be an integer of at least 1"),
        ({"learner": "ens", "members": 1.5}, "members=1.5 must be an integer of at least 1"),
        ({"learner": "ens", "members": True}, "members=True must be an integer of at least 1"),
        ({"members": 2}, "members=2 is for learner=ens, gens, not for learner=sm"),
        ({"learner": "gmoe"}, "learner=gmoe needs grow_experts=, e.g. grow_experts=2"),
        ({"grow_experts": 2}, "grow_experts=2 is for learner=gmoe, not for learner=sm"),
        ({"learner": "gmoe", "grow_experts": -1}, "must not be negative: growth only adds experts"),
        ({"learner": "gmoe", "grow_experts": [2, -1]}, "must not be negative: growth only adds experts"),
        ({"learner": "gmoe", "grow_experts": 5}, "growth 1 would add 5 experts to the 4 experts"),
        ({"learner": "gmoe", "grow_experts": [1, 4, 10]}, "growth 3 would add 10 experts to the 9 experts"),
        ({"learner": "gmoe", "experts": 1, "grow_experts": 1}, "divide the output of the mixture by about 2"),
        (
            {"learner": "gmoe", "grow_experts": 1, "from_scratch": True, "copy_experts_by": "gradient"},
            "copy_experts_by=gradient has no effect with from_scratch=true",
        ),
        ({"learner": "gmoe", "grow_experts": []}, "grow_experts=[] must be an integer or a list of integers"),
        ({"learner": "gmoe", "grow_experts": 1.5}, "grow_experts=1.5 must be an integer or a list of integers"),
        ({"learner": "gmoe", "grow_experts": [1, "2"]}, "must be an integer or a list of integers"),
        ({"learner": "gmoe", "grow_experts": True}, "grow_experts=True must be an integer or a list of integers"),
        (
            {"learner": "gmoe", "grow_experts": 1, "grow_router": "forest"},
            "grow_router='forest' is not one of copy, tree",
        ),
        ({"reuse_from": "./o"}, "reuse_from=./o is the folder of the run (out=): choose another folder"),
        ({"parallel": 0}, "parallel=0 must be an integer of at least 1"),
        ({"seed": -1}, "seed=-1 must be an integer of at least 0"),
        ({"seed": 1_000_000}, "seed=1000000 must be below 1000000"),  # seeds of members begin above
        ({"seed": 1.5}, "seed=1.5 must be an integer"),
    ],
)
def test_settings_that_fit_no_learner_are_refused(values, message):
    with pytest.raises(SettingError) as caught:
        settings(**values)
    assert message in str(caught.value)


def test_in_a_list_of_growths_the_last_number_is_for_all_further_growths():
    listed = settings(learner="gmoe", grow_experts=[1, 0, 4])
    assert [listed.learner_settings.added_at(k) for k in (2, 3, 4, 5, 6)] == [1, 0, 4, 4, 4]
    assert [settings(learner="gmoe", grow_experts=2).learner_settings.added_at(k) for k in (2, 3)] == [2, 2]


def test_the_papers_mixtures_have_4_6_8_and_12_experts(stream, tmp_path):
    options = {"experts": 4, "grow_experts": [2, 2, 4]}
    view = StreamFolder.open(stream).without_test()
    learner = make_learner(settings_of(stream, tmp_path, "gmoe", **options), view, NoProcesses())
    assert [learner.num_experts(k) for k in (1, 2, 3, 4)] == [4, 6, 8, 12]


def test_scores_of_a_learner_are_what_the_evaluator_measures(gens, stream, tmp_path):
    learner = make_learner(settings_of(stream, gens, "gens"), StreamFolder.open(stream).without_test(), NoProcesses())
    learner.load(gens / "stages/stage_002/train")
    scores = PerplexityEvaluator(StreamFolder.open(stream), tmp_path, [CPU])(learner)
    assert scores == rows_of(gens)[2].scores
