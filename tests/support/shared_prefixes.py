"""Families of sequences that go on from one prefix, as whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def whole_sequences(families: Sequence[Sequence[int]], device: str = "cpu") -> tuple[Tensor, list[int]]:
    """(flat tokens of every sequence from which no other goes on, each after its prefix's; their lengths). `families`:
    lengths of each prefix and of what goes on from it, as `AttentionLayout.of_families` takes them."""
    rows, lengths, start = [], [], 0
    for first, *others in families:
        prefix, start = range(start, start + first), start + first
        for count in others or [0]:
            rows += [*prefix, *range(start, start + count)]
            lengths.append(first + count)
            start += count
    return torch.tensor(rows, device=device), lengths
