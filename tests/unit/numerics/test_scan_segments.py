"""The recurrent scan of few long sequences, whose segments a GPU goes through side by side, in Triton's interpreter
(`test_interpreted_kernels`): outputs and states have the bits of chunks in turn."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="kernels are not interpreted")

SHAPES = [(1, 1, 64, 16), (1, 2, 12, 20)]  # G, H, K, V: two pieces of a key; odd ones
# Tokens of each sequence in each step: chunks that an earlier step began, and whole and begun ones at the end.
STEPS = [((33, 0, 70, 1, 64),), ((21,), (60,)), ((21, 16), (43, 0), (11, 48))]


def inputs(tokens: int, shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """q, k, v, decay and beta."""
    (groups, heads, key, width), at = shape, torch.Generator().manual_seed(seed)
    q, k = (torch.randn(tokens, groups, key, generator=at) for _ in range(2))
    v = torch.randn(tokens, heads, width, generator=at)
    decay, beta = (torch.sigmoid(torch.randn(tokens, heads, generator=at) + shift) for shift in (4, 0))
    return [q / key**0.5, k / key**0.5, v, decay, beta]


def made(shape: tuple[int, ...], steps: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Outputs of the first step without states, and of each step with them, and the states after all."""
    from rlloop.numerics.kernels.triton.scan import scan, scan_state

    count, outputs = len(steps[0]), list[Tensor]()
    store = torch.randn(count + 1, *scan_state(*shape), generator=torch.Generator().manual_seed(7))  # what others left
    done, rows = torch.zeros(count, dtype=torch.int64), torch.arange(count) + 1
    for index, lengths in enumerate(steps):
        given, start = inputs(sum(lengths), shape, index), torch.tensor([0, *lengths]).cumsum(0)
        if index == 0:
            outputs.append(scan(*given, False, start))
        outputs.append(scan(*given, False, start, done, store, rows))
        done = done + torch.tensor(lengths)
    return [*outputs, store]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_segments_leave_no_trace(
    shape: tuple[int, ...], steps: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlloop.numerics.kernels.triton import scan as scans

    in_turn = made(shape, steps)
    monkeypatch.setattr(scans, "SEGMENT", 32)
    monkeypatch.setattr(scans, "LEAST_SEGMENTS", 0)
    beside = made(shape, steps)
    wrong = [int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in zip(in_turn, beside, strict=True)]
    assert not any(wrong), wrong
    monkeypatch.setattr(scans, "begin_segments", None)
    with pytest.raises(TypeError):  # segments were there
        made(shape, steps)
