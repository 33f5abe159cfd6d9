"""Operations that round and sum as transformers' eager forward does: each as its modelling code writes it.

Bit-equal to transformers on one CPU, one sequence a forward and the same number of threads, for the families whose
attention is not latent (docs/parity.md says what was compared). Shapes are those of `rlloop.numerics.ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlloop.numerics.layout import CAUSAL, AttentionLayout, AttentionMask
from rlloop.numerics.routing import Clamped
from rlloop.numerics.stock import clamped_expert, seen_in, silu_mul, slots_of


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rounds the normed stream before it meets the weight."""
    stream = x if residual is None else residual + x
    wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(stream.dtype), stream


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """cos and sin in the compute type, and each product rounded."""
    c, s = (torch.cat((table[positions],) * 2, dim=-1)[:, None, :].to(x.dtype) for table in (cos, sin))
    low, high = x.chunk(2, dim=-1)
    return (x * c) + (torch.cat((-high, low), dim=-1) * s)


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, mask: AttentionMask = CAUSAL
) -> Tensor:
    """Scores in the compute type, softmax in float32 (with sinks: in the compute type, too), weights rounded."""
    starts, contexts, share = layout.query_start.tolist(), layout.context.tolist(), q.shape[1] // k.shape[1]
    outs = []
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        count = rows.stop - rows.start
        slots = slots_of(layout, s, context + count)
        keys, values = (x[slots].transpose(0, 1).repeat_interleave(share, dim=0)[None] for x in (k, v))
        scores = torch.matmul(q[rows].transpose(0, 1)[None], keys.transpose(2, 3)) * scale
        seen = seen_in(mask, count, context, q.device)
        scores = scores + torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(
            ~seen, torch.finfo(q.dtype).min
        )
        if mask.sinks is None:
            weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        else:
            sinks = mask.sinks.to(q.dtype)[None, :, None, None].expand(1, -1, count, 1)
            scores = torch.cat((scores, sinks), dim=-1)
            weights = (scores - scores.max(-1, keepdim=True).values).softmax(-1)[..., :-1]
        outs.append(torch.matmul(weights, values)[0].transpose(0, 1))
    return torch.cat(outs)


def full_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    outs = []
    for sequence in zip(*(x.split(layout.query_start.diff().tolist()) for x in (q, k, v)), strict=True):
        queries, keys, values = (x.transpose(0, 1)[None] for x in sequence)
        scores = torch.matmul(queries, keys.transpose(2, 3)) * scale
        outs.append(torch.matmul(scores.softmax(-1, dtype=torch.float32).to(q.dtype), values)[0].transpose(0, 1))
    return torch.cat(outs)


def experts(x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, gated: bool, clamped: Clamped | None = None) -> Tensor:
    """One expert after the other, its tokens in the order of their slots."""
    outputs = x.new_zeros(*chosen.shape, x.shape[1])
    for expert in chosen.unique().tolist():
        slot, token = torch.where((chosen == expert).T)
        if clamped is not None:
            outputs = outputs.index_put((token, slot), clamped_expert(x[token], up, down, expert, clamped))
            continue
        inner = torch.nn.functional.linear(x[token], up[expert])
        inner = silu_mul(*inner.chunk(2, dim=-1)) if gated else inner.relu().square()
        out = torch.nn.functional.linear(inner, down[expert])
        outputs = outputs.index_put((token, slot), out)
    return outputs


def combine(slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None, each: bool) -> Tensor:
    """Added in ascending order of expert."""
    order = chosen.argsort(dim=-1, stable=True)
    products = (slots * weights[..., None]).to(slots.dtype if each else weights.dtype)
    products = products.gather(1, order[..., None].expand_as(products))
    total = torch.zeros_like(products[:, 0])
    for slot in range(chosen.shape[1]):
        total = total + products[:, slot]
    if shared is not None:
        total = total + shared
    return total.to(slots.dtype)
