"""Finds the runs below a folder, also behind links."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rlloop.runs.journal import ROTATED

MARKS = ("metrics.jsonl", "parity.jsonl", "run.log", ".lock")  # a folder with config.yaml and any of these is a run
# Not searched for runs.
INSIDE = {"checkpoints", "rollouts", "orphaned", ROTATED, "wandb", "tensorboard", "__pycache__"}
DEPTH = 5  # of folders that are searched
LINKED = 2  # of them, below a link: RECIPE/TIME of multiruns, and never a whole disk


def find_runs(root: Path) -> list[str]:
    """Ids of the runs at or below `root`: their paths relative to it, sorted; "." for `root` itself."""
    return sorted(path.relative_to(root).as_posix() for path in runs_below(root))


def runs_below(root: Path, depth: int = DEPTH, *, links: bool = True) -> Iterator[Path]:
    """Folders of the runs at or below `root`, as they are found, without `links` only those that lie there.

    Links to folders are followed `LINKED` folders deep where `_is_trusted`. A run that several paths lead to is found
    once, without a link if there is such a path.
    """
    found = set[tuple[int, int]]()
    seen = dict[tuple[int, int], int]()  # folders, and how deep below them was searched
    tops = [(root, depth)]
    for top, within in tops:  # which grows by the links that are found
        for folder, below, files in os.walk(top):
            path = Path(folder)
            left = within - len(path.relative_to(top).parts)
            identity = _identity(path)
            if identity is None or seen.get(identity, -1) >= left:
                below.clear()
                continue
            seen[identity] = left
            if "config.yaml" in files and any(mark in files for mark in MARKS):
                below.clear()
                if identity not in found:
                    found.add(identity)
                    yield path
            elif left <= 0:
                below.clear()
            below[:] = sorted(name for name in below if name not in INSIDE and not name.startswith("."))
            if links:
                tops += [(path / name, min(left - 1, LINKED)) for name in below if _is_trusted(path / name)]


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode of a folder, the same through any link; None for one that is gone."""
    try:
        stat = folder.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


def _is_trusted(path: Path) -> bool:
    """True for a link made by this user, by root, or by the owner of what it leads to: others could show what they
    cannot read themselves."""
    try:
        return path.is_symlink() and path.lstat().st_uid in (os.geteuid(), 0, path.stat().st_uid)
    except OSError:
        return False
