import json
import math
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_alma.checkpoints import read_checkpoint, write_checkpoint
from fairseq_alma.core.errors import StreamError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.cli import main
from fairseq_alma.evaluation.devices import default_devices, default_tokens_per_batch, parse_devices
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.evaluation.perplexity import combine
from fairseq_alma.evaluation.scoring import score_tokens
from tests.commands import STAGE, run_command
from tests.streams import make_stream

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def second(stream, tmp_path_factory) -> Path:
    """Another checkpoint, of another seed."""
    folder = tmp_path_factory.mktemp("second")
    result = run_command(
        "fairseq-train", stream, *STAGE, "--mega-batches", "2", "--max-update", 15, "--seed", 7, "--save-dir", folder
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return folder / "checkpoint_best.pt"


def plain_loop(models, tokens, length):
    """Perplexity token by token, one block after the other: sum of log of the mean probability."""
    total = 0.0
    stream = [2, *tokens]  # fairseq feeds an end-of-document first
    for start in range(0, len(tokens), length):
        source = torch.tensor([stream[start : start + length]])[:, : len(tokens) - start]
        probabilities = [model(source)[0][0].double().softmax(-1) for model in models]
        for position, target in enumerate(tokens[start : start + length]):
            total -= math.log(sum(p[position, target].item() for p in probabilities) / len(models))
    return total


@torch.no_grad()
def test_one_model_and_an_ensemble_equal_a_plain_loop(stream, trained, second):
    folder = StreamFolder.open(stream)
    loaded = [load_member(checkpoint, folder, CPU) for checkpoint in (trained, second)]
    models, task = [model for model, _ in loaded], loaded[0][1]
    task.load_dataset("test")
    blocks = task.dataset("test")
    tokens = [t for i in range(len(blocks)) for t in blocks[i]["target"].tolist()]
    assert len(tokens) == folder.counts("test")["tokens"]
    results = {}
    for name, members in {"one": models[:1], "other": models[1:], "both": models}.items():
        outputs = [score_tokens(model, task, "test").log_probability_T for model in members]
        results[name] = combine(outputs, folder.counts("test")["words"])
        assert results[name].num_tokens == len(tokens)
        expected = plain_loop(members, tokens, 32)
        assert results[name].nll_sum == pytest.approx(expected, rel=1e-5)
        assert results[name].perplexity == pytest.approx(math.exp(expected / len(tokens)), rel=1e-4)
        assert results[name].word_perplexity == pytest.approx(math.exp(expected / folder.counts("test")["words"]))
    assert results["both"].loss < (results["one"].loss + results["other"].loss) / 2


def test_scores_do_not_depend_on_the_batch(stream, trained):
    model, task = load_member(trained, StreamFolder.open(stream), CPU)
    small, large = (score_tokens(model, task, "test", tokens_per_batch=n) for n in (32, 100_000))
    assert abs(small.log_probability_T - large.log_probability_T).max() < 1e-5
    assert small.load == large.load
    assert large.overflow == 0
    assert [sum(layer) for layer in large.load] == pytest.approx([1.0, 1.0])


def test_perplexity_equals_that_of_full_logits_in_float64(stream, trained):
    folder = StreamFolder.open(stream)
    model, task = load_member(trained, folder, CPU)
    task.load_dataset("test")
    blocks, nll = task.dataset("test"), []
    for i in range(len(blocks)):  # the blocks as fairseq cuts them
        with torch.no_grad():
            logits = model(blocks[i]["source"].unsqueeze(0))[0][0]
        target = blocks[i]["target"]
        nll.append(-logits.double().log_softmax(-1)[torch.arange(len(target)), target])
    nll_T, scores = torch.cat(nll), score_tokens(model, task, "test")
    assert scores.log_probability_T.dtype == np.float32
    assert np.abs(nll_T.numpy() + scores.log_probability_T).max() < 1e-5
    assert combine([scores.log_probability_T], 1).perplexity == pytest.approx(nll_T.mean().exp().item(), rel=1e-6)


@pytest.mark.parametrize("tokens_per_batch", [32, 96, 8192])
def test_two_devices_give_exactly_the_scores_of_one(stream, trained, tokens_per_batch):
    model, task = load_member(trained, StreamFolder.open(stream), CPU)
    one = score_tokens(model, task, "test", [CPU], tokens_per_batch)
    if tokens_per_batch < 8192:  # with 8192, there is only one batch
        # Each of the two threads waits at its first batch until the other has a batch, too. Otherwise, on a busy
        # machine, one thread could score all batches before the other begins.
        both, seen = threading.Barrier(2, timeout=60), threading.local()

        def wait_for_the_other(*_):
            if not hasattr(seen, "waited"):
                seen.waited = True
                both.wait()

        model.register_forward_pre_hook(wait_for_the_other)
    two = score_tokens(model, task, "test", [CPU, CPU], tokens_per_batch)
    assert (one.log_probability_T == two.log_probability_T).all()
    assert (one.load, one.overflow) == (two.load, two.overflow)


def test_a_device_that_fails_stops_the_others(stream, trained):
    model, task = load_member(trained, StreamFolder.open(stream), CPU)
    batches = []

    def fail_in_the_third(*_):
        batches.append(0)
        if len(batches) == 3:
            raise RuntimeError("out of memory")
        time.sleep(0.05)

    model.register_forward_pre_hook(fail_in_the_third)
    with pytest.raises(RuntimeError, match="out of memory"):
        score_tokens(model, task, "test", [CPU, CPU], tokens_per_batch=32)
    assert len(batches) < 8  # of 32


def test_a_sample_is_the_first_whole_blocks(stream, trained):
    model, task = load_member(trained, StreamFolder.open(stream), CPU)
    whole_T = score_tokens(model, task, "test").log_probability_T
    for max_tokens, expected in ((1, 32), (64, 64), (95, 64), (10**6, len(whole_T))):
        sample_T = score_tokens(model, task, "test", max_tokens=max_tokens).log_probability_T
        assert len(sample_T) == expected
        assert np.abs(sample_T - whole_T[:expected]).max() < 1e-5


def test_a_bfloat16_model_is_scored_with_float32_log_probabilities(stream, trained, tmp_path):
    folder, checkpoint = StreamFolder.open(stream), read_checkpoint(trained)
    checkpoint["cfg"]["model"]["precision"] = "bfloat16"
    write_checkpoint(checkpoint, tmp_path / "bfloat16.pt")
    results = []
    for path in (trained, tmp_path / "bfloat16.pt"):
        model, task = load_member(path, folder, CPU)
        results.append(score_tokens(model, task, "test").log_probability_T)
    plain, half = results
    assert half.dtype == np.float32
    # Compare the mean: a token whose two best experts have almost the same gate may go to the other one.
    assert 0 < np.abs(plain - half).mean() < 2e-2 * np.abs(plain).mean()
    # bfloat16 has 8 bits: rounded to it, most of the values would change.
    assert (torch.from_numpy(half).bfloat16().float().numpy() != half).mean() > 0.9


def test_devices_are_named_or_refused(stream, trained, capsys):
    assert parse_devices("cpu") == [CPU]
    assert parse_devices("cpu, cpu") == [CPU, CPU]
    assert parse_devices(None) == default_devices()
    assert default_tokens_per_batch([CPU]) == 8192
    assert main([str(trained), "--stream", str(stream), "--device", "cuda:99"]) == 2
    assert "device 'cuda:99' does not exist here: give one of cpu" in capsys.readouterr().err
    assert main([str(trained), "--stream", str(stream), "--device", "cpu,cpu", "--json"]) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test-gpu")
def test_all_gpus_give_the_scores_of_the_cpu(stream, trained):
    folder = StreamFolder.open(stream)
    model, task = load_member(trained, folder, CPU)
    expected = score_tokens(model, task, "test")
    gpus = default_devices()
    assert {gpu.type for gpu in gpus} == {"cuda"}
    assert 8192 <= default_tokens_per_batch(gpus) <= 65536
    for devices in (gpus[:1], gpus, [gpus[0], gpus[0]]):
        model, task = load_member(trained, folder, devices[0])
        scores = score_tokens(model, task, "test", devices, tokens_per_batch=96)
        assert np.abs(scores.log_probability_T - expected.log_probability_T).max() < 1e-3
        assert np.abs(np.array(scores.load) - np.array(expected.load)).max() < 1e-2


def test_it_agrees_with_what_training_logged_on_the_validation_set(stream, trained):
    model, task = load_member(trained, StreamFolder.open(stream), CPU)
    logged = read_checkpoint(trained)["extra_state"]["val_loss"]
    scored = combine([score_tokens(model, task, "valid").log_probability_T], num_words=1)
    assert scored.perplexity == pytest.approx(logged, rel=1e-6)


def test_alma_eval_prints_that_every_token_was_scored(stream, trained, capsys):
    assert main([str(trained), "--stream", str(stream), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_tokens"] == StreamFolder.open(stream).counts("test")["tokens"]
    assert main([str(trained), str(trained), "--stream", str(stream)]) == 0
    text = capsys.readouterr().out
    assert "2 members on" in text
    # An ensemble of a model with itself is the model.
    assert f"{result['perplexity']:.4f} per token" in text
    assert f"{result['bits_per_byte']:.6f} bits per byte" in text


def test_bits_per_byte_need_the_bytes_of_the_text(own_stream, trained, capsys):
    path = own_stream / "stream.json"
    description = json.loads(path.read_text())
    assert main([str(trained), "--stream", str(own_stream), "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    bits = score["num_tokens"] * math.log2(score["perplexity"])
    assert score["bits_per_byte"] == pytest.approx(bits / description["splits"]["test"].pop("bytes"))
    path.write_text(json.dumps(description))  # a stream of an earlier version
    assert main([str(trained), "--stream", str(own_stream), "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == score.keys() - {"bits_per_byte", "num_bytes"}
    assert main([str(trained), "--stream", str(own_stream)]) == 0
    assert "per byte" not in capsys.readouterr().out


def test_bad_input_gives_one_message(stream, trained, tmp_path, capsys):
    other_words = make_stream(tmp_path / "other", num_words=30, tokens=400)
    same_size = make_stream(tmp_path / "same_size", tokens=400)
    dictionary = same_size / "dict.txt"
    dictionary.write_text(dictionary.read_text().replace("w0 1", "x0 1"))
    description = json.loads((same_size / "stream.json").read_text())
    from fairseq_alma.core.files import sha256_of

    description["tokenizer"]["dict_sha256"] = sha256_of(dictionary)
    (same_size / "stream.json").write_text(json.dumps(description))
    cut_short = shutil.copy(trained, tmp_path / "cut_short.pt")
    with open(cut_short, "r+b") as file:
        file.truncate(10_000)
    for arguments, message in [
        ([str(trained)], "--stream"),
        ([str(tmp_path / "none.pt"), "--stream", str(stream)], "no run and no checkpoint at"),
        ([str(cut_short), "--stream", str(stream)], "no complete checkpoint"),
        ([str(trained), "--stream", str(tmp_path / "nowhere")], "alma-prep"),
        ([str(trained), "--stream", str(other_words)], "dictionary of 24 entries"),
        ([str(trained), "--stream", str(same_size)], "another dictionary"),
        ([str(tmp_path)], "no predictor.json"),
        ([str(trained), "--stream", str(stream), "--stage", "1"], "--stage needs a run folder"),
    ]:
        assert main(arguments) == 2
        output = capsys.readouterr().err
        assert output.startswith("alma-eval: ")
        assert message in output
        assert "Traceback" not in output


def test_members_of_other_dictionaries_make_no_ensemble(stream, trained, tmp_path):
    other = make_stream(tmp_path / "other", num_words=30, tokens=400)
    with pytest.raises(StreamError, match="dictionary of 24 entries"):
        load_member(trained, StreamFolder.open(other), CPU)


def test_the_stream_of_a_run_is_the_one_it_was_trained_on(stream, trained, tmp_path, capsys):
    run, other = tmp_path / "run", make_stream(tmp_path / "other", tokens=400)
    run.mkdir()
    (run / "predictor.json").write_text(json.dumps({"checkpoints": [{"path": str(trained)}]}))

    def said(**settings):
        (run / "settings.json").write_text(json.dumps(settings))
        status = main([str(run)])
        return status, capsys.readouterr().err

    folder = StreamFolder.open(stream)
    evaluated_on = [folder.digest(split) for split in ("valid", "test")]
    assert said(stream=str(stream), evaluated_on=evaluated_on)[0] == 0
    status, error = said(stream=str(other), evaluated_on=evaluated_on)
    assert status == 2 and f"the held-out text of {other} is not that of the stream with which" in error
    status, error = said(stream=str(tmp_path / "moved"), evaluated_on=evaluated_on)
    assert status == 2 and "if the stream was moved, give --stream" in error
    # A folder of checkpoints that were copied to be deployed.
    (run / "settings.json").unlink()
    assert main([str(run), "--stream", str(stream)]) == 2
    error = capsys.readouterr().err
    assert f"is not a run folder: give the checkpoint files ({trained}) and --stream" in error


def test_the_number_of_tokens_in_a_pass_must_be_positive(stream, trained, capsys):
    for number in ("0", "-5"):
        with pytest.raises(SystemExit):
            main([str(trained), "--stream", str(stream), "--tokens-per-batch", number])
        assert f"{number} must be 1 or more" in capsys.readouterr().err


def test_the_predictor_of_an_earlier_stage_is_scored(stream, trained, second, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "predictors").mkdir(parents=True)
    (run / "settings.json").write_text(json.dumps({"stream": str(stream)}))
    for name, path in (("predictor", second), ("predictors/stage_001", trained), ("predictors/stage_002", second)):
        (run / f"{name}.json").write_text(json.dumps({"checkpoints": [{"path": str(path)}]}))

    def loss(*arguments):
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["loss"]

    first, last = (loss(path, "--stream", stream) for path in (trained, second))
    assert first != last
    assert [loss(run), loss(run, "--stage", 1), loss(run, "--stage", 2)] == [last, first, last]
    assert main([str(run), "--stage", "3"]) == 2
    assert "no predictor of stage 3: predictors of these stages are stored: 1, 2" in capsys.readouterr().err
