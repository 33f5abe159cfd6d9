"""Sampling parameters as columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlloop.models.logits_processing import warp_for
from rlloop.numerics.layout import LogitsProcessing
from rlloop.types import SamplingParams, stop_ids

EOS = (2, 3)


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 32, **changes})


def banned(warp: LogitsProcessing) -> list[list[int]]:
    assert warp.banned_start is not None
    assert warp.banned_ids is not None
    return [warp.banned_ids[a:b].tolist() for a, b in zip(warp.banned_start[:-1], warp.banned_start[1:], strict=True)]


def test_rows_at_their_defaults_need_no_columns():
    assert (
        warp_for([None, params(), params(seed=3, ignore_eos=True, stop_token_ids=(9,))], [0, 1, 2], EOS)
        == LogitsProcessing()
    )
    assert warp_for([], [], EOS) == LogitsProcessing()


def test_one_row_that_departs_makes_that_column():
    warp = warp_for([params(), params(temperature=0.5, top_k=7), None], [0, 0, 0], EOS)
    assert warp.temperature is not None
    assert warp.top_k is not None
    assert (warp.temperature.tolist(), warp.temperature.dtype) == ([1.0, 0.5, 1.0], torch.float32)
    assert (warp.top_k.tolist(), warp.top_k.dtype) == ([0, 7, 0], torch.int64)
    assert warp.top_p is None
    assert warp.min_p is None
    assert warp.banned_start is None
    warp = warp_for([params(top_p=0.9), params(min_p=0.1)], [0, 0], EOS)
    assert warp.top_p is not None
    assert warp.min_p is not None
    np.testing.assert_allclose(warp.top_p.numpy(), [0.9, 1.0])
    np.testing.assert_allclose(warp.min_p.numpy(), [0.0, 0.1])


@pytest.mark.parametrize(
    ("sampling", "made", "wanted"),
    [
        (params(min_tokens=3), 2, [2, 3]),
        (params(min_tokens=3), 3, []),
        (params(min_tokens=3, stop_token_ids=(9,)), 0, [2, 3, 9]),
        (params(min_tokens=3, stop_token_ids=(9,), ignore_eos=True), 0, [9]),
        (params(min_tokens=3, ignore_eos=True), 0, []),
        (None, 0, []),
    ],
)
def test_what_would_end_a_completion_is_impossible_before_min_tokens(sampling, made, wanted):
    warp = warp_for([params(min_tokens=1), sampling], [0, made], EOS)
    assert banned(warp) == [[2, 3], wanted]


def test_stop_ids_are_the_models_and_the_requests():
    assert stop_ids(params(stop_token_ids=(9,)), EOS) == (2, 3, 9)
    assert stop_ids(params(stop_token_ids=(9,), ignore_eos=True), EOS) == (9,)


def test_counts_stand_for_so_many_rows_each():
    sampling = [params(temperature=0.5, min_tokens=2), None, params(top_k=4)]
    counts, made = [3, 0, 2], [0, 1, 2, 0, 1]
    short = warp_for(sampling, made, EOS, counts=counts)
    long = warp_for([row for row, n in zip(sampling, counts, strict=True) for _ in range(n)], made, EOS)
    for name in ("temperature", "top_k", "banned_start", "banned_ids"):
        assert torch.equal(getattr(short, name), getattr(long, name)), name
    assert banned(short) == [[2, 3], [2, 3], [], [], []]
    assert short.top_p is None
