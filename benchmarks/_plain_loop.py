"""A training loop in plain PyTorch, without fairseq's: the limit with which lm_train.py compares ours.

It trains switch_lm_base, or the Switch Transformer of Hugging Face as a decoder, on random tokens with the criterion's
losses, gradient clipping and torch's fused AdamW. It prints a line after every --log-interval updates.
"""

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fairseq_alma.lm.compilation import cost_so_far

Loss = Callable[[Tensor, Tensor], Tensor]
"""Function that maps inputs and targets, int64 [B, L], to the loss to minimise, a scalar: mean over tokens."""


def ours(options: argparse.Namespace) -> tuple[nn.Module, Loss]:
    """Return our model and its loss."""
    import fairseq_alma

    fairseq_alma.register()
    from fairseq.data import Dictionary

    from fairseq_alma.models import switch_lm

    dictionary = Dictionary()
    for number in range(options.vocabulary - len(dictionary)):
        dictionary.add_symbol(f"w{number}")
    sizes = Namespace()
    getattr(switch_lm, options.arch)(sizes)
    config = switch_lm.SwitchLanguageModelConfig(
        **vars(sizes), dropout=0.1, num_experts=options.experts, tokens_per_sample=options.length,
        precision=options.precision, capacity_factor=options.capacity_factor,
        compile_batch=options.sequences if options.compile else 0,
    )  # fmt: skip
    model = switch_lm.SwitchLanguageModel.build_model(config, Namespace(source_dictionary=dictionary))

    def loss(source: Tensor, target: Tensor) -> Tensor:
        nll, extra = model(source, nll_of=target, has_padding=False)
        balance = sum(mixture.routing.balance_loss for mixture in extra["mixtures"])
        return nll / target.numel() + 0.01 * balance

    return model, loss


def hugging_face(options: argparse.Namespace) -> tuple[nn.Module, Loss]:
    """Return the decoder of Hugging Face's Switch Transformer, without an encoder, and its loss.

    It has the sizes of switch_lm_base, with relative positions, and no biases, as in T5.
    """
    sys.modules.setdefault("torchaudio", None)  # type: ignore[arg-type]  # see _lm_layer.transformers_layer
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersStack

    dim, layers = (512, 6) if options.arch == "switch_lm_base" else (768, 12)
    config = SwitchTransformersConfig(
        vocab_size=options.vocabulary, d_model=dim, d_kv=64, d_ff=4 * dim, num_heads=dim // 64, num_layers=layers,
        num_decoder_layers=layers, num_sparse_decoder_layers=layers // 2, num_experts=options.experts,
        expert_capacity=-(-options.length // options.experts), dropout_rate=0.1, router_jitter_noise=0.0,
        is_decoder=True, use_cache=False,
    )  # fmt: skip
    config.is_decoder, config.use_cache = True, False
    embedding = nn.Embedding(options.vocabulary, dim)
    stack = SwitchTransformersStack(config)
    stack.set_input_embeddings(embedding)
    nn.init.normal_(embedding.weight, std=dim**-0.5)
    model = nn.ModuleList([stack, embedding])

    def loss(source: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(source.device.type, dtype=torch.bfloat16, enabled=options.precision == "bfloat16"):
            features = stack(input_ids=source, use_cache=False).last_hidden_state
            logits = nn.functional.linear(features * dim**-0.5, embedding.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    return model, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["ours", "hf"], default="ours")
    parser.add_argument("--arch", default="switch_lm_base")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--capacity-factor", type=float, default=1.0)
    parser.add_argument("--vocabulary", type=int, default=50_264)
    parser.add_argument("--length", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--sequences", type=int, default=4, help="sequences in an update")
    parser.add_argument("--compile", action="store_true", help="compile the layers and the loss of our model")
    parser.add_argument("--log-interval", type=int, default=1, help="number of updates between two lines")
    parser.add_argument("--peers", action="append", default=[], help="folder with libraries")
    options = parser.parse_args()
    sys.path += options.peers  # at the end, so that packages of this environment come first
    torch.manual_seed(0)
    model, loss_of = (ours if options.model == "ours" else hugging_face)(options)
    model.to(options.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    update = 0
    while True:
        tokens = torch.randint(4, options.vocabulary, (options.sequences, options.length + 1), device=options.device)
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update += 1
        if update % options.log_interval == 0:
            values = {"loss": loss.item()}
            if options.compile:
                values["compile_seconds"] = cost_so_far()[1]
            print(f"| train_inner | {json.dumps(values)}", flush=True)


if __name__ == "__main__":
    main()
