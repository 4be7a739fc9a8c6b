"""Exported models compute what the run computes, and an export is complete or not there."""

import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_prep.tokenization.tokenizers import NUM_SPECIAL, SentencePiece, load_tokenizer
from fairseq_alma.core.errors import RunError, StreamError
from fairseq_alma.core.run_folder import EXPORTED as RECORD
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.deploy import deploy
from fairseq_alma.evaluation.members import load_model
from fairseq_alma.huggingface.export import export, main
from fairseq_alma.huggingface.tokenizer import exported_tokenizer
from tests.fairseq_alma.huggingface.conftest import SENTENCE
from tests.late_writers import num_kills_before_it_ends

pytestmark = pytest.mark.filterwarnings("ignore")
LENGTHS = (1, 2, 37, 512)


def loaded(path, stream):
    model, _ = load_model(path, StreamFolder.open(stream), torch.device("cpu"))
    return model


def from_pretrained(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


def tokens(num_words, batch=2, length=512):
    """Random tokens, each sequence after the end of a document."""
    found = torch.randint(4, num_words, (batch, length), generator=torch.Generator().manual_seed(0))
    found[:, 0] = 2
    return found


@torch.no_grad()
def check_logits(ours, theirs, num_words, atol=1e-5):
    x = tokens(num_words)
    expected = ours(x)[0]
    for length in LENGTHS:
        torch.testing.assert_close(theirs(x[:, :length]).logits, expected[:, :length], atol=atol, rtol=0)
    # The first 300 tokens at once, then some more one by one, with a cache.
    output = theirs(x[:, :300], use_cache=True)
    parts = [output.logits]
    for place in (300, 301, 302):
        output = theirs(x[:, place : place + 1], cache=output.cache, use_cache=True)
        parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected[:, :303], atol=atol, rtol=0)
    # The first sequence has padding on the left.
    padded, mask = x.clone(), torch.ones_like(x)
    padded[0, :200], padded[0, 200:], mask[0, :200] = 1, x[0, :312], 0
    output = theirs(padded[:, :510], attention_mask=mask[:, :510], use_cache=True)
    last = theirs(padded[:, 510:], attention_mask=mask, cache=output.cache).logits
    logits = torch.cat([output.logits, last], dim=1)
    torch.testing.assert_close(logits[0, 200:], expected[0, :312], atol=atol, rtol=0)
    torch.testing.assert_close(logits[1], expected[1], atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("experts", "tree"), [(1, False), pytest.param(2, False, marks=pytest.mark.slow), (12, False), (4, True)]
)
def test_logits_are_those_of_the_model(checkpoint, stream, tmp_path, experts, tree):
    path = checkpoint(experts, tree=tree)
    assert export([path], tmp_path / "out", stream)
    ours = loaded(path, stream)
    num_words = StreamFolder.open(stream).dictionary_size
    for attention in ("sdpa", "eager"):
        theirs = from_pretrained(tmp_path / "out", attn_implementation=attention)
        assert type(theirs).__name__ == ("OPTForCausalLM" if experts == 1 else "AlmaForCausalLM")
        check_logits(ours, theirs, num_words)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [*(pytest.param(one, marks=pytest.mark.slow) for one in (1, 12)), 2])
def test_logits_of_the_base_model(checkpoint, stream, tmp_path, experts):
    path = checkpoint(experts, arch="switch_lm_base")
    export([path], tmp_path / "out", stream)
    for attention in ("sdpa", "eager"):
        theirs = from_pretrained(tmp_path / "out", attn_implementation=attention)
        check_logits(loaded(path, stream), theirs, StreamFolder.open(stream).dictionary_size)


@pytest.mark.parametrize("experts", [*(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2)), 12])
def test_logits_in_bfloat16_differ_by_at_most_two_percent(checkpoint, stream, tmp_path, experts):
    """But for a few tokens whose two best experts are almost equal, so that rounding decides between them."""
    path = checkpoint(experts)
    export([path], tmp_path / "out", stream)
    ours, theirs = loaded(path, stream), from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    ours.decoder.precision = "bfloat16"
    x = tokens(StreamFolder.open(stream).dictionary_size, length=300)
    with torch.no_grad():
        expected, found = ours(x)[0].float(), theirs(x).logits.float()
    differences = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (differences < 2e-2).float().mean() > (0.9 if experts > 1 else 0.999)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation_of_the_experts(checkpoint, stream, tmp_path, implementation):
    path = checkpoint(12)
    export([path], tmp_path / "out", stream)
    theirs = from_pretrained(tmp_path / "out", experts_implementation=implementation)
    x = tokens(StreamFolder.open(stream).dictionary_size, length=50)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, loaded(path, stream)(x)[0], atol=1e-5, rtol=0)


@torch.no_grad()
def check_greedy(models, ids, start, num_words):
    """Assert that each token from `start` on has the largest mean probability after the tokens before it."""
    mean = sum(model(torch.tensor([ids]))[0][0].double().softmax(dim=-1) for model in models)
    mean[:, [0, 1, 3, *range(num_words, mean.size(1))]] = 0  # ids without text
    assert ids[start:] == mean.argmax(dim=-1)[start - 1 : -1].tolist()


@pytest.mark.parametrize("experts", [pytest.param((2,), marks=pytest.mark.slow), (2, 1)], ids=["model", "ensemble"])
def test_generate_gives_the_tokens_of_the_run(checkpoint, stream, tmp_path, experts):
    from transformers import AutoTokenizer

    import fairseq_alma

    paths = [checkpoint(number, seed=number) for number in experts]
    export(paths, tmp_path / "out", stream)
    theirs, ours = from_pretrained(tmp_path / "out"), [loaded(path, stream) for path in paths]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    prompts, num_words = ["the stream arrives", "a"], len(tokenizer)
    batch = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    length = batch.input_ids.size(1)
    output = theirs.generate(**batch, max_new_tokens=60, do_sample=False).tolist()
    predictor = fairseq_alma.load(paths, stream=stream)
    for row, mask, expected in zip(
        output, batch.attention_mask.tolist(), predictor.generate(prompts, 60, temperature=0), strict=True
    ):
        end = row.index(2, length) + 1 if 2 in row[length:] else len(row)
        padding = mask.index(1)
        check_greedy(ours, row[padding:end], length - padding, num_words)
        assert set(row[end:]) <= {1}
        assert row[length:end] == expected.ids
    assert max(len(row) for row in output) == length + 60
    # Without a prompt, a document begins.
    check_greedy(ours, theirs.generate(max_new_tokens=9, do_sample=False)[0].tolist(), 1, num_words)
    # Beams reorder the cache of every member.
    options = {"max_new_tokens": 9, "num_beams": 3, "do_sample": False}
    assert theirs.generate(**batch, **options).equal(theirs.generate(**batch, **options, use_cache=False))


def test_an_ensemble_predicts_the_mean_of_the_probabilities(checkpoint, stream, tmp_path):
    paths = [checkpoint(2, seed=2), checkpoint(1, seed=1)]
    export(paths, tmp_path / "out", stream)
    x = tokens(StreamFolder.open(stream).dictionary_size, length=40)
    with torch.no_grad():
        expected = sum(loaded(path, stream)(x)[0].double().softmax(dim=-1) for path in paths) / 2
        found = from_pretrained(tmp_path / "out")(x, labels=x)
    torch.testing.assert_close(found.logits.double().exp(), expected, atol=1e-6, rtol=1e-5)
    nll = -expected[:, :-1].gather(-1, x[:, 1:, None]).log().mean()
    assert float(found.loss) == pytest.approx(float(nll), rel=1e-5)
    member = from_pretrained(tmp_path / "out/member_1")
    with torch.no_grad():
        torch.testing.assert_close(member(x).logits, loaded(paths[0], stream)(x)[0], atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("experts", [(2,), (2, 1)], ids=["model", "ensemble"])
def test_the_cache_may_have_its_earlier_name_and_get_its_layers_when_they_are_used(
    checkpoint, stream, tmp_path, experts
):
    from transformers import DynamicCache

    export([checkpoint(number, seed=number) for number in experts], tmp_path / "out", stream)
    model = from_pretrained(tmp_path / "out")
    x = tokens(StreamFolder.open(stream).dictionary_size, length=20)
    first = model(x[:, :8], use_cache=True)
    second = model(x[:, 8:], past_key_values=first.cache)
    torch.testing.assert_close(second.logits, model(x).logits[:, 8:], atol=1e-5, rtol=0)
    if len(experts) == 1:
        first = model.model(x[:, :8], use_cache=True)
        second = model.model(x[:, 8:], past_key_values=first.cache)
        torch.testing.assert_close(second[0], model.model(x)[0][:, 8:], atol=1e-5, rtol=0)
    else:
        with pytest.raises(ValueError, match="give input_ids, not inputs_embeds"):
            model(inputs_embeds=model.get_input_embeddings()(x))
    greedy = {"max_new_tokens": 9, "do_sample": False}
    expected = model.generate(x, **greedy)
    assert model.generate(x, cache=DynamicCache(), **greedy).equal(expected)


def test_an_exported_ensemble_draws_only_ids_that_have_a_text(checkpoint, stream, tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    export([checkpoint(1, seed=seed) for seed in (1, 2)], tmp_path / "out", stream)
    model = from_pretrained(tmp_path / "out")
    ids = range(len(AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)))
    torch.manual_seed(0)
    drawn = model.generate(torch.full((40, 1), 2), do_sample=True, temperature=50.0, max_new_tokens=50)
    after_the_end = (drawn[:, 1:-1] == 2).cumsum(dim=1) > 0
    assert {*drawn[:, 2:][~after_the_end].tolist()} <= {*ids} - {0, 1, 3}
    # It is that of the folder, which a user may have edited.
    GenerationConfig(max_new_tokens=3).save_pretrained(tmp_path / "out")
    assert from_pretrained(tmp_path / "out").generation_config.max_new_tokens == 3


def test_the_exported_model_can_be_trained(checkpoint, stream, tmp_path):
    export([checkpoint(4, tree=True)], tmp_path / "out", stream)
    model = from_pretrained(tmp_path / "out")
    x = tokens(StreamFolder.open(stream).dictionary_size, length=40)
    model.train()(x, labels=x).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.save_pretrained(tmp_path / "again")
    model.eval()
    with torch.no_grad():
        assert from_pretrained(tmp_path / "again")(x).logits.equal(model(x).logits)


TEXTS = [SENTENCE, "", " </s> <s><pad>a<unk> <|end|>\n\n\tb  c ", "<alma", "Ünïcödé 🙂 ½", "the learner </s>"]


def trained(model, trainer, pre_tokenizer, decoder=None, normalizer=None, added=()):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder, tokenizer.normalizer = pre_tokenizer, decoder, normalizer
    tokenizer.train_from_iterator([SENTENCE, *TEXTS] * 3, trainer)
    tokenizer.add_special_tokens(list(added))
    return tokenizer


BYTES = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
GIVEN = {
    "bpe with </s>": lambda: trained(
        models.BPE(), trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], **BYTES),
        pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(),
        added=[AddedToken("<|end|>", lstrip=True)],
    ),
    "bpe that ignores merges": lambda: trained(
        models.BPE(ignore_merges=True), trainers.BpeTrainer(vocab_size=300, **BYTES),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel(),
    ),
    "unigram": lambda: trained(
        models.Unigram(), trainers.UnigramTrainer(vocab_size=100, unk_token="<unk>", special_tokens=["<unk>"],
                                                  show_progress=False),
        pre_tokenizers.Metaspace(), decoders.Metaspace(), normalizers.NFKC(),
    ),
    "wordpiece": lambda: trained(
        models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]"],
                                                                      show_progress=False),
        pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(),
    ),
    "wordlevel": lambda: trained(
        models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False),
        pre_tokenizers.WhitespaceSplit(),
    ),
}  # fmt: skip


def written(folder, file):
    """Write a tokenizer for transformers, and return it as transformers loads it."""
    from transformers import AutoTokenizer

    for name, content in zip(("tokenizer.json", "tokenizer_config.json"), exported_tokenizer(file), strict=True):
        (folder / name).write_text(json.dumps(content))
    return AutoTokenizer.from_pretrained(folder)


def check_tokenizer(theirs, file):
    ours = load_tokenizer(file)
    for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert theirs(text).input_ids == [2, *(ids + NUM_SPECIAL).tolist()], text
        assert theirs(text, add_special_tokens=False).input_ids == (ids + NUM_SPECIAL).tolist()
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == ours.decode(ids.tolist())
    assert (theirs.bos_token_id, theirs.pad_token_id, theirs.eos_token_id, theirs.unk_token_id) == (2, 1, 2, 3)
    assert theirs(["a", "the learner"], padding=True).input_ids[0][0] == 1


def test_the_tokenizer_has_the_ids_of_the_stream(stream, tmp_path):
    theirs = written(tmp_path, stream / "tokenizer.json")
    assert theirs.eos_token == "</s>"
    check_tokenizer(theirs, stream / "tokenizer.json")


@pytest.mark.parametrize("name", GIVEN)
def test_given_tokenizers_have_the_ids_of_the_stream(tmp_path, name):
    given = tmp_path / "given.json"
    GIVEN[name]().save(str(given))
    check_tokenizer(written(tmp_path, given), given)


def test_a_sentencepiece_tokenizer_has_the_ids_of_the_stream(tmp_path):
    file = tmp_path / "sentencepiece.model"
    runs = "a  b   c    d     --- ---- ------ ====== \u2581\u2581 x\n\n\n   y <0x0A> <unk>\t\x00 \U0001f642\U0001f642"
    file.write_bytes(SentencePiece.train(iter([SENTENCE, runs, Path(__file__).read_text()] * 3), 500))
    theirs, ours = written(tmp_path, file), load_tokenizer(file)
    check_tokenizer(theirs, file)
    generator = random.Random(0)
    texts = [runs, Path(__file__).read_text(), *("".join(generator.choices("ab -=.\n", k=200)) for _ in range(300))]
    for text, ids in zip(texts, ours.encode(texts), strict=True):
        assert theirs(text).input_ids == [2, *(ids + NUM_SPECIAL).tolist()], text
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == ours.decode(ids.tolist())


def test_another_sentencepiece_model_is_refused(tmp_path):
    import sentencepiece

    file = tmp_path / "sentencepiece.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([SENTENCE] * 9), model_prefix=str(file.with_suffix("")), vocab_size=45, minloglevel=2
    )
    with pytest.raises(StreamError, match="not a sentencepiece model as alma-prep trains it"):
        exported_tokenizer(file)


def test_a_run_and_its_stages_are_exported_with_a_card(run, stream, tmp_path, capsys):
    from transformers import AutoTokenizer

    assert main([str(run), str(tmp_path / "last")]) == 0
    assert main([str(run), str(tmp_path / "first"), "--stage", "1"]) == 0
    paths = [[run / f"stages/stage_00{k}/member_{n}/checkpoint_best.pt" for n in (1, 2)] for k in (1, 2)]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "last", trust_remote_code=True)
    x = torch.tensor([tokenizer("the stream arrives").input_ids])
    for folder, of_stage in zip(("first", "last"), paths, strict=True):
        with torch.no_grad():
            expected = sum(loaded(path, stream)(x)[0].softmax(dim=-1) for path in of_stage) / 2
            found = from_pretrained(tmp_path / folder)(x).logits.exp()
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    card = (tmp_path / "first/README.md").read_text()
    rows = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert f"{rows[1]['perplexity']:,.2f}" in card and f"{rows[2]['perplexity']:,.2f}" not in card
    assert "| learner | ens |" in card and "| books | books |" in card and str(stream.parent) not in card
    assert f"{rows[2]['perplexity']:,.2f}" in (tmp_path / "last/README.md").read_text()
    assert main([str(run), str(tmp_path / "last")]) == 0
    assert "contains this model already" in capsys.readouterr().out
    assert "| seed | 0 |" in card
    deployed, _ = deploy(run, tmp_path / "deployed")
    assert main([str(deployed), str(tmp_path / "of_deployed")]) == 0
    assert "FLOPs" in card and "FLOPs" not in (tmp_path / "of_deployed/README.md").read_text()


def test_what_is_at_out_is_not_replaced(checkpoint, stream, tmp_path):
    out, path = tmp_path / "out", checkpoint(2)
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="contains no model that alma-export wrote"):
        export([path], out, stream)
    (out / "notes.txt").unlink()  # an empty folder contains nothing that could be lost
    assert export([path], out, stream)
    (out / "README.md").write_text("edited")
    assert not export([path], out, stream)
    assert (out / "README.md").read_text() == "edited"
    with pytest.raises(RunError, match="contains another model"):
        export([checkpoint(1)], out, stream)
    (out / "config.json").write_text("{}")
    with pytest.raises(RunError, match=r"has been changed \(config.json\)"):
        export([path], out, stream)


def test_an_export_that_is_killed_at_any_write_leaves_nothing_that_looks_finished(checkpoint, stream, tmp_path):
    path, out = checkpoint(2), tmp_path / "place/out"
    out.parent.mkdir()
    export([path], tmp_path / "whole", stream)  # imports everything
    assert num_kills_before_it_ends(lambda: export([path], out, stream), out) > 10
    assert (out / RECORD).read_text() == (tmp_path / "whole" / RECORD).read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.pt", "out", "--stream", "{stream}"], "there is no run and no checkpoint at 'missing.pt'"),
        (["{checkpoint}", "out"], "give --stream"),
        (["{checkpoint}", "out", "--stream", "{stream}", "--stage", "1"], "--stage needs a run folder"),
        (["{run}", "out", "--stage", "7"], "no predictor of stage 7"),
    ],
)
def test_errors_are_one_line(arguments, message, checkpoint, stream, run, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"checkpoint": checkpoint(2), "stream": stream, "run": run}
    assert main([argument.format(**names) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("alma-export: ") and message in line
    assert not (tmp_path / "out").exists()


def test_without_transformers_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["a.pt", "out", "--stream", "stream"]) == 2
    assert "pip install 'fairseq-alma[hf]'" in capsys.readouterr().err
