"""A whole decoder layer of a decode step in one launch: each task takes some rows through all of its operations.

Rows are independent, so no task waits for another between two operations, and what lies between them stays in the
cache of one core. The operations are the kernels that make them alone, called on a task's rows, so bits are theirs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu.compiled import attention, elementwise, fused, linear
from rlloop.numerics.kernels.cpu.compiled.bfloat16 import CHAIN
from rlloop.numerics.kernels.cpu.compiled.jit import flat, inlined, parallel_kernel, take, threads_for
from rlloop.numerics.kernels.cpu.compiled.linear import FORWARD, NO, YES, no_further
from rlloop.numerics.layout import AttentionLayout, DecoderWeights

ROWS = 128  # of a task, where threads share the rows. Each task packs all weights, so fewer cost more
WEIGHTS = 1 << 21  # of a layer at most: larger ones are better packed once for all rows
NO_SINKS = np.empty(0, np.float32)

# Numba reads no attributes of globals.
_norm, _product, _attention = elementwise.rms_norm.part, linear.product.part, attention.forward.part
_qkv, _cache_write, _gated = fused.three_products.part, fused.cache_write.part, fused.gated_product.part


@inlined
def _zero():
    return np.zeros(1, np.int64)


@inlined
def _room(numbers):
    return np.empty(numbers, np.float32)


@parallel_kernel
def _layer(
    counter, chunk, delta, stream, has_stream, norm, second_norm, q_norm, k_norm, has_norms, eps, q_weight, k_weight,
    v_weight, o_weight, gate, up, down, positions, cos, sin, slots, keys, values, query_start, context, block_start,
    blocks, block_size, width, inner, heads, groups, head, scale, split, window, sinks, tiles, out, out_stream,
):  # fmt: skip
    """Rows are of `width` numbers, the MLP's of `inner`. `tiles`: those of the products for queries to values, for
    `width` and for `inner`."""
    queries, past, share = heads * head, groups * head, heads // groups
    columns, first_task = np.array([queries, past, past]), np.arange(chunk + 1) * groups
    x, scales, lse = _room(chunk * width), _room(chunk), _room(chunk * heads)
    q, k, v, read = _room(chunk * queries), _room(chunk * past), _room(chunk * past), _room(chunk * queries)
    made, gated = _room(chunk * width), _room(chunk * inner)
    begin = take(counter) * chunk
    while begin < len(positions):
        end = min(len(positions), begin + chunk)
        rows, own = end - begin, delta[begin * width : end * width]
        total, before, scale_of = out_stream[begin * width : end * width], own, scales[:rows]
        if has_stream:
            _norm(_zero(), own, stream[begin * width : end * width], norm, eps, YES, total, x, scale_of, width)
            before = total
        else:
            _norm(_zero(), own, own, norm, eps, NO, own, x, scale_of, width)
        _qkv(_zero(), q_weight, k_weight, v_weight, x, q, k, v, columns, rows, width, CHAIN, tiles[0], chunk)
        _cache_write(
            _zero(), q, k, v, q_norm, k_norm, eps, has_norms, positions[begin:end], cos, sin, slots[begin:end], q, keys,
            values, heads, groups, head // 2,
        )  # fmt: skip
        _attention(
            _zero(), q, keys, values, head, query_start[: rows + 1], context[begin:end],
            block_start[begin * blocks : end * blocks], blocks, block_size, first_task[: rows + 1], share, heads,
            groups, head, head, scale, split, window, True, sinks, read, lse,
        )  # fmt: skip
        _product(
            _zero(), o_weight, YES, read, YES, o_weight, NO, made, rows, width, queries, FORWARD, CHAIN, tiles[1],
            chunk, no_further(read, o_weight),
        )  # fmt: skip
        _norm(_zero(), made, before, second_norm, eps, YES, total, x, scale_of, width)
        _gated(_zero(), gate, up, x, gated, rows, inner, width, CHAIN, tiles[2], chunk)
        _product(
            _zero(), down, YES, gated, YES, down, NO, out[begin * width : end * width], rows, width, inner, FORWARD,
            CHAIN, tiles[1], chunk, no_further(gated, down),
        )  # fmt: skip
        begin = take(counter) * chunk


def decoder_layer(
    delta: Tensor, stream: Tensor | None, weights: DecoderWeights, eps: float, positions: Tensor,
    rope: tuple[Tensor, Tensor], slots: Tensor, keys: Tensor, values: Tensor, layout: AttentionLayout, scale: float,
    split: int, window: int,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    (rows, width), inner, (_, groups, head) = delta.shape, len(weights.gate), keys.shape
    queries, past = len(weights.qkv[0]), groups * head
    float32 = all(tensor.dtype == torch.float32 for tensor in (delta, keys, *weights.all))
    if not float32 or rows == 0 or sum(tensor.numel() for tensor in weights.all) > WEIGHTS:
        return None
    threads = threads_for(rows * max(2 * inner, queries + 2 * past) * width)
    if threads > 1 and rows < threads * ROWS:  # they share the columns of a weight rather than the few rows
        return None
    chunk = min(rows, ROWS) if threads > 1 else min(rows, linear.MOST_ROWS)
    tiles = np.array([linear.plan(chunk, n, width, 1, CHAIN)[0] for n in (queries + 2 * past, width, inner)])
    out, out_stream = torch.empty_like(delta), torch.empty_like(delta)
    first, other = weights.norms
    q_norm, k_norm = weights.head_norms or (first, first)
    matrices = (*weights.qkv, weights.o, weights.gate, weights.up, weights.down)
    _layer(
        threads, chunk, flat(delta.contiguous()), flat(delta if stream is None else stream.contiguous()),
        stream is not None, flat(first), flat(other), flat(q_norm), flat(k_norm), weights.head_norms is not None,
        np.float32(eps), *(flat(matrix.contiguous()) for matrix in matrices), flat(positions.contiguous()),
        flat(rope[0]), flat(rope[1]), flat(slots.contiguous()), flat(keys.view(-1)), flat(values.view(-1)),
        flat(layout.query_start), flat(layout.context), flat(layout.block_start.contiguous()),
        layout.block_start.shape[1], layout.block_size, width, inner, queries // head, groups, head, np.float32(scale),
        split, window, NO_SINKS, tiles, flat(out), flat(out_stream),
    )  # fmt: skip
    return out, out_stream
