"""Meetings of the GPUs of a host: each tells all others that it is here, and waits for them, on the device.

What a GPU wrote before it told has arrived at those that have waited. The kernel that reads it can meet: its first
program tells, and all of its programs wait, each for itself.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rlloop.numerics.kernels.triton.launch import hopper

FORWARD = 1 << 20  # meetings of a forward at most


class Meeting(NamedTuple):
    """The `number`-th of a forward, whose meetings are counted from `round` on. Only `begin` sets that, so all programs
    of a kernel can read it at any time."""

    flags: Tensor  # [R] int64: addresses of R int64 each, zero at first: a rank's last meeting
    round: Tensor  # [1] int64, zero at first
    rank: int
    number: int


# One warp of a program tells, and waits: a rank a lane, since a word to another GPU takes a microsecond or two.
TELL = tl.constexpr("""{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.lt.u32 first, thread, 32;
    @first st.release.sys.global.b64 [$1], $2;
    mov.b32 $0, 0;
}""")
AWAIT = tl.constexpr("""{
    .reg .pred behind;
    .reg .b32 thread;
    .reg .b64 seen;
    mov.u32 thread, %tid.x;
    setp.ge.u32 behind, thread, 32;
    @behind bra done;
again:
    ld.acquire.sys.global.b64 seen, [$1];
    setp.lt.s64 behind, seen, $2;
    @behind bra again;
done:
    mov.b32 $0, 0;
}""")


@triton.jit
def place(flags, round, rank, index, RANKS: tl.constexpr):
    """(addresses of this rank's flags at all ranks, of all ranks' flags here, what they count up to). No predecessor
    writes what this reads."""
    WIDE: tl.constexpr = triton.next_power_of_2(RANKS)
    other = tl.minimum(tl.arange(0, WIDE), RANKS - 1)
    theirs, mine = tl.load(flags + other) + rank * 8, tl.load(flags + rank) + other * 8
    return theirs, mine, tl.zeros((WIDE,), tl.int64) + tl.load(round, cache_modifier=".cg") + index


@triton.jit
def met(theirs, mine, now):
    """All threads have done what this tells of."""
    if tl.program_id(0) == 0:
        tl.inline_asm_elementwise(TELL, "=r,l,l", [theirs, now], tl.int32, is_pure=False, pack=1)
    tl.inline_asm_elementwise(AWAIT, "=r,l,l", [mine, now], tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()  # a thread has waited for one of the ranks, or for none


@triton.jit(do_not_specialize=["rank", "index"])
def _meet(flags, round, rank, index, RANKS: tl.constexpr, EARLY: tl.constexpr):
    theirs, mine, now = place(flags, round, rank, index, RANKS)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    met(theirs, mine, now)


def meet(meeting: Meeting) -> None:
    """Waits, on the device, until every rank is here: what each wrote before has arrived."""
    early = hopper(meeting.flags.device)
    _meet[(1,)](*meeting, RANKS=len(meeting.flags), EARLY=early, num_warps=1, launch_pdl=early)


@triton.jit(do_not_specialize=["rank"])
def _begin(flags, round, rank, FORWARD: tl.constexpr, RANKS: tl.constexpr):
    began = tl.load(round) + FORWARD
    theirs, mine, now = place(flags, round, rank, FORWARD, RANKS)
    met(theirs, mine, now)
    tl.store(round, began)


def begin(meeting: Meeting) -> None:
    """The meeting before a forward's first. Its successor cannot begin early, so later ones read `round` at any
    time."""
    _begin[(1,)](*meeting[:3], FORWARD=FORWARD, RANKS=len(meeting.flags), num_warps=1)
