"""The invariant matrix product beside PyTorch's own, float32, forward and backward.

    python benchmarks/linear.py              # all of torch's threads
    python benchmarks/linear.py --threads 1  # what one core does: the kernels alone, whatever else the machine runs
    python benchmarks/linear.py --quick      # four shapes, nothing recorded

Ours go through the operation that models call. Rounds of the two alternate, and each one's fastest counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from results_schema import Figure, report

from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import NumericsProfile

ROWS = (1, 16, 64, 256, 2048)
SHAPES = ((64, 64), (64, 256), (256, 64), (256, 256), (256, 768), (1024, 1024), (1024, 4096), (4096, 1024))  # K, N
BACKWARD = ((512, 64, 256), (2048, 256, 256), (2048, 256, 768), (512, 1024, 1024))  # M, K, N
AIM = 0.9  # from 256 rows, K and N on


def fastest(works: list[Callable[[], object]], seconds: float) -> list[float]:
    """Seconds of one call of each, the best of many rounds."""
    best = [float("inf")] * len(works)
    counts = []
    for work in works:
        work()
        began = time.perf_counter()
        work()
        counts.append(max(1, int(0.01 / max(time.perf_counter() - began, 1e-6))))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, (work, count) in enumerate(zip(works, counts, strict=True)):
            began = time.perf_counter()
            for _ in range(count):
                work()
            best[i] = min(best[i], (time.perf_counter() - began) / count)
    return best


def figure(name: str, work: int, works: list[Callable[[], object]], seconds: float, aim: float | None) -> Figure:
    ours, theirs = (2e-9 * work / t for t in fastest(works, seconds))
    return Figure(name=name, unit="GFLOP/s", value=ours, peer="torch", peer_value=theirs, aim=aim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="per shape")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    linear = ops_for(NumericsProfile()).linear
    figures = []
    for rows in (1, 256) if args.quick else ROWS:
        for width, outputs in SHAPES[3:5] if args.quick else SHAPES:
            x, weight = torch.randn(rows, width), torch.randn(outputs, width)
            name = f"linear forward, M {rows}, K {width}, N {outputs}"
            aim = AIM if min(rows, width, outputs) >= 256 else None
            works = [lambda x=x, w=weight: linear(x, w), lambda x=x, w=weight: F.linear(x, w)]
            with torch.inference_mode():
                figures.append(figure(name, rows * width * outputs, works, args.seconds, aim))
    for rows, width, outputs in () if args.quick else BACKWARD:
        x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(outputs, width, requires_grad=True)
        grad = torch.randn(rows, outputs)
        works = [
            lambda out=out, x=x, w=weight, g=grad: torch.autograd.grad(out, (x, w), g, retain_graph=True)
            for out in (linear(x, weight), F.linear(x, weight))
        ]
        name = f"linear backward, M {rows}, K {width}, N {outputs}"
        figures.append(figure(name, 2 * rows * width * outputs, works, args.seconds, None))
    report("linear" if args.threads > 1 else "linear-one-thread", figures, write=not args.quick)


if __name__ == "__main__":
    main()
