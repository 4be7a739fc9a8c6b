"""alma-import: make a starting point for alma-lm of an OPT model in the format of Hugging Face.

alma-import FOLDER OUT
alma-prep STREAM --tokenizer OUT/tokenizer.json --source ...       a stream with the ids of the model
alma-lm stream=STREAM init_from=OUT/checkpoint.pt experts=1 ...    continue its training

With learner=gmoe grow_experts=3 grow_router=tree, every second feed-forward network becomes a mixture of 4 experts
after the first stage.

Only models that switch_lm computes exactly are imported: OPT with ReLU, layer norms before the attention, biases and
tied embeddings. The files are read as numbers and text. No code that they name is run.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shortened
from typing import TYPE_CHECKING, Any

from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.files import parse_json, remove_unfinished, sha256_of, written_aside
from fairseq_alma.core.printing import hide_messages_of_libraries, say
from fairseq_alma.core.program import Parser, command
from fairseq_alma.huggingface.export import require_libraries

if TYPE_CHECKING:
    from torch import Tensor

CHECKPOINT, TOKENIZER = "checkpoint.pt", "tokenizer.json"
"""Files in the folder that alma-import writes."""
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EXACT = {
    "activation_function": "relu", "do_layer_norm_before": True, "_remove_final_layer_norm": False, "enable_bias": True,
    "layer_norm_elementwise_affine": True, "tie_word_embeddings": True, "pad_token_id": 1, "bos_token_id": 2,
    "eos_token_id": 2,
}  # fmt: skip
"""Options of OPT with the only value that switch_lm computes."""
_SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "ffn_dim", "max_position_embeddings", "num_attention_heads"
)  # fmt: skip
_DTYPES = ("F32", "F16", "BF16")
_NO_GPT2 = "GPT-2 has the activation gelu_new, and switch_lm has ReLU"


def import_model(source: Path, out: Path) -> None:
    """Write a checkpoint, and the tokenizer and the dictionary that a stream for it has, to the new folder `out`.

    Args:
        source: folder with config.json, tokenizer.json and weights in the format safetensors.
        out: the folder to write.

    Raises:
        SettingError: if `source` contains no such model, or one that switch_lm does not compute exactly.
        RunError: if `out` exists.
    """
    require_libraries("alma-import")
    from data_prep.errors import PrepError
    from data_prep.tokenization.given import given_tokenizer
    from data_prep.tokenization.tokenizers import dictionary_names, dictionary_size, dictionary_text, load_tokenizer
    from fairseq_alma.checkpoints import write_checkpoint
    from fairseq_alma.huggingface.tokenizer import stream_tokenizer

    if out.exists():
        raise RunError(f"{out} exists: choose another folder, or remove it")
    config = _config(source)
    path = _plain_file(source, TOKENIZER, "save it with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER)")
    try:
        _, content = given_tokenizer(str(path))
    except PrepError as error:
        raise SettingError(str(error)) from error
    tokenizer = stream_tokenizer(content, path)
    remove_unfinished(out)
    with written_aside(out) as folder:
        folder.mkdir()
        (folder / TOKENIZER).write_bytes(tokenizer)
        symbols = load_tokenizer(folder / TOKENIZER).symbols()
        if (size := dictionary_size(len(symbols))) != config["vocab_size"]:
            # It is common to resize a model to exactly the tokens of its tokenizer.
            resized = (
                f"model.resize_token_embeddings({size}), as a stream has a multiple of 8 entries, and save it again"
            )
            is_exact = size - 8 < config["vocab_size"] < size
            raise SettingError(
                f"{source} has vocab_size {config['vocab_size']:,}, but with {path} a stream has a dictionary of "
                f"{size:,} entries: {f'call {resized}' if is_exact else 'give the tokenizer of the model'}"
            )
        # As in a stream, so that the model can be used before there is a stream.
        names = dictionary_names(symbols)
        (folder / "dict.txt").write_text(dictionary_text(names), encoding="utf-8", newline="")
        weights = _weights(source, config)
        write_checkpoint(_checkpoint(weights, config, sha256_of(folder / "dict.txt")), folder / CHECKPOINT)


def _config(source: Path) -> dict[str, Any]:
    """Return the checked configuration of an OPT model. Raise SettingError for any other."""
    from transformers import OPTConfig

    path = _plain_file(source, "config.json", "give the folder of a model in the format of Hugging Face")
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:
        raise SettingError(f"{path} cannot be read ({error}): download it again") from error
    kind = found.get("model_type") if isinstance(found, dict) else None
    if kind != "opt":
        reason = f", because {_NO_GPT2}" if kind == "gpt2" else ""
        raise SettingError(
            f"{path} has model_type {shortened(kind)}, expected 'opt': no other model is imported{reason}"
        )
    if "auto_map" in found:
        raise SettingError(f"{path} names code of its own (auto_map), which is not run: give a model without it")
    config = {**OPTConfig().to_dict(), **found}
    for name, value in _EXACT.items():
        if type(config[name]) is not type(value) or config[name] != value:
            raise SettingError(
                f"{path} has {name}={shortened(config[name])}, but switch_lm computes only {name}={value!r}: this "
                f"model cannot be imported"
            )
    for name in _SIZES:
        if type(config[name]) is not int or config[name] < 1:
            raise SettingError(f"{path} has {name}={shortened(config[name])}, expected an integer, 1 or more")
    if found.get("word_embed_proj_dim") not in (None, config["hidden_size"]):
        raise SettingError(
            f"{path} has word_embed_proj_dim={shortened(found['word_embed_proj_dim'])}, but switch_lm has embeddings "
            f"of the model width, {config['hidden_size']}: this model cannot be imported"
        )
    if config["hidden_size"] % config["num_attention_heads"]:
        raise SettingError(f"{path}: hidden_size must be a multiple of num_attention_heads")
    return config


def _plain_file(folder: Path, name: str, advice: str) -> Path:
    """Return the path of a file in a folder. Raise SettingError if it is missing, or a link or a path out of it."""
    path = folder / name
    if Path(name).name != name:
        raise SettingError(f"{folder} names the file {shortened(name)}, which is not a file in it: download it again")
    if path.is_symlink():
        raise SettingError(f"{path} is a link, and links are not followed: copy the folder with cp -rL")
    if not path.is_file():
        raise SettingError(f"{path} is missing: {advice}")
    return path


def _weights(source: Path, config: Mapping[str, Any]) -> "dict[str, Tensor]":
    """Return the weights in float32, named as in `opt_shapes`.

    All shapes are compared before a weight is read. Raise SettingError if a file or a weight does not fit.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    from fairseq_alma.huggingface.weights import opt_shapes

    files = [_plain_file(source, name, _no_weights(source)) for name in _names_of_files(source)]
    opened: dict[str, Any] = {}
    try:
        for path in files:
            file = safe_open(path, framework="pt")
            opened |= {name.removeprefix("model."): (path, file, name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise SettingError(f"{path} is not a file of safetensors ({error}): download it again") from error
    if config["num_hidden_layers"] > len(opened):  # before a list of all layers is made
        raise SettingError(f"{source} has fewer weights than layers (num_hidden_layers): download it again")
    sizes = (
        config[name]
        for name in ("vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size", "ffn_dim")
    )
    expected = opt_shapes(*sizes)
    if "lm_head.weight" in opened:
        expected["lm_head.weight"] = expected["decoder.embed_tokens.weight"]
    if one_sided := sorted(expected.keys() ^ opened.keys()):
        where = "config.json" if one_sided[0] in expected else "the weights"
        raise SettingError(f"{source}: {shortened(one_sided[0])} is only in {where}: this model cannot be imported")
    for name, (path, file, stored) in opened.items():
        part = file.get_slice(stored)
        if list(part.get_shape()) != expected[name] or part.get_dtype() not in _DTYPES:
            raise SettingError(
                f"{path}: {name} has the shape {list(part.get_shape())} and the type {part.get_dtype()}, expected "
                f"{expected[name]} and one of {', '.join(_DTYPES)}"
            )
    weights = {name: file.get_tensor(stored).to(torch.float32) for name, (_, file, stored) in opened.items()}
    if wrong := next((name for name, values in weights.items() if not values.isfinite().all()), None):
        raise SettingError(f"{source}: {wrong} contains numbers that are not finite: download it again")
    output = weights.pop("lm_head.weight", None)
    if output is not None and not torch.equal(output, weights["decoder.embed_tokens.weight"]):
        raise SettingError(f"{source}: lm_head.weight is not the embedding, and switch_lm has tied embeddings")
    return weights


def _names_of_files(source: Path) -> list[str]:
    """Return the names of the files with the weights, from the index if there is one."""
    if not (source / _INDEX).exists() or (source / _WEIGHTS).exists():
        return [_WEIGHTS]
    path = _plain_file(source, _INDEX, "")
    try:
        index = parse_json(path.read_bytes())
        names = index["weight_map"].values()
        if not all(isinstance(name, str) and name.endswith(".safetensors") for name in names):
            raise ValueError("weight_map names files that are not .safetensors")
        return sorted(set(names))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingError(f"{path} cannot be read ({error!r}): download it again") from error


def _no_weights(source: Path) -> str:
    advice = "download the model again"
    if any(source.glob("*.bin")):
        advice = "pickles are not read. Convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER)"
    return advice


def _checkpoint(weights: "Mapping[str, Tensor]", config: Mapping[str, Any], dictionary: str) -> dict[str, Any]:
    """Return the checkpoint of a model with one expert in each mixture, as fairseq-train writes it.

    `dictionary` is the SHA-256 digest of its dict.txt.
    """
    import torch
    from omegaconf import OmegaConf

    from fairseq_alma.huggingface.weights import switch_weights
    from fairseq_alma.lm.fairseq_config import member_config

    state = switch_weights(weights)
    for number in range(1, config["num_hidden_layers"], 2):
        # The rest of a mixture. The router has no influence as long as there is one expert.
        mixture, dim = f"decoder.layers.{number}.mixture.", config["hidden_size"]
        generator = torch.Generator().manual_seed(number)
        state[f"{mixture}router.weight"] = torch.randn(1, dim, generator=generator) * dim**-0.5
        state[f"{mixture}router.split_E"] = torch.full((1,), -1.0)
        state[f"{mixture}valid_loss_E"] = state[f"{mixture}valid_tokens_E"] = torch.zeros(1, dtype=torch.float64)
        state[f"{mixture}valid_input_ED"] = torch.zeros(1, dim)
    state["decoder.version"] = torch.tensor([1.0])
    length = config["max_position_embeddings"]
    options = member_config(
        {"arch": "switch_lm_base", "data": "STREAM", "num_experts": 1, "tokens_per_sample": length,
         "total_num_update": 1}
    )  # fmt: skip
    options.model.update(
        {
            "decoder_layers": config["num_hidden_layers"], "decoder_embed_dim": config["hidden_size"],
            "decoder_ffn_embed_dim": config["ffn_dim"], "decoder_attention_heads": config["num_attention_heads"],
            "learned_positions": length,
        }
    )  # fmt: skip
    return {
        "args": None,
        "cfg": OmegaConf.to_container(options, resolve=True, enum_to_str=True),
        "model": state,
        "criterion": None,
        "optimizer_history": [{"optimizer_name": None, "lr_scheduler_state": {}, "num_updates": 0}],
        "task_state": {},
        "extra_state": {
            "train_iterator": {"epoch": 1}, "val_loss": None, "previous_training_time": 0.0,
            "AlmaLanguageModelingTask": {
                "processed": {kind: {"tokens": 0, "token_pairs": 0} for kind in ("training", "validation")},
                "dict_sha256": dictionary,
            },
        },
    }  # fmt: skip


@command("alma-import")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alma-import and return its exit status."""
    parser = Parser(prog="alma-import", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="FOLDER", help="folder of a model in the format of Hugging Face")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    arguments = parser.parse_args(argv)
    hide_messages_of_libraries()
    import_model(arguments.source, arguments.out)
    out = arguments.out
    say(
        f"wrote {out}. Make a stream with alma-prep --tokenizer {out / TOKENIZER}, and continue with alma-lm "
        f"init_from={out / CHECKPOINT} experts=1"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
