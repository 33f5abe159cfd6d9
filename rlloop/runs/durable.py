"""Forcing files to the disk, so that they survive a crash of the machine."""

from __future__ import annotations

import os
from pathlib import Path


def fsync(path: Path) -> None:
    """A file or a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Every file and folder in it, and itself."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)
