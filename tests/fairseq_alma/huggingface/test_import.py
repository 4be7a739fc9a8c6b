"""OPT models become starting points of alma-lm, exactly; all other folders are refused before a weight is read."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from fairseq_alma.checkpoints import require_checkpoint, write_checkpoint
from fairseq_alma.core.errors import SettingError
from fairseq_alma.core.files import sha256_of
from fairseq_alma.core.stream_folder import StreamFolder
from fairseq_alma.evaluation.members import load_model
from fairseq_alma.growth.checkpoint import grow_checkpoint
from fairseq_alma.huggingface.export import export
from fairseq_alma.huggingface.importing import import_model, main
from tests.commands import RUN, run_command
from tests.late_writers import num_kills_before_it_ends

pytestmark = pytest.mark.filterwarnings("ignore")


def logits(path, stream, x):
    model, _ = load_model(path, StreamFolder.open(stream), torch.device("cpu"))
    with torch.no_grad():
        return model(x)[0]


@pytest.fixture(scope="module")
def opt(checkpoint, stream, tmp_path_factory):
    """The folder of an OPT model with the vocabulary of the stream, in two files in float16, as others write it."""
    from transformers import OPTConfig, OPTForCausalLM

    folder = tmp_path_factory.mktemp("opt")
    exported = folder / "exported"
    export([checkpoint(1)], exported, stream)
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=StreamFolder.open(stream).dictionary_size, hidden_size=96, num_hidden_layers=3, ffn_dim=160,
        num_attention_heads=6, max_position_embeddings=64, word_embed_proj_dim=96,
    )  # fmt: skip
    model = OPTForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    model.half().save_pretrained(folder / "model", max_shard_size="300KB")
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(exported / name, folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def imported(opt, tmp_path_factory):
    out = tmp_path_factory.mktemp("imported") / "out"
    assert main([str(opt), str(out)]) == 0
    return out


def test_an_imported_model_computes_the_same(opt, imported, stream):
    from transformers import OPTForCausalLM

    x = torch.randint(4, 300, (2, 64), generator=torch.Generator().manual_seed(0))
    model = OPTForCausalLM.from_pretrained(opt, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(x).logits
    torch.testing.assert_close(logits(imported / "checkpoint.pt", stream, x), expected, atol=1e-5, rtol=0)


def test_export_import_export_gives_the_same_files(checkpoint, stream, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    export([checkpoint(1)], first, stream)
    import_model(first, tmp_path / "imported")
    assert (tmp_path / "imported/tokenizer.json").read_bytes() == (stream / "tokenizer.json").read_bytes()
    export([tmp_path / "imported/checkpoint.pt"], second, stream)
    names = {path.name for path in first.iterdir()}
    assert {path.name for path in second.iterdir()} == names
    for name in names - {"alma_export.json"}:  # which has the digest of the checkpoint
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_an_import_that_is_killed_at_any_write_leaves_nothing_that_looks_finished(opt, imported, tmp_path):
    out = tmp_path / "place/out"
    out.parent.mkdir()
    assert num_kills_before_it_ends(lambda: import_model(opt, out), out) > 5
    for name in ("tokenizer.json", "dict.txt"):
        assert (out / name).read_bytes() == (imported / name).read_bytes()
    ours, whole = (require_checkpoint(folder / "checkpoint.pt")["model"] for folder in (out, imported))
    assert ours.keys() == whole.keys() and all(ours[name].equal(whole[name]) for name in whole)


def test_training_continues_from_an_imported_model_and_its_layers_become_mixtures(imported, stream, tmp_path):
    run = tmp_path / "run"
    settings = (
        *RUN,
        "updates_per_mega_batch=8",
        "validations=1",
        "replay=all",
        "learner=gmoe",
        "grow_experts=3",
        "grow_router=tree",
    )
    start = f"init_from={imported / 'checkpoint.pt'}"
    done = run_command("alma-lm", f"stream={stream}", f"out={run}", start, "experts=1", *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    begun = require_checkpoint(run / "stages/stage_000/member_1/checkpoint_untrained.pt")["model"]
    wanted = require_checkpoint(imported / "checkpoint.pt")["model"]
    assert all(begun[name].equal(wanted[name]) for name in wanted)
    rows = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert rows[2]["perplexity"] < rows[1]["perplexity"] < rows[0]["perplexity"]
    assert [row["num_experts"] for row in rows] == [1, 1, 4]
    assert json.loads((run / "settings.json").read_text())["init_from"] == str(imported / "checkpoint.pt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["experts=4"], "has 1 experts in each mixture, but experts=4: give experts=1, or add experts with alma-grow"),
        (["experts=1", "tokens_per_sample=128"], "is more than the 64 positions"),
        (["experts=1", "from_scratch=true"], "cannot be combined with from_scratch=true"),
        (["experts=1", "init_from=missing.pt"], "missing.pt is not a complete checkpoint"),
    ],
)
def test_settings_that_do_not_fit_the_checkpoint(imported, stream, tmp_path, settings, message):
    from fairseq_alma.lm.fairseq_config import Member, TrainingConfigs
    from fairseq_alma.lm.settings import LanguageModelSettings

    values = {"stream": str(stream), "out": str(tmp_path / "run"), "init_from": str(imported / "checkpoint.pt"),
              "updates": 1, "tokens_per_sample": 32, "batch_size": 8, "sequences_per_update": 8,
              "precision": "float32"}  # fmt: skip
    for setting in settings:
        name, value = setting.split("=")
        values[name] = int(value) if value.isdecimal() else value == "true" or value
    with pytest.raises(SettingError, match=message):
        given = LanguageModelSettings.from_mapping(values)
        TrainingConfigs(given, StreamFolder.open(stream).without_test(), None).of(Member.of_run(1, 0, given.experts))


def grow(imported, target):
    """Write the imported model with two experts, as after a validation."""
    checkpoint = require_checkpoint(imported / "checkpoint.pt")
    for name, value in checkpoint["model"].items():
        if name.endswith("valid_loss_E"):
            value.fill_(1.0)
    validated = target.with_name("validated.pt")
    write_checkpoint(checkpoint, validated)
    grow_checkpoint(validated, target, 1, "tree")


def test_a_model_with_experts_of_the_router_tree_is_grown_by_it_again(imported, stream, tmp_path):
    from fairseq_alma.lm.fairseq_config import Member, TrainingConfigs
    from fairseq_alma.lm.settings import LanguageModelSettings

    grow(imported, tmp_path / "grown.pt")
    values = {"stream": str(stream), "out": str(tmp_path / "run"), "init_from": str(tmp_path / "grown.pt"),
              "updates": 1, "tokens_per_sample": 32, "batch_size": 8, "sequences_per_update": 8, "experts": 2,
              "precision": "float32", "learner": "gmoe", "grow_experts": 1}  # fmt: skip

    def check(**more):
        given = LanguageModelSettings.from_mapping({**values, **more})
        TrainingConfigs(given, StreamFolder.open(stream).without_test(), None).of(Member.of_run(1, 0, given.experts))

    check(grow_router="tree")
    with pytest.raises(SettingError, match="has experts that were added with the router tree: give grow_router=tree"):
        check()


def test_the_copy_of_another_checkpoint_does_not_count(imported, stream, tmp_path):
    """A command was killed before its first step, and another checkpoint was given to the next one."""
    from fairseq_alma.lm.init_from import initial_sizes
    from fairseq_alma.lm.settings import LanguageModelSettings

    copy = tmp_path / "stages/stage_000/member_1/checkpoint_untrained.pt"
    grow(imported, copy)
    view = StreamFolder.open(stream).without_test()

    def sizes(experts):
        return initial_sizes(
            LanguageModelSettings(
                stream=str(stream), out=str(tmp_path), init_from=str(imported / "checkpoint.pt"), updates=1,
                experts=experts, tokens_per_sample=32,
            ),
            view,
        )  # fmt: skip

    (tmp_path / "settings.json").write_text(json.dumps({"stream": str(stream), "init_from": "/first.pt"}))
    assert sizes(1)["decoder_layers"] > 0
    (tmp_path / "settings.json").write_text(
        json.dumps({"stream": str(stream), "init_from": f"{imported}/checkpoint.pt"})
    )
    assert sizes(2)["decoder_layers"] > 0  # the copy of this run, which may have been its only file


def test_a_stream_with_another_tokenizer_is_refused(imported, stream, own):
    from fairseq_alma.lm.init_from import initial_sizes
    from fairseq_alma.lm.settings import LanguageModelSettings

    other = own(stream)
    first, second, *rest = (other / "dict.txt").read_text().splitlines(keepends=True)
    (other / "dict.txt").write_text("".join([second, first, *rest]))
    description = json.loads((other / "stream.json").read_text())
    description["tokenizer"]["dict_sha256"] = sha256_of(other / "dict.txt")
    (other / "stream.json").write_text(json.dumps(description))
    view = StreamFolder.open(other).without_test()
    settings = LanguageModelSettings(
        stream=str(other), out="run", init_from=str(imported / "checkpoint.pt"), updates=1, experts=1,
        tokens_per_sample=32,
    )  # fmt: skip
    with pytest.raises(SettingError, match=r"with another dictionary than that of .* --tokenizer FILE"):
        initial_sizes(settings, view)


def configured(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def one_file(folder, **changes):
    """Join the weights in one file, with changes: a tensor, or None to remove it."""
    weights = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    weights |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / "model.safetensors")


def weighted(**changes):
    return lambda folder: one_file(folder, **changes)


def indexed(name):
    def change(folder):
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] = dict.fromkeys(index["weight_map"], name)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def pickled(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")


def linked(name):
    def change(folder):
        target = shutil.move(folder / name, folder.parent / "outside")
        (folder / name).symlink_to(target)

    return change


def huge_header(folder):
    one_file(folder)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def huge_tensor(folder):
    one_file(folder)
    header = json.dumps({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def own_tokenizer(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = []
    content["model"]["vocab"] = {symbol: number for number, symbol in enumerate("abcdef")}
    content["model"]["merges"] = []
    content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))


DECODER = "model__decoder__"
HOSTILE = {
    "gpt2": (configured(model_type="gpt2", activation_function="gelu_new"), "expected 'opt'.*gelu_new"),
    "llama": (configured(model_type="llama"), "model_type 'llama'"),
    "no type": (configured(model_type=["opt"]), "model_type"),
    "gelu": (configured(activation_function="gelu"), "computes only activation_function='relu'"),
    "post-norm": (configured(do_layer_norm_before=False), "computes only do_layer_norm_before=True"),
    "projection": (configured(word_embed_proj_dim=32), "word_embed_proj_dim=32"),
    "untied": (configured(tie_word_embeddings=False), "computes only tie_word_embeddings=True"),
    "no bias": (configured(enable_bias=0), "computes only enable_bias=True"),
    "code": (configured(auto_map={"AutoModelForCausalLM": "evil.Model"}), "names code of its own"),
    "many layers": (configured(num_hidden_layers=10**15), "fewer weights than layers"),
    "many words": (configured(vocab_size=10**15), "vocab_size 1,000,000,000,000,000"),
    "wide": (configured(hidden_size=6 * 10**15, word_embed_proj_dim=None), "has the shape"),
    "no layers": (configured(num_hidden_layers=0), "expected an integer, 1 or more"),
    "text for a size": (configured(ffn_dim="__import__('os')"), "expected an integer, 1 or more"),
    "heads": (configured(num_attention_heads=7), "must be a multiple of num_attention_heads"),
    "other layers": (configured(num_hidden_layers=2), "is only in the weights"),
    "pickle": (pickled, "model.safetensors is missing: pickles are not read"),
    "linked weights": (linked("model-00001-of-00002.safetensors"), "is a link"),
    "linked configuration": (linked("config.json"), "is a link"),
    "linked tokenizer": (linked("tokenizer.json"), "is a link"),
    "index out of the folder": (indexed("../outside.safetensors"), "which is not a file in it"),
    "absolute index": (indexed("/etc/passwd.safetensors"), "which is not a file in it"),
    "index of pickles": (indexed("pytorch_model.bin"), "names files that are not .safetensors"),
    "index of numbers": (indexed(3), "names files that are not .safetensors"),
    "missing weight": (weighted(**{f"{DECODER}layers__1__fc1__bias": None}), "is only in config.json"),
    "more weights": (weighted(evil=torch.zeros(3)), "'evil' is only in the weights"),
    "wrong shape": (weighted(**{f"{DECODER}final_layer_norm__bias": torch.zeros(95)}), r"has the shape \[95\]"),
    "integers": (weighted(**{f"{DECODER}final_layer_norm__bias": torch.zeros(96, dtype=torch.int64)}), "the type I64"),
    "not finite": (weighted(**{f"{DECODER}final_layer_norm__bias": torch.full((96,), torch.nan)}), "not finite"),
    "another output": (weighted(lm_head__weight=torch.zeros(352, 96)), "tied embeddings"),
    "huge header": (huge_header, "not a file of safetensors"),
    "huge tensor": (huge_tensor, "not a file of safetensors"),
    "not JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "model_type None"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot be read"),
    "another tokenizer": (own_tokenizer, "has the symbols a, b, c, d with the ids 0 to 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_folder_is_refused_in_one_line(opt, own, tmp_path, monkeypatch, capsys, name):
    change, message = HOSTILE[name]
    folder = own(opt)
    change(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pickle.Unpickler", None)  # nothing is read from a pickle
    assert main([str(folder), "out"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("alma-import: ")
    with pytest.raises(SettingError, match=message):
        import_model(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "owned").exists()


def test_a_model_that_was_resized_to_its_tokenizer_is_refused_with_the_size_that_it_needs(opt, own, tmp_path):
    from transformers import AutoTokenizer, OPTForCausalLM

    folder = own(opt)
    model = OPTForCausalLM.from_pretrained(folder)
    size = model.config.vocab_size
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(folder)))
    assert model.config.vocab_size % 8
    model.save_pretrained(folder, max_shard_size="300KB")
    with pytest.raises(SettingError, match=rf"call model\.resize_token_embeddings\({size}\)"):
        import_model(folder, tmp_path / "out")
    model.resize_token_embeddings(size)
    model.save_pretrained(folder, max_shard_size="300KB")
    import_model(folder, tmp_path / "out")


def test_an_existing_folder_is_not_replaced(opt, imported, capsys):
    assert main([str(opt), str(imported)]) == 2
    assert "exists: choose another folder" in capsys.readouterr().err
