"""Sizes in which attention cuts the keys, in every phase and kernel: part of the contract."""

from __future__ import annotations

import torch

TILE = 64  # keys of a step of the online softmax, at absolute positions
SEGMENT = 1024  # keys after which the softmax begins anew
SLACK = 8.0  # log2 by which a segment's reference may exceed that of those before, until they are made relative to it
LIMIT = 2.0**64  # sum of a segment's masses from which on they are made relative to its highest score
LIMIT_FLOAT16 = 65504.0  # likewise where masses become float16, whose largest number this is


def fixed(dtype: torch.dtype, width: int, v_width: int, window: int, sinks: bool) -> bool:
    """True if masses are relative to the highest score of their segment's first tile; else an online softmax makes them
    relative to the highest so far."""
    return dtype != torch.float32 and 64 <= width == v_width <= 128 and not window and not sinks


def limit(dtype: torch.dtype) -> float:
    return LIMIT_FLOAT16 if dtype == torch.float16 else LIMIT
