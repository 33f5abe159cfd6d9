"""Logprobs, their gradients and draws of CPU tensors, a bounded number of logits at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu.compiled import distribution as kernels
from rlloop.numerics.kernels.cpu.compiled.jit import threads_for
from rlloop.numerics.kernels.cpu.products import (
    adapted_linear,
    grouped_rows_gradient,
    grouped_weight_gradient,
    linear_float32,
    product,
)
from rlloop.numerics.kernels.terms import Products, rows_of, terms_gradients

LOGITS_BYTES = 64 * 2**20  # held at once; the backward makes each chunk's logits again
PRODUCTS = Products(product, grouped_rows_gradient, grouped_weight_gradient)
NOTHING, NO_IDS = np.empty(0, np.float32), np.empty(0, np.int64)


def token_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor,
    seeds: Tensor | None, positions: Tensor | None, raw: bool, *terms: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    logprobs, entropies = torch.empty(len(hidden)), torch.empty(len(hidden))
    raws, ids = torch.empty(len(hidden) if raw else 0), targets.new_empty(0 if seeds is None else len(hidden))
    outs = (logprobs, entropies, raws, ids)
    seeds_of, positions_of = (NO_IDS if x is None else _array(x) for x in (seeds, positions))
    for rows, inputs in _chunks(hidden, weight, targets, settings, banned_start, banned_ids, terms):
        kernels.score_rows(
            _threads(rows.stop - rows.start, len(weight)), *inputs, seeds_of[rows], positions_of[rows],
            *(out[rows].numpy() for out in outs),
        )  # fmt: skip
    return outs


def token_logprob_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor,
    entropies: Tensor, grad_logprobs: Tensor, grad_entropies: Tensor, of_weight: bool, z: Tensor | None = None,
    up: Tensor | None = None, slots: Tensor | None = None, ranks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Products and the sum over rows are in float32, rounded once."""
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight if of_weight else weight[:0], dtype=torch.float32)
    grad_z, grad_up = (torch.zeros(0 if x is None else x.shape) for x in (z, up))
    terms = (z, up, slots, ranks)
    for rows, inputs in _chunks(hidden, weight, targets, settings, banned_start, banned_ids, terms):
        gradients = (_array(x[rows]) for x in (entropies, grad_logprobs, grad_entropies))
        kernels.score_rows_backward(_threads(rows.stop - rows.start, len(weight)), *inputs, *gradients)
        grad_logits = torch.from_numpy(inputs[0])  # written over the logits
        grad_hidden[rows] = product(grad_logits, True, weight, False, hidden.dtype)
        if of_weight:
            grad_weight += product(grad_logits, False, hidden[rows], False, torch.float32)
        if z is not None and up is not None and slots is not None:
            grad_z[rows], of_up = terms_gradients(PRODUCTS, grad_logits, z[rows], up, True, slots[rows], torch.float32)
            grad_up += of_up
    return grad_hidden, grad_weight.to(weight.dtype), grad_z.to(hidden.dtype), grad_up.to(weight.dtype)


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    ids, logprobs, raw_logprobs = torch.empty_like(seeds), torch.empty(len(seeds)), torch.empty(len(seeds))
    processing = tuple(_array(x) for x in (settings, banned_start, banned_ids))
    names = _array(seeds), _array(positions)
    outs = ids.numpy(), logprobs.numpy(), raw_logprobs.numpy()
    kernels.sample_rows(_threads(*logits.shape), _array(logits), processing, *names, *outs)
    return ids, logprobs, raw_logprobs


def score_logits(
    logits: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor
) -> tuple[Tensor, Tensor]:
    logprobs, entropies = torch.empty(len(targets)), torch.empty(len(targets))
    inputs = _array(targets), tuple(_array(x) for x in (settings, banned_start, banned_ids))
    outs = logprobs.numpy(), entropies.numpy(), NOTHING, NO_IDS
    kernels.score_rows(_threads(*logits.shape), _array(logits), *inputs, NO_IDS, NO_IDS, *outs)
    return logprobs, entropies


def score_logits_backward(
    logits: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor, entropies: Tensor,
    grad_logprobs: Tensor, grad_entropies: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """In float32, over the logits."""
    inputs = _array(targets), tuple(_array(x) for x in (settings, banned_start, banned_ids))
    gradients, out = (_array(x) for x in (entropies, grad_logprobs, grad_entropies)), _array(logits)
    kernels.score_rows_backward(_threads(*logits.shape), out, *inputs, *gradients)
    return torch.from_numpy(out)


def logits_rows(vocabulary: int) -> int:
    return max(1, LOGITS_BYTES // (4 * vocabulary))


def _chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor,
    terms: tuple[Tensor | None, ...],
) -> Iterator[tuple[slice, tuple]]:  # fmt: skip
    """(rows, their logits, targets and processing for the kernels), at most `LOGITS_BYTES` of logits."""
    every, start, ids = (_array(x) for x in (settings, banned_start, banned_ids))
    step = logits_rows(len(weight))
    for begin in range(0, len(hidden), step):
        rows = slice(begin, min(begin + step, len(hidden)))
        if (chunk_terms := rows_of(terms, rows)) is None:
            chunk = _array(linear_float32(hidden[rows], weight))
        else:
            chunk = _array(adapted_linear(hidden[rows], weight, None, torch.float32, *chunk_terms))
        yield rows, (chunk, _array(targets[rows]), (every[rows], start[begin : rows.stop + 1], ids))


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()


def _threads(rows: int, vocabulary: int) -> int:
    return threads_for(64 * rows * vocabulary)
