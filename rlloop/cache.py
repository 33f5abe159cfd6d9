"""The cache folder: recipes' models and the dashboard's indices, which can be made again.

Compiled kernels are kept in it as well (`rlloop.numerics.folders`).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlloop.errors import ConfigError
from rlloop.numerics.folders import private
from rlloop.parallel.layout import is_other_rank


def cache_root() -> Path:
    """RLLOOP_CACHE of the environment, else ~/.cache/rlloop; created if need be. Raises `ConfigError` if it cannot be
    written, or if other users may write into it."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(os.environ.get("RLLOOP_CACHE") or home / "rlloop")
    try:
        return private(root)
    except OSError as error:
        raise ConfigError(
            f"the cache {root} cannot be used: {error.strerror}; set the environment variable RLLOOP_CACHE to another"
        ) from None


def made_once(name: str, make: Callable[[Path], object], says: str = "") -> Path:
    """The folder `name` in the cache. At first use `make(folder)` writes it, under another name until it is whole;
    `says` is printed before, by one rank of each machine, for what takes long."""
    root = cache_root()
    if not (root / name).exists():
        if says and not is_other_rank(of_machine=True):
            print(says, file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".making-") as scratch:
            make(Path(scratch) / "made")
            try:
                (Path(scratch) / "made").rename(root / name)
            except OSError:  # another process was faster: its equal work stays
                if not (root / name).exists():
                    raise
    return root / name
