"""Measure how many tokens per second a model writes with a cache of keys and values, and without.

.venv/bin/python benchmarks/generate.py                    on the CPU, printed, in about ten minutes
.venv/bin/python benchmarks/generate.py --device cuda      on one GPU
.venv/bin/python benchmarks/generate.py --write            also written to benchmarks/generate.md

The alternatives are run in turn in one process. All of them choose the most probable token, and write the same tokens:
  ours           LanguagePredictor.generate
  fairseq        fairseq's SequenceGenerator with our decoder, which has the same cache
  transformers   `generate` of Hugging Face's transformers on the exported model (alma-export)
  recompute      the whole text so far goes through the model for each new token, as in earlier versions

Each ratio is shown twice: the ratio of the two smallest times, and the median of the ratios of measurements that are
neighbours in time. The median decides whether the target is met. The exit status is 0 whether targets are met or not.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import provenance, ratio_columns, table, verdict, write_part
from fairseq.sequence_generator import SequenceGenerator
from threadpoolctl import threadpool_limits
from tokenizers import Tokenizer, models, pre_tokenizers

import fairseq_alma as alma
from data_prep.tokenization.tokenizers import AnyTokenizer, dictionary_names, dictionary_text
from fairseq_alma.models.switch_lm import SwitchLanguageModel, SwitchLanguageModelConfig, switch_lm_base, switch_lm_tiny
from fairseq_alma.stream_tokenizer import StreamTokenizer

NUM_EXPERTS, PROMPT, POSITIONS = 4, 16, 1024
MODELS = {"switch_lm_tiny": (switch_lm_tiny, 8_000), "switch_lm_base": (switch_lm_base, 50_257)}
"""Name -> function that sets the sizes, and number of words."""
WAYS = ("ours", "fairseq", "transformers", "recompute")
TARGET = 10
"""Smallest ratio of the time of recompute to ours that passes, for one text of 256 tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device to measure (default: cpu)")
    parser.add_argument("--archs", nargs="+", default=list(MODELS), help="models to measure (default: tiny and base)")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens of each text (default: 256)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="numbers of texts (default: 1)")
    parser.add_argument("--precision", default="float32", help="float32 (default) or bfloat16")
    parser.add_argument("--repeats", type=int, default=3, help="number of measurements (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads on the CPU (default: 1)")
    parser.add_argument("--write", action="store_true", help="write benchmarks/generate.md")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no GPU")
    load_at_start, device = os.getloadavg()[0], torch.device(options.device)
    torch.set_num_threads(options.threads)
    threadpool_limits(options.threads)  # of NumPy
    rows = []
    for arch in options.archs:
        with tempfile.TemporaryDirectory(prefix="generate_") as folder:
            predictor = _predictor(arch, options.precision, Path(folder), device)
        for batch in options.batches:
            rows.append(_row(f"{arch}, {batch}", predictor, batch, options.tokens, options.repeats))
            print(" ".join(map(str, rows[-1])), flush=True)
    text = "\n".join([*_section(rows, device, options), "", *provenance(load_at_start)])
    print(text)
    if options.write:
        introduction = "# Speed of generation\n\nWritten by `benchmarks/generate.py --write`."
        commands = {f"On {name}": f"benchmarks/generate.py --device {name}" for name in ("cpu", "cuda")}
        write_part(introduction, commands, f"On {options.device}", text.splitlines())


def _predictor(arch: str, precision: str, folder: Path, device: torch.device) -> alma.LanguagePredictor:
    """Return a predictor with an untrained model, whose words are w0, w1, ... It uses `folder` for its tokenizer."""
    set_sizes, num_words = MODELS[arch]
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(num_words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / AnyTokenizer.file_name))
    names = dictionary_names([f"w{number}" for number in range(num_words)])
    (folder / "dict.txt").write_text(dictionary_text(names))
    from fairseq.data import Dictionary

    sizes = argparse.Namespace()
    set_sizes(sizes)
    torch.manual_seed(0)
    config = SwitchLanguageModelConfig(
        **vars(sizes), num_experts=NUM_EXPERTS, tokens_per_sample=POSITIONS, precision=precision
    )
    task = argparse.Namespace(source_dictionary=Dictionary.load(str(folder / "dict.txt")))
    model = SwitchLanguageModel.build_model(config, task).to(device)
    return alma.LanguagePredictor([model], StreamTokenizer(folder), POSITIONS)


def _row(name: str, predictor: alma.LanguagePredictor, batch: int, tokens: int, repeats: int) -> list[object]:
    """Measure the continuation of some texts. Return the columns of the table."""
    generator = torch.Generator().manual_seed(batch)
    words = torch.randint(predictor.tokenizer.token_ids.stop - 4, (batch, PROMPT), generator=generator).tolist()
    prompts = [" ".join(f"w{word}" for word in row) for row in words]
    exported = _exported(predictor)

    def _with_transformers(predictor: alma.LanguagePredictor, prompts: Sequence[str], tokens: int) -> list[list[int]]:
        source, used = _source(predictor, prompts), predictor.tokenizer.token_ids
        special = [*range(used.start), *range(used.stop, exported.config.vocab_size)]
        found = exported.generate(
            source, attention_mask=torch.ones_like(source), max_new_tokens=tokens, do_sample=False,
            suppress_tokens=special,
        )  # fmt: skip
        return found[:, source.size(1) :].tolist()

    ways = {"ours": _ours, "fairseq": _with_fairseq, "transformers": _with_transformers, "recompute": _recompute}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):
        found = {}
        for way in WAYS:
            if repeat == 0:  # a short warm-up
                ways[way](predictor, prompts, 4)
                continue
            spent, found[way] = _timed(partial(ways[way], predictor, prompts, tokens), predictor.device)
            seconds[way].append(spent / batch / tokens)
        if len({str(one) for one in found.values()}) > 1:
            print(f"{name}: the alternatives wrote different tokens (rounding decides between equal scores)")
    rates = [f"{1 / statistics.median(seconds[way]):,.0f}" for way in WAYS]
    columns = []
    for other in WAYS[1:]:
        best, median, spread = ratio_columns(seconds[other], seconds["ours"])
        columns += [f"{best:.2f}", f"{median:.2f}", f"{spread:.2f}"]
    return [name, *rates, *columns, verdict(median, TARGET, at_most=False)]


def _ours(predictor: alma.LanguagePredictor, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    return [one.ids for one in predictor.generate(prompts, tokens, min_tokens=tokens, temperature=0)]


@torch.inference_mode()
def _with_fairseq(predictor: alma.LanguagePredictor, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    dictionary, last = predictor.members[0].decoder.dictionary, PROMPT + tokens
    generator = SequenceGenerator(predictor.members, dictionary, beam_size=1, max_len_b=last, min_len=last)
    ids = torch.tensor([predictor.tokenizer.encode(prompt) for prompt in prompts], device=predictor.device)
    source = torch.cat([ids.new_full((len(ids), 1), predictor.tokenizer.eos), ids], 1)
    found = generator.generate(predictor.members, {"net_input": {"src_tokens": source}}, prefix_tokens=ids)
    return [one[0]["tokens"].tolist()[PROMPT:-1] for one in found]


@torch.no_grad()
def _recompute(predictor: alma.LanguagePredictor, prompts: Sequence[str], tokens: int) -> list[list[int]]:
    source, (model,), used = _source(predictor, prompts), predictor.members, predictor.tokenizer.token_ids
    for _ in range(tokens):
        scores, _ = model(source)
        source = torch.cat([source, scores[:, -1, used.start : used.stop].argmax(1, keepdim=True) + used.start], 1)
    return source[:, PROMPT + 1 :].tolist()


def _source(predictor: alma.LanguagePredictor, prompts: Sequence[str]) -> torch.Tensor:
    """Return the ids of the prompts, after that of </s>. They have equal lengths."""
    rows = [[predictor.tokenizer.eos, *predictor.tokenizer.encode(prompt)] for prompt in prompts]
    return torch.tensor(rows, device=predictor.device)


def _exported(predictor: alma.LanguagePredictor) -> Any:
    """Return the model as alma-export writes it."""
    try:
        import torchaudio  # noqa: F401
    except (ImportError, RuntimeError):
        # fairseq requires torchaudio. Beside a torch for another version of CUDA it cannot be imported, but if it is
        # there, transformers imports it.
        sys.modules["torchaudio"] = None  # type: ignore[assignment]
    from fairseq_alma.huggingface.configuration_alma import AlmaConfig
    from fairseq_alma.huggingface.modeling_alma import AlmaForCausalLM
    from fairseq_alma.huggingface.weights import alma_weights

    (model,) = predictor.members
    decoder = model.decoder
    config = AlmaConfig(
        vocab_size=predictor.tokenizer.dictionary_size, hidden_size=decoder.embed_tokens.embedding_dim,
        intermediate_size=decoder.layers[0].fc1.out_features, num_hidden_layers=len(decoder.layers),
        num_attention_heads=decoder.layers[0].self_attn.num_heads, num_experts=NUM_EXPERTS,
        max_position_embeddings=POSITIONS,
    )  # fmt: skip
    exported = AlmaForCausalLM(config)
    exported.load_state_dict(alma_weights(model.state_dict(), POSITIONS), strict=False)  # the output layer is tied
    # In bfloat16, the weights are bfloat16, too, because transformers has no other precision.
    dtype = torch.bfloat16 if decoder.precision == "bfloat16" else torch.float32
    return torch.nn.Module.to(exported, predictor.device, dtype).eval()


def _timed(work: Callable[[], list[list[int]]], device: torch.device) -> tuple[float, list[list[int]]]:
    """Return the seconds that `work` takes, and its result: CPU seconds, or on a GPU seconds of the clock."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    before = clock()
    result = work()  # the tokens are on the host, so nothing is left to compute
    return clock() - before, result


def _section(rows: list[list[object]], device: torch.device, options: argparse.Namespace) -> list[str]:
    """Return the lines of the report."""
    header = ["model, texts", *(f"{way}, tokens/s" for way in WAYS)]
    for other in WAYS[1:]:
        header += [f"time of {other} / ours, ratio of minima", "median", "spread of ratios"]
    on_cpu = f"the CPU ({options.threads} thread), rates in tokens per CPU second"
    where = on_cpu if device.type == "cpu" else f"one {torch.cuda.get_device_name()}, rates in tokens per second"
    words = ", ".join(f"{name} with {number:,} words" for name, (_, number) in MODELS.items() if name in options.archs)
    heading = [*header, f"recompute: at least {TARGET}"]
    return [
        f"On {where}, {options.precision}. E = {NUM_EXPERTS}; {words}. Each text has a prompt of {PROMPT} tokens and "
        f"{options.tokens} new tokens; {options.repeats} measurements of each after a warm-up, in turn. Untrained "
        f"weights, which cost the same as trained ones.",
        "",
        *table(heading, rows),
    ]


if __name__ == "__main__":
    main()
