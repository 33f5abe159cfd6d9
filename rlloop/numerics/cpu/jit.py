"""How kernels are compiled, cached and launched."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import njit

PACKAGE = Path(__file__).parents[1]


def _cache_folder() -> str:
    """One folder a state of what kernels of other files inline: numba itself looks at a kernel's own file only."""
    digest = hashlib.sha256()
    for name in ("simd.py", "random.py"):
        digest.update((PACKAGE / name).read_bytes())
    home = os.environ.get("RLLOOP_CACHE") or Path.home() / ".cache" / "rlloop"
    return str(Path(home) / "kernels" / digest.hexdigest()[:16])


if not os.environ.get("NUMBA_CACHE_DIR"):
    numba.config.CACHE_DIR = _cache_folder()  # type: ignore[attr-defined]

kernel = njit(nogil=True, cache=True, error_model="numpy")
inlined = njit(nogil=True, error_model="numpy", inline="always")
_parallel = njit(nogil=True, cache=True, error_model="numpy", parallel=True)

_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
# One launch at a time: numba's fallback threading layer cannot run two parallel kernels at once.
_LAUNCH = threading.Lock()


def parallel_kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compiles a kernel with `prange` loops, whose tasks write disjoint memory: threads cannot change a bit."""
    compiled = _parallel(function)

    def launch(*args: Any) -> None:
        with _LAUNCH:
            numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))  # type: ignore[attr-defined]
            compiled(*args)

    return launch


def flat(tensor: torch.Tensor) -> np.ndarray:
    """A contiguous tensor's memory as a flat array; bfloat16 as uint16 bits, float16 as int16 bits (see `simd`)."""
    bits = _BITS.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).detach().reshape(-1).numpy()
