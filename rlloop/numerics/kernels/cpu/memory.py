"""The allocator of a process that computes on CPU tensors."""

from __future__ import annotations

import ctypes

TRIM, MAPPED = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
LARGEST = 32 << 20  # bytes of a block that comes from the heap, the most that glibc allows
KEPT = 256 << 20  # bytes of freed memory at the heap's end that the process keeps


def keep_freed() -> bool:
    """Let glibc use freed memory again: by default most of what a step frees goes back to the system, and the next step
    gets it page by page. Returns False, and does nothing, where the C library has no such settings."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in ((MAPPED, LARGEST), (TRIM, KEPT)))
