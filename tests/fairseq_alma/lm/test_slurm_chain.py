"""launch=slurm on a real Slurm, which the fixture `slurm` starts; skipped where it cannot start."""

import json
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from fairseq_alma.checkpoints import BEST, LAST
from fairseq_alma.core.errors import RunError
from fairseq_alma.core.files import write_json
from fairseq_alma.core.ledger import Ledger
from fairseq_alma.lm import slurm_chain, slurm_job, slurm_settings
from fairseq_alma.lm.jobs import JobFolder
from fairseq_alma.lm.member import CONFIG
from fairseq_alma.lm.settings import LanguageModelSettings
from fairseq_alma.lm.slurm_settings import SlurmSettings
from launch.slurm import QueuedJob
from tests.commands import ROOT, RUN, run_command
from tests.fairseq_alma.killing import rows_without_seconds, same_rows
from tests.fairseq_alma.report.ledgers import text_rows
from tests.fairseq_alma.test_checkpoints import state_of, write
from tests.slurm import NODES
from tests.streams import make_stream

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SLURM = ("launch=slurm", "launch.partition=main", "launch.cpus_per_task=1", "launch.time=10")
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


def wait_until_no_job_is_left(slurm, out: Path, seconds: float = 300) -> None:
    slurm.wait_for(lambda: not JobFolder(out).queued(), seconds)
    assert not list(out.rglob("lease.json"))


def states(out: Path) -> dict[str, str]:
    """Return what each job of a run did, and how it ended."""
    return {record.step if record.step != "run" else f"run {n}": record.state
            for n, record in enumerate(JobFolder(out).records(), start=1)}  # fmt: skip


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
        record.id for record in JobFolder(out).records()
    ]
    shown = run_command("alma-lm", "logs", out).stdout
    assert "the run is finished" in shown
    assert f"stage_00{stages}/member_1/log.txt <==" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "more"), [(1, ()), (2, ()), (2, AVERAGE)], ids=["1", "2", "2, averaged"])
def test_members_of_an_ensemble_are_jobs_of_their_own_that_run_at_the_same_time(slurm, stream, tmp_path, stages, more):
    settings, out = (*ENS, *more, f"mega_batches={stages}"), tmp_path / "run"
    assert submit(stream, out, *settings, "launch.sbatch=--exclusive").returncode == 0
    slurm.wait_for(lambda: {job.nodes for job in JobFolder(out).queued() if job.state == "RUNNING"} == set(NODES), 120)
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
    assert "training on 2 devices" in (out / "stages/stage_001/member_1/log.txt").read_text()
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
    held = "launch.sbatch=--hold"
    assert submit(stream, out, *GMOE, held).returncode == 0
    (job,) = JobFolder(out).queued()
    again = submit(stream, out, *GMOE, held)
    expected = f"{out} has jobs already: {job.id} (pending, JobHeldUser); the queued jobs continue the run"
    assert (again.returncode, again.stdout.splitlines()[0]) == (0, expected)
    other = submit(stream, out, *SMALL, "lr=0.1")
    assert other.returncode == 2
    assert "which were submitted with other settings" in other.stderr
    for line in ("learner: was 'gmoe', is 'sm'", "lr: was 0.005, is 0.1", "launch.sbatch: was '--hold', is ''"):
        assert line in other.stderr
    here = run_command("alma-lm", f"stream={stream}", f"out={out}", *GMOE)
    assert here.returncode == 2
    assert f"To continue it here, first run: alma-lm cancel {out}" in here.stderr
    assert run_command("alma-lm", "cancel", out).returncode == 0
    assert not JobFolder(out).queued()


def test_a_job_whose_set_up_fails_does_not_train(slurm, stream, tmp_path):
    out = tmp_path / "run"
    assert submit(stream, out, *SMALL, "launch.setup=module-that-does-not-exist load cuda").returncode == 0
    wait_until_no_job_is_left(slurm, out)
    assert "alma-lm: launch.setup failed" in logs(out)
    assert not (out / "stages").exists()
    shown = " ".join(run_command("alma-lm", "status", out).stdout.split())
    assert "not started" in shown


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["launch.time=2"], "launch.time=2 must be more than 2 minutes"),
        (["launch.time=00:01:30"], "must be more than 2 minutes"),
        (["launch.nodes=2", "expert_parallel=2", "launch.gpus_per_node=1"], "is not a multiple of 2 x batch_size=8"),
        (["expert_parallel=5"], "expert_parallel=5 needs at least 5 experts, but experts=4"),
    ],
)
def test_what_cannot_run_is_refused_when_it_is_submitted(stream, tmp_path, settings, expected):
    names = {setting.partition("=")[0] for setting in settings}
    slurm = [setting for setting in SLURM if setting.partition("=")[0] not in names]
    words = [f"stream={stream}", f"out={tmp_path / 'run'}", *SMALL, *settings, *slurm]
    result = run_command("alma-lm", *words)
    assert (result.returncode, expected in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("30", 1800),
        ("1:30", 90),
        ("1:00:00", 3600),
        ("1-12", 129600),
        ("0-00:05", 300),
        ("2-01:02:03", 176523),
        ("x", None),
    ],
)
def test_time_limits_are_read_as_slurm_reads_them(time, seconds):
    assert slurm_settings._seconds(time) == seconds


def test_a_member_job_trains_with_the_average_and_the_optimizer_of_the_run(stream, tmp_path, monkeypatch):
    folder = tmp_path / "stages/stage_002/member_1"
    folder.mkdir(parents=True)
    OmegaConf.save({"optimization": {"max_update": 4}, "dataset": {"batch_size": 1}}, folder / CONFIG)
    values = {"stream": str(stream), "out": str(tmp_path), "learner": "ens", "members": 2, "updates": 4}
    settings = LanguageModelSettings.from_mapping({**values, **dict(word.split("=") for word in AVERAGE)})
    jobs = []
    monkeypatch.setattr(slurm_job, "SlurmProcesses", lambda *_: SimpleNamespace(member_job=lambda command, _: command))
    monkeypatch.setattr(slurm_job, "run_processes", lambda of_call: (jobs.extend(of_call), [0])[1])
    slurm_job.train_member(SimpleNamespace(jobs=JobFolder(tmp_path), settings=settings), 2, 1)
    (command,) = jobs
    assert command[command.index("--average") + 1] == settings.average
    assert command[-1] == "--keep-optimizer"
    assert str(folder / CONFIG) in command


def test_a_member_job_repairs_what_a_killed_one_left(stream, tmp_path, monkeypatch):
    """The last checkpoint is the best one, but was not linked yet."""
    folder = tmp_path / "stages/stage_001/member_1"
    folder.mkdir(parents=True)
    OmegaConf.save({"optimization": {"max_update": 9}, "dataset": {"batch_size": 1}}, folder / CONFIG)
    write(folder / BEST, 2, val_loss=5.0, best=5.0)
    write(folder / LAST, 4, val_loss=4.0, best=4.0)
    found = []
    monkeypatch.setattr(slurm_job, "Lease", lambda _: SimpleNamespace(wait=lambda: found.append(state_of(folder))))
    monkeypatch.setattr(slurm_job, "SlurmProcesses", lambda *_: SimpleNamespace(member_job=lambda *_: None))
    monkeypatch.setattr(slurm_job, "run_processes", lambda _: (found.append(state_of(folder)), [0])[1])
    settings = LanguageModelSettings.from_mapping({"stream": str(stream), "out": str(tmp_path), "updates": 9})
    slurm_job.train_member(SimpleNamespace(jobs=JobFolder(tmp_path), settings=settings), 1, 1)
    # Nothing is changed before the process that was training the member counts as ended.
    assert found == [{BEST: 2, LAST: 4}, {BEST: 4, LAST: 4}]


def test_a_run_whose_last_mega_batches_wait_is_submitted_to_train_on_them(stream, tmp_path, monkeypatch, capsys):
    submitted = []
    monkeypatch.setattr(slurm_chain.Chain, "submit_run", lambda chain: submitted.append(chain.settings) or "1")
    monkeypatch.setattr(JobFolder, "queued", lambda _: [])
    values = {"stream": str(stream), "out": str(tmp_path), "updates": 4, "wait": 3, "last_group": "wait"}

    def submit_with(**more):
        slurm_chain.submit_runs(LanguageModelSettings.from_mapping({**values, **more}), SlurmSettings())
        return "is finished" in capsys.readouterr().out

    (tmp_path / "settings.json").write_text(json.dumps(LanguageModelSettings.from_mapping(values).to_json()))
    write_json(tmp_path / "summary.json", {"num_arrivals": 4})
    ledger = Ledger(tmp_path / "ledger.jsonl", durable=False)
    for row in text_rows([900.0, 900.0, 900.0, 50.0]):
        ledger.append(replace(row, updated=row.t == 3))
    ledger.append(replace(text_rows([50.0] * 5)[4], updated=False))  # the fourth mega-batch waits
    (tmp_path / "stages/stage_001").mkdir(parents=True)
    (tmp_path / "stages/stage_001/train.done.json").write_text("{}")
    assert submit_with() and not submitted
    assert not submit_with(last_group="train") and len(submitted) == 1
    assert not submit_with(last_group="train", fork=True, updates=8) and len(submitted) == 2
    ledger.remove_from(4)
    ledger.append(text_rows([50.0] * 5)[4])  # now all stages are trained
    assert submit_with(last_group="train") and len(submitted) == 2
    with pytest.raises(RunError, match="updates"):
        submit_with(last_group="train", fork=True, updates=8)
    write_json(tmp_path / "summary.json", {"num_arrivals": 3})  # a job was killed after the row, before the summary
    assert not submit_with(last_group="train") and len(submitted) == 3


def test_the_summary_has_all_seeds_also_of_a_later_command(stream, tmp_path, monkeypatch):
    """While the jobs of two seeds are queued, two more are submitted; and a summary that is missing is made."""
    out = tmp_path / "run"
    queued: dict[Path, list] = {}
    monkeypatch.setattr(JobFolder, "queued", lambda jobs: queued.get(jobs.run, []))
    monkeypatch.setattr(slurm_chain, "what_they_do", lambda *_: "they continue the run")
    monkeypatch.setattr(
        slurm_chain.Chain, "submit_run",
        lambda chain: queued.setdefault(chain.jobs.run, [QueuedJob("1", "PENDING", "", "", "run")]) and "1",
    )  # fmt: skip
    monkeypatch.setattr(slurm_job, "run_seeds", lambda settings, _: finish(Path(settings.out)))

    def finish(run: Path) -> None:
        write_json(run / "settings.json", {})
        write_json(run / "arrivals.json", {"digests": ["a"], "decisions": {}})
        write_json(run / "summary.json", {"final": 9.0, "num_arrivals": 1})

    def seeds_in_summary() -> int:
        return len(json.loads((out / "summary.json").read_text())["per_seed"])

    values = {"stream": str(stream), "out": str(out), "updates": 4}
    for seeds in (2, 4):
        slurm_chain.submit_runs(LanguageModelSettings.from_mapping({**values, "seeds": seeds}), SlurmSettings())
    for seed in (2, 3, 0, 1):
        slurm_job.continue_run(slurm_chain.Chain.load(out / f"seed_{seed}"))
    assert seeds_in_summary() == 4
    (out / "summary.json").unlink()
    slurm_chain.submit_runs(LanguageModelSettings.from_mapping({**values, "seeds": 4}), SlurmSettings())
    assert seeds_in_summary() == 4


def test_settings_of_the_jobs_are_not_part_of_the_names_of_a_sweeps_runs():
    config = OmegaConf.load(ROOT / "fairseq_alma/lm/configs/alma_lm.yaml")
    excluded = config.hydra.job.config.override_dirname.exclude_keys
    assert {"launch", *(f"launch.{field.name}" for field in fields(SlurmSettings))} <= {*excluded}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["time limit", "preempted", "requeued", "cancelled"])
def test_an_interrupted_chain_ends_with_the_ledger_of_an_uninterrupted_run(slurm, stream, tmp_path, how):
    settings = [setting for setting in ENS if not setting.startswith("updates=")] + ["updates=150", "mega_batches=2"]
    out = tmp_path / "run"
    assert submit(stream, out, *settings, f"launch.sbatch=--exclusive --nodelist={NODES[0]}").returncode == 0
    log = out / "stages/stage_002/member_2/log.txt"
    slurm.wait_for(lambda: log.exists() and b'"num_updates"' in log.read_bytes(), 300)
    (job,) = [job.id for job in JobFolder(out).queued() if job.state == "RUNNING"]
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
        assert not JobFolder(out).queued()
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
    assert submit(stream, out, *settings, "launch.sbatch=--exclusive").returncode == 0
    log = out / "stages/stage_001/member_2/log.txt"
    slurm.wait_for(lambda: log.exists() and b'"num_updates"' in log.read_bytes(), 300)
    (job,) = [job for job in JobFolder(out).queued() if job.id.endswith("_2")]
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
    (job,) = [job.id for job in JobFolder(out).queued()]
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
        assert process.wait(5) == 1
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
