"""launch=slurm on a real Slurm, which the fixture `slurm` starts; skipped where it cannot start."""

import importlib
import json
import shlex
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from fairseq_alma.app import slurm_jobs as app_jobs
from fairseq_alma.app.slurm_jobs import RunJobs
from fairseq_alma.checkpoints import BEST, LAST
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import write_json
from fairseq_alma.lm import slurm_chain
from fairseq_alma.lm.member_config import CONFIG
from fairseq_alma.lm.settings import LanguageModelSettings
from launch.slurm import QueuedJob, SlurmSettings
from tests.commands import ROOT, RUN, run_command
from tests.fairseq_alma.killing import rows_without_seconds, same_rows
from tests.fairseq_alma.test_checkpoints import state_of, write
from tests.slurm import NODES
from tests.streams import make_stream

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SLURM = ("launch=slurm", "launch.partition=main", "launch.cpus=1", "launch.time=10")
UPDATES = 40
SMALL = (*RUN, f"updates={UPDATES}", "validations=1", "checkpoint_minutes=1000")
GMOE = (*SMALL, "learner=gmoe", "grow_experts=2")
ENS = (*SMALL, "learner=ens", "members=2")
AVERAGE = ("average=power:0", "schedule=constant", "optimizer_state=keep")


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Path:
    return make_stream(tmp_path_factory.mktemp("stream") / "stream", num_mega_batches=4)


def submit(stream: Path, out: Path, *settings: str) -> subprocess.CompletedProcess:
    return run_command("alma-lm", f"stream={stream}", f"out={out}", *settings, *SLURM)


def whole(stream: Path, out: Path, *settings: str) -> list[dict]:
    """Train a run without Slurm, and return its ledger."""
    result = run_command("alma-lm", f"stream={stream}", f"out={out}", *settings)
    assert result.returncode == 0, result.stderr[-3000:]
    return rows_without_seconds(out)


def wait_until_no_job_is_left(slurm, out: Path, seconds: float = 600) -> None:
    slurm.wait_for(lambda: not RunJobs(out).queued(), seconds)
    assert not list(out.rglob("lease.json"))


def states(out: Path) -> dict[str, str]:
    """Return what each job of a run did, and how it ended."""
    return {record.step if record.step != "run" else f"run {n}": record.state
            for n, record in enumerate(RunJobs(out).records(), start=1)}  # fmt: skip


def logs(out: Path) -> str:
    return "\n".join(path.read_text() for path in (out / "launch").glob("*.log"))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_each_stage_of_a_growing_mixture_is_a_job_and_the_ledger_is_that_of_a_run_without_slurm(
    slurm, stream, tmp_path, stages
):
    settings, out = (*GMOE, f"mega_batches={stages}"), tmp_path / "für 'x', #1 & 100%j"
    result = submit(stream, out, *settings)
    assert result.returncode == 0, result.stderr
    assert f"alma-lm status {shlex.quote(str(out))}" in result.stdout
    again = submit(stream, out, *settings)
    assert (again.returncode, "has jobs already" in again.stdout) == (0, True), again.stderr
    wait_until_no_job_is_left(slurm, out)
    same_rows(rows_without_seconds(out), whole(stream, tmp_path / "local", *settings))
    assert states(out) == {f"run {n}": "done" for n in range(1, stages + 1)}, logs(out)
    shown = run_command("alma-lm", "status", out).stdout
    assert "finished" in shown
    assert shown.count("done") == stages
    assert "is finished" in submit(stream, out, *settings).stdout
    provenance = json.loads((out / "provenance.json").read_text())
    assert provenance["command"][0] == "alma-lm"
    assert [p["machine"]["job_id"] for p in [provenance, *provenance["continued"]]] == [
        record.id for record in RunJobs(out).records()
    ]
    shown = run_command("alma-lm", "logs", out).stdout
    assert f"job {RunJobs(out).records()[-1].id}: done" in shown
    assert f"stage_00{stages}/member_1/log.txt <==" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "more"), [(1, ()), (2, ()), (2, AVERAGE)], ids=["1", "2", "2, averaged"])
def test_members_of_an_ensemble_are_jobs_of_their_own_that_run_at_the_same_time(slurm, stream, tmp_path, stages, more):
    settings, out = (*ENS, *more, f"mega_batches={stages}"), tmp_path / "run"
    assert submit(stream, out, *settings, "launch.options=--exclusive").returncode == 0
    slurm.wait_for(lambda: {job.nodes for job in RunJobs(out).queued() if job.state == "RUNNING"} == set(NODES), 120)
    shown = run_command("alma-lm", "status", out).stdout
    assert "the queued jobs continue the run" in shown
    assert shown.count("running") == 2
    wait_until_no_job_is_left(slurm, out)
    same_rows(rows_without_seconds(out), whole(stream, tmp_path / "local", *settings))
    steps = ["run 1", *(step for k in range(1, stages + 1)
                        for step in (f"stage {k}, member 1", f"stage {k}, member 2", f"run {3 * k + 1}"))]  # fmt: skip
    assert states(out) == dict.fromkeys(steps, "done"), logs(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "on_two_nodes"),
    [
        pytest.param(["mega_batches=1"], [], id="data parallel"),
        pytest.param(
            ["mega_batches=2", "learner=gmoe", "grow_experts=2"], ["expert_parallel=2"], id="growing experts over ranks"
        ),
    ],
)
def test_a_stage_on_two_nodes_trains_like_one_on_one_node(slurm, stream, tmp_path, more, on_two_nodes):
    settings = [setting for setting in SMALL if not setting.startswith(("batch_size=", "lr="))]
    # With a large learning rate, rounding errors would grow. The capacity and the balance loss depend on the number of
    # sequences in the last forward pass of an epoch, and this number depends on the number of nodes.
    settings += ["batch_size=4", "lr=0.0005", "precision=float32", "dropout=0", *more]
    settings += ["fairseq='--capacity-factor 0 --balance-loss-weight 0'"]
    out = tmp_path / "run"
    assert submit(stream, out, *settings, *on_two_nodes, "launch.nodes=2").returncode == 0
    wait_until_no_job_is_left(slurm, out)
    on_two, on_one = rows_without_seconds(out), whole(stream, tmp_path / "local", *settings)
    assert " as rank 1\n" in (out / "stages/stage_001/member_1/log.txt").read_text()
    for two, one in zip(on_two, on_one, strict=True):
        assert two["perplexity"] == pytest.approx(one["perplexity"], rel=1e-4)
        assert (two["train_flops"], two["num_updates"]) == (one["train_flops"], one["num_updates"])


@pytest.mark.slow
def test_a_stage_that_fails_ends_the_chain_and_status_says_why(slurm, stream, tmp_path):
    out = tmp_path / "run"
    assert submit(stream, out, *ENS, "mega_batches=1", "lr=1e30", "fairseq=--clip-norm 0").returncode == 0
    wait_until_no_job_is_left(slurm, out)
    assert states(out) == {
        "run 1": "done", "stage 1, member 1": "failed", "stage 1, member 2": "failed", "run 4": "submitted",
    }  # fmt: skip
    shown = " ".join(run_command("alma-lm", "status", out).stdout.split())
    assert "FloatingPointError" in shown
    assert "not started" in shown
    assert "run the training command again" in shown


def test_while_jobs_are_queued_other_settings_and_other_ways_to_continue_are_refused(slurm, stream, tmp_path):
    out = tmp_path / "run"
    held = "launch.options=--hold"
    assert submit(stream, out, *GMOE, held).returncode == 0
    (job,) = RunJobs(out).queued()
    again = submit(stream, out, *GMOE, held)
    expected = f"{out} has jobs already: {job.id} (pending, JobHeldUser); the queued jobs continue the run"
    assert (again.returncode, again.stdout.splitlines()[0]) == (0, expected)
    other = submit(stream, out, *SMALL, "lr=0.1")
    assert other.returncode == 2
    assert "which were submitted with other settings" in other.stderr
    assert "Differences:" in other.stderr
    for word in ("learner=gmoe", "lr=0.1", held):
        assert word in other.stderr.partition("Differences:")[2]
    here = run_command("alma-lm", f"stream={stream}", f"out={out}", *GMOE)
    assert here.returncode == 2
    assert f"To continue it here, first run: alma-lm cancel {out}" in here.stderr
    assert run_command("alma-lm", "cancel", out).returncode == 0
    assert not RunJobs(out).queued()


def test_a_job_whose_set_up_fails_does_not_train(slurm, stream, tmp_path):
    out = tmp_path / "run"
    assert submit(stream, out, *SMALL, "launch.setup=module-that-does-not-exist load cuda").returncode == 0
    wait_until_no_job_is_left(slurm, out)
    assert "launch.setup failed" in logs(out)
    assert not (out / "stages").exists()
    shown = " ".join(run_command("alma-lm", "status", out).stdout.split())
    assert "not started" in shown


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["launch.nodes=2", "expert_parallel=2", "launch.gpus=1"], "is not a multiple of 2 x batch_size=8"),
        (["expert_parallel=5"], "expert_parallel=5 needs at least 5 experts, but experts=4"),
    ],
)
def test_what_cannot_run_is_refused_when_it_is_submitted(stream, tmp_path, settings, expected):
    names = {setting.partition("=")[0] for setting in settings}
    slurm = [setting for setting in SLURM if setting.partition("=")[0] not in names]
    words = [f"stream={stream}", f"out={tmp_path / 'run'}", *SMALL, *settings, *slurm]
    result = run_command("alma-lm", *words)
    assert (result.returncode, expected in result.stderr) == (2, True), result.stderr


def train_member(folder: Path, stream: Path, monkeypatch, do=lambda: None, **values):
    """Train the member of a folder as its job does, but do something else in place of the training.

    Return the commands of the training, and the settings.
    """
    run, commands = folder.parents[2], []
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save({"optimization": {"max_update": values["updates"]}, "dataset": {"batch_size": 1}}, folder / CONFIG)
    settings = LanguageModelSettings.from_mapping({"stream": str(stream), "out": str(run), **values})
    monkeypatch.setattr(slurm_chain, "SlurmProcesses", lambda *_: SimpleNamespace(member_job=lambda words, _: words))
    monkeypatch.setattr(slurm_chain, "run_processes", lambda jobs: (commands.extend(jobs), do(), [0])[2])
    stage, number = int(folder.parent.name.removeprefix("stage_")), int(folder.name.removeprefix("member_"))
    slurm_chain.run_member_job(settings, SlurmSettings(), stage, number)
    return commands, settings


def test_a_member_job_trains_with_the_average_and_the_optimizer_of_the_run(stream, tmp_path, monkeypatch):
    folder = tmp_path / "stages/stage_002/member_1"
    values = {"learner": "ens", "members": 2, "updates": 4, **dict(word.split("=") for word in AVERAGE)}
    (command,), settings = train_member(folder, stream, monkeypatch, **values)
    assert command[command.index("--average") + 1] == settings.average
    assert command[-1] == "--keep-optimizer"
    assert str(folder / CONFIG) in command


def test_a_member_job_repairs_what_a_killed_one_left(stream, tmp_path, monkeypatch):
    """The last checkpoint is the best one, but was not linked yet."""
    folder = tmp_path / "stages/stage_001/member_1"
    folder.mkdir(parents=True)
    write(folder / BEST, 2, val_loss=5.0, best=5.0)
    write(folder / LAST, 4, val_loss=4.0, best=4.0)
    found = []
    monkeypatch.setattr(slurm_chain, "Lease", lambda _: SimpleNamespace(wait=lambda: found.append(state_of(folder))))
    train_member(folder, stream, monkeypatch, lambda: found.append(state_of(folder)), updates=9)
    # Nothing is changed before the process that was training the member counts as ended.
    assert found == [{BEST: 2, LAST: 4}, {BEST: 4, LAST: 4}]


def finish(run: Path, num_arrivals: int = 4) -> None:
    """Write what a finished run contains that `submit_runs` reads."""
    write_json(run / "settings.json", {})
    write_json(run / "arrivals.json", {"digests": ["a"] * num_arrivals, "decisions": {}})
    write_json(run / "summary.json", {"final": 9.0, "num_arrivals": num_arrivals})


@pytest.fixture
def submit_here(stream, tmp_path, monkeypatch):
    """A function that submits runs to a queue that never starts them. It returns the submitted run folders."""
    queued: list[QueuedJob] = []

    def submit(command, settings, options, comment):
        queued.append(QueuedJob(str(len(queued) + 1), "PENDING", "", "", comment))
        return queued[-1].id

    monkeypatch.setattr(app_jobs, "submit", submit)
    monkeypatch.setattr(app_jobs, "queue", lambda: queued)

    def submit_with(**more):
        before = len(queued)
        values = {"stream": str(stream), "out": str(tmp_path / "run"), "updates": 4, **more}
        monkeypatch.setattr(sys, "argv", ["alma-lm", *(f"{name}={value}" for name, value in values.items())])
        slurm_chain.submit_runs(LanguageModelSettings.from_mapping(values), SlurmSettings())
        return [Path(job.comment.partition("#")[0]) for job in queued[before:]]

    submit_with.queued = queued
    return submit_with


def test_a_finished_run_is_submitted_only_with_other_settings_or_more_mega_batches(submit_here, tmp_path):
    run = tmp_path / "run"
    assert submit_here() == [run]
    assert submit_here() == []  # it has a job
    submit_here.queued.clear()
    finish(run)
    assert submit_here() == []
    assert submit_here(last_group="train") == [run]  # perhaps the last mega-batches have waited so far
    submit_here.queued.clear()
    finish(run, num_arrivals=3)  # since then, a mega-batch was added to the stream
    assert submit_here(last_group="train") == [run]


@pytest.mark.parametrize(
    ("more", "change"),
    [
        ({"plugin": "own_parts"}, {}),
        ({"init_from": "checkpoint.pt"}, {}),
        ({"fork": True}, {"lr": 0.002}),
        ({}, {"lr": 0.002}),
        ({"plugin": "own_parts"}, {"plugin_digest": "another"}),
    ],
)
def test_a_run_that_has_trained_is_submitted_again_if_its_job_could_continue_it(
    submit_here, stream, tmp_path, monkeypatch, more, change
):
    """settings.json has what only a job knows: digests, absolute paths, and what precision=auto means."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_parts.py").write_text("")
    importlib.import_module("own_parts")
    values = {"stream": str(stream), "out": str(tmp_path / "run"), "updates": 4}
    recorded = LanguageModelSettings.from_mapping({**values, **more, "fork": False}).recorded() | change
    known_in_job = {"precision": "float32", "batch_size": 4, "evaluated_on": ["a", "b"], "dictionary": "c", "forks": {}}
    write_json(tmp_path / "run/settings.json", recorded | known_in_job)
    write_json(tmp_path / "run/stages/stage_001/train.done.json", {})
    if change and "fork" not in more:
        with pytest.raises(RunError, match=f"{next(iter(change))}: was") as error:
            submit_here(**more)
        assert ("add fork=true" in str(error.value)) == ("lr" in change)
    else:
        assert submit_here(**more) == [tmp_path / "run"]


def test_the_summary_has_all_seeds_also_of_a_later_command(submit_here, tmp_path):
    """While the jobs of two seeds are queued, two more are submitted; and a summary that is missing is made."""
    run = tmp_path / "run"

    def seeds_in_summary() -> int:
        return len(json.loads((run / "summary.json").read_text())["per_seed"])

    assert submit_here(seeds=2) == [run / "seed_0", run / "seed_1"]
    assert submit_here(seeds=4) == [run / "seed_2", run / "seed_3"]
    for seed in (2, 3, 0, 1):
        finish(run / f"seed_{seed}")
        slurm_chain.summarize_seeds(run)
    assert seeds_in_summary() == 4
    (run / "summary.json").unlink()
    assert submit_here(seeds=4) == []
    assert seeds_in_summary() == 4


@pytest.mark.parametrize("config", ["fairseq_alma/lm/configs/alma_lm.yaml", "vision/configs/alma_vision.yaml"])
def test_settings_of_the_jobs_are_not_part_of_the_names_of_a_sweeps_runs(config):
    excluded = OmegaConf.load(ROOT / config).hydra.job.config.override_dirname.exclude_keys
    assert {"launch", *(f"launch.{field.name}" for field in fields(SlurmSettings))} <= {*excluded}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["time limit", "preempted", "requeued", "cancelled"])
def test_an_interrupted_chain_ends_with_the_ledger_of_an_uninterrupted_run(slurm, stream, tmp_path, how):
    settings = [setting for setting in ENS if not setting.startswith("updates=")] + ["updates=150", "mega_batches=2"]
    out = tmp_path / "run"
    assert submit(stream, out, *settings, f"launch.options=--exclusive --nodelist={NODES[0]}").returncode == 0
    log = out / "stages/stage_002/member_2/log.txt"
    slurm.wait_for(lambda: log.exists() and b'"num_updates"' in log.read_bytes(), 900)
    (job,) = [job.id for job in RunJobs(out).queued() if job.state == "RUNNING"]
    assert job.endswith("_2")
    if how == "time limit":
        slurm.run("scancel", "--batch", "--signal=USR1", job)
    elif how == "preempted":
        slurm.submit("--partition=high", f"--nodelist={NODES[0]}", "--exclusive", "--output=/dev/null",
                     "--wrap=sleep 2", folder=tmp_path)  # fmt: skip
    elif how == "requeued":
        slurm.run("scontrol", "requeue", job)
    else:
        result = run_command("alma-lm", "cancel", out)
        assert (result.returncode, result.stdout) == (0, f"cancelled: {out}\n")
        assert not RunJobs(out).queued()
        assert "cancelled" in run_command("alma-lm", "status", out).stdout
        assert submit(stream, out, *settings).returncode == 0
    wait_until_no_job_is_left(slurm, out)
    same_rows(rows_without_seconds(out), whole(stream, tmp_path / "local", *settings))
    text = log.read_text()
    assert "checkpoint_last.pt" in text
    assert set(states(out).values()) <= {"done", "stopped", "submitted"}, logs(out)


@pytest.mark.slow
def test_a_member_moves_to_the_other_node_when_its_node_is_drained(slurm, stream, tmp_path):
    settings = [setting for setting in ENS if not setting.startswith("updates=")] + ["updates=150", "mega_batches=1"]
    out = tmp_path / "run"
    assert submit(stream, out, *settings, "launch.options=--exclusive").returncode == 0
    log = out / "stages/stage_001/member_2/log.txt"
    slurm.wait_for(lambda: log.exists() and b'"num_updates"' in log.read_bytes(), 900)
    (job,) = [job for job in RunJobs(out).queued() if job.id.endswith("_2")]
    (node,) = {job.nodes} & {*NODES}
    (other,) = {*NODES} - {node}
    slurm.drain(node)
    try:
        # A drained node starts no new jobs, but its jobs go on. An administrator who needs the node requeues them.
        slurm.run("scontrol", "requeue", job.id)
        wait_until_no_job_is_left(slurm, out)
    finally:
        slurm.drain(node, is_on=False)
    assert slurm.job(job.id)["NodeList"] == other
    same_rows(rows_without_seconds(out), whole(stream, tmp_path / "local", *settings))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["time limit", "cancelled"])
def test_a_stage_on_two_nodes_saves_when_it_is_stopped_and_continues(slurm, stream, tmp_path, how):
    settings = [setting for setting in SMALL if not setting.startswith(("updates=", "batch_size="))]
    settings += ["batch_size=4", "mega_batches=1", "updates=600"]
    out = tmp_path / "run"
    assert submit(stream, out, *settings, "launch.nodes=2").returncode == 0
    log = out / "stages/stage_001/member_1/log.txt"
    slurm.wait_for(lambda: log.exists() and log.read_bytes().count(b'"num_updates"') > 2, 120)
    (job,) = [job.id for job in RunJobs(out).queued()]
    if how == "time limit":
        slurm.run("scancel", "--batch", "--signal=USR1", job)
    else:
        assert run_command("alma-lm", "cancel", out).returncode == 0
        assert (log.parent / "checkpoint_last.pt").exists()
        # It continues on one node.
        assert submit(stream, out, *settings, "launch.nodes=1").returncode == 0
    wait_until_no_job_is_left(slurm, out)
    assert rows_without_seconds(out)[-1]["num_updates"] == 600, logs(out)
    resumed = [line for line in log.read_text().splitlines() if "Loaded checkpoint" in line and "_last.pt" in line]
    assert all("@ 0 updates" not in line for line in resumed)
    assert resumed


@pytest.mark.slow
def test_cancel_ends_a_run_on_this_machine_and_status_names_its_process(stream, tmp_path):
    out = tmp_path / "run"
    program = Path(sys.executable).parent / "alma-lm"
    process = subprocess.Popen(
        [str(program), f"stream={stream}", f"out={out}", *SMALL, "updates=100000"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        log = out / "stages/stage_001/member_1/log.txt"
        while not (log.exists() and b'"num_updates"' in log.read_bytes()):
            assert process.poll() is None
        assert f"process {process.pid} on" in run_command("alma-lm", "status", out).stdout
        result = run_command("alma-lm", "cancel", out)
        assert (result.returncode, result.stdout) == (0, f"cancelled: {out}\n"), result.stderr
        assert process.wait(5) == 128 + signal.SIGTERM
        assert (log.parent / "checkpoint_last.pt").exists()
    finally:
        process.kill()
        process.communicate()
    assert "no run is pending or running" in run_command("alma-lm", "cancel", out).stdout
    assert "run the training command again" in run_command("alma-lm", "status", out).stdout


def test_without_slurm_the_error_says_what_is_missing(stream, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = submit(stream, tmp_path / "run", *SMALL)
    assert result.returncode == 2
    assert "the program squeue of Slurm is not installed on this machine" in result.stderr
