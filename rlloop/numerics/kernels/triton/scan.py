"""The scan of recurrent layers on CUDA: a state that every token decays and writes to. Float32 throughout.

The state is kept at multiples of `CHUNK` tokens, counted from a sequence's begin. From there on a chunk's tokens are
made by products: with S the state before the chunk, D[t, j] the product of the decays after token j up to t, and a[t]
that of all up to t,

    T = (1 + A)^-1 where A[t, j] = beta[t] D[t, j] k[t] . k[j] for j < t, so T[t] = e[t] - A[t] T;  W = D q k^T
    r = beta (v - a k S),  u = T r;  without the delta rule  u = r = beta v
    out = a q S + W u,  and after a whole chunk  S <- a[last] S + k^T (D[last] u)

Row t of each reads rows up to t alone. `prepare` makes T, W, a and D[last] of all chunks at once; `scan_chunks` goes
from chunk to chunk, or, where programs are few, `scan_pairs`, and `scan_four` without the delta rule. What a begun
chunk's later tokens need is kept in the state (`scan_state`): keys, r, T, last rows of D and a. `decode` makes one row
of each product from it: it reads S once, and writes it once in `CHUNK` tokens.

A row has the same bits from both. Products are of TF32 parts (`scan_products.split`), and each number of a product is a
chain over ascending K for each kind of part, whatever tile it stands in; rows that are not there are zeros. All else is
elementwise, and decays are multiplied in the tokens' order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlloop.numerics.kernels.triton.launch import EXACT, aligned, cdiv, hopper, power_of_two
from rlloop.numerics.kernels.triton.scan_decode import decode
from rlloop.numerics.kernels.triton.scan_four import scan_four
from rlloop.numerics.kernels.triton.scan_kernels import prepare, scan_chunks
from rlloop.numerics.kernels.triton.scan_pairs import scan_pairs

CHUNK = 16
# Of these none decides on bits; measured on an H100, or where it says so on an H200.
PIECE = 32  # numbers of a key at a time
COLUMNS, MANY_PIECE, STAGES = 64, 16, 2  # of a program of `scan_chunks`, whose warps have 16 columns each
FEW_PROGRAMS, FEW_PIECE, FEW_STAGES = 320, 16, 3  # most programs of `scan_pairs` and `scan_four`; on an H200
FOUR_PIECE, FOUR_STAGES = 32, 2  # of `scan_four`, likewise
FOUR_KEY = 256  # shared memory has no room for longer keys
PREPARE_WARPS, PREPARE_STAGES = 1, 3
DECODE_COLUMNS, DECODE_PIECE, DECODE_WARPS, DECODE_STAGES = 32, 64, 2, 3  # of a program; measured on an H200
DECODE_FEW = 160  # up to so many programs read what they can before the launch in front of them is done
DECODE_PROGRAMS = 4096  # up to so many programs have one block of columns each, more take some in turn
MADE = 2 * CHUNK * CHUNK + 2 * CHUNK  # of a head and chunk: T, W, a, the last row of D
ALIGNED = 32  # numbers


def scan_state(groups: int, heads: int, key_width: int, width: int) -> tuple[int, ...]:
    """Each head's state, and of the tokens since the last whole chunk keys, r, T, D and a, end to end."""
    return (_places(groups, heads, key_width, width)["SIZE"],)


def _places(groups: int, heads: int, key_width: int, width: int) -> dict[str, int]:
    """Offsets of the kept parts in a sequence's state, and `SIZE`, the state's length; in numbers."""
    places, end = {}, heads * width * key_width
    for name, numbers in {
        "KEYS": groups * CHUNK * key_width, "VALUES": heads * CHUNK * width, "INVERSES": heads * CHUNK * CHUNK,
        "FADES": heads * CHUNK * CHUNK, "SINCE": heads * CHUNK,
    }.items():  # fmt: skip
        places[name] = cdiv(end, ALIGNED) * ALIGNED
        end = places[name] + numbers
    return places | {"SIZE": cdiv(end, ALIGNED) * ALIGNED}


def _pieces(key_width: int, most: int) -> dict[str, int]:
    """A key's numbers in pieces of at most so many, a power of two."""
    piece = min(most, power_of_two(key_width, 16))
    return {"PIECE": piece, "PIECES": cdiv(key_width, piece)}


def scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, corrects: bool, query_start: Tensor,
    context: Tensor | None = None, states: Tensor | None = None, rows: Tensor | None = None,
    settled: bool = False,
) -> Tensor:  # fmt: skip
    (tokens, groups, key_width), (_, heads, width), sequences = q.shape, v.shape, len(query_start) - 1
    q, k, v, decay, beta = (aligned(x) for x in (q, k, v, decay, beta))
    out = torch.empty_like(v)
    if tokens == 0:
        return out
    places = _places(groups, heads, key_width, width)
    shape: dict[str, Any] = {
        "GROUPS": groups, "HEADS": heads, "KEY": key_width, "CHUNK": CHUNK, "CORRECTS": corrects, **EXACT,
    }  # fmt: skip
    has_states = states is not None and context is not None and rows is not None
    if has_states and tokens == sequences:
        columns = min(DECODE_COLUMNS, power_of_two(width, 16))
        parts = blocks = cdiv(width, columns)
        early = hopper(q.device)
        requests = aligned(context), aligned(rows)
        kept = settled and requests[0] is context and requests[1] is rows  # a copy is a launch
        ahead = early and kept and blocks * heads * sequences <= DECODE_FEW
        while parts % 2 == 0 and parts * heads * sequences > DECODE_PROGRAMS:
            parts //= 2
        decode[(parts, heads, sequences)](
            q, k, v, decay, beta, *requests, states, out, WIDTH=width, COLUMNS=columns,
            BLOCKS=blocks // parts, STAGES=2 if blocks == parts else DECODE_STAGES, EARLY=early, AHEAD=ahead,
            launch_pdl=early, num_warps=DECODE_WARPS,
            **_pieces(key_width, DECODE_PIECE), **places, **shape,
        )  # fmt: skip
        return out
    query_start = aligned(query_start)
    context, rows, store = (aligned(context), aligned(rows), states) if has_states else (query_start, query_start, q)
    # Chunks of a sequence have consecutive places from `query_start // CHUNK + 2 sequence` on, which always suffice.
    most = tokens // CHUNK + 2 * sequences
    made = torch.empty(most, heads, MADE, device=q.device)
    begun = torch.empty(sequences if has_states else 1, CHUNK, groups, key_width, device=q.device)
    shape |= {"MADE": MADE}
    of_rows = {name: at for name, at in places.items() if name != "VALUES"}
    # No argument of the training's is specialised otherwise than the engine's: both run the same compiled kernels.
    prepare[(most, groups)](
        q, k, decay, beta, query_start, context, rows, store, made, begun, int(has_states), sequences,
        STAGES=PREPARE_STAGES, num_warps=PREPARE_WARPS, **_pieces(key_width, PIECE), **of_rows, **shape,
    )  # fmt: skip
    few = cdiv(width, 16) * heads * sequences <= FEW_PROGRAMS
    if few and not corrects and key_width <= FOUR_KEY:
        scan_four[(cdiv(width, 16), heads, sequences)](
            q, k, v, beta, query_start, context, rows, store, made, begun, out, int(has_states), WIDTH=width,
            STAGES=FOUR_STAGES, num_warps=4, **_pieces(key_width, FOUR_PIECE), **places, **shape,
        )  # fmt: skip
        return out
    if few and corrects:
        scan_pairs[(cdiv(width, 16), heads, sequences)](
            q, k, v, beta, query_start, context, rows, store, made, begun, out, int(has_states), WIDTH=width,
            PIECES=cdiv(key_width, 2 * FEW_PIECE), PIECE=FEW_PIECE, STAGES=FEW_STAGES, num_warps=2, **places,
            **shape,
        )  # fmt: skip
        return out
    columns = min(COLUMNS, power_of_two(width, 16))
    scan_chunks[(cdiv(width, columns), heads, sequences)](
        q, k, v, beta, query_start, context, rows, store, made, begun, out, int(has_states), WIDTH=width,
        COLUMNS=columns, STAGES=STAGES, num_warps=columns // 16, **_pieces(key_width, MANY_PIECE), **places, **shape,
    )  # fmt: skip
    return out
