"""Converts sampling parameters into a `LogitsProcessing`; engine and trainer share it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlloop.numerics.layout import LogitsProcessing
from rlloop.numerics.transfer import on_device
from rlloop.types import SamplingParams, stop_ids


def warp_for(
    sampling: Sequence[SamplingParams | None],
    lengths: Sequence[int] | np.ndarray,
    eos_token_ids: tuple[int, ...],
    *,
    device: str | torch.device = "cpu",
    counts: Sequence[int] | None = None,
) -> LogitsProcessing:
    """The temperature, truncation and banned tokens of N rows of logits.

    `sampling[i]` is row i's (None: temperature 1, nothing truncated, nothing banned); with `counts`, that of the next
    `counts[i]` rows. `lengths` [N] counts the tokens that the completion had before each row's token.
    """
    params = [item if item is not None and _warps(item) else None for item in sampling]
    if not any(params):
        return LogitsProcessing()

    def column(name: str, default: float, dtype: type) -> torch.Tensor | None:
        values = np.array([default if item is None else getattr(item, name) for item in params], dtype)
        if (values == default).all():
            return None
        return on_device(values if counts is None else np.repeat(values, counts), device)

    banned_start = banned_ids = None
    if any(item is not None and item.min_tokens for item in params):
        rows = params if counts is None else [item for item, n in zip(params, counts, strict=True) for _ in range(n)]
        banned = [
            stop_ids(item, eos_token_ids) if item is not None and done < item.min_tokens else ()
            for item, done in zip(rows, np.asarray(lengths).tolist(), strict=True)
        ]
        if any(banned):
            starts = np.cumsum([0, *map(len, banned)])
            banned_start = on_device(starts.astype(np.int64), device)
            banned_ids = on_device(np.array([token for ids in banned for token in ids], np.int64), device)
    return LogitsProcessing(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int64),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        banned_start=banned_start,
        banned_ids=banned_ids,
    )


def _warps(params: SamplingParams) -> bool:
    return params.temperature != 1.0 or params.truncates or params.min_tokens > 0
