"""The models of a run score and continue texts: `fairseq_alma.load`, alma-generate, and fairseq's own commands."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import fairseq_alma as alma
from data_prep.tokenization.tokenizers import ByteBPE, dictionary_names, dictionary_text
from fairseq_alma.checkpoints import read_checkpoint, write_checkpoint
from fairseq_alma.core.errors import RunError, SettingError, StreamError
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.deploy import deploy
from fairseq_alma.evaluation.members import load_member
from fairseq_alma.generate import main as alma_generate
from fairseq_alma.models.switch_lm import SwitchLanguageModel
from fairseq_alma.stream_tokenizer import StreamTokenizer
from tests.commands import run_command
from tests.fairseq_alma.evaluation.test_perplexity import plain_loop
from tests.fairseq_alma.models.test_switch_lm import make_with

PROMPT = "w1 w2 w3"
GREEDY = {"temperature": 0}


def changed(source: Path, target: Path, noise: float = 0.0, window: int | None = None) -> Path:
    """Write a checkpoint with noise on its weights, and another tokens_per_sample. Return its path."""
    state = read_checkpoint(source)
    generator = torch.Generator().manual_seed(0)
    for name, weight in state["model"].items():
        if weight.dim() > 1 and noise:
            scale = noise * weight.std()
            state["model"][name] = weight + scale * torch.randn(weight.shape, generator=generator).to(weight)
    if window is not None:
        state["cfg"]["task"]["tokens_per_sample"] = window
    write_checkpoint(state, target)
    return target


@pytest.fixture(scope="module")
def members(trained, tmp_path_factory) -> list[Path]:
    """Two checkpoints whose context is 256 tokens."""
    folder = tmp_path_factory.mktemp("members")
    return [changed(trained, folder / f"{number}.pt", 0.3 + 0.2 * number, 256) for number in (0, 1)]


@pytest.fixture(scope="module")
def one(members, stream):
    return alma.load(members[0], stream=stream)


@pytest.fixture(scope="module")
def both(members, stream):
    return alma.load(members, stream=stream)


@pytest.fixture(scope="module")
def short(trained, stream):
    """A predictor whose context is 32 tokens."""
    return alma.load(trained, stream=stream)


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A predictor with a byte-level tokenizer and an untrained model, which writes any bytes."""
    folder = tmp_path_factory.mktemp("letters")
    (folder / "tokenizer.json").write_bytes(ByteBPE.train(["was war é 漢字 🦜 " * 9, "the thing that"], 300))
    names = dictionary_names(ByteBPE(folder / "tokenizer.json").symbols())
    (folder / "dict.txt").write_text(dictionary_text(names), encoding="utf-8")
    tokenizer = StreamTokenizer(folder)
    model = make_with(Namespace(), num_words=tokenizer.dictionary_size)
    torch.nn.init.normal_(model.decoder.embed_tokens.weight, std=0.01)
    return alma.LanguagePredictor([model], tokenizer, 16)


def test_the_ids_are_those_of_dict_txt_and_text_is_kept_exactly(letters, tmp_path):
    tokenizer, text = letters.tokenizer, " wáş\n\t é漢字🦜 the <s> madeupword0000\x85 "
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.decode([0, 1, *ids, 2, 3, tokenizer.dictionary_size - 1]) == text
    from fairseq.data import Dictionary

    dictionary = Dictionary.load(str(tokenizer.path / "dict.txt"))
    assert tokenizer.symbols == dictionary.symbols and tokenizer.eos == dictionary.eos()
    from fairseq.data.encoders import build_bpe

    alma.register()
    bpe = build_bpe(Namespace(bpe="alma_stream", data=str(tokenizer.path)))
    assert dictionary.encode_line(bpe.encode(text), add_if_not_exist=False).tolist() == [*ids, 2]
    assert bpe.decode(dictionary.string(torch.tensor([*ids, 2]))) == text


def test_a_folder_without_the_tokenizer_of_the_model_is_refused(letters, stream, members, tmp_path):
    with pytest.raises(
        StreamError, match=r"has no tokenizer\.json and no sentencepiece\.model: give the stream folder"
    ):
        StreamTokenizer(tmp_path)
    for name in ("dict.txt", "tokenizer.json"):
        shutil.copy(stream / name, tmp_path / name)
    assert alma.load(members[0], stream=tmp_path).generate(PROMPT, 5, **GREEDY)[0].ids  # without the text
    shutil.copy(letters.tokenizer.path / "tokenizer.json", tmp_path)
    with pytest.raises(StreamError, match="does not list the symbols of"):
        StreamTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(StreamError, match="cannot be read"):
        StreamTokenizer(tmp_path)
    with pytest.raises(StreamError, match="dictionary of 24 entries"):
        alma.load(members[0], stream=letters.tokenizer.path)


def test_a_text_has_the_score_that_it_has_in_an_evaluation(short, trained, members, stream):
    texts = [" ".join(f"w{(7 * i * i + i) % 20}" for i in range(length)) for length in (70, 1, 32, 5)]
    pair = alma.load([trained, members[1]], stream=stream)
    for predictor in (short, pair):
        scores = predictor.score([*texts, ""])
        for text, score in zip(texts, scores, strict=False):
            ids = predictor.tokenizer.encode(text)
            assert score.nats.sum() == pytest.approx(plain_loop(predictor.members, ids, 32), rel=1e-5)
            assert score.num_tokens == len(ids) and score.num_bytes == len(text)
            assert score.perplexity == pytest.approx(math.exp(score.nats.sum() / len(ids)))
            assert score.bits_per_byte == pytest.approx(score.nats.sum() / math.log(2) / len(text))
            assert f"perplexity={score.perplexity:.6g}, " in repr(score)
        assert scores[-1].num_tokens == 0 and math.isnan(scores[-1].perplexity)
    (whole,) = short.score(texts[0], end_of_document=True)
    assert whole.num_tokens == 71
    np.testing.assert_allclose(whole.nats[:70], short.score(texts[0])[0].nats, rtol=1e-5)


def test_logits_give_the_probabilities_of_the_next_tokens(one, both):
    ids = [both.tokenizer.eos, *both.tokenizer.encode(PROMPT)]
    p = torch.stack([member(torch.tensor([ids]))[0][0].softmax(-1) for member in both.members]).mean(0)
    torch.testing.assert_close(both.logits(ids).softmax(-1), p)
    assert one.logits(torch.tensor([ids, ids])).shape == (2, 4, 24)
    torch.testing.assert_close(one.logits(ids), one.members[0](torch.tensor([ids]))[0][0])


def greedy_of_fairseq(checkpoints, stream, num_tokens, prompt=PROMPT) -> list[int]:
    """Return the tokens that fairseq's SequenceGenerator writes after a prompt."""
    loaded = [load_member(path, StreamFolder.open(stream), torch.device("cpu")) for path in checkpoints]
    models, task, ids = [model for model, _ in loaded], loaded[0][1], StreamTokenizer(stream).encode(prompt)
    last = len(ids) + num_tokens
    generator = task.build_generator(models, Namespace(beam=1, max_len_b=last, min_len=last))
    sample = {"net_input": {"src_tokens": torch.tensor([[task.dictionary.eos(), *ids]])}}
    return task.inference_step(generator, models, sample)[0][0]["tokens"].tolist()[len(ids) : -1]


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fairseqs_generator_the_command_and_the_api_write_the_same_100_tokens(count, members, stream, capsys):
    checkpoints, length = members[:count], {"max_tokens": 100, "min_tokens": 100}
    predictor = alma.load(checkpoints, stream=stream)
    prompts = [PROMPT, "w5 w6", "w10", "w0 w7 w19", "w13 w4"]
    written = [greedy_of_fairseq(checkpoints, stream, 100, prompt) for prompt in prompts]
    assert len({token for ids in written for token in ids}) > 3  # one continuation may repeat one token
    assert [found.ids for found in predictor.generate(prompts, **length, **GREEDY)] == written
    (found,), expected = predictor.generate(PROMPT, **length, **GREEDY), written[0]
    assert len(expected) == 100
    assert found.ids == expected and found.text == predictor.tokenizer.decode([4, *expected]).removeprefix("w0")
    options = ["--prompt", PROMPT, "--max-tokens=100", "--min-tokens=100", "--temperature=0", "--json"]
    assert alma_generate([*map(str, checkpoints), "--stream", str(stream), *options]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"prompt": PROMPT, "text": found.text, "ids": expected}
    assert "".join(predictor.generate_pieces(PROMPT, **length, **GREEDY)) == found.text


def test_a_continuation_depends_neither_on_the_other_prompts_nor_on_the_cache(short, both):
    prompts = [PROMPT, "", "w4", " ".join(["w5 w6"] * 40), "w7 w8"]
    for options in (GREEDY, {"seed": 3, "top_k": 9}):
        together = both.generate(prompts, 15, min_tokens=10, **options)
        assert together[0] == both.generate(prompts[0], 15, min_tokens=10, **options)[0]
        assert together[:3] == both.generate(prompts[:3], 15, min_tokens=10, **options)
    for number, found in enumerate(short.generate(prompts, 36, min_tokens=36, **GREEDY)):
        context = [2, *short.tokenizer.encode(prompts[number])]
        for place, token in enumerate(found.ids):
            # Whenever the context is full, its beginning is left out: at most half, and enough for what may follow.
            context = context[-max(16, 32 - (36 - place)) :] if len(context) > 32 else context
            scores = short.logits(context)[-1].clone()
            scores[[0, 1, 2, 3]] = -math.inf
            assert int(scores.argmax()) == token
            context.append(token)


def test_tokens_are_drawn_with_their_probabilities(one):
    p = one.logits([2, *one.tokenizer.encode(PROMPT)])[-1].double().div(1.5).softmax(-1).numpy()
    p[[0, 1, 3]] = 0
    for options, kept in (
        ({}, 24),
        ({"top_k": 4}, 4),
        ({"top_p": 0.7}, int((np.sort(p / p.sum())[::-1].cumsum() < 0.7).sum()) + 1),
    ):
        rest = np.where(p >= np.sort(p)[-kept], p, 0)
        drawn = one.generate([PROMPT] * 960, 1, temperature=1.5, seed=1, **options)
        counts = np.bincount([one.ids[0] for one in drawn], minlength=24)
        assert (counts[rest == 0] == 0).all()
        often = rest / rest.sum() * 960 > 5
        expected = rest[often] / rest[often].sum() * counts[often].sum()
        assert chisquare(counts[often], expected).pvalue > 1e-3
    assert one.generate(PROMPT, 9, top_k=1) == one.generate(PROMPT, 9, top_p=1e-9) == one.generate(PROMPT, 9, **GREEDY)
    # Scores divided by such a number are too large for the exponential function.
    for temperature in (1e-6, 1e-29, 1e-38, 1e-45):
        assert one.generate(PROMPT, 9, temperature=temperature) == one.generate(PROMPT, 9, **GREEDY)
    assert one.generate(PROMPT, 50, temperature=3) != one.generate(PROMPT, 50, temperature=3)  # without a seed


def test_a_low_temperature_makes_the_most_probable_token_of_an_ensemble_more_probable(both):
    """The mean of the members' probabilities is sharpened, and not the members', whose favourites may differ."""
    never = torch.tensor([0, 1, 3])
    for ids in ([2, 4, token] for token in range(4, 24)):
        tokens = torch.tensor([ids])
        p = [both._next_scores(tokens, [{}, {}], t, never).softmax(-1)[0].double() for t in (1.0, 0.25)]
        torch.testing.assert_close(p[1], p[0] ** 4 / (p[0] ** 4).sum(), rtol=1e-3, atol=1e-9)


def test_half_of_a_surrogate_pair_is_read_as_in_a_corpus(one):
    assert one.tokenizer.encode("a\ud800b") == one.tokenizer.encode("a?b")
    assert one.score(["a\ud800b"])[0].num_bytes == 3


def test_a_document_ends_where_the_model_ends_it(one):
    found = one.generate([""] * 20, 100, seed=0)
    lengths = [len(each.ids) for each in found]
    assert len(set(lengths)) > 5 and max(lengths) > 30
    assert all((each.ids[-1] == 2) == (len(each.ids) < 100) and 2 not in each.ids[:-1] for each in found)
    assert min(len(each.ids) for each in one.generate([""] * 20, 60, seed=0, min_tokens=30)) > 30


def test_beams_find_what_fairseqs_beams_find_and_never_a_less_probable_text(both, stream, members):
    for ids, beam in (([], 4), (both.tokenizer.encode(PROMPT), 5)):
        prompt = both.tokenizer.decode(ids)
        (found,) = both.generate(prompt, 12, beam=beam, min_tokens=12)
        (greedy,) = both.generate(prompt, 12, min_tokens=12, **GREEDY)
        total = [both.score(prompt + text)[0].nats.sum() for text in (found.text, greedy.text)]
        assert len(found.ids) == 12 and total[0] <= total[1] + 1e-4
    # The </s> that fairseq forces after the last token does not count.
    for prompt in ("", *(PROMPT[start:] for start in range(len(PROMPT)))):
        assert both.generate(prompt, 1, beam=20, min_tokens=1) == both.generate(prompt, 1, min_tokens=1, **GREEDY)
    with pytest.raises(
        SettingError, match=r"beam=2 needs the whole text in the context of 256 tokens.*at most 252 follow"
    ):
        both.generate(PROMPT, 253, beam=2)
    assert both.generate(PROMPT, 252, beam=2)[0].ids
    with pytest.raises(SettingError, match="leave out beam="):
        both.generate_pieces(PROMPT, beam=2)


def test_pieces_are_whole_characters_and_together_the_text(letters):
    for seed in range(4):
        (expected,) = letters.generate("wár 漢", 40, seed=seed, min_tokens=40)
        pieces = list(letters.generate_pieces("wár 漢", 40, seed=seed, min_tokens=40))
        assert "".join(pieces) == expected.text
        assert len(pieces) > 5
        assert not any(piece.endswith("\N{REPLACEMENT CHARACTER}") for piece in pieces[:-1])


def test_pieces_are_the_text_if_a_tokenizer_decodes_only_whole_runs_of_bytes(letters, monkeypatch):
    """Tokenizers such as those of Llama 2 replace each byte of a run that is not UTF-8."""
    text = " ab éé 漢字 🦜 ab"
    written = [*text.encode()]

    def decode(ids: list[int]) -> str:
        found = ""
        for is_ascii, run in itertools.groupby(ids, lambda one: one < 128):
            part = bytes(run)
            try:
                found += part.decode()
            except UnicodeDecodeError:
                assert not is_ascii
                found += "\N{REPLACEMENT CHARACTER}" * len(part)
        return found

    monkeypatch.setattr(letters, "tokenizer", SimpleNamespace(encode=lambda text: [*text.encode()], decode=decode))
    monkeypatch.setattr(letters, "_next_tokens", lambda *_: iter([{0: one} for one in written]))
    pieces = [*letters.generate_pieces("né")]
    assert pieces == [*text]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature=-1: give a number that is 0"),
        ({"top_p": 0}, "top_p=0: give a number that is more than 0"),
        ({"max_tokens": 0}, "max_tokens=0: give a number that is 1 or more"),
        ({"min_tokens": 101}, "min_tokens=101: give a number that is from 0 to max_tokens=100"),
        ({"beam": 3, "top_k": 2}, "leave out temperature, top_k and top_p"),
    ],
)
def test_invalid_options_are_refused(one, options, message):
    with pytest.raises(SettingError, match=message):
        one.generate(PROMPT, **options)


@pytest.fixture
def run(members, stream, tmp_path) -> Path:
    """A run folder with two stages: the model after stage 1, and the ensemble after stage 2."""
    (tmp_path / "run/predictors").mkdir(parents=True)
    (tmp_path / "run/settings.json").write_text(json.dumps({"stream": str(stream)}))
    for name, paths in (("predictor", members), ("predictors/stage_001", members[:1])):
        found = {"checkpoints": [{"path": str(path)} for path in paths]}
        (tmp_path / f"run/{name}.json").write_text(json.dumps(found))
    return tmp_path / "run"


def test_a_run_and_a_stage_of_it_are_loaded(run, one, both, capsys):
    now, before = alma.load(run), alma.load(str(run), stage=1)
    assert (len(now.members), len(before.members)) == (2, 1)
    assert now.score(PROMPT)[0].nats.tolist() == both.score(PROMPT)[0].nats.tolist()
    assert before.score(PROMPT)[0].nats.tolist() == one.score(PROMPT)[0].nats.tolist()
    with pytest.raises(RunError, match="no predictor of stage 3"):
        alma.load(run, 3)
    with pytest.raises(SettingError, match="device 'cuda:9' does not exist here"):
        alma.load(run, device="cuda:9")
    (run / "settings.json").write_text(json.dumps({"stream": str(run / "moved")}))
    assert alma_generate([str(run), "--prompt", PROMPT]) == 2
    assert "if the stream was moved, give --stream" in capsys.readouterr().err


def test_the_command_takes_prompts_from_options_a_file_and_a_pipe(run, capsys, monkeypatch, tmp_path):
    (tmp_path / "prompts.txt").write_text("w1 w2\r\n\nw3\n")
    options = [str(run), "--stage", "1", "--seed", "5", "--max-tokens", "7"]

    def printed(*more: str) -> list[dict]:
        assert alma_generate([*options, *more, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    found = printed("--prompt", "", "--prompts", str(tmp_path / "prompts.txt"), "--num", "2")
    assert [one["prompt"] for one in found] == ["", "", "w1 w2", "w1 w2", "w3", "w3"]
    assert found[2]["text"] != found[3]["text"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\nw3\n"))
    assert [one["prompt"] for one in printed()] == ["w1 w2", "w3"]
    assert alma_generate([*options, "--prompt", "w1 w2", "--prompt", "w3"]) == 0
    texts = capsys.readouterr().out.removesuffix("\n").split("\n-----\n")
    assert [text[:5] for text in texts] == ["w1 w2", "w3 w1"[:2] + texts[1][2:5]]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for more, message in (
        ([], 'there is no prompt: give --prompt TEXT; --prompt "" begins a document'),
        (["--num", "0"], "--num 0: give a number that is 1 or more"),
        (["--num", "2", "--temperature", "0"], "--beam and --temperature 0 find one text for each prompt"),
        (["--top-p", "2"], "top_p=2.0: give a number that is more than 0"),
        (["--prompts", str(tmp_path / "nowhere")], f"there is no file {tmp_path}/nowhere: give --prompts a file"),
        (["--prompts", str(tmp_path / "empty.txt")], "empty.txt has no line with text: give --prompt TEXT"),
    ):
        (tmp_path / "empty.txt").write_text("\n \n")
        assert alma_generate([*options, *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith("alma-generate: ") and message in error and error.count("\n") == 1


def test_a_folder_that_is_no_run_is_named(run, stream, tmp_path):
    deploy(run, tmp_path / "to")
    for name, file in (("export", "alma_export.json"), ("unfinished", "settings.json"), ("empty", "text.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    shutil.copytree(run, tmp_path / "several/one")
    for folder, message in (
        (tmp_path / "to", f"copied: give {tmp_path}/to/current"),
        (tmp_path / "several", "contains several runs. Give one of them"),
        (stream, f"is a stream, not a run: train on it first, with alma-lm stream={stream} out=RUN"),
        (tmp_path / "export", "is an exported model: load it with transformers"),
        (tmp_path / "unfinished", "is a run without a finished stage: run its command again"),
        (tmp_path / "empty", "has no predictor.json, so it is not a run"),
        (tmp_path / "nowhere", f"there is no run and no checkpoint at '{tmp_path}/nowhere'"),
    ):
        with pytest.raises((RunError, StreamError), match=re.escape(message)):
            alma.load(folder)


def test_a_mistyped_option_of_generate_is_named(run):
    with pytest.raises(SettingError, match=r"generate has no option max_token: did you mean max_tokens\?"):
        alma.load(run).generate(PROMPT, max_token=3)
    with pytest.raises(SettingError, match=r"generate has no option xyz\. The options are max_tokens, "):
        alma.load(run).generate(PROMPT, xyz=3)


def test_on_a_terminal_prompts_are_typed_and_texts_appear_while_they_are_written(run, monkeypatch):
    ours, theirs = os.openpty()
    os.write(ours, b"w1 w2 w3\n\x04")  # a line, and the end of the input
    with open(theirs, "w") as output, open(os.dup(theirs)) as typed, contextlib.redirect_stdout(output):
        monkeypatch.setattr(sys, "stdin", typed)
        assert alma_generate([str(run), "--max-tokens", "9", "--min-tokens", "9", "--temperature", "0"]) == 0
        output.flush()
        shown = ""
        while not shown.endswith("prompt> \r\n"):  # what the user typed, the text, and the second question
            shown += os.read(ours, 10_000).decode()
    os.close(ours)
    assert f"{PROMPT}{alma.load(run).generate(PROMPT, 9, min_tokens=9, **GREEDY)[0].text}\r\n" in shown


def test_fairseqs_commands_read_and_write_text(members, stream, tmp_path):
    prompts = [PROMPT, "w4 w9"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    common = (
        stream, "--user-dir", "fairseq_alma", "--task", "alma_lm", "--path", ":".join(map(str, members)),
        "--bpe", "alma_stream", "--beam", 1, "--max-len-b", 20, "--min-len", 20, "--cpu",
    )  # fmt: skip
    result = run_command("fairseq-interactive", *common, "--input", tmp_path / "prompts.txt")
    assert result.returncode == 0, result.stderr[-3000:]
    texts = [line.split("\t")[2] for line in result.stdout.splitlines() if line.startswith("D-")]
    predictor = alma.load(members, stream=stream)
    for prompt, text in zip(prompts, texts, strict=True):
        length = 20 - len(predictor.tokenizer.encode(prompt))
        assert text == prompt + predictor.generate(prompt, length, min_tokens=length, **GREEDY)[0].text
    result = run_command(
        "fairseq-generate", *common, "--gen-subset", "valid", "--prefix-size", 5, "--batch-size", 4,
        "--tokens-per-sample", 16,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    target = {line[0][2:]: line[1] for line in lines if line[0].startswith("T-")}
    written = {line[0][2:]: line[2] for line in lines if line[0].startswith("D-")}
    assert target.keys() == written.keys() and len(target) > 20
    # The first 5 tokens are those of the target. fairseq ends a text at </s>, also within them.
    whole = [key for key, text in written.items() if len(text.split()) >= 5]
    assert len(whole) > 10
    assert all(written[key].split()[:4] == target[key].split()[:4] for key in whole)


def test_fairseqs_hub_samples_and_scores(members, stream):
    alma.register()
    hub = SwitchLanguageModel.from_pretrained(
        str(members[0].parent), members[0].name, str(stream), bpe="alma_stream", batch_size=2
    )
    one = alma.load(members[0], stream=stream)
    texts = hub.sample([PROMPT, "w4"], beam=1, max_len_b=30, min_len=30)
    for prompt, text in zip([PROMPT, "w4"], texts, strict=True):
        length = 30 - len(one.tokenizer.encode(prompt))
        assert text == prompt + one.generate(prompt, length, min_tokens=length, **GREEDY)[0].text
    for scored, ours in zip(hub.score([PROMPT, "w4"]), one.score([PROMPT, "w4"]), strict=True):
        np.testing.assert_allclose(-scored["positional_scores"].numpy(), ours.nats, rtol=1e-4)
    drawn = hub.sample(PROMPT, beam=1, sampling=True, sampling_topk=5, max_len_b=20)
    assert drawn.startswith(PROMPT) and "<unk>" not in drawn
    assert hub.sample(PROMPT, beam=1, sampling=True, sampling_topp=0.8, temperature=2.0, max_len_b=20)


def test_what_is_no_text_and_what_does_not_fit_is_refused(one):
    for texts in (["a", None], [7], [b"x"]):
        with pytest.raises(SettingError, match="give a text or a list of texts, not "):
            one.generate(texts)
        with pytest.raises(SettingError, match="give a text or a list of texts, not "):
            one.score(texts)
    for length in (0, one.window + 1):
        with pytest.raises(SettingError, match=f"{length} tokens: give 1 to {one.window}"):
            one.logits([2] * length)
