"""The invariant attention beside PyTorch's (the faster of its FlashAttention 2 and cuDNN), bfloat16, by CUDA graphs.

    python benchmarks/gpu_attention.py [--only decode prefill chunk gradients] [--quick]

Ours decodes over a paged cache (pages of 16, scattered); the peer over keys that lie in one piece. FlashAttention 3 is
measured too where vLLM, which brings it, is installed: over the same pages, and with its default number of splits. The
fastest peer counts; of long prompts FlashAttention 3, where it is there, whose aim is higher.

Gradients are autograd's calls on both sides, without graphs. The work counted is that of five products, which the peers
compute; ours computes seven. The peers' sums are in another order in every run.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics

import torch
import torch.nn.functional as F
from gpu_shapes import seconds
from results_schema import Figure, need_gpus, report
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import NumericsProfile

DEVICE = "cuda"
HEADS = {"0.6B": (16, 8, 128), "8B": (32, 8, 128)}
DECODE = ((256, 384), (128, 1024), (32, 4096), (8, 16384), (1, 32768), (8, 32768))  # sequences, context
PREFILL = ((32, 512), (16, 1024), (4, 4096), (4, 8192), (1, 16384), (1, 32768))
LONG = (8192, 32768)  # lengths at which FlashAttention 3 alone is the peer
CHUNKS = ((32, 512, 0), (4, 2048, 2048))  # sequences, queries of each, keys before them
GRADIENTS = ((64, 512), (16, 2048), (8, 8192), (1, 32768))
OPS = ops_for(NumericsProfile())
BACKENDS = {"SDPA, FlashAttention 2": SDPBackend.FLASH_ATTENTION, "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE)


def peers(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, list]:
    """[B, H, T, D] each."""

    def call(backend: SDPBackend) -> object:
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    found = {}
    for name, backend in BACKENDS.items():
        try:
            call(backend)
        except RuntimeError as error:
            print(f"{name} does not run here: {str(error).splitlines()[0]}")
            continue
        found[name] = [lambda backend=backend: call(backend)]
    return found


def flash3(
    q: Tensor, k: Tensor, v: Tensor, queries: int, keys: int, causal: bool, pages: Tensor | None = None, page: int = 16
) -> dict[str, list]:
    """q [T, H, D], k and v [slots, G, D]; as many sequences as `queries` divides T."""
    if importlib.util.find_spec("vllm") is None:
        return {}
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    count = len(q) // queries
    start = torch.arange(count + 1, dtype=torch.int32, device=DEVICE) * queries
    if pages is None:
        where = {"cu_seqlens_k": start}
    else:
        k, v = (x.view(-1, page, *x.shape[1:]) for x in (k, v))
        used = torch.full((count,), keys, dtype=torch.int32, device=DEVICE)
        where = {"seqused_k": used, "block_table": (pages // page).int().contiguous()}
    given = {"max_seqlen_q": queries, "cu_seqlens_q": start, "max_seqlen_k": keys, "causal": causal, "fa_version": 3}
    return {"FlashAttention 3": [lambda: flash_attn_varlen_func(q, k, v, **given, **where)]}


def compared(
    name: str, unit: str, scale: float, ours: list, others: dict[str, list], aim: float, recorded: bool = True
) -> Figure:
    mine, *theirs = seconds([ours, *others.values()], recorded)
    best = min(range(len(theirs)), key=lambda at: statistics.median(theirs[at]))
    ours_scaled, theirs_scaled = ([scale / each for each in times] for times in (mine, theirs[best]))
    return Figure.of_rounds(name, unit, ours_scaled, list(others)[best], theirs_scaled, aim=aim, peer_kind="fastest")


def decode(model: str, sequences: int, context: int) -> Figure:
    heads, groups, width = HEADS[model]
    page, pages = 16, context // 16
    order = torch.randperm(sequences * pages, device=DEVICE).view(sequences, pages) * page
    k, v = (draw(sequences * context, groups, width) for _ in range(2))
    q = draw(sequences, heads, width)
    layout = AttentionLayout(
        query_start=torch.arange(sequences + 1, device=DEVICE),
        context=torch.full((sequences,), context - 1, device=DEVICE),
        block_start=order, block_size=page, contiguous=False,
    )  # fmt: skip
    shaped = [x.view(sequences, context, groups, width).transpose(1, 2).contiguous() for x in (k, v)]
    others = peers(q[:, :, None], *shaped, causal=False) | flash3(q, k, v, 1, context, False, order, page)
    moved = 4e-9 * sequences * context * groups * width
    ours = [lambda: OPS.attention(q, k, v, layout, width**-0.5)]
    return compared(f"attention decode {model}, {sequences} x {context}", "GB/s", moved, ours, others, 0.85)


def prefill(model: str, sequences: int, length: int) -> Figure:
    heads, groups, width = HEADS[model]
    q, k, v = (draw(sequences * length, n, width) for n in (heads, groups, groups))
    layout = AttentionLayout.of_sequences([length] * sequences, DEVICE)
    shaped = [x.view(sequences, length, -1, width).transpose(1, 2) for x in (q, k, v)]
    work = 2e-12 * sequences * heads * length * length * width
    ours = [lambda: OPS.attention(q, k, v, layout, width**-0.5)]
    others = flash3(q, k, v, length, length, True)
    alone = bool(others) and length in LONG
    if not alone:
        others = peers(*shaped, causal=True) | others
    name, aim = f"attention prefill {model}, {sequences} x {length}", 0.9 if alone else 0.75
    return compared(name, "TFLOP/s", work, ours, others, aim)


def chunk(model: str, sequences: int, queries: int, context: int, page: int = 16) -> Figure:
    """Chunked prefill over pages, which of the peers only FlashAttention 3 has."""
    heads, groups, width = HEADS[model]
    keys = context + queries
    order = torch.randperm(sequences * keys // page, device=DEVICE).view(sequences, -1) * page
    k, v = (draw(sequences * keys, groups, width) for _ in range(2))
    q = draw(sequences * queries, heads, width)
    layout = AttentionLayout(
        query_start=torch.arange(sequences + 1, device=DEVICE) * queries,
        context=torch.full((sequences,), context, device=DEVICE),
        block_start=order, block_size=page, contiguous=False,
    )  # fmt: skip
    work = 2e-12 * sequences * heads * width * (keys * keys - context * context)
    ours = [lambda: OPS.attention(q, k, v, layout, width**-0.5)]
    name = f"attention chunked prefill {model}, {sequences} x {queries} after {context}, pages of {page}"
    return compared(name, "TFLOP/s", work, ours, flash3(q, k, v, queries, keys, True, order, page), 0.75)


@torch.inference_mode(False)
@torch.enable_grad()
def gradients(model: str, sequences: int, length: int) -> Figure:
    heads, groups, width = HEADS[model]
    flat = [draw(sequences * length, n, width).requires_grad_() for n in (heads, groups, groups)]
    grad = draw(sequences * length, heads, width)
    shaped = [x.detach().view(sequences, length, -1, width).transpose(1, 2).requires_grad_() for x in flat]
    grad_shaped = grad.view(sequences, length, -1, width).transpose(1, 2)
    out = OPS.attention(*flat, AttentionLayout.of_sequences([length] * sequences, DEVICE), width**-0.5)

    def call(out: Tensor, leaves: list[Tensor], grad: Tensor) -> list:
        return [lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)]

    others = {
        name: call(run(), shaped, grad_shaped) for name, (run,) in peers(*shaped, causal=True).items()
    }  # fmt: skip
    work = 5e-12 * sequences * heads * length * length * width
    name, aim = f"attention gradients {model}, {sequences} x {length}", 0.9 if length in LONG else 0.75
    return compared(name, "TFLOP/s", work, call(out, flat, grad), others, aim, recorded=False)


PARTS = {
    "decode": (decode, DECODE), "prefill": (prefill, PREFILL), "chunk": (chunk, CHUNKS),
    "gradients": (gradients, GRADIENTS),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="record these beside the rest")
    parser.add_argument("--quick", action="store_true", help="one model, nothing recorded")
    args = parser.parse_args()
    need_gpus()
    torch.manual_seed(0)
    vllm = importlib.util.find_spec("vllm") is not None
    figures = []
    with torch.inference_mode():
        for model in list(HEADS)[: 1 if args.quick else 2]:
            for part in args.only:
                measure, shapes = PARTS[part]
                if part != "chunk" or vllm:
                    figures += [measure(model, *shape) for shape in shapes]
    report("gpu-attention", figures, packages=("triton", *(("vllm",) if vllm else ())), write=not args.quick)


if __name__ == "__main__":
    main()
