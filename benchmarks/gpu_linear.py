"""The invariant matrix product beside cuBLAS (`torch.nn.functional.linear`), bfloat16: CUDA graphs, cold weights.

    python benchmarks/gpu_linear.py [--quick]

Ours go through the kernels that models call. Shapes are those of Qwen3 0.6B, 8B and 30B-A3B (its attention and head).
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from gpu_shapes import L2_BYTES, seconds
from results_schema import Figure, report, table

from rlloop.numerics.triton.contract import linear

SHAPES = {  # model -> name -> (K, N)
    "0.6B": {
        "q": (1024, 2048), "kv": (1024, 1024), "o": (2048, 1024), "gate": (1024, 3072), "down": (3072, 1024),
        "head": (1024, 151936),
    },
    "8B": {"q": (4096, 4096), "kv": (4096, 1024), "gate": (4096, 12288), "down": (12288, 4096), "head": (4096, 151936)},
    "30B-A3B": {"q": (2048, 4096), "kv": (2048, 512), "o": (4096, 2048), "head": (2048, 151936)},
}  # fmt: skip
SMALL, LARGE = (1, 8, 16, 32, 64), (1024, 4096, 16384)


def figure(model: str, name: str, rows: int, width: int, outputs: int) -> Figure:
    size = 2 * (width * outputs + (0 if rows > 64 else rows * (width + outputs)))
    copies = max(2, min(64, L2_BYTES // size)) if rows <= 64 else 2
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        [torch.randn(n, width, dtype=torch.bfloat16, device="cuda", generator=generator) for n in (rows, outputs)]
        for _ in range(copies)
    ]
    ours, theirs = seconds(
        [[lambda x=x, w=w, f=f: f(x, w) for x, w in inputs] for f in (lambda x, w: linear(x, w, None), F.linear)]
    )
    if rows <= 64:
        unit, scale = "GB/s", 1e-9 * size
    else:
        unit, scale = "TFLOP/s", 2e-12 * rows * width * outputs
    return Figure(
        name=f"linear {model} {name}, M {rows}, K {width}, N {outputs}, bf16", unit=unit, value=scale / ours,
        peer="cuBLAS", peer_value=scale / theirs, aim=0.95,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three numbers of rows, nothing recorded")
    args = parser.parse_args()
    figures = []
    with torch.inference_mode():
        for model, shapes in SHAPES.items():
            for name, (width, outputs) in shapes.items():
                for rows in (16, 64, 4096) if args.quick else SMALL + LARGE:
                    if rows * outputs < 1 << 31:
                        figures.append(figure(model, name, rows, width, outputs))
    if args.quick:
        print(table(figures))
    else:
        report("gpu-linear", figures, packages=("triton",))


if __name__ == "__main__":
    main()
