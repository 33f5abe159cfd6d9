"""Sizes that steps are padded to, so that few graphs serve many steps."""

from __future__ import annotations

import numpy as np

LONG = 1024  # tokens; in longer contexts, attention reads decoding apart from prompts


def rounded(rows: int, *, finely: bool = False) -> int:
    """Rounds up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: no more than a third of the rows is idle.

    `finely`: beyond 32, where more rows take longer, to 36, 40, 44, ..., 64, 72, ...: no more than a ninth.
    """
    if rows <= 3:
        return rows
    power = 1 << (rows - 1).bit_length()
    if finely and rows > 32:
        return multiple(rows, power // 16)
    return power if rows > power * 3 // 4 else power * 3 // 4


def decoding(counts: np.ndarray, longest: int) -> int:
    """Number of a step's leading rows that decode (one token each), for `AttentionLayout.decoding`; 0 where no context
    is `longest` enough, and where all rows decode."""
    return int((counts != 1).argmax()) if longest > LONG else 0


def rounded_rows(rows: int) -> int:
    """Rounds up to 4, 16, 64, 256, ...: of a step with prompts, where idle rows are few tokens among many."""
    return 1 << max(2, -(-(rows - 1).bit_length() // 2) * 2)


def rounded_tokens(count: int) -> int:
    """As `rounded` up to 256, whose time is that of reading weights; then no more than a fifth is idle, beyond 2,048 an
    eighth. Even."""
    if count <= 256:
        return (count := rounded(count)) + count % 2
    power = 1 << (count - 1).bit_length()
    return multiple(count, min(power // 8, 256))


def multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def at_least(pages: int, least: int) -> int:
    """`least` doubled until it reaches `pages`."""
    size = max(1, least)
    while size < pages:
        size *= 2
    return size
