"""Time and profile the updates of a switch language model in one process. lm_profile.py runs it for each variant.

It prints a JSON object: `seconds`, the smallest CPU seconds of the parts of an update, and `kinds`, the CPU seconds of
one update by kind of operation (see KINDS).
"""

import argparse
import inspect
import json
import re
import sys
import time
from argparse import Namespace
from typing import Any

import torch

KINDS = {
    "attention": r"scaled_dot_product|_flash_attention",
    "matrix products": r"^aten::(mm|addmm|bmm|baddbmm|addbmm|_grouped_mm|mv|dot)$|mkldnn_linear",
    "softmax and loss over the vocabulary": r"log_softmax|nll_loss|^aten::exp_?$|cross_entropy|logsumexp",
    "copies and conversions": r"^aten::(copy_|_to_copy|clone|cat|contiguous)$",
    "layer normalization": r"layer_norm",
    "routing (index, gather, scatter, sort)": r"index|gather|scatter|sort|bincount|topk|embedding|cumsum|one_hot",
    "dropout": r"dropout|bernoulli",
}
"""Kind of operation -> pattern of the names of torch's operations. The first pattern that matches counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--code", required=True, help="root of the ALMA repository whose code is measured")
    parser.add_argument("--arch", default="switch_lm_base")
    parser.add_argument("--layers", type=int, help="number of layers (default: that of the architecture)")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--optimizer", choices=["fairseq", "fused"], default="fused")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=50_264)
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--sequences", type=int, default=4, help="sequences in an update")
    parser.add_argument("--repeats", type=int, default=3, help="measured updates, after one that is not measured")
    options = parser.parse_args()
    sys.path.insert(0, options.code)
    if options.device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    update = make_update(options)
    update()
    times = [update() for _ in range(options.repeats)]
    seconds = {part: min(one[part] for one in times) for part in times[0]}
    print(json.dumps({"seconds": seconds, "kinds": profile(update, options.device)}))


def make_update(options: argparse.Namespace):
    """Return a function that trains for one update on random tokens and returns the seconds of its parts."""
    import fairseq_alma

    fairseq_alma.register()
    from fairseq.data import Dictionary
    from fairseq.optim.adam import Adam

    from fairseq_alma.criteria.switch_lm import SwitchLanguageModelCriterion
    from fairseq_alma.models import switch_lm

    dictionary = Dictionary()
    for number in range(options.vocabulary - len(dictionary)):
        dictionary.add_symbol(f"w{number}")
    sizes = Namespace(**({"decoder_layers": options.layers} if options.layers else {}))
    getattr(switch_lm, options.arch)(sizes)
    values = {**vars(sizes), "dropout": 0.1, "num_experts": options.experts, "tokens_per_sample": options.length}
    values |= {"capacity_factor": 0.0, "precision": options.precision}
    known = inspect.signature(switch_lm.SwitchLanguageModelConfig).parameters
    config = switch_lm.SwitchLanguageModelConfig(**{name: value for name, value in values.items() if name in known})
    model = switch_lm.SwitchLanguageModel.build_model(config, Namespace(source_dictionary=dictionary))
    model.to(options.device).train()
    criterion = SwitchLanguageModelCriterion(Namespace(target_dictionary=dictionary), 0.01, 0.0)
    parameters = list(model.parameters())
    if options.optimizer == "fused":
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    else:
        optimizer = Adam(parameters, lr=1e-5, betas=(0.9, 0.98), weight_decay=0.0)
    shape = (options.sequences, options.length + 1)
    tokens = torch.randint(4, options.vocabulary, shape, device=options.device)
    sample: dict[str, Any] = {
        "target": tokens[:, 1:],
        "ntokens": tokens[:, 1:].numel(),
        "net_input": {"src_tokens": tokens[:, :-1]},
    }
    if "has_padding" in inspect.signature(model.forward).parameters:
        sample["net_input"]["has_padding"] = False
    clock = time.process_time if options.device == "cpu" else synchronized_time

    def update() -> dict[str, float]:
        start = clock()
        loss, num_tokens, _ = criterion(model, sample)
        forward = clock()
        (loss / num_tokens).backward()
        backward = clock()
        torch.nn.utils.clip_grad_norm_([p for p in parameters if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        end = clock()
        return {"forward": forward - start, "backward": backward - forward, "clipping and Adam": end - backward}

    return update


def synchronized_time() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def profile(update, device: str) -> dict[str, float]:
    """Return the seconds of one update by kind of operation. Other operations are counted as "elementwise, other"."""
    with torch.profiler.profile() as profiler:
        update()
    kinds = dict.fromkeys([*KINDS, "Adam and clipping in one kernel", "elementwise, other"], 0.0)
    for event in profiler.key_averages():
        seconds = (event.self_cpu_time_total if device == "cpu" else event.self_device_time_total) / 1e6
        kinds[kind_of(event.key)] += seconds
    return kinds


def kind_of(name: str) -> str:
    if re.search(r"_fused_adam|vector_norm|_foreach", name):
        return "Adam and clipping in one kernel"
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "elementwise, other")


if __name__ == "__main__":
    main()
