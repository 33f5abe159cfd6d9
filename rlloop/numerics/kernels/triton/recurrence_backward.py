"""Gradients of the scan, over whole sequences or from a state on.

Notation is that of `scan`, with chunks of `CHUNK` tokens: a backward's sums need no order but one that is the same in
every run. With S the state before a chunk and g the gradient of its outputs, the forward is

    N = T (beta (v - a k S));  without the delta rule  N = beta v
    out = a q S + P N,  P = D q k^T;  S' = a[last] S + (D[last] k)^T N

and, with S' now standing for the gradient of the state that the chunk ends with, the backward

    R = T^T (P^T g + D[last] k S'), without the delta rule without T
    of S = a[last] S' + (a q)^T g - (beta a k)^T R;  of P = g N^T and of A = -R N^T where they are not 0
    of v = beta R;  of q = a g S^T + (D of P) k
    of k = D[last] N S'^T - beta a R S^T + (D of P)^T q + (B + B^T) k,  B = beta D of A

Eight launches, seven without the delta rule: `prepare` and `invert`, of all chunks at once, what needs no state;
`begin_states` and `end_states`, chunk after chunk, S and then S'; `of_values`, `of_queries` and `of_keys`, of all
chunks at once, the gradients; `of_gates` ends those of decays and beta. Every number is added up by one program in a
fixed order. A long batch takes its heads in parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlloop.numerics.kernels.triton.launch import aligned, hopper, power_of_two
from rlloop.numerics.kernels.triton.scan_backward_gradients import of_gates, of_keys, of_queries, of_values
from rlloop.numerics.kernels.triton.scan_backward_states import begin_states, end_states, invert, prepare

CHUNK = 64
LEAST = 128, 64  # numbers of a key and of a value in tiles, which narrower heads do not fill: compiled for 16 and 32 by
# Triton 3.6, gradients of values were wrong on an H200 with the delta rule, though right in Triton's interpreter
NUMBERS = 1 << 28  # of states at a time, which are kept twice


class Tiles(NamedTuple):
    """Numbers of a key and of a value at a time, warps of a program, and tiles in flight."""

    keys: int
    values: int
    warps: int
    stages: int


TILES = {  # 0: the kernel has no such choice
    prepare: Tiles(64, 0, 4, 0),
    invert: Tiles(0, 128, 4, 0),
    begin_states: Tiles(0, 32, 4, 3),
    end_states: Tiles(0, 32, 4, 2),
    of_values: Tiles(0, 32, 4, 2),
    of_queries: Tiles(64, 32, 4, 3),
    of_keys: Tiles(64, 32, 4, 2),  # as many keys as `of_queries`
    of_gates: Tiles(0, 0, 4, 0),
}


def scan_backward(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, query_start: Tensor, grad: Tensor,
    begun: Tensor | None = None, of_states: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """decay: from 0 on; one below 1.2e-38 counts as 0."""
    q, k, v, decay, beta, query_start, grad = (aligned(x) for x in (q, k, v, decay, beta, query_start, grad))
    gradients = tuple(torch.empty_like(x) for x in (q, k, v, decay, beta))
    (tokens, groups, key_width), (_, heads, width) = q.shape, v.shape
    if tokens == 0:
        return gradients
    if begun is not None:  # states as `scan` keeps them, whose chunks end here
        begun = begun[:, : heads * width * key_width].unflatten(1, (heads, width, key_width)).contiguous()
    slots = tokens // CHUNK + len(query_start) - 1  # a sequence's begin at `query_start // CHUNK + sequence`
    share = heads // groups
    numbers = slots * share * power_of_two(key_width, LEAST[0]) * power_of_two(width, LEAST[1])
    step = max(1, NUMBERS // numbers)
    for first in range(0, groups, step):
        of_groups, of_heads = slice(first, first + step), slice(first * share, (first + step) * share)
        given = [x[:, of_groups] for x in (q, k)] + [x[:, of_heads] for x in (v, decay, beta, grad)]
        made = [x[:, of_groups] for x in gradients[:2]] + [x[:, of_heads] for x in gradients[2:]]
        ends = [None if x is None else x[:, of_heads] for x in (begun, of_states)]
        _some_heads(given, made, ends, corrects, query_start, slots, {"GROUPS": groups, "HEADS": heads})
    return gradients


def _some_heads(
    given: list[Tensor], made: list[Tensor], ends: list[Tensor | None], corrects: bool, query_start: Tensor, slots: int,
    rows: dict[str, int],
) -> None:  # fmt: skip
    """Tensors are parts of those of all groups and heads, whose rows they have."""
    (q, k, v, decay, beta, grad), (by_q, by_k, by_v, by_decay, by_beta), (begun, of_states) = given, made, ends
    (_, groups, key_width), (_, heads, width), sequences = q.shape, v.shape, len(query_start) - 1
    keys, values = power_of_two(key_width, LEAST[0]), power_of_two(width, LEAST[1])
    roomy = hopper(q.device) and keys <= 128  # what is in flight takes up to 201 KiB of a multiprocessor's memory

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((slots, *shape), device=q.device, dtype=dtype)

    def parts(*shape: int) -> Tensor:
        return room(shape[0], 2, *shape[1:], dtype=torch.bfloat16)

    def options(kernel: Any) -> dict[str, Any]:
        tiles = TILES[kernel]
        every = {
            **rows, "KEY": key_width, "WIDTH": width, "CHUNK": CHUNK, "KEYS": keys, "VALUES": values,
            "PIECE": tiles.keys, "COLUMNS": min(tiles.values, values), "CORRECTS": corrects,
            "STAGES": tiles.stages if roomy else 1, "HAS_BEGUN": begun is not None, "HAS_SLOPES": of_states is not None,
        }  # fmt: skip
        return {name: every[name] for name in kernel.arg_names if name in every} | {"num_warps": tiles.warps}

    query_parts, key_parts = parts(groups, CHUNK, keys), parts(groups, CHUNK, keys)
    pairs, logs = room(groups, 2, CHUNK, CHUNK), room(heads, CHUNK, dtype=torch.float64)
    prepare[(groups, slots)](
        q, k, decay, query_start, query_parts, key_parts, pairs, logs, sequences, heads, **options(prepare)
    )
    inverses, slopes, written, solved = (pairs,) * 4  # not read
    if corrects:
        inverses, slopes = parts(heads, CHUNK, CHUNK), room(heads, CHUNK, values)
        written, solved = parts(heads, CHUNK, values), parts(heads, CHUNK, values)
        invert[(heads, slots)](
            beta, grad, query_start, pairs, logs, inverses, slopes, sequences, heads, **options(invert)
        )
    states, of_ends = parts(heads, keys, values), parts(heads, keys, values)
    begin_states[(values // TILES[begin_states].values, heads, sequences)](
        v, beta, query_start, key_parts, logs, inverses, written, states, v if begun is None else begun, heads,
        **options(begin_states),
    )  # fmt: skip
    end_states[(values // TILES[end_states].values, heads, sequences)](
        beta, grad, query_start, query_parts, key_parts, logs, inverses, slopes, solved, of_ends,
        grad if of_states is None else of_states, heads, **options(end_states),
    )  # fmt: skip
    of_pairs = room(heads, 4, CHUNK, CHUNK, dtype=torch.bfloat16)
    of_values[(heads, slots)](
        v, beta, grad, query_start, key_parts, pairs, logs, written, solved, of_ends, of_pairs, by_v, by_decay,
        by_beta, sequences, heads, **options(of_values),
    )  # fmt: skip
    pieces = keys // TILES[of_keys].keys
    sums = torch.empty(pieces, slots, heads, 4, CHUNK, device=q.device)
    of_queries[(pieces, groups, slots)](
        grad, query_start, query_parts, key_parts, logs, states, of_pairs, by_q, sums, sequences, heads, slots,
        **options(of_queries),
    )  # fmt: skip
    of_keys[(pieces, groups, slots)](
        v, beta, query_start, query_parts, key_parts, logs, written, solved, states, of_ends, of_pairs, by_k, sums,
        sequences, heads, slots, **options(of_keys),
    )  # fmt: skip
    of_gates[(heads, slots)](
        beta, query_start, logs, sums, by_decay, by_beta, sequences, heads, slots, PARTS=pieces, **options(of_gates)
    )
