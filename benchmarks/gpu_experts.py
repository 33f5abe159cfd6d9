"""A layer's experts, bfloat16, beside vLLM's `fused_moe` where vLLM is installed, else torch's grouped products.

    python benchmarks/gpu_experts.py [--quick]

Both sides are told which experts each token goes to, and with which weights; both do the rest: sort, gate and up,
activation, down, weighted sum. CUDA graphs; several sets of weights, so that none is found in the cache. Tokens go to
eight experts each, drawn evenly.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from gpu_shapes import L2_BYTES, seconds
from results_schema import Figure, need_gpus, report
from torch import Tensor

from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import NumericsProfile

SHAPES = {64: (2048, 768, 8), 128: (2048, 768, 8)}  # experts -> hidden, one expert's, chosen a token
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096, 8192)
OPS = ops_for(NumericsProfile())
Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # x, gate_up, down, chosen, weights


def ours(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return OPS.combine(OPS.experts(x, gate_up, down, chosen), chosen, weights)


def by_torch(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Experts as transformers computes them by `grouped_mm`."""
    experts, order = chosen.flatten().sort()
    ends = torch.searchsorted(experts, torch.arange(len(down), device=x.device), right=True).int()
    gate, up = torch._grouped_mm(x[order // chosen.shape[1]], gate_up.mT, offs=ends).chunk(2, dim=-1)
    made = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends) * weights.flatten()[order, None]
    slots = torch.empty_like(made, dtype=torch.float32)
    slots[order] = made
    return slots.view(*chosen.shape, -1).sum(1).to(x.dtype)


def peer() -> tuple[str, Layer]:
    if importlib.util.find_spec("vllm") is None:
        return "torch._grouped_mm", by_torch
    from vllm.model_executor.layers.fused_moe import fused_experts

    def fused(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return fused_experts(x, gate_up, down, weights, chosen)

    return "vLLM fused_moe", fused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three numbers of tokens, nothing recorded")
    args = parser.parse_args()
    need_gpus()
    name, theirs = peer()
    figures = []
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda", generator=generator)

    with torch.inference_mode():
        for count, (hidden, inner, top_k) in SHAPES.items():
            size = 2 * 3 * count * hidden * inner
            sets = [
                (draw(count, 2 * inner, hidden) / 45, draw(count, hidden, inner) / 28)
                for _ in range(max(2, L2_BYTES // size + 1))
            ]
            for tokens in TOKENS[::4] if args.quick else TOKENS:
                x = draw(tokens, hidden)
                chosen = torch.rand(tokens, count, device="cuda", generator=generator).topk(top_k)[1]
                weights = torch.rand(tokens, top_k, device="cuda", generator=generator)
                weights /= weights.sum(-1, keepdim=True)
                mine, other = ours(x, *sets[0], chosen, weights), theirs(x, *sets[0], chosen, weights)
                error = (mine.float() - other.float()).norm() / mine.float().norm()
                assert error < 0.02, f"{name} gives something else: {error:.3f}"
                mine, other = seconds(
                    [[lambda s=s, f=f, x=x, c=chosen, w=weights: f(x, *s, c, w) for s in sets] for f in (ours, theirs)]
                )
                figures.append(
                    Figure.of_rounds(
                        f"experts {hidden}x{inner}, {top_k} of {count}, {tokens} tokens, bf16", "us",
                        [1e6 * each for each in mine], name, [1e6 * each for each in other], aim=0.95,
                        lower_is_better=True,
                    )
                )  # fmt: skip
    report("gpu-experts", figures, packages=("triton", *(("vllm",) if "vLLM" in name else ())), write=not args.quick)


if __name__ == "__main__":
    main()
