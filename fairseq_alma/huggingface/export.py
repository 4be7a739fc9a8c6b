"""alma-export: write a model for Hugging Face's transformers.

alma-export RUN OUT
alma-export RUN OUT --stage 2
alma-export CHECKPOINT [CHECKPOINT ...] OUT --stream STREAM      several checkpoints: an ensemble

Models with one expert in each mixture are written as OPT models, which need no code of ours. Load the others with
`AutoModelForCausalLM.from_pretrained(OUT, trust_remote_code=True)`.
"""

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from fairseq_alma.core.errors import RunError, SettingError
from fairseq_alma.core.files import read_json, remove_unfinished, sealed, sha256_of, write_json, written_aside
from fairseq_alma.core.printing import hide_messages_of_libraries, say
from fairseq_alma.core.program import Parser, add_models, command
from fairseq_alma.core.run_folder import EXPORTED

if TYPE_CHECKING:
    from torch import Tensor

    from fairseq_alma.stream_tokenizer import StreamTokenizer

CODE = ("configuration_alma.py", "modeling_alma.py")
FORMAT_VERSION = 1


class Record(TypedDict):
    """The content of alma_export.json."""

    format_version: int
    checkpoints: list[str]
    """SHA-256 digest of each checkpoint."""
    tokenizer: str
    """SHA-256 digest of the tokenizer file of the stream."""
    files: dict[str, str]
    """SHA-256 digest of each exported file, but the model card, which people edit."""


def require_libraries(command: str) -> None:
    """Raise SettingError if transformers or safetensors is not installed."""
    if missing := [name for name in ("safetensors", "transformers") if importlib.util.find_spec(name) is None]:
        raise SettingError(
            f"{command} needs {' and '.join(missing)}, which is not installed: run pip install 'fairseq-alma[hf]'"
        )


def export(paths: Sequence[Path], out: Path, stream: Path | None = None, stage: int | None = None) -> bool:
    """Write a model, or an ensemble, to the folder `out`. Return False if it is there already.

    Args:
        paths: the run folder, or the checkpoints of an ensemble.
        out: the folder to write. It must not exist, unless it is empty or contains the same export.
        stream: the stream folder, or a folder with its dict.txt and tokenizer file; by default the stream of the run.
        stage: the stage of the run; by default the last one.

    Raises:
        SettingError, StreamError, RunError: if a checkpoint, a stream or `out` cannot be used.
    """
    require_libraries("alma-export")
    from fairseq_alma.evaluation.members import find_members
    from fairseq_alma.huggingface.card import model_card
    from fairseq_alma.huggingface.tokenizer import exported_tokenizer
    from fairseq_alma.stream_tokenizer import StreamTokenizer

    found = find_members(paths, stream, stage)
    checkpoints, dictionary = found.checkpoints, StreamTokenizer(found.stream)
    tokenizer = dictionary.file
    if out.exists() and _is_there(out, [sha256_of(path) for path in checkpoints], sha256_of(tokenizer)):
        return False
    remove_unfinished(out)
    described, tokenizer_config = exported_tokenizer(tokenizer)
    with written_aside(out) as folder:
        folder.mkdir()
        members = []
        for number, path in enumerate(checkpoints, start=1):
            member = folder / f"member_{number}" if len(checkpoints) > 1 else folder
            members.append(_write_model(path, dictionary, member))
        if len(checkpoints) > 1:
            _write_ensemble(members, dictionary, folder)
        for place in {folder, *(path.parent for path in folder.glob("member_*/config.json"))}:
            write_json(place / "tokenizer.json", described, durable=False)
            write_json(place / "tokenizer_config.json", tokenizer_config, durable=False)
        run = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
        length = min(config["max_position_embeddings"] for config in members)
        needs_code = len(members) > 1 or members[0]["model_type"] != "opt"
        card = model_card(run, stage, found.stream, len(members), needs_code, length)
        (folder / "README.md").write_text(card, encoding="utf-8")
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
        record = Record(
            format_version=FORMAT_VERSION,
            checkpoints=[sha256_of(path) for path in checkpoints],
            tokenizer=sha256_of(tokenizer),
            files={str(path.relative_to(folder)): sha256_of(path) for path in files},
        )
        write_json(folder / EXPORTED, sealed(record), durable=False)
    return True


def _is_there(out: Path, checkpoints: list[str], tokenizer: str) -> bool:
    """Return whether `out` is an export of these files, given by their digests; False if it is an empty folder.

    Raise RunError if it contains anything else.
    """
    if out.is_dir() and not any(out.iterdir()):
        return False
    path, why = out / EXPORTED, "contains no model that alma-export wrote"
    if path.is_file():
        record = read_json(path, Record)
        changed = [
            name for name, digest in record["files"].items()
            if not (out / name).is_file() or sha256_of(out / name) != digest
        ]  # fmt: skip
        why = f"has been changed ({changed[0]})" if changed else "contains another model"
        if not changed and (record["checkpoints"], record["tokenizer"]) == (checkpoints, tokenizer):
            return True
    raise RunError(f"{out} exists, and {why}: choose another folder, or remove it")


def _write_model(path: Path, dictionary: "StreamTokenizer", folder: Path) -> dict[str, Any]:
    """Write one model, without its tokenizer, and return its configuration."""
    import torch
    from transformers import OPTConfig

    from fairseq_alma.checkpoints import require_checkpoint
    from fairseq_alma.evaluation.members import load_model
    from fairseq_alma.huggingface.configuration_alma import AlmaConfig
    from fairseq_alma.huggingface.weights import alma_weights, opt_weights, router_splits
    from fairseq_alma.models.stored import stored_model

    options = stored_model(require_checkpoint(path), path)
    model, _ = load_model(path, dictionary, torch.device("cpu"))
    state = model.state_dict()
    if options.eval_capacity_factor:
        say(
            f"note: {path} was evaluated with a limit on the tokens of an expert (eval_capacity_factor="
            f"{options.eval_capacity_factor}). The exported model has no limit",
            sys.stderr,
        )
    length = min(options.tokens_per_sample, options.learned_positions)  # later positions were not trained
    common: dict[str, Any] = {
        "vocab_size": dictionary.dictionary_size, "hidden_size": options.decoder_embed_dim,
        "num_hidden_layers": options.decoder_layers, "num_attention_heads": options.decoder_attention_heads,
        "max_position_embeddings": length, "dropout": options.dropout, "attention_dropout": options.attention_dropout,
        "bos_token_id": 2, "pad_token_id": 1, "eos_token_id": 2, "dtype": "float32",
    }  # fmt: skip
    if options.num_experts == 1:
        config: Any = OPTConfig(**common, ffn_dim=options.decoder_ffn_embed_dim, architectures=["OPTForCausalLM"])
        weights = opt_weights(state, length)
    else:
        config = AlmaConfig(
            **common, intermediate_size=options.decoder_ffn_embed_dim, num_experts=options.num_experts,
            activation_dropout=options.activation_dropout, router_splits=router_splits(state),
            architectures=["AlmaForCausalLM"], **_auto_map("Alma"),
        )  # fmt: skip
        weights = alma_weights(state, length)
    _write_files(config, dictionary, folder, weights)
    return config.to_dict()


def _write_ensemble(members: Sequence[Mapping[str, Any]], dictionary: "StreamTokenizer", folder: Path) -> None:
    """Write the configuration of an ensemble, given those of its members."""
    from fairseq_alma.huggingface.configuration_alma import AlmaEnsembleConfig

    first = members[0]
    config = AlmaEnsembleConfig(
        member_types=[member["model_type"] for member in members], vocab_size=first["vocab_size"],
        hidden_size=first["hidden_size"], num_attention_heads=first["num_attention_heads"],
        num_hidden_layers=sum(member["num_hidden_layers"] for member in members),
        max_position_embeddings=min(member["max_position_embeddings"] for member in members), dtype="float32",
        architectures=["AlmaEnsembleForCausalLM"], **_auto_map("AlmaEnsemble"),
    )  # fmt: skip
    _write_files(config, dictionary, folder)


def _auto_map(name: str) -> dict[str, Any]:
    """Return the entry of config.json that says in which files the classes are."""
    configuration, model = f"configuration_alma.{name}Config", f"modeling_alma.{name}ForCausalLM"
    return {"auto_map": {"AutoConfig": configuration, "AutoModelForCausalLM": model}}


def _write_files(
    config: Any, dictionary: "StreamTokenizer", folder: Path, weights: "Mapping[str, Tensor] | None" = None
) -> None:
    """Write the configurations of a model, the code that it needs, and its weights if there are any."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    # As in alma-generate, no id is chosen that stands for no text, except for </s>.
    chosen = {*dictionary.token_ids, config.eos_token_id}
    GenerationConfig(
        bos_token_id=config.bos_token_id, pad_token_id=config.pad_token_id, eos_token_id=config.eos_token_id,
        suppress_tokens=[index for index in range(config.vocab_size) if index not in chosen],
    ).save_pretrained(folder)  # fmt: skip
    if weights is not None:
        path = folder / "model.safetensors"
        save_file(dict(weights), path, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", path)  # safetensors lets only its owner read it
    if config.model_type != "opt":
        for name in CODE:
            shutil.copyfile(Path(__file__).with_name(name), folder / name)


@command("alma-export")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command alma-export and return its exit status."""
    parser = Parser(prog="alma-export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser, "export")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    arguments = parser.parse_args(argv)
    hide_messages_of_libraries()
    is_new = export(arguments.path, arguments.out, arguments.stream, arguments.stage)
    say(f"wrote {arguments.out}" if is_new else f"{arguments.out} contains this model already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
