"""Attention of CPU tensors, over all keys or over selected ones, and the indexer's selection."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu.compiled import attention as kernels
from rlloop.numerics.kernels.cpu.compiled import attention_backward as backward_kernels
from rlloop.numerics.kernels.cpu.compiled import sparse as sparse_kernels
from rlloop.numerics.kernels.cpu.compiled.jit import flat, threads_for
from rlloop.numerics.layout import AttentionLayout

NO_SINKS = np.empty(0, np.float32)


def attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, context: Tensor, block_start: Tensor, block_size: int,
    scale: float, split: int, window: int, sinks: Tensor | None, causal: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (tokens, heads, width), (_, groups, v_width) = q.shape, v.shape
    out, lse = q.new_empty(tokens, heads, v_width), torch.empty(tokens, heads)
    starts, contexts = flat(query_start), flat(context)
    counts = starts[1:] - starts[:-1]
    pairs = int(counts @ (contexts + counts)) * heads  # of a query and a key, about
    threads = threads_for(pairs * (width + v_width))
    kernels.forward(
        threads, flat(q.contiguous()), flat(k.contiguous()), *_value_rows(v), starts, contexts,
        flat(block_start.contiguous()), block_start.shape[1], block_size,
        *kernels.plan(counts, heads, groups, threads), heads, groups, width, v_width, np.float32(scale), split, window,
        causal, NO_SINKS if sinks is None else flat(sinks.float()), flat(out), flat(lse),
    )  # fmt: skip
    return out, lse


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float,
    window: int, causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    families = np.arange(len(query_start))  # each sequence is one
    return _backward(q, k, v, flat(query_start), families, out, lse, grad, scale, window, causal)


def families_backward(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, out: Tensor, lse: Tensor, grad: Tensor, scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    families = np.array(layout.families, np.int64)
    return _backward(q, k, v, flat(layout.query_start), families, out, lse, grad, scale, window, True)


def _backward(
    q: Tensor, k: Tensor, v: Tensor, starts: np.ndarray, families: np.ndarray, out: Tensor, lse: Tensor, grad: Tensor,
    scale: float, window: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    (_, heads, width), (_, groups, v_width) = q.shape, v.shape
    tokens = starts[families[1:]] - starts[families[:-1]]
    pairs = int(tokens @ tokens) * heads
    backward_kernels.backward(
        threads_for(pairs * (width + v_width)), *map(flat, (q, k, v, out, lse, grad.contiguous())), starts, families,
        heads, groups, width, v_width, np.float32(scale), window, causal, *map(flat, gradients),
    )  # fmt: skip
    return gradients


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    context = torch.zeros_like(query_start[1:])
    return attention(q, k, v, query_start, context, query_start[:-1, None], longest, scale, 0, 0, None, causal=False)


def full_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return attention_backward(q, k, v, query_start, out, lse, grad, scale, 0, causal=False)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, query_start: Tensor, block_start: Tensor, block_size: int,
    scale: float, split: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (tokens, heads, width), v_width, count = q.shape, v.shape[2], selected.shape[1]
    out, lse = q.new_empty(tokens, heads, v_width), torch.empty(tokens, heads)
    sparse_kernels.forward(
        threads_for(tokens * count * heads * (width + v_width)), flat(q.contiguous()), flat(k.contiguous()),
        *_value_rows(v), flat(selected.contiguous()), count, flat(query_start), flat(block_start.contiguous()),
        block_start.shape[1], block_size, heads, width, v_width, np.float32(scale), split, flat(out), flat(lse),
    )  # fmt: skip
    return out, lse


def sparse_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, query_start: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    (tokens, heads, width), v_width, count = q.shape, v.shape[2], selected.shape[1]
    sparse_kernels.backward(
        threads_for(tokens * count * heads * (width + v_width)), flat(q), flat(k), flat(v),
        flat(selected.contiguous()), count, flat(out), flat(lse), flat(grad.contiguous()), flat(query_start), heads,
        width, v_width, np.float32(scale), *map(flat, gradients),
    )  # fmt: skip
    return gradients


def select(q: Tensor, k: Tensor, weights: Tensor, layout: AttentionLayout, scale: float, count: int) -> Tensor:
    (tokens, heads, width), starts, contexts = q.shape, flat(layout.query_start), flat(layout.context)
    selected, counts = torch.empty(tokens, count, dtype=torch.int64), np.diff(starts)
    first_task = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(-(-counts // sparse_kernels.QUERIES), out=first_task[1:])
    pairs = int(counts @ (contexts + counts)) * heads
    sparse_kernels.select(
        threads_for(pairs * width), flat(q.contiguous()), flat(k.contiguous()), flat(weights.contiguous()), starts,
        contexts, flat(layout.block_start.contiguous()), layout.block_start.shape[1], layout.block_size, first_task,
        heads, width, np.float32(scale), count, flat(selected),
    )  # fmt: skip
    return selected


def _value_rows(v: Tensor) -> tuple[np.ndarray, int]:
    """The memory of values [slots, G, D], and how far one row is from the next. Latents are part of wider rows."""
    if v.shape[1] == 1 and v.stride(2) == 1 and v.stride(0) >= v.shape[2] and len(v) > 0:
        return flat(v.detach().as_strided(((len(v) - 1) * v.stride(0) + v.shape[2],), (1,))), v.stride(0)
    return flat(v.contiguous()), v.shape[2]
