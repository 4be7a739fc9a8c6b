"""fairseq's own commands on our stream and our checkpoints, as real processes."""

import inspect
import json
import re

import pytest

from fairseq_alma.checkpoints import num_updates, read_checkpoint, write_checkpoint
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.data import sequence_iterator
from fairseq_alma.evaluation.cli import main as alma_eval
from tests.commands import ROOT, STAGE, run_command


def records(log: str, kind: str) -> list[dict]:
    return [json.loads(m[1]) for m in re.finditer(rf"\| INFO \| {kind} \| (\{{.*\}})", log)]


def test_training_logs_what_a_mixture_does_and_keeps_the_best_by_perplexity(trained):
    log = (trained.parent / "log.txt").read_text()
    inner, valid = records(log, "train_inner"), records(log, "valid")
    for key in ("loss", "nll_loss", "ppl", "balance_loss", "overflow_percent", "load_entropy_bits"):
        assert key in inner[-1]
    assert float(inner[-1]["ppl"]) < float(inner[0]["ppl"])
    assert float(inner[-1]["overflow_percent"]) > 0  # capacity factor 1 in training
    assert float(valid[-1]["valid_overflow_percent"]) == 0  # no limit in evaluation
    best = min(float(v["valid_ppl"]) for v in valid)
    assert read_checkpoint(trained)["extra_state"]["val_loss"] == pytest.approx(best, rel=1e-4)


def test_a_checkpoint_carries_the_ranking_of_its_experts(trained, stream):
    state = read_checkpoint(trained)["model"]
    tokens = StreamFolder.open(stream).counts("valid")["tokens"]
    for layer in (1, 3):
        assert state[f"decoder.layers.{layer}.mixture.valid_tokens_E"].sum() == tokens
        assert (state[f"decoder.layers.{layer}.mixture.valid_loss_E"] >= 0).all()


def test_eval_lm_and_alma_eval_agree(trained, stream, capsys):
    result = run_command(
        "fairseq-eval-lm", stream, "--user-dir", "fairseq_alma", "--task", "alma_lm", "--path", trained,
        "--gen-subset", "test", "--tokens-per-sample", 32, "--batch-size", 8,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    output = result.stdout + result.stderr
    alma_eval([str(trained), "--stream", str(stream), "--json"])
    ours = json.loads(capsys.readouterr().out)
    assert float(re.search(r"Perplexity: ([\d.]+)", output)[1]) == pytest.approx(ours["perplexity"], abs=0.006)
    scored = int(re.search(r"Evaluated ([\d,]+) tokens", output)[1].replace(",", ""))
    assert scored == ours["num_tokens"] == StreamFolder.open(stream).counts("test")["tokens"]


def test_the_task_trains_any_language_model_of_fairseq(stream, tmp_path, capsys):
    task = ("--user-dir", "fairseq_alma", "--task", "alma_lm", "--tokens-per-sample", 32, "--batch-size", 8)
    result = run_command(
        "fairseq-train", stream, *task, "--mega-batches", "1", "--arch", "transformer_lm", "--decoder-layers", 1,
        "--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--decoder-attention-heads", 2, "--optimizer", "adam",
        "--lr", 0.01, "--max-update", 30, "--save-dir", tmp_path, "--no-epoch-checkpoints", "--num-workers", 0,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    best = tmp_path / "checkpoint_best.pt"
    result = run_command("fairseq-eval-lm", stream, *task, "--path", best, "--gen-subset", "test")
    assert result.returncode == 0, result.stderr[-3000:]
    output = result.stdout + result.stderr
    assert float(re.search(r"Perplexity: ([\d.]+)", output)[1]) < 24  # the number of types
    assert f"Evaluated {StreamFolder.open(stream).counts('test')['tokens']:,} tokens" in output
    assert alma_eval([str(best), "--stream", str(stream)]) == 2
    assert "is a checkpoint of transformer_lm, which is not one of our architectures" in capsys.readouterr().err


def test_a_training_on_other_data_needs_new_meters_to_write_a_best_checkpoint(stream, trained, tmp_path):
    """Otherwise, fairseq compares with the best score of the training before, as docs/fairseq.md says."""
    before = read_checkpoint(trained)
    before["extra_state"]["best"] = 1e-3
    write_checkpoint(before, tmp_path / "before.pt")
    for options in (["--reset-dataloader"], ["--reset-dataloader", "--reset-meters"]):
        folder = tmp_path / options[-1]
        result = run_command(
            "fairseq-train", stream, *STAGE, "--mega-batches", 3, "--restore-file", tmp_path / "before.pt", *options,
            "--max-update", num_updates(before) + 1, "--save-dir", folder, "--cpu",
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-3000:]
        assert (folder / "checkpoint_best.pt").exists() == ("--reset-meters" in options)
    advice = " ".join(options)
    assert advice in (ROOT / "docs/fairseq.md").read_text() and advice in inspect.getsource(sequence_iterator)


def test_validate_scores_what_training_scored(trained, stream):
    result = run_command(
        "fairseq-validate", stream, "--user-dir", "fairseq_alma", "--task", "alma_lm", "--path", trained,
        "--batch-size", 5,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    perplexity = float(re.search(r"\| ppl ([\d.]+)", result.stdout + result.stderr)[1])
    assert perplexity == pytest.approx(read_checkpoint(trained)["extra_state"]["val_loss"], rel=1e-4)


@pytest.mark.slow
def test_a_stage_through_fairseqs_hydra(stream, tmp_path):
    result = run_command(
        "fairseq-hydra-train", "--config-dir", ROOT / "fairseq_alma/configs/fairseq_hydra_train",
        "--config-name", "switch_lm_tiny",
        f"common.user_dir={ROOT}/fairseq_alma", f"task.data={stream}", "task.mega_batches=2-3",
        "task.tokens_per_sample=32", "optimization.max_update=6", "lr_scheduler.total_num_update=6",
        "lr_scheduler.warmup_updates=1", f"checkpoint.save_dir={tmp_path}", f"hydra.run.dir={tmp_path}/hydra",
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    state = read_checkpoint(tmp_path / "checkpoint_last.pt")
    assert num_updates(state) == 6
    assert state["cfg"]["task"]["mega_batches"] == "2-3"


def test_the_test_set_is_refused_by_the_commands_too(stream, trained, tmp_path):
    for command in (
        ("fairseq-train", stream, *STAGE, "--valid-subset", "test", "--max-update", 1, "--save-dir", tmp_path),
        ("fairseq-validate", stream, "--user-dir", "fairseq_alma", "--task", "alma_lm", "--path", trained,
         "--batch-size", 5, "--valid-subset", "test"),
    ):  # fmt: skip
        result = run_command(*command)
        assert result.returncode != 0
        assert "may not be used for training or validation" in result.stderr + result.stdout
    assert list(tmp_path.glob("*.pt")) == []


def test_only_the_validation_set_ranks_the_experts(stream, tmp_path):
    result = run_command(
        "fairseq-train", stream, *STAGE, "--mega-batches", 1, "--max-update", 4, "--save-dir", tmp_path, "--cpu",
        "--valid-subset", "valid,train",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    state = read_checkpoint(tmp_path / "checkpoint_last.pt")["model"]
    tokens = StreamFolder.open(stream).counts("valid")["tokens"]
    assert state["decoder.layers.1.mixture.valid_tokens_E"].sum() == tokens


def test_blocks_that_are_too_long_for_the_model_are_not_left_out(stream, tmp_path):
    short = (*STAGE, "--mega-batches", 1, "--max-update", 2, "--save-dir", tmp_path, "--cpu")
    result = run_command("fairseq-train", stream, *short, "--learned-positions", 32)
    assert result.returncode == 0, result.stderr[-3000:]
    result = run_command(
        "fairseq-eval-lm", stream, "--user-dir", "fairseq_alma", "--task", "alma_lm", "--tokens-per-sample", 1024,
        "--path", tmp_path / "checkpoint_best.pt", "--batch-size", 8,
    )  # fmt: skip
    assert result.returncode != 0
    assert "is invalid (=1024) since max_positions=32" in result.stderr
