"""Products of the kernels of `scan`, of TF32 parts, and the tiles of them. A state is stored transposed, [V, K], and so
are tiles of values, [V, 16]: a warp then has 16 columns of S alone, and no other warp's numbers stand between two
chunks, but in `scan_pairs` and `scan_four`. Along K, tiles come in pieces of `PIECE` numbers, so that registers hold
the parts of few of them at a time.

Equal bits need the same instructions in all kernels: `mma.sync` of 16 x 8 x 8, whose K slots have the same numbers. So
no product has 64 rows or more but in blocks of 16 rows each, and nothing that is multiplied comes from `tl.join`
(Triton then sets kWidth = 2)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split(x):
    """x = high + low, of which a tensor core reads 11 bits each: `high` is rounded to them, ties away from zero."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def turned(n):
    """A product's column n has the number `turned(n)` (a key's, or a token): 0 4 1 5 2 6 3 7 of each eight."""
    return (n & -8) | ((n & 1) << 2) | ((n & 6) >> 1)


@triton.jit
def straight(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr = False):
    """Columns that were `turned`, in order; `BACK`: those in order, `turned`.

    A lane has numbers 2 i and 2 i + 1 of eight columns of a product, but multiplies i and i + 4: where the columns were
    turned, they are the same, and no number goes to another lane."""
    if BACK:
        x = x.reshape(ROWS, COLUMNS // 8, 2, 4)
    else:
        x = x.reshape(ROWS, COLUMNS // 8, 4, 2)
    return x.permute(0, 1, 3, 2).reshape(ROWS, COLUMNS)


@triton.jit
def straight_tiles(x, TILES: tl.constexpr, COLUMNS: tl.constexpr, BACK: tl.constexpr = False):
    """As `straight`, of tiles [TILES, 16, COLUMNS], one for each warp."""
    if BACK:
        x = x.reshape(TILES, 16, COLUMNS // 8, 2, 4)
    else:
        x = x.reshape(TILES, 16, COLUMNS // 8, 4, 2)
    return x.permute(0, 1, 2, 4, 3).reshape(TILES, 16, COLUMNS)


@triton.jit
def in_blocks(x, BLOCKS: tl.constexpr):
    """Rows in blocks of 16, of which each warp has its own; 0: as the compiler likes."""
    return x if BLOCKS == 0 else x.reshape(BLOCKS, 16, x.shape[1])


@triton.jit
def for_blocks(x, BLOCKS: tl.constexpr):
    return x if BLOCKS == 0 else tl.broadcast_to(x[None, :, :], (BLOCKS, x.shape[0], x.shape[1]))


@triton.jit
def nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr = 0):
    zeros = in_blocks(tl.zeros((ROWS, COLUMNS), tl.float32), BLOCKS)
    return zeros, zeros, zeros


@triton.jit
def plus(sums, high, low, to_high, to_low, BLOCKS: tl.constexpr = 0):
    """Sums of their own for each kind of term: three short chains at a time in place of a long one."""
    high, low = in_blocks(high, BLOCKS), in_blocks(low, BLOCKS)
    to_high, to_low = for_blocks(to_high, BLOCKS), for_blocks(to_low, BLOCKS)
    # That many inexact sums are allowed is meant for other types: here it keeps the compiler from chaining the three.
    return (
        tl.dot(low, to_high, sums[0], input_precision="tf32", max_num_imprecise_acc=16),
        tl.dot(high, to_low, sums[1], input_precision="tf32", max_num_imprecise_acc=16),
        tl.dot(high, to_high, sums[2], input_precision="tf32", max_num_imprecise_acc=16),
    )


@triton.jit
def summed(sums, BLOCKS: tl.constexpr = 0):
    x = (sums[0] + sums[1]) + sums[2]
    return x if BLOCKS == 0 else x.reshape(BLOCKS * 16, x.shape[2])


@triton.jit
def times(high, low, to_high, to_low, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr = 0):
    """A product over the 16 tokens of a chunk."""
    return summed(plus(nothing(ROWS, COLUMNS, BLOCKS), high, low, to_high, to_low, BLOCKS), BLOCKS)


@triton.jit
def written(high, low, keys, BLOCKS: tl.constexpr = 0):
    """x^T k, which a whole chunk adds to a piece of a state. Products are summed before the state is added: a tensor
    core cuts its sums off, which long sums must not be."""
    to_high, to_low = split(keys)
    high, low = in_blocks(high, BLOCKS), in_blocks(low, BLOCKS)
    to_high, to_low = for_blocks(to_high, BLOCKS), for_blocks(to_low, BLOCKS)
    sums = tl.dot(low, to_high, input_precision="tf32", max_num_imprecise_acc=16)
    sums = tl.dot(high, to_low, sums, input_precision="tf32", max_num_imprecise_acc=16)
    sums = tl.dot(high, to_high, sums, input_precision="tf32", max_num_imprecise_acc=16)
    return sums if BLOCKS == 0 else sums.reshape(BLOCKS * 16, sums.shape[2])


@triton.jit
def pieces(at, mask, of_key, KEY: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr):
    """Tiles [., PIECE] side by side. `of_key`: the numbers of a piece."""
    tiles = ()
    for piece in tl.static_range(PIECES):
        inside = (piece * PIECE + of_key < KEY)[None, :]
        tiles = tiles + (tl.load(at + piece * PIECE, mask & inside, 0.0),)  # noqa: RUF005
    return tiles
