"""Grouped experts beside a loop over experts with stock products, float32; and what recording choices costs an engine.

    python benchmarks/experts.py              # all of torch's threads
    python benchmarks/experts.py --threads 1 --quick

Both sides do the whole layer: sort, gate and up, activation, down, back into the order of the slots. Rounds of the two
alternate, and each one's fastest counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from linear import fastest
from results_schema import Figure, report
from torch import Tensor

from rlloop.models import Model, new_model
from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import NumericsProfile
from rlloop.rollout import Engine
from rlloop.runs.rollouts import pack_experts
from rlloop.types import SamplingParams

TOKENS = (1, 16, 128, 1024)
SHAPES = ((256, 96, 16, 4), (512, 192, 32, 8), (1024, 384, 32, 8))  # hidden, one expert's, experts, chosen a token
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


def loop_over_experts(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor) -> Tensor:
    """Baseline without a grouped kernel: one torch product per expert, in turn."""
    made = x.new_empty(*chosen.shape, x.shape[1])
    for expert in range(len(down)):
        token, slot = torch.where(chosen == expert)
        if len(token):
            gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
            made[token, slot] = F.linear(F.silu(gate) * up, down[expert])
    return made


def layers(seconds: float, quick: bool) -> list[Figure]:
    ops, figures = ops_for(NumericsProfile()), []
    for hidden, inner, experts, top_k in SHAPES[:1] if quick else SHAPES:
        gate_up, down = torch.randn(experts, 2 * inner, hidden) / 16, torch.randn(experts, hidden, inner) / 16
        for tokens in TOKENS:
            x, chosen = torch.randn(tokens, hidden), torch.rand(tokens, experts).topk(top_k)[1]
            works: list[Callable[[], object]] = [
                lambda x=x, chosen=chosen, a=gate_up, b=down: ops.experts(x, a, b, chosen),
                lambda x=x, chosen=chosen, a=gate_up, b=down: loop_over_experts(x, a, b, chosen),
            ]
            ours, theirs = (2e-9 * 3 * tokens * top_k * hidden * inner / t for t in fastest(works, seconds))
            name = f"experts {hidden}x{inner}, {top_k} of {experts}, {tokens} tokens"
            figures.append(
                Figure(name=name, unit="GFLOP/s", value=ours, peer="loop of stock products", peer_value=theirs, aim=1.0)
            )
    return figures


def recording(model: Model, rounds: int) -> list[Figure]:
    """Cost of recording every token's experts: bytes, and time of a rollout."""
    prompts = [list(range(i, i + 16)) for i in range(64)]
    sampling = [SamplingParams(max_tokens=48, seed=i, ignore_eos=True) for i in range(len(prompts))]
    engines, best = [Engine(model, record_choices=record) for record in (True, False)], [float("inf")] * 2
    made = engines[0].generate(prompts, sampling)
    for _ in range(rounds):
        for at, engine in enumerate(engines):
            engine.set_version(engine.policy_version + 1)  # no prefix of the last round is of use
            began = time.perf_counter()
            engine.generate(prompts, sampling)
            best[at] = min(best[at], time.perf_counter() - began)
    experts = [each.routed_experts for each in made if each.routed_experts is not None]
    tokens = sum(len(each) for each in experts)
    stored = sum(len(pack_experts(each)["data"]) * 3 / 4 for each in experts)  # base64 is 4 bytes for 3
    layers, top_k, count = model.route_shape() or (0, 0, 0)
    name = f"choices of {layers} layers, {top_k} of {count} experts"
    with_choices, without = (len(prompts) * 48 / seconds for seconds in best)
    return [
        Figure(name=f"{name}: in memory", unit="bytes/token", value=sum(each.nbytes for each in experts) / tokens),
        Figure(name=f"{name}: in a rollout file", unit="bytes/token", value=stored / tokens),
        Figure(name=f"{name}: rollout time", unit="% more", value=100 * (best[0] / best[1] - 1)),
        Figure(name=f"{name}: rollout", unit="tokens/s", value=with_choices, peer="not recorded", peer_value=without),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="per shape")
    parser.add_argument("--quick", action="store_true", help="one shape, nothing recorded")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        figures = layers(args.seconds, args.quick)
    figures += recording(new_model(MODEL, seed=0), 1 if args.quick else 25)
    report("experts" if args.threads > 1 else "experts-one-thread", figures, write=not args.quick)


if __name__ == "__main__":
    main()
