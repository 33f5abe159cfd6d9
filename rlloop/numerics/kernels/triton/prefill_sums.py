"""Sums of `prefill` over earlier segments, in global memory: registers have no room for them beside a segment's.

Each thread has 16-byte pieces of its own there. Where no row's reference changes, a segment's sums are added to them by
reductions, of which nothing comes back; they take numbers below 2^-126 for 0, and so do the other ways of joining.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlloop.numerics.kernels.triton import segments

SEGMENT = gl.constexpr(segments.SEGMENT)
SLACK = gl.constexpr(segments.SLACK)


def _kept(n: int) -> tuple[tuple[str, str], ...]:
    """(assembly, constraints) to store, to add and to load a thread's n sums."""
    results = n // 4  # registers that are not used: an operation has results, here of one byte for each number
    fours = [range(i, i + 4) for i in range(0, n, 4)]
    at = [f"[at + {512 * each[0]}]" for each in fours]  # a warpgroup's pieces lie one behind the other

    def begin(address: int) -> str:
        return f"{{.reg .b64 at; mov.b64 at, ${address}; "

    def numbers(name: str, each: range, first: int = 0) -> str:
        return "{" + ", ".join(f"{name}{first + i}" for i in each) + "}"

    def joined(where: str, each: range) -> str:
        parts = [f"ld.relaxed.gpu.global.v4.f32 {{b0, b1, b2, b3}}, {where};"]
        parts += [f"mul.f32 b{j}, b{j}, ${fade + i}; add.ftz.f32 b{j}, b{j}, t{i};" for j, i in enumerate(each)]
        return " ".join([*parts, f"st.relaxed.gpu.global.v4.f32 {where}, {{b0, b1, b2, b3}};"])

    pieces = list(zip(at, fours, strict=True))
    stores = [f"st.relaxed.gpu.global.v4.f32 {where}, {numbers('$', each, results)};" for where, each in pieces]
    loads = [f"ld.relaxed.gpu.global.v4.f32 {numbers('$', each)}, {where};" for where, each in pieces]
    factor, fade = results + n, results + 2 * n
    # The fades of the thread's two rows, of which the second has numbers 2 and 3 of each piece.
    moved = (
        f"setp.neu.f32 moved, ${fade}, 0f3F800000; setp.neu.f32 other, ${fade + 2}, 0f3F800000;"
        " or.pred moved, moved, other; vote.sync.any.pred moved, moved, 0xffffffff;"
    )
    add = [
        f"{begin(results + 3 * n)}.reg .pred moved, other; .reg .f32 t<{n}>, b<4>;",
        *(f"mul.f32 t{i}, ${results + i}, ${factor + i};" for i in range(n)),
        f"{moved} @moved bra.uni MOVED;",
        *(f"red.relaxed.gpu.global.add.v4.f32 {where}, {numbers('t', each)};" for where, each in pieces),
        "bra.uni DONE; MOVED:",
        *(joined(where, each) for where, each in pieces),
        "DONE: }",
    ]
    none = ["=r"] * results
    return (
        (begin(results + n) + " ".join(stores) + "}", ",".join([*none, *["f"] * n, *["l"] * n])),
        (" ".join(add), ",".join([*none, *["f"] * (3 * n), *["l"] * n])),
        (begin(n) + " ".join(loads) + "}", ",".join([*["=f"] * n, *["l"] * n])),
    )


# (assembly, constraints) for a thread's two rows, whose addresses are one: four numbers, the rows' tops and totals.
PUT = gl.constexpr(("st.relaxed.gpu.global.v4.f32 [$6], {$2, $3, $4, $5};", "=r,=r,f,f,f,f,l,l"))
GET = gl.constexpr(("ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l,l"))
STORE_32, ADD_32, LOAD_32 = (gl.constexpr(each) for each in _kept(32))
STORE_64, ADD_64, LOAD_64 = (gl.constexpr(each) for each in _kept(64))


@gluon.jit
def _places(memory, ROWS: gl.constexpr, W: gl.constexpr, A: gl.constexpr):
    """Addresses [ROWS, W] of the pieces of the thread that has a number."""
    down = gl.arange(0, ROWS, gl.SliceLayout(1, A))[:, None]
    along = gl.arange(0, W, gl.SliceLayout(0, A))[None, :]
    thread = down // 16 * 32 + down % 8 * 4 + along % 8 // 2
    return memory + thread.to(gl.int64) * 16


@gluon.jit
def _row_places(memory, ROWS: gl.constexpr, W: gl.constexpr, S: gl.constexpr):
    """Addresses [ROWS] of a row's top and total, behind all sums; four threads have them, and write the same."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, S))
    return memory + ROWS * W * 4 + (row // 16 * 8 + row % 8).to(gl.int64) * 16


@gluon.jit
def _put(part, at):
    gl.inline_asm_elementwise(PUT[0], PUT[1], [part[0], part[1], at], gl.int32, is_pure=False, pack=2)


@gluon.jit
def _get(at):
    return gl.inline_asm_elementwise(GET[0], GET[1], [at], (gl.float32, gl.float32), is_pure=False, pack=2)


@gluon.jit
def _store(sums, kept):
    PACK: gl.constexpr = sums.shape[1] // 2
    ASM: gl.constexpr = STORE_64 if PACK == 64 else STORE_32
    gl.inline_asm_elementwise(ASM[0], ASM[1], [sums, kept], gl.int8, is_pure=False, pack=PACK)


@gluon.jit
def _add(sums, part_fade, fade, kept):
    """The numbers at `kept` become themselves * `fade` + `sums` * `part_fade`."""
    PACK: gl.constexpr = sums.shape[1] // 2
    ASM: gl.constexpr = ADD_64 if PACK == 64 else ADD_32
    gl.inline_asm_elementwise(ASM[0], ASM[1], [sums, part_fade, fade, kept], gl.int8, is_pure=False, pack=PACK)


@gluon.jit
def _load(kept, W: gl.constexpr):
    PACK: gl.constexpr = W // 2
    ASM: gl.constexpr = LOAD_64 if PACK == 64 else LOAD_32
    return gl.inline_asm_elementwise(ASM[0], ASM[1], [kept], gl.float32, is_pure=False, pack=PACK)


@gluon.jit
def _added(a, b):
    return gl.inline_asm_elementwise("add.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _spread(x, shape: gl.constexpr, A: gl.constexpr):
    """A number for each row, across a tile."""
    return gl.convert_layout(x, gl.SliceLayout(1, A))[:, None] + gl.zeros(shape, x.dtype, A)


@gluon.jit
def limited(total, LIMIT: gl.constexpr):
    """A segment's total, infinite where its row is to be computed anew, and so then is what it is joined with."""
    return gl.where(total <= LIMIT, total, float("inf"))


@gluon.jit
def _weights(part, whole, LIMIT: gl.constexpr):
    """((top, total) of both, factor of the sums before, factor of the part's)"""
    top, total = part
    whole_top, whole_total = whole
    highest = gl.where(top > whole_top + SLACK, top, whole_top)
    fade = gl.exp2(whole_top - highest)
    part_fade = gl.exp2(top - highest)
    total = whole_total * fade + limited(total, LIMIT) * part_fade
    return (highest, total), fade, part_fade


@gluon.jit
def settle(part, sums, memory, tile, S: gl.constexpr, A: gl.constexpr, LIMIT: gl.constexpr):
    """At a segment's first tile: the segment before it joins those before that."""
    ROWS: gl.constexpr = sums.shape[0]
    kept = _places(memory, ROWS, sums.shape[1], A)
    at = _row_places(memory, ROWS, sums.shape[1], S)
    if tile > SEGMENT:
        whole, fade, part_fade = _weights(part, _get(at), LIMIT)
        _add(sums, _spread(part_fade, sums.shape, A), _spread(fade, sums.shape, A), kept)
        _put(whole, at)
    else:
        _store(sums, kept)
        _put((part[0], limited(part[1], LIMIT)), at)


@gluon.jit
def settled(part, sums, memory, position, last, S: gl.constexpr, A: gl.constexpr, LIMIT: gl.constexpr):
    """((top, total), sums) of the last segment's part and of those before it."""
    ROWS: gl.constexpr = sums.shape[0]
    segment = last // SEGMENT * SEGMENT
    both = (part[0], limited(part[1], LIMIT))
    if segment > 0:
        before = _load(_places(memory, ROWS, sums.shape[1], A), sums.shape[1])
        whole = _get(_row_places(memory, ROWS, sums.shape[1], S))
        joined, fade, part_fade = _weights(part, whole, LIMIT)
        new = _added(before * _spread(fade, sums.shape, A), sums * _spread(part_fade, sums.shape, A))
        early = position < segment  # queries that come before this segment
        sums = gl.where(gl.convert_layout(early, gl.SliceLayout(1, A))[:, None], before, new)
        both = (gl.where(early, whole[0], joined[0]), gl.where(early, whole[1], joined[1]))
    return both, sums
