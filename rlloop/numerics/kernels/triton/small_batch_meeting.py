"""`meeting` for kernels in Gluon: a copy by TMA may read what others wrote as soon as all have met."""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rlloop.numerics.kernels.triton.gluon_names import barrier
from rlloop.numerics.kernels.triton.meeting import AWAIT, TELL

FENCE = gl.constexpr("fence.proxy.async.global; mov.b32 $0, 0;")


@gluon.jit
def place(flags, round, rank, index, RANKS: gl.constexpr):
    """`meeting.place`, for programs of four warps."""
    WIDE: gl.constexpr = triton.next_power_of_2(RANKS)
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    other = gl.minimum(gl.arange(0, WIDE, LANES), RANKS - 1)
    theirs, mine = gl.load(flags + other) + rank * 8, gl.load(flags + rank) + other * 8
    return theirs, mine, gl.full((WIDE,), 0, gl.int64, LANES) + (gl.load(round, cache_modifier=".cg") + index)


@gluon.jit
def met(theirs, mine, now):
    """`meeting.met`."""
    if gl.program_id(0) == 0:
        gl.inline_asm_elementwise(TELL, "=r,l,l", [theirs, now], gl.int32, is_pure=False, pack=1)
    gl.inline_asm_elementwise(AWAIT, "=r,l,l", [mine, now], gl.int32, is_pure=False, pack=1)
    barrier()
    gl.inline_asm_elementwise(FENCE, "=r,l", [now], gl.int32, is_pure=False, pack=1)
