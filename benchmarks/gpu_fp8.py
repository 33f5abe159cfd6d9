"""Weights that train in 8 bits (model.quantize=fp8) beside bfloat16 on a GPU: products, experts, and how far apart.

    python benchmarks/gpu_fp8.py [--only products experts kl] [--steps 300]

`products`: a linear layer and the quantisation of its inputs, CUDA graphs, weights in turn so that none is in a cache.
`experts`: 128 of 768, 8 a token, hidden 2,048; forward in graphs, forward and backward by the clock, in turns.
`kl`: a model of 4 layers with the widths of Qwen3-8B, and one with those of Qwen3-30B-A3B, trained for `--steps` steps
on a Markov chain of 4,096 tokens with four successors each (entropy 1.2 nats); then its masters as bfloat16 and as 8
bits read new sequences of the chain. Both directions of the KL divergence are added, in nats a token, and averaged.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_shapes import L2_BYTES, seconds
from ranks_experts import MIXTURE, TINY
from results_schema import Figure, need_gpus, report
from torch import Tensor

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import Model, load_model, new_model
from rlloop.models.scoring import ScoreRow, hidden_states
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.trainer import Trainer, TrainSequence

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": False, "eos_token_id": 151645,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PRODUCTS = ((4096, 4096), (24576, 4096), (4096, 12288))  # outputs, inputs
ROWS = (1, 8, 32, 128, 512, 2048, 8192)
EXPERTS, HIDDEN, INNER, TOP_K = 128, 2048, 768, 8
TOKENS = (16, 128, 1024, 8192, 16384)
CHAIN, SUCCESSORS = 4096, (0.5, 0.25, 0.15, 0.1)
ROUNDS = 5
OPS = ops_for(NumericsProfile())


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def products() -> list[Figure]:
    figures = []
    for outputs, width in PRODUCTS:
        count = max(2, L2_BYTES // (outputs * width) + 1)
        plain = [draw(outputs, width, scale=0.02) for _ in range(count)]
        quantised = [Fp8Weight.of(each, outputs, torch.bfloat16) for each in plain]
        for rows in ROWS:
            x = draw(rows, width)
            with torch.inference_mode():
                ways = [[lambda x=x, w=w: OPS.linear(x, w) for w in weights] for weights in (quantised, plain)]
                own, other = seconds(ways)
            figures.append(
                Figure.of_rounds(
                    f"linear {width} to {outputs}, {rows} rows, fp8", "us", [1e6 * each for each in own], "bfloat16",
                    [1e6 * each for each in other], lower_is_better=True,
                )
            )  # fmt: skip
            print(figures[-1], file=sys.stderr)
    return figures


def by_clock(ways: list[Callable[[], object]]) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in ways]
    for turn in range(ROUNDS + 2):
        for taken, way in zip(times, ways, strict=True):
            torch.cuda.synchronize()
            began = time.perf_counter()
            way()
            torch.cuda.synchronize()
            if turn > 1:
                taken.append(time.perf_counter() - began)
    return times


def experts() -> list[Figure]:
    figures = []
    plain = [draw(EXPERTS, 2 * INNER, HIDDEN, scale=0.02), draw(EXPERTS, HIDDEN, INNER, scale=0.03)]
    spans = (INNER, HIDDEN)
    quantised = [Fp8Weight.of(each, span, torch.bfloat16) for each, span in zip(plain, spans, strict=True)]
    sets = [[torch.nn.Parameter(each) for each in weights] for weights in (quantised, plain)]
    for tokens in TOKENS:
        x, grad = draw(tokens, HIDDEN), draw(tokens, TOP_K, HIDDEN)
        chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K)[1]

        def both(
            weights: list[torch.nn.Parameter], x: Tensor = x, grad: Tensor = grad, chosen: Tensor = chosen
        ) -> None:
            for each in weights:
                each.grad = None
            OPS.experts(x.clone().requires_grad_(), *weights, chosen).backward(grad)

        with torch.inference_mode():
            forward = seconds([[lambda w=w, x=x, c=chosen: OPS.experts(x, *w, c)] * 2 for w in sets])
        names = ("forward", "forward and backward")
        for name, times in zip(names, (forward, by_clock([lambda w=w: both(w) for w in sets])), strict=True):
            figures.append(
                Figure.of_rounds(
                    f"experts {HIDDEN}x{INNER}, {TOP_K} of {EXPERTS}, {tokens} tokens, {name}, fp8", "us",
                    [1e6 * each for each in times[0]], "bfloat16", [1e6 * each for each in times[1]],
                    lower_is_better=True, aim=1.0,
                )
            )  # fmt: skip
            print(figures[-1], file=sys.stderr)
    return figures


def chains(count: int, length: int, seed: int, states: int) -> list[list[int]]:
    """Sequences of the Markov chain: which four follow a token is drawn once, by a seed of its own."""
    follow = np.random.default_rng(0).integers(0, states, (states, len(SUCCESSORS)))
    rng = np.random.default_rng(seed)
    tokens = np.empty((count, length), np.int64)
    tokens[:, 0] = rng.integers(0, states, count)
    for at in range(1, length):
        tokens[:, at] = follow[tokens[:, at - 1], rng.choice(len(SUCCESSORS), count, p=SUCCESSORS)]
    return tokens.tolist()


def learned(config: dict[str, Any], device: str, steps: int, folder: Path, tiny: bool) -> None:
    """A model of the configuration that has read the chain, saved as float32."""
    count, length, states = (4, 24, 16) if tiny else (64, 256, CHAIN)
    model = new_model(config, seed=0, dtype="bfloat16", context=join(torch.device(device), Layout()))
    trainer = Trainer(
        model, TrainerConfig(lr=1e-3 if tiny else 3e-4, warmup_steps=min(20, steps), max_batch_tokens=16384)
    )
    for step in range(steps):
        batch = [
            TrainSequence(
                token_ids=ids, predict=range(1, length), advantages=np.ones(length - 1, np.float32),
                rollout_logprobs=np.zeros(length - 1, np.float32),
            )
            for ids in chains(count, length, step + 1, states)
        ]  # fmt: skip
        loss = trainer.forward_backward(batch, get_loss("sft")).metrics["loss/total"].value
        trainer.optim_step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss:.3f}", file=sys.stderr)
    trainer.save_weights(folder)


@torch.no_grad()
def symmetric_kl(left: Model, right: Model, texts: list[list[int]]) -> float:
    """Mean over all positions of both directions' sum, nats."""
    total, count = 0.0, 0
    for ids in texts:
        rows = [ScoreRow(ids, range(1, len(ids)))]
        p, q = (model.logits(hidden_states(model, rows)).double().log_softmax(-1) for model in (left, right))
        total += float(((p.exp() - q.exp()) * (p - q)).sum())
        count += len(p)
    return total / count


def kl(steps: int, tiny: bool) -> list[Figure]:
    device, figures = "cpu" if tiny else "cuda", []
    small = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    shapes = {
        "8B": {
            **DENSE,
            **({**small, "num_key_value_heads": 2, "eos_token_id": 2} if tiny else {}),
            "num_hidden_layers": 4,
        },
        "30B-A3B": {**(TINY if tiny else MIXTURE), "num_hidden_layers": 4},
    }
    for name, config in shapes.items():
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "model"
            learned(config, device, steps, folder, tiny)
            models = [load_model(folder, dtype="bfloat16", device=device, quantize=kind) for kind in ("fp8", "none")]
        texts = chains(4 if tiny else 16, 24 if tiny else 256, 10**6, 16 if tiny else CHAIN)
        found = symmetric_kl(*models, texts)
        figures.append(
            Figure(
                name=f"symmetric KL of fp8 to bfloat16, {name} widths, 4 layers", unit="nats", value=found,
                peer="the aim", peer_value=0.01, lower_is_better=True, aim=1.0,
            )
        )  # fmt: skip
        print(figures[-1], file=sys.stderr)
        del models
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=["products", "experts", "kl"], default=["products", "experts", "kl"]
    )
    parser.add_argument("--steps", type=int, default=300, help="that a model of `kl` trains for")
    parser.add_argument("--tiny", action="store_true", help="`kl` with toys on a CPU, nothing recorded")
    given = parser.parse_args()
    if not given.tiny:
        need_gpus(instead="--tiny runs a toy on a CPU")
    figures = list[Figure]()
    if not given.tiny:
        torch.manual_seed(0)
        figures += products() if "products" in given.only else []
        figures += experts() if "experts" in given.only else []
    figures += kl(given.steps, given.tiny) if "kl" in given.only or given.tiny else []
    report("gpu-fp8", figures, packages=("triton",), write=not (given.tiny or len(given.only) < 3))


if __name__ == "__main__":
    main()
