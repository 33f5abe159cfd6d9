"""Where recipes' models and the dashboard's indices are kept, which can all be made again.

Compiled kernels lie beside them, by the same rule (`rlloop.numerics.cpu.jit`, which imports nothing of the rest).
"""

from __future__ import annotations

import os
from pathlib import Path

from rlloop.errors import ConfigError


def cache_root() -> Path:
    """The environment's RLLOOP_CACHE, or ~/.cache/rlloop; made if need be. Raises `ConfigError` if it is read-only."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("RLLOOP_CACHE") or home / "rlloop")
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            raise PermissionError(None, "it is read-only")
    except OSError as error:
        raise ConfigError(
            f"the cache {root} cannot be written: {error.strerror}; the environment variable RLLOOP_CACHE names another"
        ) from None
    return root
