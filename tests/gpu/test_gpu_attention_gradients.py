"""Attention's gradients: values beside float64's, the same bits in every run and whatever else is in the batch."""

import pytest
import torch

from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import ops_for
from rlloop.numerics.probe import same_bits
from rlloop.numerics.profile import NumericsProfile
from tests.support.attention_gradients import exact

OURS = ops_for(NumericsProfile())
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def inputs(lengths, heads, groups, width, dtype):
    """q, k, v and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    counts = (heads, groups, groups, heads)
    return [torch.randn(sum(lengths), n, width, generator=generator).to("cuda", dtype) for n in counts]


def gradients(q, k, v, grad, lengths):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = OURS.attention(*leaves, AttentionLayout.of_sequences(lengths, "cuda"), q.shape[2] ** -0.5)
    return torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("lengths", "heads", "groups", "width"),
    [
        ([1000, 1, 333, 1500, 64, 127], 4, 2, 128),
        ([65, 700], 5, 1, 128),  # a number of heads that divides no tile
        ([900, 0, 128, 0, 63], 6, 2, 64),
        ([500, 70], 2, 2, 96),
        ([5000], 1, 1, 128),
    ],
)
def test_values_and_bits(lengths, heads, groups, width, dtype) -> None:
    given = inputs(lengths, heads, groups, width, dtype)
    found = gradients(*given, lengths)
    start = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v, grad = (x.cpu() for x in given)
    for mine, theirs in zip(found, exact((q, k, v, start, None, None, grad, width**-0.5), 0, True), strict=True):
        assert (mine.cpu() - theirs).norm() < LIMITS[dtype] * theirs.norm()
    for _ in range(3):
        assert all(map(same_bits, found, gradients(*given, lengths))), "again"
    begin, end = int(start[-2]), int(start[-1])
    alone = gradients(*(x[begin:end] for x in given), [end - begin])
    assert all(same_bits(x[begin:end], y) for x, y in zip(found, alone, strict=True)), "alone"


def test_other_sequences_numbers_stay_theirs() -> None:
    lengths = [100, 70, 90]
    given = inputs(lengths, 4, 2, 128, torch.bfloat16)
    alone = gradients(*(x[100:170] for x in given), [70])
    for x in given:
        x[:100] = x[170:] = torch.nan
    together = gradients(*given, lengths)
    assert all(same_bits(x[100:170], y) for x, y in zip(together, alone, strict=True))
