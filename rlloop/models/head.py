"""The output projection: logits, logprobs and draws, over a vocabulary that tensor-parallel ranks may share.

A rank computes the logits of its part of the vocabulary. An all-to-all then gives each rank some rows over the whole
vocabulary, which it scores and samples as one rank does; all ranks get the results. So no rank holds all logits (but of
fewer than `FEW_ROWS` rows a rank), and every distribution (greedy, truncated, banned, redrawn) has one rank's bits.

On GPUs, an engine's rows at temperature 1 without truncation or bans are drawn where their logits lie. Ranks exchange
what they measured of blocks of the vocabulary, and the one that has the token draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlloop.models.stages import Stage
from rlloop.numerics import operators
from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.kernels.terms import terms_gradients
from rlloop.numerics.layout import VOCABULARY_BLOCK, LogitsProcessing
from rlloop.numerics.operators.adapted import PRODUCTS
from rlloop.numerics.operators.distribution import Adapted, check_targets, dense, draw, draw_part, draws_parts, terms_of
from rlloop.numerics.operators.products import product
from rlloop.numerics.ops import Ops
from rlloop.parallel.cut import share, shares
from rlloop.parallel.division import Division, exchanged_parts, exchanged_rows, gathered

VECTOR = 16  # numbers; if a row is a multiple, kernels lay out its blocks alike, whether it is whole or a rank's part
FEW_ROWS = 2  # a rank: with fewer, all ranks measure all rows, which saves an exchange


class Head:
    """The output projection of a model. `weight` has this rank's rows of it; `division` says which, None: all.
    `adapted`: its adapter, if it has one.

    In a pipeline the last `stage` computes; the others get its draws, and placeholders for the rest.
    """

    def __init__(
        self,
        ops: Ops,
        weight: Callable[[], Tensor],
        division: Division | None,
        stage: Stage | None = None,
        vocabulary: int = 0,
        adapted: Adapted = None,
    ) -> None:
        self._ops, self._weight, self._division = ops, weight, division
        self._stage, self._vocabulary = None if stage is None or stage.whole else stage, vocabulary
        self._adapted = adapted

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of this rank's tokens of the vocabulary [T, v] -> [T, V], on every rank."""
        if self._stage is None:
            return gathered(logits, self._division)
        every = torch.empty(len(logits), self._vocabulary, dtype=torch.float32, device=logits.device)
        return self._stage.shared(gathered(logits, self._division) if self._stage.last else every)

    def sample(
        self, logits: Tensor, processing: LogitsProcessing, seeds: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Ops.sample` of rows of `logits`: every rank gets all results."""
        if self._stage is None:
            return self._sampled(logits, processing, seeds, positions)
        bits = torch.empty(3, len(seeds), dtype=torch.int32, device=seeds.device)
        if self._stage.last:
            ids, logprobs, raw = self._sampled(logits, processing, seeds, positions)
            bits = torch.stack((ids.int(), logprobs.view(torch.int32), raw.view(torch.int32)))
        ids, logprobs, raw = self._stage.shared(bits).unbind()
        return ids.long(), logprobs.view(torch.float32), raw.view(torch.float32)

    def _sampled(
        self, logits: Tensor, processing: LogitsProcessing, seeds: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        division = self._division
        if division is None:
            return self._ops.sample(logits, processing, seeds, positions)
        ranks, count = division.ranks, len(logits)
        # One rank alone must not raise for a row without a distribution; readers of the ids check for -1.
        draws = draw if self._ops.profile.token_logprob == "rlloop" else self._ops.sample
        if count < FEW_ROWS * ranks.size:
            return draws(division.gather(logits, 1), processing, seeds, positions)
        in_blocks = division.aligned(VOCABULARY_BLOCK) and division.count % VECTOR == 0
        if processing.plain and draws is draw and in_blocks and draws_parts(logits.device):
            return _drawn_in_parts(logits, seeds, positions, division)
        rows = shares(count, ranks.size)
        begin, end = share(count, ranks.size, ranks.rank)
        own = exchanged_parts(logits, rows, division)
        ids, logprobs, raw = draws(own, processing.rows(begin, end), seeds[begin:end], positions[begin:end])
        bits = torch.stack((ids.int(), logprobs.view(torch.int32), raw.view(torch.int32)), 1)
        ids, logprobs, raw = (column.contiguous() for column in ranks.gather(bits, 0, rows).unbind(1))
        return ids.long(), logprobs.view(torch.float32), raw.view(torch.float32)

    def token_logprob(self, hidden: Tensor, targets: Tensor, processing: LogitsProcessing) -> tuple[Tensor, Tensor]:
        """`Ops.token_logprob`."""
        if self._stage is not None and not self._stage.last:
            return _placeholders(hidden)
        if not self._exchanges:
            return self._ops.token_logprob(hidden, self._whole_weight(), targets, processing)
        return self._scored(hidden, targets, processing, None, None, False)[:2]

    def token_redraw(
        self, hidden: Tensor, targets: Tensor, processing: LogitsProcessing, seeds: Tensor | None, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`Ops.token_redraw`."""
        if self._stage is not None and not self._stage.last:
            logprobs, entropies = _placeholders(hidden)
            return logprobs, entropies, torch.zeros_like(entropies), torch.full_like(targets, -1)
        if not self._exchanges:
            return self._ops.token_redraw(hidden, self._whole_weight(), targets, processing, seeds, positions)
        logprobs, entropies, raw, ids = self._scored(
            hidden, targets, processing, seeds, positions, not processing.plain
        )
        drawn = torch.full_like(targets, -1) if seeds is None else torch.where(seeds < 0, -1, ids)
        return logprobs, entropies, logprobs.detach() if processing.plain else raw, drawn

    @property
    def _exchanges(self) -> bool:
        return self._division is not None and self._ops.profile.token_logprob == "rlloop"

    def _whole_weight(self) -> Tensor:
        return gathered(self._weight(), self._division, 0)

    def _scored(
        self, hidden: Tensor, targets: Tensor, processing: LogitsProcessing, seeds: Tensor | None,
        positions: Tensor | None, raw: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert self._division is not None
        check_targets(targets, self._division.count)
        terms = terms_of(hidden, self._adapted)
        return _CutLogprob.apply(
            hidden, self._weight(), targets, processing, seeds, positions, raw, self._division, *terms
        )


def _drawn_in_parts(
    logits: Tensor, seeds: Tensor, positions: Tensor, division: Division
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, logprobs and raw logprobs, on every rank."""
    ((first, _),) = division.own
    blocks = [-(-size // VOCABULARY_BLOCK) for size in division.sizes]
    ids, logprobs = draw_part(logits, seeds, positions, first, partial(division.ranks.gather, dim=3, sizes=blocks))
    drawn = division.ranks.gather(torch.stack((ids.int(), logprobs.view(torch.int32)))[None])  # [R, 2, T]
    owner = drawn[:, :1].argmax(0, keepdim=True)  # the others have -1
    ids, bits = drawn.gather(0, owner.expand(1, 2, -1))[0].unbind()
    logprobs = bits.view(torch.float32)
    return ids.long(), logprobs, logprobs


def _placeholders(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Zeros for logprobs and entropies [N], in the graph of hidden [N, D]."""
    return hidden[:, 0].float(), hidden[:, 0].float()


class _CutLogprob(torch.autograd.Function):
    """`operators.token_redraw`'s kernel over a vocabulary in parts, with its chunks of rows and its gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, processing: LogitsProcessing, seeds: Tensor | None,
        positions: Tensor | None, raw: bool, division: Division, *terms: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        chunks = []
        for begin, rows, own in _chunks(hidden, division):
            logits = _logits(hidden, weight, terms, slice(begin, begin + sum(rows)), rows, division)
            logprobs, entropies = operators.score_logits(logits, targets[own], processing.rows(own.start, own.stop))
            raws, ids = torch.zeros_like(logprobs), torch.zeros_like(targets[own])
            if raw:
                raws = operators.score_logits(logits, targets[own], LogitsProcessing())[0]
            if seeds is not None and positions is not None:
                ids = draw(logits, processing.rows(own.start, own.stop), seeds[own], positions[own])[0]
            del logits  # before the next are made
            floats = (logprobs, entropies, raws)
            bits = torch.stack((*(x.view(torch.int32) for x in floats), ids.int()), 1)
            chunks.append(division.ranks.gather(bits, 0, rows))
        logprobs, entropies, raws, ids = (column.contiguous() for column in torch.cat(chunks).unbind(1))
        logprobs, entropies, raws = (x.view(torch.float32) for x in (logprobs, entropies, raws))
        ids = ids.long()
        ctx.save_for_backward(hidden, weight, targets, entropies, *terms)
        ctx.processing, ctx.division = processing, division
        ctx.mark_non_differentiable(raws, ids)
        return logprobs, entropies, raws, ids

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropies, *terms = ctx.saved_tensors
        division, grad_logprobs, grad_entropies = ctx.division, *grads[:2]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        whole = division.gather(weight, 0) if needs_hidden else weight
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        adapter = _OfAdapter(terms, division) if terms[0] is not None else None
        kernels = kernels_for(hidden.device)
        for begin, rows, own in _chunks(hidden, division):
            chunk = slice(begin, begin + sum(rows))
            logits = _logits(hidden, weight, terms, chunk, rows, division)
            processed = dense(ctx.processing.rows(own.start, own.stop), division.count, targets[own])
            of_rows = (entropies[own], grad_logprobs[own], grad_entropies[own])
            gradient = kernels.score_logits_backward(logits, targets[own], *processed, *of_rows, hidden.dtype)
            del logits
            if needs_hidden:
                grad_rows = product(gradient, True, whole, False, hidden.dtype)
                grad_hidden[chunk] = division.ranks.gather(grad_rows, 0, rows)
            columns = exchanged_rows(gradient, rows, division) if needs_weight or adapter else gradient
            if needs_weight:
                grad_weight += product(columns, False, hidden[chunk], False, torch.float32)
            if adapter is not None:
                adapter.add(gradient, columns, chunk, rows, own)
            del gradient, columns
        of_terms = (None, None) if adapter is None else (adapter.z.to(hidden.dtype), adapter.up.to(weight.dtype))
        return grad_hidden, grad_weight.to(weight.dtype), *[None] * 6, *of_terms, None, None


class _OfAdapter:
    """Gradients of an adapter's z [T, r] (whole on every rank) and of own rows of B', in float32."""

    def __init__(self, terms: Sequence[Tensor], division: Division) -> None:
        self._z, self._up, self._slots, _ = terms
        self._whole, self._ranks = division.gather(self._up, 1), division.ranks
        self.z, self.up = (torch.zeros_like(x, dtype=torch.float32) for x in (self._z, self._up))

    def add(self, gradient: Tensor, columns: Tensor, chunk: slice, rows: list[int], own: slice) -> None:
        """Of a chunk, from the logits' gradient: own rows of the whole vocabulary, and own columns of all rows."""
        z, slots = self._z, self._slots
        of_z, _ = terms_gradients(PRODUCTS, gradient, z[own], self._whole, True, slots[own], torch.float32)
        self.z[chunk] = self._ranks.gather(of_z, 0, rows)
        self.up += terms_gradients(PRODUCTS, columns, z[chunk], self._up, True, slots[chunk], torch.float32)[1]


def _logits(
    hidden: Tensor, weight: Tensor, terms: Sequence[Tensor | None], chunk: slice, rows: list[int], division: Division
) -> Tensor:
    """[n, V]: of a chunk of the rows, this rank's `rows`, over the whole vocabulary."""
    z, up, slots, ranks = terms
    if z is None or up is None or slots is None or ranks is None:
        return exchanged_parts(operators.logits(hidden[chunk], weight), rows, division)
    logits = operators.linear_with_terms(
        hidden[chunk], weight, None, torch.float32, z[chunk], up, True, slots[chunk], ranks
    )
    return exchanged_parts(logits, rows, division)


def _chunks(hidden: Tensor, division: Division):
    """(first row, rows of each rank, own rows) of chunks as long as one rank's: gradients add up chunk by chunk."""
    ranks, step = division.ranks, kernels_for(hidden.device).logits_rows(division.count)
    for begin in range(0, len(hidden), step):
        count = min(step, len(hidden) - begin)
        first, last = share(count, ranks.size, ranks.rank)
        yield begin, shares(count, ranks.size), slice(begin + first, begin + last)


class Apart(torch.autograd.Function):
    """A tensor whose gradient goes to `take` instead of the tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, take: Callable[[Tensor], None]) -> Tensor:
        ctx.take = take
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.take(grads[0])
        return None, None
