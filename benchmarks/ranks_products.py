"""One Qwen3-8B layer's products with their communication, over the GPUs of one host, beside the all-reduce form.

    torchrun --nproc-per-node N benchmarks/ranks_products.py [--rows 1 32 ...]

bfloat16, CUDA graphs. The peer cuts the second product of each pair by its inputs and adds the ranks' results with
NCCL's all-reduce, as serving engines do. Ours cuts every product by its outputs and copies: with NCCL's all-gather, or
by writing into the other GPUs' memory from the product's own kernel. Attention itself is left out of both.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from results_schema import Figure, need_gpus, report
from torch import Tensor, nn

from rlloop.models.peer_gathers import PeerGathers
from rlloop.parallel.context import join
from rlloop.parallel.division import evenly
from rlloop.parallel.layout import Layout

WIDTH, INNER, QUERIES, KEYS = 4096, 12288, 4096, 1024
ROWS = (1, 8, 32, 128, 256, 512, 1024, 2048, 8192)
LAYERS, REPLAYS, ROUNDS = 8, 10, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    given = parser.parse_args()
    need_gpus(2)
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it on every GPU: torchrun --nproc-per-node N benchmarks/ranks_products.py")
    from rlloop.numerics.kernels.triton import backend as kernels
    from rlloop.numerics.kernels.triton import peers

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    tp = join(device, Layout(tp=dist.get_world_size())).tp
    generator = torch.Generator(device).manual_seed(0)

    def weight(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, device=device, generator=generator).mul_(0.02).bfloat16()

    q, k, v = weight(QUERIES, WIDTH), weight(KEYS, WIDTH), weight(KEYS, WIDTH)
    o, down = weight(WIDTH, QUERIES), weight(WIDTH, INNER)
    gate, up = weight(INNER, WIDTH), weight(INNER, WIDTH)

    def rows_of(w: Tensor) -> Tensor:
        return held(w.chunk(tp.size)[tp.rank])

    o_r, down_r, gate_r, up_r = map(rows_of, (o, down, gate, up))
    qkv_r, gate_up = held(torch.cat([rows_of(w) for w in (q, k, v)])), torch.cat([gate_r, up_r])
    o_k, down_k = (w.chunk(tp.size, 1)[tp.rank].contiguous() for w in (o, down))
    heads = QUERIES // tp.size
    gathers = PeerGathers(tp, device, max(given.rows) * INNER, None)
    queries, width, inner_width = evenly(QUERIES, tp), evenly(WIDTH, tp), evenly(INNER, tp)
    assert queries is not None, "one process has no peers"
    assert width is not None
    assert inner_width is not None

    inner = torch.empty(max(given.rows), INNER // tp.size, device=device, dtype=torch.bfloat16)
    at_inner = torch.tensor([inner.data_ptr()], device=device)
    wide = torch.randn(max(given.rows), INNER, device=device).bfloat16()

    def reduced(x: Tensor) -> Tensor:
        y = (x @ qkv_r.T)[:, :heads] @ o_k.T
        dist.all_reduce(y)
        g, u = (y @ gate_up.T).chunk(2, -1)
        peers.write(u, at_inner, inner.shape[1], g)  # one fused kernel for the activation
        y = inner[: len(x)] @ down_k.T
        dist.all_reduce(y)
        return y

    def gathered(x: Tensor) -> Tensor:
        a = tp.gather(kernels.linear(x, qkv_r, None)[:, :heads], -1)
        y = tp.gather(kernels.linear(a, o_r, None), -1)
        return tp.gather(kernels.linear(tp.gather(kernels.gated_linear(y, gate_r, up_r), -1), down_r, None), -1)

    def written(x: Tensor) -> Tensor:
        a = gathers.gather(kernels.linear(x, qkv_r, None)[:, :heads], queries)
        y = gathers.product(a, o_r, None, width)
        y = gathers.gated(y, gate_r, up_r, inner_width, read_next=True)
        return gathers.product(y, down_r, None, width)

    def local(x: Tensor) -> Tensor:
        """The products alone, which communicate nothing: a floor."""
        for w in (qkv_r, o_r):
            kernels.linear(x, w, None)
        kernels.gated_linear(x, gate_r, up_r)
        return kernels.linear(wide[: len(x)], down_r, None)

    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "all-reduce": reduced,
        "gather, NCCL": gathered,
        "gather, written": written,
        "products alone": local,
    }
    figures = []
    for rows in given.rows:
        x = torch.randn(rows, WIDTH, device=device, generator=generator).bfloat16()
        times = {name: measured(form, x, gathers) for name, form in forms.items()}
        one = whole_layer(x, q, o, gate, up, down)
        for name, form in forms.items():
            if name.startswith("gather"):
                different = int((form(x).view(torch.int16) != one.view(torch.int16)).sum())
                assert different == 0, f"{name} at {rows} rows: {different} of {one.numel()} elements differ"
        if tp.rank == 0:
            print(
                f"{tp.size} GPUs, {rows} rows: "
                + ", ".join(
                    f"{name} {min(t):.0f}/{statistics.median(t):.0f}/{max(t):.0f}" for name, t in times.items()
                ),
                flush=True,
            )
            best = min((name for name in times if name.startswith("gather")), key=lambda n: statistics.median(times[n]))
            figures.append(Figure.of_rounds(
                f"layer's products, 8B, {tp.size} GPUs, {rows} rows, {best}", "us", times[best],
                "all-reduce form, NCCL, cuBLAS", times["all-reduce"], aim=0.95, lower_is_better=True,
            ))  # fmt: skip
    if tp.rank == 0:
        report(f"ranks-products-{tp.size}", figures)
    dist.destroy_process_group()


def held(w: Tensor) -> nn.Parameter:
    """A model's weight, which kernels fetch before their predecessors have ended."""
    return nn.Parameter(w.contiguous(), requires_grad=False)


def whole_layer(x: Tensor, q: Tensor, o: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same on one rank: the bits to have."""
    from rlloop.numerics.kernels.triton import backend as kernels

    y = kernels.linear(kernels.linear(x, q, None), o, None)
    return kernels.linear(kernels.silu_mul(kernels.linear(y, gate, None), kernels.linear(y, up, None)), down, None)


def measured(form: Callable[[Tensor], Tensor], x: Tensor, gathers: PeerGathers) -> list[float]:
    """Microseconds a layer, of each round."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gathers.begin()
        for _ in range(3):
            form(x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gathers.begin()
        for _ in range(LAYERS):
            form(x)
    times = []
    for _ in range(ROUNDS):
        graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / REPLAYS / LAYERS * 1e3)
    return times


if __name__ == "__main__":
    main()
