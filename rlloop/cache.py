"""Where recipes' models and the dashboard's indices are kept, which can all be made again.

Compiled kernels lie beside them (`rlloop.numerics.folders`).
"""

from __future__ import annotations

import os
from pathlib import Path

from rlloop.errors import ConfigError
from rlloop.numerics.folders import private


def cache_root() -> Path:
    """The environment's RLLOOP_CACHE, or ~/.cache/rlloop; made if need be. Raises `ConfigError` where it cannot be
    written, or others may write into it."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("RLLOOP_CACHE") or home / "rlloop")
    try:
        return private(root)
    except OSError as error:
        raise ConfigError(
            f"the cache {root} cannot be used: {error.strerror}; the environment variable RLLOOP_CACHE names another"
        ) from None
