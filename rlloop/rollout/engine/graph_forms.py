"""Forms of steps, for each of which a graph is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlloop.rollout.engine.graph_sizes import multiple, rounded, rounded_rows, rounded_tokens


class Form(NamedTuple):
    """Padded sizes and variant of a step, for which a graph is recorded."""

    rows: int
    pages: int  # of a row
    adapted: str  # rows have "none", "one" or "many" adapters
    draws: bool = False
    tokens: int = 0  # of a step with prompts; 0: each row decodes one
    decoding: int = 0  # rows of them that come first, have one token, and are read apart


def decode_forms(requests: int, widths: Sequence[int], *, draws: bool, finely: bool = False) -> list[Form]:
    """Forms of all steps in which up to `requests` requests decode, without adapters. `widths`: numbers of pages."""
    sizes = sorted({rounded(n, finely=finely) for n in range(1, requests + 1)})
    return [Form(rows, width, "none", draws) for width in widths for rows in sizes]


def prompt_forms(requests: int, width: int, room: int, most: int) -> list[Form]:
    """Forms of all steps of up to `most` tokens, prompts among them, of up to `requests` requests without adapters.
    `width`: pages of each, for up to `room` tokens."""
    sizes = sorted({rounded_rows(n + 1) for n in range(1, requests + 1)})
    counts = sorted({rounded_tokens(n) for n in range(1, most + 1)})
    return [
        Form(rows, width, "none", tokens=count) for rows in sizes for count in counts if rows < count <= rows * room
    ]


class PromptInputs(NamedTuple):
    """Inputs of a step with prompts: parts of one tensor, or of an array to copy into it; int64."""

    tokens: Any  # [4, T]: token, adapter's slot, position, slot
    starts: Any  # [R + 1]: where rows begin
    context: Any  # [R]
    rows: Any  # [R], of the states
    pages: Any  # [R, B]: their first slots

    @classmethod
    def shapes(cls, form: Form) -> list[tuple[int, ...]]:
        return [(4, form.tokens), (form.rows + 1,), (form.rows,), (form.rows,), (form.rows, form.pages)]

    @classmethod
    def size(cls, form: Form) -> int:
        return sum(multiple(int(np.prod(shape)), 2) for shape in cls.shapes(form))

    @classmethod
    def of(cls, flat: Any, form: Form) -> PromptInputs:
        parts, begin = [], 0
        for shape in cls.shapes(form):
            count = int(np.prod(shape))
            parts.append(flat[begin : begin + count].reshape(shape))
            begin += multiple(count, 2)  # at addresses that kernels take as they are
        return cls(*parts)
