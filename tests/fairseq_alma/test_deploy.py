"""alma-deploy: what is deployed works by itself, and `current` leads to a whole predictor at each moment."""

import json
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fairseq_alma as alma
import vision
from fairseq_alma.core.deployments import deployments
from fairseq_alma.core.errors import RunError, SettingError, StreamError
from fairseq_alma.core.files import sha256_of, write_json
from fairseq_alma.core.lease import Lease
from fairseq_alma.core.run_folder import find_runs
from fairseq_alma.deploy import all_deployed, current_of, deploy, go_back, main, withdraw
from fairseq_alma.huggingface.export import export
from tests.commands import ROOT, RUN, run_command
from tests.killed_here import killed_when_it_calls
from tests.streams import make_stream
from tests.vision.tiny_runs import small_run, taken

TEXT = "w1 w2 w3 w1 w5"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of an ensemble after three stages. Its stream is gone; the files of the tokenizer are in tokenizer/."""
    folder = tmp_path_factory.mktemp("run")
    stream = make_stream(folder / "stream")
    settings = (f"stream={stream}", f"out={folder / 'run'}", *RUN, "learner=ens", "members=2", "updates=4")
    result = run_command("alma-lm", *settings)
    assert result.returncode == 0, result.stderr[-2000:]
    return folder / "run"


@pytest.fixture
def moved(run, tmp_path) -> Path:
    """A copy of the run that a test may change."""
    return shutil.copytree(run, tmp_path / "moved")


def names(to: Path) -> list[str]:
    return [one.folder.name for one in all_deployed(to)]


def score(folder: Path, **options) -> float:
    return alma.load(folder, **options).score(TEXT)[0].nats.sum()


def test_what_is_deployed_predicts_as_the_run_without_run_and_stream(run, tmp_path, capsys):
    expected = {stage: score(run, stage=stage) for stage in (2, 3)}
    hidden = run.parent.with_name("hidden")
    assert main([str(run), str(tmp_path / "to"), "--stage", "2"]) == 0
    assert main([str(run), str(tmp_path / "to")]) == 0
    to = Path(shutil.move(tmp_path / "to", tmp_path / "elsewhere"))  # all links are relative
    run.parent.rename(hidden)
    try:
        assert score(to / "current") == score(to / "stage_003") == expected[3]
        assert score(to / "stage_002") == expected[2] != expected[3]
        generated = run_command("alma-generate", to / "current", "--prompt", "w1", "--max-tokens", 3, "--json")
        assert generated.returncode == 0 and len(json.loads(generated.stdout)["ids"]) <= 3, generated.stderr
        text = f"{TEXT}\r\n{TEXT}"  # its line ends count as they are
        (tmp_path / "text.txt").write_bytes(text.encode())
        evaluated = run_command("alma-eval", to / "current", "--text", tmp_path / "text.txt", "--json")
        assert evaluated.returncode == 0, evaluated.stderr
        ended = alma.load(to / "current").score(text, end_of_document=True)[0]
        found = json.loads(evaluated.stdout)
        assert (found["perplexity"], found["num_bytes"]) == (pytest.approx(ended.perplexity), len(text))
        refused = run_command("alma-eval", to / "current")
        assert refused.returncode == 2 and "--text" in refused.stderr
    finally:
        hidden.rename(run.parent)
    scored = run_command("alma-eval", to / "current", "--stream", run.parent / "stream")
    assert scored.returncode == 0, scored.stderr


def test_back_list_and_keep(run, tmp_path, capsys):
    to = tmp_path / "to"
    for stage in (1, 2, 3):
        deploy(run, to, stage, keep=2)
    assert names(to) == ["stage_002", "stage_003"] and current_of(to) == to / "stage_003"
    assert main(["--back", str(to)]) == 0 and current_of(to) == to / "stage_002"
    with pytest.raises(RunError, match="has no predictor from before"):
        go_back(to)
    # A scheduled command does not deploy again what was taken back, and a user can.
    assert deploy(run, to) == (to / "stage_002", False) and current_of(to) == to / "stage_002"
    assert main(["--list", str(to)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"but not {to / 'stage_003'} again")
    assert lines[1].endswith("(taken back)") and lines[2].endswith("(current)")
    assert deployments(run)[-1]["stage"] == 2
    assert deploy(run, to, 3) == (to / "stage_003", True) and current_of(to) == to / "stage_003"
    assert deploy(run, to) == (to / "stage_003", True) and names(to) == ["stage_002", "stage_003"]
    assert main([str(run), str(to)]) == 0
    assert capsys.readouterr().out == f"already deployed: {to / 'stage_003'}\n"
    assert main([str(run), str(to), "--stage", "2"]) == 0
    assert "the next alma-deploy without --stage deploys stage 3 again" in capsys.readouterr().out
    deploy(run, to), go_back(to), capsys.readouterr()
    assert main([str(run), str(to), "--stage", "1"]) == 0
    assert "stage 3 was taken back: the next alma-deploy without --stage waits" in capsys.readouterr().out


def test_no_more_than_the_limit_are_kept_and_what_was_taken_back_stays_known(run, tmp_path):
    to = tmp_path / "to"
    for stage in (2, 3):
        deploy(run, to, stage, keep=2)
    go_back(to)
    deploy(run, to, 1, keep=2)  # stage 2 goes: without the folder of stage 3, the next command would deploy it again
    assert names(to) == ["stage_003", "stage_001"]
    assert deploy(run, to, keep=2) == (to / "stage_001", False)
    deploy(run, to, 3, keep=2), go_back(to)
    deploy(run, to, 2, keep=1)
    assert names(to) == ["stage_002"]


def test_a_copy_that_the_user_has_made_is_left_alone(run, tmp_path):
    to = tmp_path / "to"
    deploy(run, to, 1)
    shutil.copytree(to / "current", to / "golden")
    for stage in (2, 3):
        deploy(run, to, stage, keep=1)
    assert {path.name for path in to.iterdir()} == {"current", "golden", "stage_003"}


def test_what_is_deployed_is_no_run(moved, tmp_path):
    deploy(moved, moved.parent / "deployed", 1)
    assert find_runs(tmp_path) == [moved]


def test_the_list_is_in_the_order_of_deployment_with_its_times(run, tmp_path, capsys):
    to = tmp_path / "to"
    for stage, since in ((1, "2025-02-01 02:00:00"), (2, "2025-03-01 02:00:00")):
        deploy(run, to, stage)
        replace(all_deployed(to)[-1], since=since).write()
    go_back(to)
    assert main(["--list", str(to)]) == 0
    assert [line.split("  ")[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["stage_002", "2025-03-01 02:00"], ["stage_001", "2025-02-01 02:00"],
    ]  # fmt: skip


def test_what_was_withdrawn_is_not_deployed_again(moved, tmp_path, capsys):
    to = tmp_path / "to"
    for stage in (1, 2, 3):
        deploy(moved, to, stage)
    checkpoints = json.loads((moved / "predictors/stage_002.json").read_text())["checkpoints"]
    assert withdraw(to, {checkpoints[1]["sha256"]}) == [to / "stage_002"] == withdraw(to, {checkpoints[1]["sha256"]})
    assert withdraw(to, {"0" * 64}) == []
    assert main(["--list", str(to)]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("(has learned from text that was removed)")
    with pytest.raises(RunError, match=r"stage 2 of .* has learned from text that alma-forget has removed"):
        deploy(moved, to, 2)
    assert go_back(to) == to / "stage_001"
    deploy(moved, to, 3)
    assert names(to) == ["stage_001", "stage_003"]
    withdraw(to, set(all_deployed(to)[0].content))
    with pytest.raises(RunError, match=r"stage_001 has learned from text that alma-forget has removed"):
        go_back(to)


def test_a_current_predictor_that_was_withdrawn_is_replaced_also_by_one_that_was_taken_back(run, tmp_path):
    to = tmp_path / "to"
    for stage in (1, 3):
        deploy(run, to, stage)
    go_back(to)
    withdraw(to, set(all_deployed(to)[0].content))
    assert deploy(run, to) == (to / "stage_003", True) and names(to) == ["stage_003"]


def test_a_stage_without_scores_is_deployed_with_a_note(moved, tmp_path, capsys):
    ledger = (moved / "ledger.jsonl").read_text().splitlines(keepends=True)
    (moved / "ledger.jsonl").write_text("".join(ledger[:-1]))
    assert main([str(moved), str(tmp_path / "to")]) == 0
    expected = f"deployed: {tmp_path}/to/stage_003 (stage 3 is not scored yet: run the command of {moved} again)\n"
    assert capsys.readouterr().out == expected
    shown = run_command("alma-lm", "status", moved)
    assert "1 of 3 mega-batches are left, and stage 3 is trained, but not scored" in " ".join(shown.stdout.split())
    assert main([str(moved), str(tmp_path / "to"), "--stage", "2"]) == 0
    assert "not scored" not in capsys.readouterr().out


def test_a_run_folder_that_cannot_be_written_is_deployed_all_the_same(moved, tmp_path, capsys):
    (moved / "deployments.json").write_text("damaged")
    deploy(moved, tmp_path / "to")
    assert "does not know what is deployed" in capsys.readouterr().err and names(tmp_path / "to") == ["stage_003"]


def test_a_stage_that_was_trained_again_is_another_predictor(moved, tmp_path):
    to = tmp_path / "to"
    deploy(moved, to, 2), deploy(moved, to)
    file = moved / json.loads((moved / "predictors/stage_003.json").read_text())["checkpoints"][0]["path"]
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(RunError, match="has changed since the run recorded its sha256"):
        deploy(moved, to)
    assert names(to) == ["stage_002", "stage_003"]
    for name in ("predictor.json", "predictors/stage_003.json"):
        content = json.loads((moved / name).read_text())
        content["checkpoints"][0]["sha256"] = sha256_of(file)
        write_json(moved / name, content)
    assert deploy(moved, to)[0] == to / "stage_003_2" == current_of(to)
    assert go_back(to) == to / "stage_003"


def test_damage_and_wrong_folders_are_refused(run, moved, tmp_path, capsys):
    to = tmp_path / "to"
    deploy(run, tmp_path / "other", 2)
    wrong = (tmp_path, "Give one of them"), (run / "stages", "it is not a run"), (tmp_path / "other", "the run first")
    for source, message in wrong:
        with pytest.raises((RunError, SettingError), match=message):
            deploy(source, to)
    with pytest.raises(RunError, match="no predictor of stage 9"):
        deploy(run, to, 9)
    with pytest.raises(SettingError, match="1 or more"):
        deploy(run, to, keep=0)
    assert not to.exists()
    (tmp_path / "stream").mkdir()
    (tmp_path / "stream/stream.json").write_text("{}")
    for wrong_place in (moved, tmp_path / "stream", moved.parent):  # a run, a stream, and a folder with a run
        with pytest.raises(SettingError, match="is a run, a model or a stream, or contains runs"):
            deploy(run, wrong_place)
    wrong_calls = ([str(to)], ["--back", str(run), str(to)], ["--list", str(to)], ["--back", str(to)],
                   ["--back", str(to), "--stage", "1"], ["--list", str(to), "--keep", "2"])  # fmt: skip
    for arguments in wrong_calls:
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
    deploy(run, to, 2), deploy(run, to, 3)
    weights = to / "stage_002/member_1.pt"
    weights.write_bytes(weights.read_bytes()[:-1])
    for command in (lambda: go_back(to), lambda: deploy(run, to, 2)):
        with pytest.raises(RunError, match=r"member_1\.pt is missing or has changed"):
            command()
    assert current_of(to) == to / "stage_003"
    settings = json.loads((moved / "settings.json").read_text())
    write_json(moved / "settings.json", settings | {"dictionary": "0" * 64})
    with pytest.raises(RunError, match="is not that of the run"):
        deploy(moved, to)
    write_json(moved / "settings.json", settings | {"stream": str(tmp_path / "gone")})
    with pytest.raises(StreamError):
        deploy(moved, to)


def start(*arguments) -> subprocess.Popen:
    command = [sys.executable, "-m", "fairseq_alma.deploy", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_at_once_are_safe(run, tmp_path):
    to = tmp_path / "to"
    processes = [start(run, to, "--stage", stage) for stage in (1, 2, 3, 3)]
    texts = [process.communicate()[1] for process in processes]
    statuses = [process.returncode for process in processes]
    assert 0 in statuses and {*statuses} <= {0, 2}
    assert all(text.count("\n") == 1 for text, status in zip(texts, statuses, strict=True) if status == 2), texts
    for one in all_deployed(to):
        one.check()
    assert current_of(to) in [one.folder for one in all_deployed(to)]
    with Lease(to), pytest.raises(RunError, match="process"):
        deploy(run, to)


@pytest.mark.parametrize("kills", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_a_whole_predictor(run, tmp_path, kills):
    """Killed after a random time, again and again; then the same command ends the work."""
    to, generator = tmp_path / "to", random.Random(0)
    deploy(run, to, 1)
    began = time.monotonic()
    assert start(run, to, "--stage", 2).wait() == 0
    seconds = time.monotonic() - began
    commands = [(run, to), ("--back", to), (run, to, "--stage", 1), (run, to, "--stage", 3, "--keep", 1)]
    for number in range(kills):
        process = start(*commands[number % len(commands)])
        time.sleep(seconds * generator.uniform(0.5, 1.0))
        process.kill()
        process.communicate()
        whole = {one.folder: one for one in all_deployed(to)}
        whole[current_of(to)].check()
        assert (to / "current").readlink() == Path(current_of(to).name)
    assert start(run, to, "--stage", 3).wait() == 0
    assert score(to / "current") == score(run)
    assert {path.name for path in to.iterdir()} == {"current", *names(to)}


def test_back_goes_one_back_also_if_it_was_killed_before_the_link_was_changed(moved, tmp_path):
    to = tmp_path / "to"
    for stage in (1, 2, 3):
        deploy(moved, to, stage)

    # The link is the last thing that changes. What is noted before does not move the next call.
    with killed_when_it_calls(Path, "symlink_to"):
        go_back(to)
    assert current_of(to) == to / "stage_003"
    assert go_back(to) == to / "stage_002" == current_of(to)
    assert deployments(moved)[-1]["stage"] == 2


def test_what_is_deployed_is_deployed_elsewhere_as_from_its_run(moved, tmp_path, capsys):
    """From staging to production: the run knows of both, so alma-forget and the gate do, too."""
    deploy(moved, tmp_path / "staging", 2), deploy(moved, tmp_path / "staging")
    assert main([str(tmp_path / "staging/current"), str(tmp_path / "to")]) == 0
    assert capsys.readouterr().out == f"deployed: {tmp_path / 'to/stage_003'}\n"
    [copied] = all_deployed(tmp_path / "to")
    assert (copied.run, copied.stage, copied.source) == (str(moved), 3, f"stage 3 of {moved}")
    assert [(Path(one["to"]).name, one["stage"]) for one in deployments(moved)[-2:]] == [("staging", 3), ("to", 3)]
    assert not (tmp_path / "staging/stage_003/deployments.json").exists()
    assert score(tmp_path / "to/current") == score(moved)
    with pytest.raises(SettingError, match="leave out --stage"):
        deploy(tmp_path / "staging/current", tmp_path / "to", 2)
    # A record that names another folder, or a run that does not know it, is not followed.
    shutil.copytree(tmp_path / "staging/stage_003", tmp_path / "foreign/stage_003")
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim/predictor.json").write_text("{}")
    [foreign] = all_deployed(tmp_path / "foreign")
    for victim in (tmp_path / "victim", tmp_path):
        replace(foreign, run=str(victim)).write()
        deploy(tmp_path / "foreign/stage_003", tmp_path / "own")
        assert not (victim / "deployments.json").exists()
        shutil.rmtree(tmp_path / "own")
    weights = tmp_path / "staging/stage_002/member_1.pt"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(RunError, match="has changed while it was copied"):
        deploy(tmp_path / "staging/stage_002", tmp_path / "to")
    newest = all_deployed(tmp_path / "staging")[-1]
    replace(newest, files={**newest.files, "../stage_002/member_1.pt": "0" * 64}).write()
    with pytest.raises(RunError, match="names a file outside its folder"):
        deploy(tmp_path / "staging/current", tmp_path / "to")
    withdraw(tmp_path / "staging", []), withdraw(tmp_path / "to", copied.content)
    with pytest.raises(RunError, match="alma-forget has removed"):
        deploy(tmp_path / "to/stage_003", tmp_path / "third")


def test_networks_of_images(tmp_path):
    small_run(tmp_path / "run", seeds=2, epochs=2, keep_stages=True, **taken("gens", grow_every=1))
    images, run, to = np.zeros((2, 8, 8), np.uint8), tmp_path / "run/seed_1", tmp_path / "to"
    expected = [vision.load(run, stage)(images) for stage in (2, None)]
    deploy(run, to, 2)
    before = deploy(run, to)[0]
    shutil.rmtree(tmp_path / "run")
    for folder, probabilities in zip((to / "stage_002", to / "current"), expected, strict=True):
        np.testing.assert_array_equal(vision.load(folder)(images), probabilities)
    assert before == to / "stage_004" and vision.load(to / "current").class_names == vision.load(before).class_names


def test_an_exported_model(run, tmp_path, capsys):
    pytest.importorskip("safetensors")
    for stage in (2, 3):
        export([run], tmp_path / f"export_{stage}", stage=stage)
        deploy(tmp_path / f"export_{stage}", tmp_path / "to")
    assert names(tmp_path / "to") == ["export_2", "export_3"]
    assert main(["--back", str(tmp_path / "to")]) == 0 and main([str(tmp_path / "export_3"), str(tmp_path / "to")]) == 0
    assert f"was taken back; to deploy it again, remove its folder in {tmp_path / 'to'})" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "to/export_3")
    deploy(tmp_path / "export_3", tmp_path / "to")
    copied = tmp_path / "to/current"
    files = {path.name for path in (tmp_path / "export_3").iterdir()}
    assert {path.name for path in copied.iterdir()} == files | {"deployed.json"}
    weights = tmp_path / "export_2/member_1/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(RunError, match=r"model.safetensors is not what alma-export has written: export the"):
        deploy(tmp_path / "export_2", tmp_path / "new")
    assert not (tmp_path / "new").exists()
    # Its configuration may be edited.
    edited = tmp_path / "export_3/generation_config.json"
    edited.write_text(edited.read_text().replace("{", '{"temperature": 0.5,', 1))
    folder, is_source = deploy(tmp_path / "export_3", tmp_path / "to")
    assert is_source and (folder / "generation_config.json").read_text() == edited.read_text()
    tokenizer = tmp_path / "export_3/tokenizer.json"
    content = tokenizer.read_bytes()
    tokenizer.write_bytes(content[:-9])
    with pytest.raises(RunError, match=r"tokenizer.json is not what alma-export has written"):
        deploy(tmp_path / "export_3", tmp_path / "to")
    tokenizer.write_bytes(content)
    edited.unlink()
    with pytest.raises(RunError, match=r"generation_config.json is missing: export the model again"):
        deploy(tmp_path / "export_3", tmp_path / "to")


def test_the_stream_may_have_been_moved(moved, tmp_path, capsys):
    stream = Path(json.loads((moved / "settings.json").read_text())["stream"])
    stream.rename(tmp_path / "stream")
    try:
        assert main([str(moved), str(tmp_path / "to")]) == 2
        assert "if the stream was moved, give --stream" in capsys.readouterr().err
        assert main([str(moved), str(tmp_path / "to"), "--stream", str(tmp_path / "stream")]) == 0
    finally:
        (tmp_path / "stream").rename(stream)
    assert main([str(tmp_path / "to/current"), str(tmp_path / "other"), "--stream", str(stream)]) == 2
    assert "--stream is for a run of alma-lm" in capsys.readouterr().err
