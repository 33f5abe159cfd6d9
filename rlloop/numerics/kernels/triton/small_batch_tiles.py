"""Tiles of `small_batch_linear` by shape, measured on an H200, most of 256 rows on an H100."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor


class Tiles(NamedTuple):
    rows: int
    outputs: int
    width: int  # of K at a time
    swapped: bool  # weights on the left
    stages: int
    early: bool = True  # the launch begins before its predecessor has ended
    part: int = 16  # with an adapter: columns of z that a program makes; 0: each makes what it needs, of few columns
    z_rows: int = 64  # rows of it


TABLE = (  # (up to so many rows, outputs and K, the tiles). None: others are faster
    (8, 1024, 4096, Tiles(8, 32, 256, True, 6)),
    (8, 1024, None, Tiles(8, 32, 256, True, 6)),
    (8, 8192, None, Tiles(8, 64, 256, True, 5)),
    (8, None, None, Tiles(8, 64, 128, True, 5)),
    (16, 2048, None, Tiles(16, 16, 256, False, 5)),
    (16, 8192, None, Tiles(16, 64, 256, True, 5)),
    (16, None, None, Tiles(16, 64, 128, True, 5)),
    (32, 2048, None, Tiles(32, 16, 256, False, 5)),
    (32, 3072, None, Tiles(32, 64, 256, True, 4)),
    (32, 4096, None, Tiles(32, 32, 128, False, 9)),
    (32, 8192, None, Tiles(32, 64, 128, True, 8)),
    (32, None, None, Tiles(32, 64, 128, True, 4)),
    (64, 2048, None, Tiles(64, 16, 256, False, 5)),
    (64, 8192, 8192, Tiles(64, 32, 256, False, 4)),
    (64, 8192, None, Tiles(32, 64, 128, True, 8, early=False)),
    (64, None, 1024, Tiles(64, 64, 64, True, 6)),
    (64, None, None, Tiles(64, 128, 128, True, 4, early=False)),
    (128, 2048, None, Tiles(64, 32, 256, False, 4, part=32)),
    (128, 4096, None, Tiles(64, 64, 128, True, 6, part=32)),
    (128, 8192, None, Tiles(128, 64, 64, True, 8, part=32)),
    (192, 1024, None, Tiles(64, 32, 256, False, 4, part=32)),
    (192, 3072, None, Tiles(64, 64, 128, True, 6, part=32)),
    (192, 4096, None, Tiles(64, 128, 64, True, 8, part=32)),
    (192, 8192, None, Tiles(64, 128, 128, True, 4, part=32)),
    (256, 1024, None, Tiles(64, 32, 256, False, 4, part=32)),
    (256, 2048, None, Tiles(64, 64, 128, True, 6, part=32)),
    (256, 3072, None, None),
    (256, 4096, None, Tiles(128, 64, 64, True, 8, part=32)),
    (256, 8192, None, Tiles(128, 128, 64, True, 6, part=32)),
)
# The same, without K, for three weights end to end (their outputs together), and for a gate with what it scales.
TABLE_END_TO_END = (
    (8, 1536, Tiles(8, 16, 256, True, 6)),
    (8, 4096, Tiles(8, 64, 256, True, 5)),
    (8, None, Tiles(8, 64, 128, True, 5)),
    (16, 4096, Tiles(16, 64, 256, True, 5)),
    (16, None, Tiles(16, 64, 128, True, 5)),
    (32, 4096, Tiles(32, 64, 256, True, 4)),
    (32, 8192, Tiles(32, 64, 256, True, 4)),
    (32, None, Tiles(32, 64, 256, True, 4, early=False)),
    (64, 4096, Tiles(32, 64, 256, True, 4)),
    (64, None, Tiles(64, 64, 128, True, 5, early=False)),
    (128, 4096, Tiles(64, 64, 128, True, 5, part=32)),
    (128, None, None),
    (256, 4096, None),
    (256, 8192, Tiles(128, 128, 64, True, 6, part=32)),
)
TABLE_GATED = (
    (8, 3072, Tiles(8, 32, 128, True, 6)),
    (8, 4096, Tiles(8, 64, 128, True, 6)),
    (8, 8192, Tiles(8, 64, 64, True, 6)),
    (8, 12288, Tiles(8, 64, 64, True, 6)),
    (8, None, Tiles(8, 64, 128, True, 6)),
    (16, 4096, Tiles(16, 64, 128, True, 6)),
    (16, 8192, Tiles(16, 64, 64, True, 6)),
    (16, 12288, Tiles(16, 64, 128, True, 3, early=False)),
    (16, None, Tiles(16, 64, 128, True, 6)),
    (32, None, Tiles(32, 64, 128, True, 4)),
    (64, 4096, Tiles(32, 64, 128, True, 4)),
    (64, 8192, Tiles(64, 64, 128, True, 4, early=False)),
    (64, 12288, None),
    (64, None, Tiles(64, 64, 64, True, 8)),
    (128, 8192, Tiles(64, 64, 64, True, 8, early=False, part=32)),
)
# With an adapter, where another kernel would be faster without one; the last for hundreds of rows.
TABLE_ADAPTED = (
    (256, 4096, Tiles(64, 128, 64, True, 6, part=32)),
    (256, None, Tiles(128, 128, 64, True, 6, part=32)),
    (None, None, Tiles(128, 128, 64, True, 6, early=False, part=32)),
)
TABLE_ADAPTED_GATED = (
    (256, 4096, Tiles(64, 128, 64, True, 5, part=32)),
    (256, None, Tiles(128, 64, 64, True, 6, part=32)),
    (None, None, Tiles(128, 64, 64, True, 6, early=False, part=32)),
)
# With an adapter of few columns, where programs that make z themselves are faster than some that wait for it.
TABLE_OWN: tuple[tuple[int, int | None, Tiles | None], ...] = (
    (8, 2048, Tiles(8, 16, 256, True, 6, part=0)),
    (32, 1024, Tiles(16, 16, 256, True, 5, part=0)),
    (128, None, None),
    (256, 1024, Tiles(64, 32, 128, False, 6, part=0)),
)
TABLE_OWN_END_TO_END: tuple[tuple[int, int | None, Tiles | None], ...] = (
    (8, 4096, Tiles(8, 32, 256, True, 4, part=0)),
    (32, 4096, Tiles(32, 32, 256, True, 4, part=0)),
    (128, None, None),
    (256, 4096, Tiles(128, 64, 64, True, 4, part=0)),
)
OWN_COLUMNS = 32  # of z that a program may make for itself


def tiles_for(rows: int, outputs: int, width: int) -> Tiles | None:
    for most_rows, most_outputs, most_width, tiles in TABLE:
        fits = (most_outputs is None or outputs <= most_outputs) and (most_width is None or width <= most_width)
        if rows <= most_rows and fits:
            return tiles
    return None


def tiles_of(
    table: tuple[tuple[int | None, int | None, Tiles | None], ...], x: Tensor, weights: tuple[Tensor, ...], outputs: int
) -> Tiles | None:
    """The tiles of a table for x [T, K] and weights of `outputs` together; None where another kernel has to do it."""
    rows, width = x.shape
    if rows == 0 or x.itemsize != 2 or width == 0 or width % 8:
        return None
    fitting = (
        tiles
        for most_rows, most, tiles in table
        if (most_rows is None or rows <= most_rows) and (most is None or outputs <= most)
    )
    tiles = next(fitting, None)
    return None if tiles is None or any(len(weight) % tiles.outputs for weight in weights) else tiles


def adapted_tiles(x: Tensor, weights: tuple[Tensor, ...], rank: int, gated: bool) -> Tiles | None:
    """Tiles for x [T, K] times these weights with one adapter of this rank."""
    outputs = sum(map(len, weights)) // (2 if gated else 1)
    if gated:
        tables: tuple[Any, ...] = (), TABLE_GATED, TABLE_ADAPTED_GATED
    elif len(weights) == 3:
        tables = TABLE_OWN_END_TO_END, TABLE_END_TO_END, TABLE_ADAPTED
    else:
        tables = TABLE_OWN, (), TABLE_ADAPTED
    found = [tiles_of(table, x, weights, outputs) for table in tables]
    if len(weights) == 1:
        found[1] = tiles_for(len(x), outputs, x.shape[1])
    tiles = next(filter(None, found[rank > OWN_COLUMNS :]), None)
    if gated and tiles and rank > OWN_COLUMNS:  # or registers would not hold z beside the sums
        tiles = tiles._replace(rows=min(tiles.rows, 64))
    return tiles
