"""`token_logprob` and `sample`: one definition of a row's distribution for trainer and sampler.

Logits are the float32 sums of `linear`, never rounded to a narrower type. Memory for them is bounded: forward and
backward process the rows in chunks, and the backward recomputes each chunk's logits, where kernels did not keep their
gradients (`Kernels.kept_token_logprob`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.layout import AdapterSlots, Factors, LogitsProcessing
from rlloop.numerics.operators.adapted import adapted_linear, reduced
from rlloop.numerics.operators.library import operator
from rlloop.numerics.operators.products import linear_float32

Adapted = tuple[Factors, AdapterSlots] | None  # the head's adapters, and which each row has
_KEEPS = ContextVar("keeps the logits' gradients", default=True)


@contextmanager
def logits_gradients(*, kept: bool) -> Iterator[None]:
    """Forwards in it keep the logits' gradients where kernels can. Not `kept`: the backward makes logits again, as it
    has to where entropies are differentiated."""
    token = _KEEPS.set(kept)
    try:
        yield
    finally:
        _KEEPS.reset(token)


def logits(hidden: Tensor, weight: Tensor, adapted: Adapted = None) -> Tensor:
    """Logits of the vocabulary, the bits that `token_logprob` uses. hidden [T, K], weight [V, K] -> [T, V] float32."""
    if adapted is not None:
        return adapted_linear(hidden, weight, None, *adapted, torch.float32)
    return linear_float32(hidden, weight)


def token_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, processing: LogitsProcessing, adapted: Adapted = None
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy. A target that the processing makes impossible has logprob −inf and sends no gradient.

    A row whose logits hold no distribution (NaN, +inf, all of them −inf) gives NaN.
    """
    check_targets(targets, len(weight))
    return _scored(hidden, weight, targets, processing, None, None, False, adapted)[:2]


def token_redraw(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    processing: LogitsProcessing,
    seeds: Tensor | None,
    positions: Tensor,
    adapted: Adapted = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`token_logprob`, raw logprobs and redrawn ids, of the same logits.

    A row without a distribution draws −1, and so does one whose seed is negative.
    """
    check_targets(targets, len(weight))
    drawn_at = None if seeds is None else positions
    logprobs, entropies, raw, ids = _scored(
        hidden, weight, targets, processing, seeds, drawn_at, not processing.plain, adapted
    )
    drawn = torch.full_like(targets, -1) if seeds is None else torch.where(seeds < 0, -1, ids)
    return logprobs, entropies, logprobs.detach() if processing.plain else raw, drawn


def _scored(
    hidden: Tensor, weight: Tensor, targets: Tensor, processing: LogitsProcessing, seeds: Tensor | None,
    positions: Tensor | None, raw: bool, adapted: Adapted,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`Kernels.token_logprob`, differentiable."""
    inputs = hidden, weight, targets, *dense(processing, len(weight), targets), seeds, positions, raw
    may_keep = adapted is None and _KEEPS.get()
    keeps = getattr(kernels_for(hidden.device), "kept_token_logprob", None) if may_keep else None
    return (keeps and keeps(*inputs)) or _token_logprob(*inputs, *terms_of(hidden, adapted))


def terms_of(hidden: Tensor, adapted: Adapted) -> tuple[Tensor | None, ...]:
    """Adapter terms of the output head: z, up, slots and ranks of `AdapterTerms`; four Nones without an adapter."""
    if adapted is None:
        return (None,) * 4
    factors, which = adapted
    return reduced(hidden, factors.down, which), factors.up, which.slots(hidden), factors.ranks


def check_targets(targets: Tensor, vocabulary: int) -> None:
    # Validating on a GPU would force a synchronisation: there, a target that is no token has logprob NaN.
    if len(targets) == 0 or not targets.is_cpu:
        return
    if not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise ValueError(
            f"targets run from {targets.min()} to {targets.max()}; they must be from 0 to {vocabulary - 1}"
        )


class NotFinite(ValueError):
    """Logits from which no token can be drawn, as weights that are not finite make them."""


def sample(
    logits: Tensor, processing: LogitsProcessing, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token a row. Raises `NotFinite` for a row that holds no distribution, as NaN weights make it; on a GPU,
    where that check would force a synchronisation, its id is −1 (see `check_drawn`).

    The token is the first whose cumulative mass, in order of id and in float64, exceeds u times the whole, where u is
    the number that `random.uniform` gives for (seed, position).
    """
    ids, logprobs, raw_logprobs = draw(logits, processing, seeds, positions)
    if ids.is_cpu and (ids < 0).any():
        row = int((ids < 0).nonzero()[0])
        raise NotFinite(
            f"row {row} of {len(ids)} holds no distribution to sample from: {int(logits[row].isnan().sum())} of its "
            f"logits are NaN, the largest is {logits[row].max().item()}; they must stay finite when divided by the "
            "temperature, and one token at least must not be banned; look for weights that are not finite"
        )
    return ids, logprobs, raw_logprobs


def check_drawn(ids: np.ndarray) -> None:
    """Raises `NotFinite` where one of the ids that `sample` gave is −1."""
    if (ids < 0).any():
        row = int((ids < 0).nonzero()[0][0])
        raise NotFinite(
            f"row {row} of {len(ids)} holds no distribution to sample from; look for weights that are not finite"
        )


def score_logits(logits: Tensor, targets: Tensor, processing: LogitsProcessing) -> tuple[Tensor, Tensor]:
    """`token_logprob` of logits [T, V] float32 that were made elsewhere; without a gradient."""
    return kernels_for(logits.device).score_logits(logits, targets, *dense(processing, logits.shape[1], targets))


def draw(
    logits: Tensor, processing: LogitsProcessing, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`sample` without errors: a row without a distribution gets id −1."""
    return _sample(logits, seeds, positions, *dense(processing, logits.shape[1], seeds))


def draws_parts(device: torch.device) -> bool:
    """True if `draw_part` can be called there."""
    return kernels_for(device).sample_part is not None


def draw_part(
    logits: Tensor, seeds: Tensor, positions: Tensor, first: int, gather: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """`draw` of rows at temperature 1, of a rank's part of the vocabulary (`Kernels.sample_part`): ids and logprobs."""
    sample_part = kernels_for(logits.device).sample_part
    assert sample_part is not None
    return sample_part(logits, seeds, positions, *dense(LogitsProcessing(), logits.shape[1], seeds), first, gather)


def dense(processing: LogitsProcessing, vocabulary: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The processing as arguments of an operator: settings [T, 4] float64, which is exact for all, and the bans.

    `like`, [T] int64, has the rows and the device.
    """
    settings = like.new_zeros(len(like), 4, dtype=torch.float64)
    settings[:, ::2] = 1.0
    for column, value in enumerate((processing.temperature, processing.top_k, processing.top_p, processing.min_p)):
        if value is not None:
            settings[:, column] = value
    start, ids = processing.banned_start, processing.banned_ids
    if start is None or ids is None:
        return settings, like.new_zeros(len(like) + 1), like.new_empty(0)
    if len(ids) > 0 and ids.is_cpu and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"banned ids run from {ids.min()} to {ids.max()}; they must be from 0 to {vocabulary - 1}")
    return settings, start, ids


def _result_shapes(hidden: Tensor, seeds: Tensor | None, raw: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty results of `_token_logprob`."""
    count = len(hidden)
    logprobs, entropies = _floats(hidden, count, 2)
    (raws,) = _floats(hidden, count if raw else 0, 1)
    return logprobs, entropies, raws, hidden.new_empty(0 if seeds is None else count, dtype=torch.int64)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], output[1], *inputs[9:])
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved, needs = ctx.saved_tensors, ctx.needs_input_grad
    grads = _token_logprob_backward(*saved[:7], grad_logprobs, grad_entropies, needs[1], *saved[7:])
    hidden, weight, z, up = (grad if need else None for grad, need in zip(grads, needs[:2] + needs[9:11], strict=True))
    return hidden, weight, *[None] * 7, z, up, None, None


def _floats(like: Tensor, count: int, copies: int) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(count, dtype=torch.float32) for _ in range(copies))


TERMS = "Tensor? z, Tensor? up, Tensor? slots, Tensor? ranks"  # of the head's adapters
WARP = "Tensor settings, Tensor banned_start, Tensor banned_ids"
_token_logprob = operator(
    f"token_logprob(Tensor hidden, Tensor weight, Tensor targets, {WARP}, Tensor? seeds, Tensor? positions, bool raw,"
    f" {TERMS})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda hidden, *others: _result_shapes(hidden, others[5], others[7]),
    _backward,
    _keep_for_backward,
)
_token_logprob_backward = operator(
    f"token_logprob_backward(Tensor hidden, Tensor weight, Tensor targets, {WARP}, Tensor entropies, "
    f"Tensor grad_logprobs, Tensor grad_entropies, bool of_weight, {TERMS}) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda hidden, weight, *others: (
        torch.empty_like(hidden),
        torch.empty_like(weight) if others[7] else weight.new_empty(0),
        *(hidden.new_empty(0) if each is None else torch.empty_like(each) for each in others[8:10]),
    ),
)
_sample = operator(
    f"sample(Tensor logits, Tensor seeds, Tensor positions, {WARP}) -> (Tensor, Tensor, Tensor)",
    lambda logits, seeds, *others: (torch.empty_like(seeds), *_floats(logits, len(seeds), 2)),
)
