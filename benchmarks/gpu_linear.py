"""The invariant matrix product beside cuBLAS and other invariant products, bfloat16: CUDA graphs, cold weights.

    python benchmarks/gpu_linear.py [--rows 96 128 256 512 768] [--models 14B 32B] [--quick]

Ours go through the kernels that models call. Shapes are those of Qwen3 0.6B, 8B and 30B-A3B (its attention and head),
and of 14B and 32B if they are named.
Products follow one another on other inputs; of few rows, our next launch overlaps with the end of the one before.
Up to 64 rows, batch_invariant_ops (its `matmul_persistent`) and vLLM's batch-invariant mode stand beside them, where
they can be imported. On Hopper that mode is cuBLASLt without a workspace, so no split of K, in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpu_shapes import L2_BYTES, seconds
from results_schema import Figure, need_gpus, report
from torch import Tensor

SHAPES = {  # model -> name -> (K, N)
    "0.6B": {
        "q": (1024, 2048), "kv": (1024, 1024), "o": (2048, 1024), "gate": (1024, 3072), "down": (3072, 1024),
        "head": (1024, 151936),
    },
    "8B": {"q": (4096, 4096), "kv": (4096, 1024), "gate": (4096, 12288), "down": (12288, 4096), "head": (4096, 151936)},
    "30B-A3B": {"q": (2048, 4096), "kv": (2048, 512), "o": (4096, 2048), "head": (2048, 151936)},
    "14B": {"q": (5120, 5120), "gate": (5120, 17408), "down": (17408, 5120)},
    "32B": {"q": (5120, 8192), "o": (8192, 5120), "gate": (5120, 25600), "down": (25600, 5120)},
}  # fmt: skip
MODELS = ("0.6B", "8B", "30B-A3B")
SMALL, MIDDLE, LARGE = (1, 8, 16, 32, 64), (96, 128, 256, 512, 768), (1024, 4096, 16384)
QUICK = (16, 64, 256, 4096)
VLLM = "vllm.model_executor.layers.batch_invariant"
THINKING = "batch_invariant_ops"

Product = Callable[[Tensor, Tensor], Tensor]


class Case(NamedTuple):
    model: str
    name: str
    rows: int
    width: int
    outputs: int

    @property
    def bytes(self) -> int:
        """Bytes that a product of few rows has to move."""
        return 2 * (self.width * self.outputs + self.rows * (self.width + self.outputs))

    def figure(self, peer: str, ours: list[float], theirs: list[float], aim: float) -> Figure:
        few = self.rows <= SMALL[-1]
        scale = 1e-9 * self.bytes if few else 2e-12 * self.rows * self.width * self.outputs
        return Figure.of_rounds(
            f"linear {self.model} {self.name}, M {self.rows}, K {self.width}, N {self.outputs}, bf16",
            "GB/s" if few else "TFLOP/s", [scale / each for each in ours], peer, [scale / each for each in theirs],
            aim=aim,
        )  # fmt: skip


def cases(numbers: tuple[int, ...], models: Sequence[str]) -> Iterator[Case]:
    for model in models:
        for name, (width, outputs) in SHAPES[model].items():
            yield from (Case(model, name, rows, width, outputs) for rows in numbers if rows * outputs < 1 << 31)


def ours(x: Tensor, weight: Tensor) -> Tensor:
    from rlloop.numerics.kernels.triton.backend import linear  # needs Triton, which --help does not

    return linear(x, weight, None)


def times(case: Case, products: list[Product]) -> list[list[float]]:
    copies = max(2, min(64, L2_BYTES // case.bytes)) if case.rows < LARGE[0] else 2
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        [
            torch.randn(n, case.width, dtype=torch.bfloat16, device="cuda", generator=generator)
            for n in (case.rows, case.outputs)
        ]
        for _ in range(copies)
    ]
    return seconds([[lambda x=x, w=w, f=f: f(x, w) for x, w in inputs] for f in products])


def beside_cublas(numbers: tuple[int, ...], models: Sequence[str]) -> list[Figure]:
    """A product beside cuBLAS, and beside batch_invariant_ops if it is installed."""
    peers: dict[str, Product] = {"cuBLAS": F.linear}
    if importlib.util.find_spec(THINKING):
        module = importlib.import_module(f"{THINKING}.{THINKING}")
        peers[THINKING] = lambda x, w: module.matmul_persistent(x, w.T)
    figures = []
    for case in cases(numbers, models):
        shown = peers if case.rows <= SMALL[-1] else {"cuBLAS": F.linear}
        mine, *others = times(case, [ours, *shown.values()])
        for peer, other in zip(shown, others, strict=True):
            figures.append(case.figure(peer, mine, other, 0.95 if peer == "cuBLAS" else 1.0))
    return figures


def in_vllm_s_mode(numbers: tuple[int, ...], models: Sequence[str]) -> list[list[list[float]]]:
    """(ours, vLLM's) seconds of each case in each round. The mode is a setting of the whole process."""
    importlib.import_module(VLLM).enable_batch_invariant_mode()
    return [times(case, [ours, F.linear]) for case in cases(numbers, models)]


def beside_vllm(numbers: tuple[int, ...], models: Sequence[str]) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "seconds.json")
        command = [sys.executable, __file__, "--models", *models, "--vllm", str(path), *map(str, numbers)]
        subprocess.run(command, check=True)
        measured = json.loads(path.read_text())
    return [
        case.figure("vLLM batch-invariant", mine, theirs, 1.0)
        for case, (mine, theirs) in zip(cases(numbers, models), measured, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four numbers of rows, nothing recorded")
    parser.add_argument("--rows", type=int, nargs="+", help="record these numbers of rows beside the rest")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=MODELS, help="whose shapes")
    parser.add_argument("--vllm", nargs="+", help=argparse.SUPPRESS)  # the other process: a path, then numbers of rows
    args = parser.parse_args()
    need_gpus()
    with torch.inference_mode():
        if args.vllm:
            path, *numbers = args.vllm
            Path(path).write_text(json.dumps(in_vllm_s_mode(tuple(map(int, numbers)), args.models)))
            return
        numbers = tuple(args.rows or (QUICK if args.quick else SMALL + MIDDLE + LARGE))
        figures = beside_cublas(numbers, args.models)
    packages = ["triton"]
    few = tuple(rows for rows in numbers if rows <= SMALL[-1])
    if few and importlib.util.find_spec("vllm"):
        figures += beside_vllm(few, args.models)
        packages.append("vllm")
    report("gpu-linear", figures, packages=tuple(packages), write=not args.quick)


if __name__ == "__main__":
    main()
