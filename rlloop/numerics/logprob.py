"""`token_logprob` and `sample` by the contract: one distribution of a row, for the trainer and for the sampler.

Logits are the float32 sums of `linear`, never rounded to a narrower type. `token_logprob` never holds more than
`LOGITS_BYTES` of them: forward and backward go over the rows in chunks, and backward makes each chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.cpu import distribution
from rlloop.numerics.kernels.cpu.contract import _operator, linear_out_float32, on_cuda, product_cpu
from rlloop.numerics.kernels.cpu.jit import threads_for
from rlloop.numerics.layout import LogitsWarp

LOGITS_BYTES = 64 * 2**20
NOTHING, NO_IDS = np.empty(0, np.float32), np.empty(0, np.int64)


def logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits of the vocabulary, the bits that `token_logprob` uses. hidden [T, K], weight [V, K] -> [T, V] float32."""
    return linear_out_float32(hidden, weight)


def token_logprob(hidden: Tensor, weight: Tensor, targets: Tensor, warp: LogitsWarp) -> tuple[Tensor, Tensor]:
    """A target that the warp makes impossible has logprob −inf and sends no gradient.

    A row whose logits hold no distribution (NaN, +inf, all of them −inf) gives NaN.
    """
    _check_targets(targets, len(weight))
    return _token_logprob(hidden, weight, targets, *_dense(warp, len(weight), targets), None, None, False)[:2]


def token_redraw(
    hidden: Tensor, weight: Tensor, targets: Tensor, warp: LogitsWarp, seeds: Tensor | None, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the same logits. A row without a distribution draws −1, and so does one whose seed is negative."""
    _check_targets(targets, len(weight))
    plain = all(value is None for value in vars(warp).values())
    logprobs, entropies, raw, ids = _token_logprob(
        hidden, weight, targets, *_dense(warp, len(weight), targets), seeds, None if seeds is None else positions,
        not plain,
    )  # fmt: skip
    drawn = torch.full_like(targets, -1) if seeds is None else torch.where(seeds < 0, -1, ids)
    return logprobs, entropies, logprobs.detach() if plain else raw, drawn


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    # On a GPU, looking would mean waiting for it: there, a target that is no token has logprob NaN.
    if len(targets) > 0 and not targets.is_cuda and not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise ValueError(
            f"targets run from {targets.min()} to {targets.max()}; they must be from 0 to {vocabulary - 1}"
        )


def sample(logits: Tensor, warp: LogitsWarp, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Raises ValueError for a row that holds no distribution, as NaN weights make it; on a GPU, where looking would
    mean waiting for it, its id is −1 (see `check_drawn`).

    The token is the first whose cumulative mass, in order of id and in float64, exceeds u times the whole, where u is
    the number that `random.uniform` gives for (seed, position).
    """
    ids, logprobs, raw_logprobs = _sample(logits, seeds, positions, *_dense(warp, logits.shape[1], seeds))
    if not ids.is_cuda and (ids < 0).any():
        row = int((ids < 0).nonzero()[0])
        raise ValueError(
            f"row {row} of {len(ids)} holds no distribution to sample from: {int(logits[row].isnan().sum())} of its "
            f"logits are NaN, the largest is {logits[row].max().item()}; they must stay finite when divided by the "
            "temperature, and one token at least must not be banned; look for weights that are not finite"
        )
    return ids, logprobs, raw_logprobs


def check_drawn(ids: np.ndarray) -> None:
    """Raises ValueError where one of the ids that `sample` gave is −1."""
    if (ids < 0).any():
        row = int((ids < 0).nonzero()[0][0])
        raise ValueError(
            f"row {row} of {len(ids)} holds no distribution to sample from; look for weights that are not finite"
        )


def score_logits(logits: Tensor, targets: Tensor, warp: LogitsWarp) -> tuple[Tensor, Tensor]:
    """`token_logprob` of logits [T, V] float32 that were made elsewhere; without a gradient."""
    dense = _dense(warp, logits.shape[1], targets)
    if logits.is_cuda:
        return on_cuda("score_logits")(logits, targets, *dense)
    logprobs, entropies = torch.empty(len(targets)), torch.empty(len(targets))
    given = (_array(targets), tuple(_array(x) for x in dense))
    outs = logprobs.numpy(), entropies.numpy(), NOTHING, NO_IDS
    distribution.score_rows(_threads(*logits.shape), _array(logits), *given, NO_IDS, NO_IDS, *outs)
    return logprobs, entropies


def _dense(warp: LogitsWarp, vocabulary: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The warp as arguments of a custom op: settings [T, 4] float64, which holds them all exactly, and the bans.

    `like`, [T] int64, has the rows and the device.
    """
    settings = like.new_zeros(len(like), 4, dtype=torch.float64)
    settings[:, ::2] = 1.0
    for column, value in enumerate((warp.temperature, warp.top_k, warp.top_p, warp.min_p)):
        if value is not None:
            settings[:, column] = value
    start, ids = warp.banned_start, warp.banned_ids
    if start is None or ids is None:
        return settings, like.new_zeros(len(like) + 1), like.new_empty(0)
    if len(ids) > 0 and not ids.is_cuda and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError(f"banned ids run from {ids.min()} to {ids.max()}; they must be from 0 to {vocabulary - 1}")
    return settings, start, ids


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().numpy()


def _threads(rows: int, vocabulary: int) -> int:
    return threads_for(64 * rows * vocabulary)


def _chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, warp: tuple[Tensor, Tensor, Tensor]
) -> Iterator[tuple[slice, tuple]]:
    """(rows, their logits, targets and warps for the kernels), a bounded number of logits at a time."""
    settings, start, ids = (_array(x) for x in warp)
    step = max(1, LOGITS_BYTES // (4 * len(weight)))
    for begin in range(0, len(hidden), step):
        rows = slice(begin, min(begin + step, len(hidden)))
        chunk = _array(linear_out_float32(hidden[rows], weight))
        yield rows, (chunk, _array(targets[rows]), (settings[rows], start[begin : rows.stop + 1], ids))


def _token_logprob_cpu(
    hidden: Tensor, weight: Tensor, targets: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor,
    seeds: Tensor | None, positions: Tensor | None, raw: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(logprobs, entropies, raw logprobs if asked for, ids where there are seeds)"""
    outs = _witnessed(hidden, seeds, raw)
    seeds_of, positions_of = (NO_IDS if x is None else _array(x) for x in (seeds, positions))
    for rows, inputs in _chunks(hidden, weight, targets, (settings, banned_start, banned_ids)):
        threads = _threads(rows.stop - rows.start, len(weight))
        distribution.score_rows(
            threads, *inputs, seeds_of[rows], positions_of[rows], *(out[rows].numpy() for out in outs)
        )
    return outs


def _witnessed(hidden: Tensor, seeds: Tensor | None, raw: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for what `_token_logprob` gives."""
    count = len(hidden)
    logprobs, entropies = _floats(hidden, count, 2)
    (raws,) = _floats(hidden, count if raw else 0, 1)
    return logprobs, entropies, raws, hidden.new_empty(0 if seeds is None else count, dtype=torch.int64)


def _token_logprob_backward_cpu(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    settings: Tensor,
    banned_start: Tensor,
    banned_ids: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden and weight. Products and the sum over rows are in float32, rounded once."""
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
    for rows, inputs in _chunks(hidden, weight, targets, (settings, banned_start, banned_ids)):
        given = (_array(x[rows]) for x in (entropies, grad_logprobs, grad_entropies))
        distribution.score_rows_backward(_threads(rows.stop - rows.start, len(weight)), *inputs, *given)
        grad_logits = torch.from_numpy(inputs[0])
        grad_hidden[rows] = product_cpu(grad_logits, True, weight, False, hidden.dtype)
        grad_weight += product_cpu(grad_logits, False, hidden[rows], False, torch.float32)
    return grad_hidden, grad_weight.to(weight.dtype)


def _sample_cpu(
    logits: Tensor, seeds: Tensor, positions: Tensor, settings: Tensor, banned_start: Tensor, banned_ids: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Id −1 where a row holds no distribution."""
    ids, logprobs, raw_logprobs = torch.empty_like(seeds), torch.empty(len(seeds)), torch.empty(len(seeds))
    warps = tuple(_array(x) for x in (settings, banned_start, banned_ids))
    names = _array(seeds), _array(positions)
    out = ids.numpy(), logprobs.numpy(), raw_logprobs.numpy()
    distribution.sample_rows(_threads(*logits.shape), _array(logits), warps, *names, *out)
    return ids, logprobs, raw_logprobs


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.mark_non_differentiable(*output[2:])


def _backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_token_logprob_backward(*ctx.saved_tensors, grad_logprobs, grad_entropies), *[None] * 7


def _floats(like: Tensor, count: int, copies: int) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(count, dtype=torch.float32) for _ in range(copies))


WARP = "Tensor settings, Tensor banned_start, Tensor banned_ids"
_token_logprob = _operator(
    f"token_logprob(Tensor hidden, Tensor weight, Tensor targets, {WARP}, Tensor? seeds, Tensor? positions, bool raw)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _token_logprob_cpu,
    lambda hidden, *others: _witnessed(hidden, others[5], others[7]),
    _backward,
    _keep_for_backward,
)
_token_logprob_backward = _operator(
    f"token_logprob_backward(Tensor hidden, Tensor weight, Tensor targets, {WARP}, Tensor entropies, "
    "Tensor grad_logprobs, Tensor grad_entropies) -> (Tensor, Tensor)",
    _token_logprob_backward_cpu,
    lambda hidden, weight, *others: (torch.empty_like(hidden), torch.empty_like(weight)),
)
_sample = _operator(
    f"sample(Tensor logits, Tensor seeds, Tensor positions, {WARP}) -> (Tensor, Tensor, Tensor)",
    _sample_cpu,
    lambda logits, seeds, *others: (torch.empty_like(seeds), *_floats(logits, len(seeds), 2)),
)
