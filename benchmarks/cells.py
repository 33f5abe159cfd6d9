"""Parts of a table: which cells run, and when to stop so that a time limit is kept. What is recorded is merged.

cells.add_arguments(parser)
groups = {cell: [cell] for cell in cells.chosen(every, args.cells)}
for cell in cells.within(groups, args.seconds):
    ...
    report("gpu-train", figures, part=True)
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cells", nargs="+", metavar="PATTERN", help="these only, e.g. '8B/*' '*/one'; all if left out"
    )
    parser.add_argument("--seconds", type=float, help="begin nothing that would likely end later")
    parser.add_argument("--list", action="store_true", help="print the cells, run nothing")


def chosen(every: Sequence[str], patterns: Sequence[str] | None) -> list[str]:
    """The cells that any of the patterns fits, in their order. Raises `SystemExit` for a pattern that fits none."""
    for pattern in patterns or ():
        if not fnmatch.filter(every, pattern):
            raise SystemExit(f"no cell is {pattern!r}; there are {' '.join(every)}")
    return [cell for cell in every if patterns is None or any(fnmatch.fnmatch(cell, each) for each in patterns)]


def within(
    groups: Mapping[str, Sequence[str]],
    seconds: float | None,
    clock: Callable[[], float] = time.monotonic,
    option: str = "--cells",
) -> Iterator[str]:
    """Names of groups of cells, as long as another as slow as the slowest so far would end in time; then what is left
    is printed, after the `option` that chooses it. The first always runs. A group's time is that until the next is
    asked for."""
    begin = last = clock()
    longest, names = 0.0, list(groups)
    for at, name in enumerate(names):
        now = clock()
        longest, last = max(longest, now - last), now
        if seconds is not None and at and now - begin + longest > seconds:
            left = " ".join(cell for rest in names[at:] for cell in groups[rest])
            print(f"no time for the rest; go on with {option} {left}", file=sys.stderr)
            return
        yield name
