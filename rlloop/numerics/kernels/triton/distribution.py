"""The distribution of rows of logits: processed, measured, differentiated and sampled from.

A row's processed logits z are its logits, −inf where banned, over the temperature; then what top-k, top-p or min-p
drops becomes −inf too. Vocabulary blocks of `BLOCK` are measured each by its own program: top m_b, masses' sum of
exp(z − m_b), and the sum of masses times (z − m_b). They are joined in one tree whose shape is the vocabulary's alone.
Trainer and sampler run the same kernels, so they agree in every bit.

Of a vocabulary that ranks share, each has whole blocks: it measures its own, and draws where the draw falls into one
of them. Logits then begin with token FIRST.

`settings` is [T, 4] float64: temperature (0: greedy, measured raw), top-k, top-p, min-p. `cuts` is [T, 3] float32: a
token stays when z is above the first, or equal to it and its id at most the second; the third is the row's largest z.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, power_of_two
from rlloop.numerics.kernels.triton.random import uniform
from rlloop.numerics.layout import VOCABULARY_BLOCK as BLOCK


@triton.jit
def _processed(x, ids, row, temperature, banned_start, banned_ids, SIZE: tl.constexpr):
    """Logits at `ids` without banned ones, over the temperature."""
    x = tl.where(ids < SIZE, x, float("-inf"))
    if temperature != 0:
        for index in range(tl.load(banned_start + row), tl.load(banned_start + row + 1)):
            x = tl.where(ids == tl.load(banned_ids + index), float("-inf"), x)
        x = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * temperature)
    return x


@triton.jit
def _kept(z, ids, row, temperature, min_p, cuts):
    """z, −inf where truncation drops it."""
    if temperature != 0:
        value, last, top = tl.load(cuts + row * 3), tl.load(cuts + row * 3 + 1), tl.load(cuts + row * 3 + 2)
        stays = (z > value) | ((z == value) & (ids.to(tl.float32) <= last))
        if min_p > 0:
            stays = stays & (tl.exp(z - top) >= min_p)
        z = tl.where(stays, z, float("-inf"))
    return z


@triton.jit
def _is_plain(row, temperature, min_p, banned_start, cuts):
    """True if no temperature, ban or truncation changes the row's logits."""
    whole = (tl.load(cuts + row * 3) == float("-inf")) & (min_p <= 0)
    unbanned = tl.load(banned_start + row) == tl.load(banned_start + row + 1)
    return (temperature == 0) | ((temperature == 1) & whole & unbanned)


@triton.jit
def _key(z):
    """An integer in the order of z; −0 counts as 0."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weight(
    logits, row, edge, last, top, temperature, banned_start, banned_ids, BY_MASS: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Count or mass of the tokens with keys above `edge`, and of those with that key and ids up to `last`."""
    total = tl.full((), 0.0, tl.float64)
    for begin in range(0, SIZE, BLOCK):
        ids = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + row * SIZE + ids, ids < SIZE, float("-inf"))
        z = _processed(x, ids, row, temperature, banned_start, banned_ids, SIZE)
        key = _key(z)
        counts = (z > float("-inf")) & ((key > edge) | ((key == edge) & (ids <= last)))
        if BY_MASS:
            total += tl.sum(tl.where(counts, tl.exp(z - top), 0.0).to(tl.float64), 0)
        else:
            total += tl.sum(counts.to(tl.int32), 0).to(tl.float64)
    return total


@triton.jit
def _cut(
    logits, row, edge, last, limit, top, temperature, banned_start, banned_ids, BY_MASS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(key, id) of the last token that stays when a token stays while those before it weigh less than `limit`.

    The order is by value descending, then id ascending; tokens after (edge, last) are out already. Bisection, over the
    keys and then over the ids of equal ones: in one tree of sums, more tokens never weigh less, however it is rounded.
    """
    low, high = edge.to(tl.int64), _key(top).to(tl.int64)
    while high > low:  # the largest key that, with all above it, weighs `limit`
        middle = (low + high + 1) >> 1  # above `edge`, so that tokens with that key are still counted
        weight = _weight(
            logits, row, middle, SIZE, top, temperature, banned_start, banned_ids, BY_MASS, SIZE, BLOCK
        )  # fmt: skip
        if weight >= limit:
            low = middle
        else:
            high = middle - 1
    first, end = 0, tl.where(low > edge, SIZE - 1, last)
    while end > first:
        middle_id = (first + end) // 2
        weight = _weight(
            logits, row, low, middle_id, top, temperature, banned_start, banned_ids, BY_MASS, SIZE, BLOCK
        )  # fmt: skip
        if weight >= limit:
            end = middle_id
        else:
            first = middle_id + 1
    return low.to(tl.int32), end


@triton.jit
def _cuts(logits, settings, banned_start, banned_ids, cuts, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k = tl.load(settings + row * 4).to(tl.float32), tl.load(settings + row * 4 + 1)
    top_p, min_p = tl.load(settings + row * 4 + 2).to(tl.float32), tl.load(settings + row * 4 + 3).to(tl.float32)
    by_rank = (top_k > 0) & (top_k < SIZE)
    if (temperature != 0) & (by_rank | (top_p < 1) | (min_p > 0)):
        top = tl.full((), float("-inf"), tl.float32)
        for begin in range(0, SIZE, BLOCK):
            ids = begin + tl.arange(0, BLOCK)
            x = tl.load(logits + row * SIZE + ids, ids < SIZE, float("-inf"))
            top = tl.maximum(top, tl.max(_processed(x, ids, row, temperature, banned_start, banned_ids, SIZE), 0))
        edge, last = tl.full((), -2139095041, tl.int32), tl.full((), SIZE - 1, tl.int32)  # the key of −inf
        if by_rank:
            edge, last = _cut(
                logits, row, edge, last, top_k, top, temperature, banned_start, banned_ids, False, SIZE, BLOCK
            )  # fmt: skip
        if top_p < 1:
            total = _weight(logits, row, edge, last, top, temperature, banned_start, banned_ids, True, SIZE, BLOCK)
            limit = total * top_p.to(tl.float64)
            edge, last = _cut(
                logits, row, edge, last, limit, top, temperature, banned_start, banned_ids, True, SIZE, BLOCK
            )  # fmt: skip
        bits = tl.where(edge < 0, edge ^ 0x7FFFFFFF, edge)
        tl.store(cuts + row * 3, bits.to(tl.float32, bitcast=True))
        tl.store(cuts + row * 3 + 1, last.to(tl.float32))
        tl.store(cuts + row * 3 + 2, top)
    else:
        tl.store(cuts + row * 3, float("-inf"))
        tl.store(cuts + row * 3 + 1, SIZE * 1.0)
        tl.store(cuts + row * 3 + 2, 0.0)


@triton.jit
def _measured(z):
    """(top, sum of masses, sum of masses times distance from the top) of a block; (−inf, 0, 0) where all is −inf."""
    top = tl.max(z, 0)
    away = z - tl.where(top == float("-inf"), 0.0, top)
    masses = tl.exp(away)
    return top, tl.sum(masses, 0), tl.sum(tl.where(z > float("-inf"), masses * away, 0.0), 0)


@triton.jit
def _measure(
    logits, settings, banned_start, banned_ids, cuts, block_stats, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """block_stats[row, kind, 3, block]: kind 0 is the raw row, if `RAW`; 1 the processed one. NaN and +inf weigh
    NaN."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * SIZE + ids, ids < SIZE, float("-inf"))
    temperature = tl.load(settings + row * 4).to(tl.float32)
    min_p = tl.load(settings + row * 4 + 3).to(tl.float32)
    at = block_stats + row * (6 * BLOCKS) + block
    plain = _is_plain(row, temperature, min_p, banned_start, cuts)
    if RAW or plain:
        top, mass, spread = _measured(x)  # NaN and +inf make the mass NaN
        tl.store(at, top)
        tl.store(at + BLOCKS, mass)
        tl.store(at + 2 * BLOCKS, spread)
        if plain:
            tl.store(at + 3 * BLOCKS, top)
            tl.store(at + 4 * BLOCKS, mass)
            tl.store(at + 5 * BLOCKS, spread)
    if not plain:
        broken = tl.max((x < float("inf")).to(tl.int32) ^ 1, 0) > 0
        z = _processed(x, ids, row, temperature, banned_start, banned_ids, SIZE)
        top, mass, spread = _measured(_kept(z, ids, row, temperature, min_p, cuts))
        tl.store(at + 3 * BLOCKS, top)
        tl.store(at + 4 * BLOCKS, tl.where(broken, float("nan"), mass))
        tl.store(at + 5 * BLOCKS, spread)


@triton.jit
def _joined(block_stats, row, kind, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """(top of each block, its mass, its spread, all at the row's top; the row's top and mass). No distribution: NaN."""
    block = tl.arange(0, PADDED)
    at = block_stats + (row * 2 + kind) * (3 * BLOCKS) + block
    tops = tl.load(at, block < BLOCKS, float("-inf"))
    masses = tl.load(at + BLOCKS, block < BLOCKS, 0.0)
    spreads = tl.load(at + 2 * BLOCKS, block < BLOCKS, 0.0)
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), float("nan"), top)
    fade = tl.exp(tops - top)
    away = tl.where(tops > float("-inf"), tops - top, 0.0)
    spreads = fade * (spreads + away * masses)
    masses = fade * masses
    return fade, masses, spreads, top, tl.sum(masses, 0)


@triton.jit(do_not_specialize=["kind"])
def _score(
    logits, settings, banned_start, banned_ids, cuts, block_stats, targets, kind, logprobs, entropies, stats,
    SIZE: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.where(kind == 0, 0.0, tl.load(settings + row * 4).to(tl.float32))
    min_p = tl.load(settings + row * 4 + 3).to(tl.float32)
    _, _, spreads, top, total = _joined(block_stats, row, kind, BLOCKS, PADDED)
    log_total = tl.log(total)
    target = tl.load(targets + row) - FIRST
    known = (target >= 0) & (target < SIZE)
    x = tl.load(logits + row * SIZE + target, known, 0.0)
    z = _kept(
        _processed(x, target, row, temperature, banned_start, banned_ids, SIZE), target, row, temperature, min_p, cuts
    )
    tl.store(logprobs + row, tl.where(known, (z - top) - log_total, float("nan")))
    tl.store(entropies + row, log_total - tl.div_rn(tl.sum(spreads, 0), total))
    tl.store(stats + row * 2, top)
    tl.store(stats + row * 2 + 1, total)


@triton.jit
def _gradient(
    logits, settings, banned_start, banned_ids, cuts, stats, targets, entropies, grad_logprobs, grad_entropies, out,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradient of the logits from those of the two results of `_score`."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # What a plain row needs is asked for before anything is computed with it.
    z = tl.load(logits + row * SIZE + ids, ids < SIZE, float("-inf"))
    temperature, min_p = tl.load(settings + row * 4).to(tl.float32), tl.load(settings + row * 4 + 3).to(tl.float32)
    top, total = tl.load(stats + row * 2), tl.load(stats + row * 2 + 1)
    by_logprob, by_entropy = tl.load(grad_logprobs + row), tl.load(grad_entropies + row)
    entropy, target = tl.load(entropies + row), tl.load(targets + row)
    plain = _is_plain(row, temperature, min_p, banned_start, cuts)
    at_target = tl.load(logits + row * SIZE + target)
    if not plain:  # with this the kernel takes about 1.5 times as long
        at_target = _processed(at_target, target, row, temperature, banned_start, banned_ids, SIZE)
        at_target = _kept(at_target, target, row, temperature, min_p, cuts)
        z = _processed(z, ids, row, temperature, banned_start, banned_ids, SIZE)
        z = _kept(z, ids, row, temperature, min_p, cuts)
    by_logprob = tl.where(at_target > float("-inf"), by_logprob, 0.0)
    log_total = tl.log(total)
    logprob = (z - top) - log_total
    mass = tl.exp(logprob)
    gradient = -mass * (by_logprob + by_entropy * (logprob + entropy))
    gradient = tl.where(z > float("-inf"), gradient, 0.0) + tl.where(ids == target, by_logprob, 0.0)
    if not plain:
        gradient = gradient / tl.where(temperature == 0, 1.0, temperature)
    gradient = tl.where(total == total, gradient, float("nan"))
    tl.store(out + row * SIZE + ids, gradient.to(out.dtype.element_ty), ids < SIZE)


@triton.jit
def _draw(
    logits, settings, banned_start, banned_ids, cuts, block_stats, seeds, positions, tokens, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The first token whose cumulative mass, in order of id, exceeds u times the whole; −1: no distribution, or a token
    of another rank."""
    row = tl.program_id(0).to(tl.int64)
    temperature, min_p = tl.load(settings + row * 4).to(tl.float32), tl.load(settings + row * 4 + 3).to(tl.float32)
    fade, masses, _, _, total = _joined(block_stats, row, 1, BLOCKS, PADDED)
    token = tl.full((), -1, tl.int32)
    if total == total:
        if temperature == 0:
            best = tl.full((), float("-inf"), tl.float32)
            for begin in range(0, SIZE, BLOCK):
                ids = begin + tl.arange(0, BLOCK)
                x = tl.load(logits + row * SIZE + ids, ids < SIZE, float("-inf"))
                z = _processed(x, ids, row, 1.0, banned_start, banned_ids, SIZE)
                highest = tl.max(z, 0)
                if highest > best:
                    best = highest
                    token = tl.min(tl.where(z == highest, ids, SIZE), 0)
        else:
            block = tl.arange(0, PADDED)
            wide = masses.to(tl.float64)
            until = tl.cumsum(wide, 0)
            whole = tl.max(until, 0)
            limit = uniform(tl.load(seeds + row), tl.load(positions + row)) * whole
            # Blocks before the one that the limit falls into; rounding may leave it a hair above them all.
            last = tl.max(tl.where(masses > 0, block, 0), 0)
            here = tl.minimum(tl.sum((until <= limit).to(tl.int32), 0), last)
            before = tl.max(tl.where(block < here, until, 0.0), 0)
            rest = (limit - before) / tl.sum(tl.where(block == here, fade, 0.0), 0).to(tl.float64)
            block_top = tl.load(block_stats + (row * 2 + 1) * (3 * BLOCKS) + here)
            begin = here * BLOCK - FIRST
            own = (begin >= 0) & (begin < SIZE)
            ids = begin + tl.arange(0, BLOCK)
            x = tl.load(logits + row * SIZE + ids, own & (ids < SIZE), float("-inf"))
            z = _processed(x, ids, row, temperature, banned_start, banned_ids, SIZE)
            mass = tl.exp(_kept(z, ids, row, temperature, min_p, cuts) - block_top)
            inside = tl.cumsum(mass.to(tl.float64), 0)
            possible = tl.max(tl.where(mass > 0, ids, 0), 0)
            token = tl.min(tl.where((inside > rest) & (mass > 0), ids, possible), 0)
            token = tl.where(own, token + FIRST, -1)
    tl.store(tokens + row, token.to(tl.int64))


class Processing(NamedTuple):
    """As `rlloop::token_logprob` takes it: [T, 4] float64, [T + 1] int64, [N] int64."""

    settings: Tensor
    banned_start: Tensor
    banned_ids: Tensor

    @classmethod
    def of(cls, settings: Tensor, banned_start: Tensor, banned_ids: Tensor) -> Processing:
        return cls(aligned(settings), aligned(banned_start), aligned(banned_ids))

    def rows(self, begin: int, end: int) -> Processing:
        return Processing.of(self.settings[begin:end], self.banned_start[begin : end + 1], self.banned_ids)


class Part(NamedTuple):
    """A rank's part of a vocabulary: whole blocks, but for the last rank's last."""

    first: int  # token that its logits begin with, a multiple of BLOCK
    gather: Callable[[Tensor], Tensor]  # what it measured, [T, 2, 3, own blocks] -> [T, 2, 3, all ranks' blocks]


class Rows:
    """Rows of logits [T, V] as processed, T at least 1, measured; with `raw`, as they are, too. Of a `part` of the
    vocabulary: rows that nothing truncates or bans."""

    def __init__(self, logits: Tensor, processing: Processing, *, raw: bool = False, part: Part | None = None) -> None:
        self.logits, self.processing = aligned(logits), processing
        self.count, size = logits.shape
        self.block = min(BLOCK, power_of_two(size, 16)) if part is None else BLOCK
        blocks = cdiv(size, self.block)
        self.size = {"SIZE": size}
        self.cuts, self.parts = logits.new_empty(self.count, 3), logits.new_empty(self.count, 2, 3, blocks)
        self.shared = (self.logits, *processing, self.cuts)
        _cuts[(self.count,)](*self.shared, **self.size, BLOCK=self.block, num_warps=8, **EXACT)
        grid = (self.count, blocks)
        _measure[grid](
            *self.shared, self.parts, **self.size, BLOCK=self.block, BLOCKS=blocks, RAW=raw, num_warps=4, **EXACT
        )  # fmt: skip
        if part is not None:
            self.parts = aligned(part.gather(self.parts))
            blocks = self.parts.shape[-1]
        self.blocks = {"BLOCKS": blocks, "PADDED": power_of_two(blocks), "FIRST": 0 if part is None else part.first}

    def score(self, targets: Tensor, *, raw: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(logprobs [T], entropies [T], stats [T, 2])."""
        logprobs, entropies = self.logits.new_empty(self.count), self.logits.new_empty(self.count)
        stats = self.logits.new_empty(self.count, 2)
        _score[(self.count,)](
            *self.shared, self.parts, aligned(targets), 0 if raw else 1, logprobs, entropies, stats, **self.size,
            **self.blocks, num_warps=1, **EXACT,
        )  # fmt: skip
        return logprobs, entropies, stats

    def gradient(
        self, targets: Tensor, entropies: Tensor, grad_logprobs: Tensor, grad_entropies: Tensor, dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = torch.empty_like(self.logits, dtype=dtype) if out is None else out
        stats = self.score(targets)[2]
        arguments = (aligned(x) for x in (targets, entropies, grad_logprobs, grad_entropies))
        grid = (self.count, self.blocks["BLOCKS"])
        _gradient[grid](*self.shared, stats, *arguments, out, **self.size, BLOCK=self.block, num_warps=4)
        return out

    def draw(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """[T] int64; −1 where a row holds no distribution."""
        tokens = torch.empty_like(seeds)
        _draw[(self.count,)](
            *self.shared, self.parts, aligned(seeds), aligned(positions), tokens, **self.size, BLOCK=self.block,
            **self.blocks, num_warps=8, **EXACT,
        )  # fmt: skip
        return tokens
