"""Logprobs, their gradients and draws of CUDA tensors, a bounded number of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlloop.numerics.kernels.terms import Optional4, rows_of, terms_gradients
from rlloop.numerics.kernels.triton import linear as products
from rlloop.numerics.kernels.triton.adapted import PRODUCTS, continued
from rlloop.numerics.kernels.triton.distribution import Part, Processing, Rows
from rlloop.numerics.kernels.triton.launch import ROOM, aligned

LOGITS_ROWS = 2048  # at a time at most, in whole steps of what cuBLAS gets
LOGITS_BYTES = 2 << 30


def logits_rows(vocabulary: int) -> int:
    step = min(LOGITS_ROWS, max(1, LOGITS_BYTES // (4 * vocabulary)))
    return step // ROOM * ROOM or step


def _chunks(
    hidden: Tensor, weight: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor,
    terms: Optional4, raw: bool = False,
) -> Iterator[tuple[slice, Rows]]:  # fmt: skip
    """(rows, their logits measured), a bounded number of logits at a time, if the caller drops each before the next."""
    step = logits_rows(len(weight))
    processing, hidden = Processing.of(settings, banned_start, banned_ids), aligned(hidden)
    for begin in range(0, len(hidden), step):
        rows = slice(begin, min(begin + step, len(hidden)))
        yield rows, _measured(hidden[rows], weight, rows_of(terms, rows), processing.rows(rows.start, rows.stop), raw)


def _measured(
    hidden: Tensor, weight: Tensor, terms: tuple[Tensor, Tensor, bool, Tensor, Tensor] | None, processing: Processing,
    raw: bool,
) -> Rows:  # fmt: skip
    logits = products.product(hidden, weight, None, torch.float32)
    if terms is not None:
        logits = continued(logits, None, torch.float32, *terms)
    return Rows(logits, processing, raw=raw)


def token_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor,
    seeds: Tensor | None, positions: Tensor | None, raw: bool, *terms: Tensor | None,
    keep: Callable[[slice, Rows], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(logprobs, entropies, raw logprobs if asked for, ids where there are seeds). `keep` is called with each chunk."""
    logprobs, entropies, raws = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
    ids = torch.empty_like(targets)
    for rows, measured in _chunks(hidden, weight, settings, banned_start, banned_ids, terms, raw):
        logprobs[rows], entropies[rows], _ = measured.score(targets[rows])
        if raw:
            raws[rows] = measured.score(targets[rows], raw=True)[0]
        if seeds is not None and positions is not None:
            ids[rows] = measured.draw(seeds[rows], positions[rows])
        if keep is not None:
            keep(rows, measured)
        del measured
    return logprobs, entropies, raws if raw else raws[:0], ids if seeds is not None else ids[:0]


def token_logprob_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor,
    entropies: Tensor, grad_logprobs: Tensor, grad_entropies: Tensor, of_weight: bool, z: Tensor | None = None,
    up: Tensor | None = None, slots: Tensor | None = None, ranks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight if of_weight else weight[:0], dtype=torch.float32)
    grad_z, grad_up = (torch.zeros(0 if x is None else x.shape, device=hidden.device) for x in (z, up))
    for rows, measured in _chunks(hidden, weight, settings, banned_start, banned_ids, (z, up, slots, ranks)):
        arguments = (targets[rows], entropies[rows], grad_logprobs[rows], grad_entropies[rows])
        grad_logits = measured.gradient(*arguments, hidden.dtype)
        del measured
        grad_hidden[rows] = torch.mm(grad_logits, weight)
        if of_weight:
            grad_weight += products.gradient(grad_logits, False, hidden[rows], False, torch.float32)
        if z is not None and up is not None and slots is not None:
            grad_z[rows], of_up = terms_gradients(PRODUCTS, grad_logits, z[rows], up, True, slots[rows], torch.float32)
            grad_up += of_up
        del grad_logits
    return grad_hidden, grad_weight.to(weight.dtype), grad_z.to(hidden.dtype), grad_up.to(weight.dtype)


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, logprobs, raw logprobs); id −1 where a row holds no distribution."""
    if len(logits) == 0:
        return torch.empty_like(seeds), logits.new_empty(0), logits.new_empty(0)
    rows = Rows(logits, Processing.of(settings, banned_start, banned_ids), raw=True)
    ids = rows.draw(seeds, positions)
    return ids, rows.score(ids)[0], rows.score(ids, raw=True)[0]


def sample_part(
    logits: Tensor, seeds: Tensor, positions: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor,
    first: int, gather: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(ids, logprobs); −1 and NaN where the token is another rank's, or a row holds no distribution."""
    rows = Rows(logits, Processing.of(settings, banned_start, banned_ids), raw=True, part=Part(first, gather))
    ids = rows.draw(seeds, positions)
    return ids, rows.score(ids)[0]


def score_logits_backward(
    logits: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor, entropies: Tensor,
    grad_logprobs: Tensor, grad_entropies: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """In `dtype`."""
    if len(logits) == 0:
        return logits.to(dtype)
    rows = Rows(logits, Processing.of(settings, banned_start, banned_ids))
    return rows.gradient(targets, entropies, grad_logprobs, grad_entropies, dtype)


def score_logits(
    logits: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """`token_logprob` of logits that were made elsewhere."""
    if len(logits) == 0:
        return logits.new_empty(0), logits.new_empty(0)
    return Rows(logits, Processing.of(settings, banned_start, banned_ids)).score(targets)[:2]
