"""Slow and simple reference implementation, differentiable, in any float type; tests compare with it.

One row, head and query at a time, as the contracts are written. bfloat16 and float16 are computed in float32 and
rounded once; float32 and float64 are computed in themselves. Shapes are those of `rlloop.numerics.ops`.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from rlloop.numerics.layout import CAUSAL, AttentionLayout, AttentionMask, LogitsProcessing, RecurrentState
from rlloop.numerics.random import uniform
from rlloop.numerics.routing import Clamped, Routing


def widen(x: Tensor) -> Tensor:
    """x in the type it is computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = widen(x) @ widen(weight).T
    return (out if bias is None else out + widen(bias)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    stream = x if residual is None else (widen(x) + widen(residual)).to(x.dtype)
    wide = widen(stream)
    mean_square = (wide * wide).sum(-1, keepdim=True) / wide.shape[-1]
    return (wide / torch.sqrt(mean_square + eps) * widen(weight)).to(x.dtype), stream


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    g = widen(gate)
    return (g / (1 + torch.exp(-g)) * widen(up)).to(gate.dtype)


def sigmoid_mul(gate: Tensor, up: Tensor) -> Tensor:
    return (widen(up) / (1 + torch.exp(-widen(gate)))).to(up.dtype)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    wide = widen(x)
    if tanh:
        return (wide / (1 + torch.exp(-((8 / torch.pi) ** 0.5) * (wide + 0.044715 * wide**3)))).to(x.dtype)
    return (wide * (1 + torch.erf(wide / 2**0.5)) / 2).to(x.dtype)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, layout: AttentionLayout, states: RecurrentState | None
) -> Tensor:
    wide, taps = widen(x), widen(weight)[:, 0].T  # [K, C]
    kept, out = len(taps) - 1, []
    for s, (begin, end) in enumerate(itertools.pairwise(layout.query_start.tolist())):
        past = wide.new_zeros(kept, x.shape[1])
        if states is not None and layout.context[s] > 0:
            past = states.store[states.rows[s]].to(wide.dtype)
        read = torch.cat((past, wide[begin:end]))
        for t in range(end - begin):
            total = (read[t : t + kept + 1] * taps).sum(0)
            out.append(total if bias is None else total + widen(bias))
        if states is not None:
            states.store[states.rows[s]] = read[len(read) - kept :].to(states.store.dtype)
    return torch.stack(out) if out else wide


def recurrent_gates(a: Tensor, rate: Tensor, bias: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    x = widen(a) + widen(bias)
    step = (x.clamp(min=0) + torch.log(1 + torch.exp(-x.abs()))).clamp(min=floor)
    return torch.exp(-torch.exp(widen(rate)) * step), step


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, layout: AttentionLayout,
    states: RecurrentState | None,
) -> Tensor:  # fmt: skip
    queries, keys, values, decay, beta = (widen(x) for x in (q, k, v, decay, beta))
    share, out = v.shape[1] // q.shape[1], []
    for s, (begin, end) in enumerate(itertools.pairwise(layout.query_start.tolist())):
        state = values.new_zeros(v.shape[1], q.shape[2], v.shape[2])
        if states is not None and layout.context[s] > 0:
            state = states.store[states.rows[s]].to(values.dtype)
        for t in range(begin, end):
            key, query = (x[t].repeat_interleave(share, dim=0)[..., None] for x in (keys, queries))  # [H, K, 1]
            state = state * decay[t, :, None, None]
            value = values[t] - (state * key).sum(1) if corrects else values[t]
            state = state + key * (value * beta[t, :, None])[:, None]
            out.append((state * query).sum(1))
        if states is not None:
            states.store[states.rows[s]] = state.to(states.store.dtype)
    return torch.stack(out) if out else values


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide, half = widen(x), x.shape[-1] // 2
    rows = []
    for t, position in enumerate(positions.tolist()):
        c, s = cos[position], sin[position]  # [D / 2]
        low, high = wide[t, :, :half], wide[t, :, half:]
        rows.append(torch.cat((low * c - high * s, low * s + high * c), dim=-1))
    return torch.stack(rows).to(x.dtype) if rows else x


def _read(scores: Tensor, values: Tensor, split: int, sink: Tensor | None = None) -> Tensor:
    """Values [n, D] weighted by the softmax of scores [..., n], computed in parts of `split` keys (0: one part)."""
    size = split or scores.shape[-1]
    top, total = (scores.new_tensor(number) for number in ((-torch.inf, 0.0) if sink is None else (0.0, 1.0)))
    top, read = top if sink is None else widen(sink), values.new_zeros(())
    for chunk, rows in zip(scores.split(size, dim=-1), values.split(size), strict=True):
        highest = torch.maximum(top, chunk.amax(-1, keepdim=True))
        fade, mass = torch.exp(top - highest), torch.exp(chunk - highest)
        top, total, read = highest, total * fade + mass.sum(-1, keepdim=True), read * fade + mass @ rows
    return read / total


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, mask: AttentionMask = CAUSAL
) -> Tensor:
    q_wide, k_wide, v_wide = widen(q), widen(k), widen(v)
    starts, contexts, blocks = layout.query_start.tolist(), layout.context.tolist(), layout.block_start.tolist()
    group = q.shape[1] // k.shape[1]  # query heads that share one key-value head
    out = []
    for s, context in enumerate(contexts):
        for t in range(starts[s], starts[s + 1]):
            seen = context + (t - starts[s]) + 1  # keys at positions up to the query's own
            begin = max(0, seen - mask.window) if mask.window else 0
            slots = [blocks[s][j // layout.block_size] + j % layout.block_size for j in range(begin, seen)]
            split, heads = 0 if mask.window else mask.split, []
            for h in range(q.shape[1]):
                scores = k_wide[slots, h // group] @ q_wide[t, h] * scale
                sink = None if mask.sinks is None else mask.sinks[h]
                heads.append(_read(scores, v_wide[slots, h // group], split, sink))
            out.append(torch.stack(heads))
    return torch.stack(out).to(q.dtype) if out else q


def full_attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    out = []
    for begin, end in itertools.pairwise(layout.query_start.tolist()):
        scores = torch.einsum("thd,shd->hts", widen(q[begin:end]), widen(k[begin:end])) * scale
        mass = torch.exp(scores - scores.amax(-1, keepdim=True))
        weights = mass / mass.sum(-1, keepdim=True)
        out.append(torch.einsum("hts,shd->thd", weights, widen(v[begin:end])))
    return torch.cat(out).to(q.dtype) if out else q


def index_weights(x: Tensor, weight: Tensor) -> Tensor:
    return router_logits(x, weight, exact=True)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = widen(x) - widen(x).mean(-1, keepdim=True)
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (normed * widen(weight) + widen(bias)).to(x.dtype)


def select(q: Tensor, k: Tensor, weights: Tensor, layout: AttentionLayout, scale: float, count: int) -> Tensor:
    starts, contexts, blocks = layout.query_start.tolist(), layout.context.tolist(), layout.block_start.tolist()
    rows = []
    for s, context in enumerate(contexts):
        for t in range(starts[s], starts[s + 1]):
            seen = context + (t - starts[s]) + 1
            slots = [blocks[s][j // layout.block_size] + j % layout.block_size for j in range(seen)]
            scores = torch.relu(widen(k)[slots, 0] @ widen(q)[t].T * scale) @ weights[t].to(widen(q).dtype)
            values = [-torch.inf if value != value else value for value in scores.tolist()]
            best = sorted(order(values)[:count])
            rows.append(best + [-1] * (count - len(best)))
    return torch.tensor(rows, dtype=torch.int64).view(len(q), count)


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, selected: Tensor, layout: AttentionLayout, scale: float, split: int = 0
) -> Tensor:
    sequences, blocks = layout.sequences.tolist(), layout.block_start.tolist()
    out = []
    for t, (s, row) in enumerate(zip(sequences, selected.tolist(), strict=True)):
        slots = [blocks[s][j // layout.block_size] + j % layout.block_size for j in row if j >= 0]
        scores = widen(q)[t] @ widen(k)[slots, 0].T * scale
        out.append(_read(scores, widen(v)[slots, 0], split))
    return torch.stack(out).to(q.dtype) if out else q.new_empty(0, q.shape[1], v.shape[2])


def head_linear(x: Tensor, weight: Tensor, by_row: bool) -> Tensor:
    heads = [widen(x[:, h]) @ (widen(w).T if by_row else widen(w)) for h, w in enumerate(weight)]
    return torch.stack(heads, dim=1).to(x.dtype)


def router_logits(x: Tensor, weight: Tensor, exact: bool, bias: Tensor | None = None) -> Tensor:
    logits = widen(x) @ widen(weight).T if exact else widen(linear(x, weight, None))
    if bias is None:
        return logits
    logits = logits + widen(bias)
    return logits if exact else widen(logits.to(x.dtype))


def _chosen(values: list[float], routing: Routing) -> list[int]:
    """The experts of one token, by what ranks them."""
    values = [-torch.inf if value != value else value for value in values]
    if routing.groups > 1:
        size = len(values) // routing.groups
        groups = [values[g * size : (g + 1) * size] for g in range(routing.groups)]
        best = order([sum(sorted(group)[-2:]) for group in groups])[: routing.top_groups]
        values = [value if e // size in best else -torch.inf for e, value in enumerate(values)]
    return order(values)[: routing.top_k]


def route(logits: Tensor, bias: Tensor | None, routing: Routing, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if routing.score == "softmax":
        mass = torch.exp(logits - logits.amax(-1, keepdim=True))
        scores = mass / mass.sum(-1, keepdim=True)
    else:
        scores = 1 / (1 + torch.exp(-logits))
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if given is None:
        chosen = torch.tensor([_chosen(row, routing) for row in ranked.tolist()]).view(len(logits), routing.top_k)
    else:
        chosen = given.long()
    weights = scores.gather(1, chosen)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    return weights * routing.scale, chosen, scores


def _clamped_glu(x: Tensor, rule: Clamped) -> Tensor:
    gate, up = widen(x[..., ::2]).clamp(max=rule.limit), widen(x[..., 1::2]).clamp(-rule.limit, rule.limit)
    return (gate * (up + 1) / (1 + torch.exp(-rule.alpha * gate))).to(x.dtype)


def experts(x: Tensor, up: Tensor, down: Tensor, chosen: Tensor, gated: bool, clamped: Clamped | None = None) -> Tensor:
    tokens = []
    for t, row in enumerate(chosen.tolist()):
        slots = []
        for expert in row:
            if clamped is not None:
                inner = _clamped_glu(linear(x[t : t + 1], up[expert].T, clamped.up_bias[expert]), clamped)
                slots.append(linear(inner, down[expert].T, clamped.down_bias[expert])[0])
                continue
            inner = linear(x[t : t + 1], up[expert], None)
            inner = silu_mul(*inner.chunk(2, dim=-1)) if gated else inner.relu().square()
            slots.append(linear(inner, down[expert], None)[0])
        tokens.append(torch.stack(slots))
    return torch.stack(tokens) if tokens else x.new_empty(0, chosen.shape[1], x.shape[1])


def combine(slots: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None, each: bool) -> Tensor:
    out = []
    for t, row in enumerate(chosen.tolist()):
        total = torch.zeros_like(widen(slots[t, 0]))
        for slot in sorted(range(len(row)), key=lambda s: row[s]):
            product = widen(slots[t, slot]) * weights[t, slot]
            if each:
                product = widen(product.to(slots.dtype))
            total = total + product
            if each:
                total = widen(total.to(slots.dtype))
        if shared is not None:
            total = total + widen(shared[t])
        out.append(total.to(slots.dtype))
    return torch.stack(out) if out else slots.new_empty(0, slots.shape[2])


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return widen(hidden) @ widen(weight).T


def order(values: list[float]) -> list[int]:
    """Token ids by (value descending, id ascending). Zeros are equal whatever their sign."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def banned(processing: LogitsProcessing, t: int) -> list[int]:
    """The tokens that row t may not take."""
    if processing.banned_start is None or processing.banned_ids is None:
        return []
    return processing.banned_ids[int(processing.banned_start[t]) : int(processing.banned_start[t + 1])].tolist()


def processed_row(row: Tensor, processing: LogitsProcessing, t: int) -> tuple[Tensor, Tensor]:
    """Row t of the logits, as the distribution sampled from sees it.

    [V] -> (logits over the temperature, −inf where a token is impossible; whether each token is possible), both [V].
    """
    temperature = 1.0 if processing.temperature is None else processing.temperature[t].item()
    top_k = 0 if processing.top_k is None else int(processing.top_k[t])
    top_p = 1.0 if processing.top_p is None else processing.top_p[t].item()
    min_p = 0.0 if processing.min_p is None else processing.min_p[t].item()
    possible = torch.ones(len(row), dtype=torch.bool)
    if temperature == 0:
        return row, possible

    possible[banned(processing, t)] = False
    z = row / temperature
    values = z.detach().masked_fill(~possible, -torch.inf)
    ids = [i for i in order(values.tolist()) if possible[i]]
    mass = torch.exp(values - values.max()).tolist()  # relative to the top token's

    if top_k > 0:
        ids = ids[:top_k]
    if top_p < 1.0:
        total, before, nucleus = sum(mass[i] for i in ids), 0.0, []
        for i in ids:
            if before < top_p * total:  # the token that crosses top_p stays
                nucleus.append(i)
            before += mass[i]
        ids = nucleus
    ids = [i for i in ids if mass[i] >= min_p]

    possible = torch.zeros(len(row), dtype=torch.bool)
    possible[ids] = True
    return z.masked_fill(~possible, -torch.inf), possible


def token_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, processing: LogitsProcessing
) -> tuple[Tensor, Tensor]:
    """An impossible target has logprob −inf and sends no gradient."""
    logprobs, entropies = [], []
    rows = logits(hidden, weight)
    for t, target in enumerate(targets.tolist()):
        z, possible = processed_row(rows[t], processing, t)
        row = torch.log_softmax(z, -1)
        finite = row.masked_fill(~possible, 0.0)
        logprobs.append(row.masked_fill(~possible, -torch.inf)[target])
        entropies.append(-(torch.exp(finite) * finite)[possible].sum())
    if not logprobs:
        return rows.new_zeros(0), rows.new_zeros(0)
    return torch.stack(logprobs), torch.stack(entropies)


def sample(
    logits: Tensor, processing: LogitsProcessing, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of the cumulative distribution in order of token id: the first id whose cumulative mass passes u."""
    ids, logprobs, raw_logprobs = [], [], []
    for t, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        z, possible = processed_row(logits[t], processing, t)
        if not z[possible].isfinite().any() or not (z[possible] < torch.inf).all():
            raise ValueError(f"row {t} of the logits holds no distribution")
        if processing.temperature is not None and processing.temperature[t] == 0:
            choice = next(i for i in order(z.tolist()) if i not in banned(processing, t))
        else:
            mass = torch.exp(z - z.max()).double()
            cumulative = mass.cumsum(-1)
            choice = int((cumulative <= uniform(seed, position) * cumulative[-1]).sum())
        ids.append(choice)
        logprobs.append(torch.log_softmax(z, -1)[choice])
        raw_logprobs.append(torch.log_softmax(logits[t], -1)[choice])
    if not ids:
        return torch.empty(0, dtype=torch.int64), logits.new_zeros(0), logits.new_zeros(0)
    return torch.tensor(ids), torch.stack(logprobs), torch.stack(raw_logprobs)
