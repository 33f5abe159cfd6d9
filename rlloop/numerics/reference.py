"""Slow and obvious, differentiable, in any float type: the oracle of the tests.

One row, head and query at a time, as the contracts are written. bfloat16 and float16 are computed in float32 and
rounded once; float32 and float64 are computed in themselves. Shapes are those of `rlloop.numerics.ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout, LogitsWarp
from rlloop.numerics.random import uniform


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


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide, half = widen(x), x.shape[-1] // 2
    rows = []
    for t, position in enumerate(positions.tolist()):
        c, s = cos[position], sin[position]  # [D / 2]
        low, high = wide[t, :, :half], wide[t, :, half:]
        rows.append(torch.cat((low * c - high * s, low * s + high * c), dim=-1))
    return torch.stack(rows).to(x.dtype) if rows else x


def attention(q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    q_wide, k_wide, v_wide = widen(q), widen(k), widen(v)
    starts, contexts, blocks = layout.query_start.tolist(), layout.context.tolist(), layout.block_start.tolist()
    group = q.shape[1] // k.shape[1]  # query heads that share one key-value head
    out = []
    for s, context in enumerate(contexts):
        for t in range(starts[s], starts[s + 1]):
            seen = context + (t - starts[s]) + 1  # keys at positions up to the query's own
            slots = [blocks[s][j // layout.block_size] + j % layout.block_size for j in range(seen)]
            heads = []
            for h in range(q.shape[1]):
                scores = k_wide[slots, h // group] @ q_wide[t, h] * scale
                weights = torch.exp(scores - scores.max())
                heads.append(weights / weights.sum() @ v_wide[slots, h // group])
            out.append(torch.stack(heads))
    return torch.stack(out).to(q.dtype) if out else q


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return widen(hidden) @ widen(weight).T


def order(values: list[float]) -> list[int]:
    """Token ids by (value descending, id ascending). Zeros are equal whatever their sign."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


def banned(warp: LogitsWarp, t: int) -> list[int]:
    """The tokens that row t may not take."""
    if warp.banned_start is None or warp.banned_ids is None:
        return []
    return warp.banned_ids[int(warp.banned_start[t]) : int(warp.banned_start[t + 1])].tolist()


def warped_row(row: Tensor, warp: LogitsWarp, t: int) -> tuple[Tensor, Tensor]:
    """Row t of the logits, as the distribution sampled from sees it.

    [V] -> (logits over the temperature, −inf where a token is impossible; whether each token is possible), both [V].
    """
    temperature = 1.0 if warp.temperature is None else warp.temperature[t].item()
    top_k = 0 if warp.top_k is None else int(warp.top_k[t])
    top_p = 1.0 if warp.top_p is None else warp.top_p[t].item()
    min_p = 0.0 if warp.min_p is None else warp.min_p[t].item()
    possible = torch.ones(len(row), dtype=torch.bool)
    if temperature == 0:
        return row, possible

    possible[banned(warp, t)] = False
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


def token_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, warp: LogitsWarp) -> tuple[Tensor, Tensor]:
    """An impossible target has logprob −inf and sends no gradient."""
    logprobs, entropies = [], []
    rows = logits(hidden, weight)
    for t, target in enumerate(targets.tolist()):
        z, possible = warped_row(rows[t], warp, t)
        row = torch.log_softmax(z, -1)
        finite = row.masked_fill(~possible, 0.0)
        logprobs.append(row.masked_fill(~possible, -torch.inf)[target])
        entropies.append(-(torch.exp(finite) * finite)[possible].sum())
    if not logprobs:
        return rows.new_zeros(0), rows.new_zeros(0)
    return torch.stack(logprobs), torch.stack(entropies)


def sample(logits: Tensor, warp: LogitsWarp, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse of the cumulative distribution in order of token id: the first id whose cumulative mass passes u."""
    ids, logprobs, raw_logprobs = [], [], []
    for t, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        z, possible = warped_row(logits[t], warp, t)
        if not z[possible].isfinite().any() or not (z[possible] < torch.inf).all():
            raise ValueError(f"row {t} of the logits holds no distribution")
        if warp.temperature is not None and warp.temperature[t] == 0:
            choice = next(i for i in order(z.tolist()) if i not in banned(warp, t))
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
