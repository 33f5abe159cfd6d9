"""PyTorch's own operations: fast, and not batch-invariant. For comparison, and to plant faults in tests.

Every function is differentiable through ordinary autograd. Shapes are those of `rlloop.numerics.ops`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlloop.numerics.layout import CAUSAL, AttentionLayout, AttentionMask, LogitsProcessing
from rlloop.numerics.routing import Clamped, Routing


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    stream = x if residual is None else x + residual
    wide = stream.to(torch.promote_types(stream.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight).to(stream.dtype), stream


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def sigmoid_mul(gate: Tensor, up: Tensor) -> Tensor:
    return up * F.sigmoid(gate)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    c, s = (table[positions][:, None, :] for table in (cos, sin))
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * c - high * s, high * c + low * s), dim=-1).to(x.dtype)


def head_linear(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    return torch.einsum("thk,hnk->thn" if by_row else "thk,hkn->thn", x, weight)


def router_logits(x: Tensor, weight: Tensor, exact: bool, bias: Tensor | None = None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(wide), weight.to(wide)) if exact else F.linear(x, weight).to(wide)
    if bias is None:
        return logits
    logits = logits + bias.to(wide)
    return logits if exact else logits.to(x.dtype).to(wide)


def route(logits: Tensor, bias: Tensor | None, routing: Routing, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    scores = logits.softmax(-1) if routing.score == "softmax" else logits.sigmoid()
    if given is None:
        ranked = scores.detach() if bias is None else scores.detach() + bias
        if routing.groups > 1:
            by_group = ranked.unflatten(-1, (routing.groups, -1))
            best = by_group.topk(2, dim=-1)[0].sum(-1).topk(routing.top_groups, dim=-1, sorted=False)[1]
            kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(1, best, True)
            ranked = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        chosen = ranked.topk(routing.top_k, dim=-1, sorted=routing.score == "softmax")[1]
    else:
        chosen = given.long()
    weights = scores.gather(1, chosen)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    return weights * routing.scale, chosen, scores


def clamped_expert(x: Tensor, up: Tensor, down: Tensor, expert: int, rule: Clamped) -> Tensor:
    gate, rise = (x @ up[expert] + rule.up_bias[expert]).unflatten(-1, (-1, 2)).unbind(-1)
    gate, rise = gate.clamp(max=rule.limit), rise.clamp(-rule.limit, rule.limit)
    inner = (rise + 1) * (gate * torch.sigmoid(gate * rule.alpha))
    return inner @ down[expert] + rule.down_bias[expert]


def by_expert(chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The places of `chosen` [T, k], flat, by expert and stably [T k], and where each expert's end [E] int32."""
    ordered, order = chosen.flatten().sort(stable=True)
    return order, torch.searchsorted(ordered, torch.arange(count, device=order.device), right=True, out_int32=True)


def experts(x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, gated: bool, clamped: Clamped | None = None) -> Tensor:
    if x.is_cuda and x.dtype == torch.bfloat16 and clamped is None:
        return _grouped_experts(x, up, down, chosen, gated)
    outputs = x.new_zeros(chosen.numel(), x.shape[1])
    flat = chosen.flatten()
    for expert in flat.unique().tolist():
        at = (flat == expert).nonzero()[:, 0]
        if clamped is not None:
            outputs = outputs.index_add(0, at, clamped_expert(x[at // chosen.shape[1]], up, down, expert, clamped))
            continue
        inner = F.linear(x[at // chosen.shape[1]], up[expert])
        inner = silu_mul(*inner.chunk(2, dim=-1)) if gated else F.relu(inner).square()
        outputs = outputs.index_add(0, at, F.linear(inner, down[expert]))
    return outputs.view(*chosen.shape, -1)


def _grouped_experts(x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, gated: bool) -> Tensor:
    """`experts` without a look from the host, so that a CUDA graph can record it."""
    order, ends = by_expert(chosen, len(down))
    inner = F.grouped_mm(x[order // chosen.shape[1]], up.mT, offs=ends)
    inner = silu_mul(*inner.chunk(2, dim=-1)) if gated else F.relu(inner).square()
    outputs = F.grouped_mm(inner, down.mT, offs=ends)
    return torch.zeros_like(outputs).index_copy(0, order, outputs).view(*chosen.shape, -1)


def combine(slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None, each: bool) -> Tensor:
    products = slots * weights[..., None].to(slots.dtype if each else weights.dtype)
    total = products.sum(1).to(slots.dtype)  # in the order of the slots
    return total if shared is None else total + shared


def slots_of(layout: AttentionLayout, sequence: int, length: int) -> Tensor:
    """The slots of the first `length` keys of one sequence. [length] int64"""
    at = torch.arange(length, device=layout.block_start.device)
    return layout.block_start[sequence, at // layout.block_size] + at % layout.block_size


def seen_in(mask: AttentionMask, count: int, context: int, device: torch.device) -> Tensor:
    """Mask of the keys that each of `count` queries reads, the first at position `context`. [count, context + count]"""
    seen = torch.ones(count, context + count, dtype=torch.bool, device=device).tril(context)
    return seen.triu(context + 1 - mask.window) if mask.window else seen


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, mask: AttentionMask = CAUSAL
) -> Tensor:
    if q.is_cuda and not layout.contiguous and mask.sinks is None:
        return padded_attention(q, k, v, layout, scale, mask.window)
    starts, contexts = layout.query_start.tolist(), layout.context.tolist()
    outs = []
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        count = rows.stop - rows.start
        slots = slots_of(layout, s, context + count)
        keys, values, seen = k[slots], v[slots], seen_in(mask, count, context, q.device)
        if mask.sinks is not None:  # one more key, that scores 0 and then its sink
            keys, values = (torch.cat((x, torch.zeros_like(x[:1]))) for x in (keys, values))
            seen = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
            column = mask.sinks.to(q.dtype)[:, None, None].expand(-1, count, 1)
            seen = torch.cat((seen.expand(len(column), -1, -1), column), dim=-1)
        out = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=seen,
            scale=scale,
            enable_gqa=True,
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def full_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    sequences = zip(*(x.split(layout.query_start.diff().tolist()) for x in (q, k, v)), strict=True)
    return torch.cat(
        [
            F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in sequence), scale=scale)[0].transpose(0, 1)
            for sequence in sequences
        ]
    )


def padded_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, window: int) -> Tensor:
    """`attention` over paged keys, all sequences at once. Where each has one query, the host looks at nothing."""
    begin, pages = layout.query_start[:-1, None], layout.block_start
    counts = layout.query_start.diff()[:, None]
    most = 1 if len(q) == len(pages) else int(counts.max())
    offsets = torch.arange(most, device=q.device)
    slots = (pages[..., None] + torch.arange(layout.block_size, device=q.device)).flatten(1)  # [S, L]
    slots = slots.clamp(0, len(k) - 1)  # a short sequence's last pages may be anything
    position, key = (layout.context[:, None] + offsets)[..., None], torch.arange(slots.shape[1], device=q.device)
    seen = (key <= position) & (key > position - window) if window else key <= position  # [S, most, L]
    queries = q[(begin + offsets).clamp(max=len(q) - 1)]  # [S, most, H, D]
    out = F.scaled_dot_product_attention(
        queries.transpose(1, 2),
        k[slots].transpose(1, 2),
        v[slots].transpose(1, 2),
        attn_mask=seen[:, None],
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    ).transpose(1, 2)
    return out[:, 0] if most == 1 else out[offsets < counts]


def index_weights(x: Tensor, weight: Tensor) -> Tensor:
    return router_logits(x, weight, exact=True)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def select(q: Tensor, k: Tensor, weights: Tensor, layout: AttentionLayout, scale: float, count: int) -> Tensor:
    starts, contexts = layout.query_start.tolist(), layout.context.tolist()
    selected = q.new_full((len(q), count), -1, dtype=torch.int64)
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        length = context + rows.stop - rows.start
        keys = k[slots_of(layout, s, length), 0].float()
        scores = F.relu(torch.matmul(q[rows].float(), keys.T) * scale)  # [T, H, length]
        values = torch.matmul(weights[rows][:, None], scores)[:, 0]
        future = torch.ones_like(values, dtype=torch.bool).triu(context + 1)
        best = values.masked_fill(future, -torch.inf).topk(min(count, length), dim=-1)[1]
        unseen = torch.arange(context, length, device=q.device)[:, None] < best
        best = best.masked_fill(unseen, length).sort(-1)[0]
        selected[rows, : best.shape[1]] = best.masked_fill(best == length, -1)
    return selected


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, layout: AttentionLayout, scale: float
) -> Tensor:
    starts, contexts = layout.query_start.tolist(), layout.context.tolist()
    outs = []
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        slots = slots_of(layout, s, context + rows.stop - rows.start)
        chosen = selected[rows]
        mask = torch.zeros(len(chosen), len(slots) + 1, dtype=torch.bool, device=q.device)
        mask = mask.scatter(1, chosen.masked_fill(chosen < 0, len(slots)), True)[:, :-1]
        out = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1)[None],
            k[slots].transpose(0, 1)[None],
            v[slots].transpose(0, 1)[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    out = F.linear(hidden, weight)
    return out.to(torch.promote_types(out.dtype, torch.float32))


def without_banned(logits: Tensor, processing: LogitsProcessing) -> Tensor:
    """The logits, −inf where a token is banned. [T, V]"""
    z = logits.clone()
    if processing.banned_start is not None and processing.banned_ids is not None:
        starts = processing.banned_start
        rows = torch.repeat_interleave(torch.arange(len(starts) - 1, device=z.device), starts.diff())
        z[rows, processing.banned_ids[int(starts[0]) : int(starts[-1])]] = -torch.inf
    return z


def processed(logits: Tensor, processing: LogitsProcessing) -> Tensor:
    """The logits of the distribution sampled from, −inf where a token is impossible. [T, V] float32"""
    z = without_banned(logits, processing)
    greedy = None if processing.temperature is None else processing.temperature == 0
    if processing.temperature is not None and greedy is not None:
        z = z / torch.where(greedy, 1.0, processing.temperature)[:, None]
    value, index = torch.sort(z, dim=-1, descending=True, stable=True)
    ranks = torch.arange(z.shape[-1], device=z.device)
    drop = torch.zeros_like(value, dtype=torch.bool)
    if processing.top_k is not None:
        drop |= (ranks >= processing.top_k[:, None]) & (processing.top_k[:, None] > 0)
    if processing.top_p is not None:
        p = value.masked_fill(drop, -torch.inf).softmax(-1)
        drop |= (p.cumsum(-1) - p >= processing.top_p[:, None]) & (processing.top_p[:, None] < 1)
    if processing.min_p is not None:
        drop |= (value - value[:, :1]).exp() < processing.min_p[:, None]
    z = z.masked_fill(torch.zeros_like(drop).scatter(1, index, drop), -torch.inf)
    return z if greedy is None else torch.where(greedy[:, None], logits, z)


def token_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, processing: LogitsProcessing
) -> tuple[Tensor, Tensor]:
    z = processed(logits(hidden, weight), processing)
    logprobs = z.log_softmax(-1)
    finite = logprobs.masked_fill(logprobs.isinf(), 0.0)  # p log p of an impossible token, and its gradient, are 0
    entropy = -(logprobs.exp() * finite).sum(-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], entropy


def sample(
    logits: Tensor, processing: LogitsProcessing, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logprobs = processed(logits, processing).log_softmax(-1)
    uniform = torch.empty(len(seeds), 1, dtype=torch.float64)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        generator = torch.Generator().manual_seed((seed * 1_000_003 + position) % 2**63)
        uniform[row] = torch.rand(1, dtype=torch.float64, generator=generator)
    cumulative = logprobs.double().exp().cumsum(-1)
    ids = (cumulative <= uniform.to(logits.device) * cumulative[:, -1:]).sum(-1).clamp(max=logits.shape[-1] - 1)
    if processing.temperature is not None:
        ids = torch.where(processing.temperature == 0, without_banned(logits, processing).argmax(-1), ids)
    raw = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    return ids, logprobs.gather(-1, ids[:, None])[:, 0], raw
