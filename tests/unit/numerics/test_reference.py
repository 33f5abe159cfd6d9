"""The oracle itself, in float64: against other formulations of the same mathematics, and against finite differences."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from rlloop.numerics import reference, stock
from rlloop.numerics.layout import AttentionLayout, LogitsProcessing


@pytest.fixture
def random():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def paged(lengths, contexts, page_size):
    """Sequences whose pages are interleaved in one store, and the store's size."""
    pages = [-(-(c + n) // page_size) for n, c in zip(lengths, contexts, strict=True)]
    starts = torch.zeros(len(lengths), max(pages), dtype=torch.int64)
    for page in range(max(pages)):
        for s in range(len(lengths)):
            starts[s, page] = (page * len(lengths) + (len(lengths) - 1 - s)) * page_size
    return AttentionLayout(
        query_start=torch.tensor([0, *lengths]).cumsum(0),
        context=torch.tensor(contexts),
        block_start=starts,
        block_size=page_size,
        contiguous=False,
    ), len(lengths) * max(pages) * page_size


def test_linear(random):
    x, weight, bias = random(3, 5), random(4, 5), random(4)
    torch.testing.assert_close(reference.linear(x, weight, bias), F.linear(x, weight, bias))
    assert gradcheck(reference.linear, (x, weight, bias))


def test_linear_rounds_low_precision_once():
    x, weight, bias = (torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((3, 64), (4, 64), (4,)))
    low = [t.bfloat16() for t in (x, weight, bias)]
    expected = F.linear(*(t.double() for t in low)).bfloat16()
    assert torch.equal(reference.linear(*low), expected)


def test_rms_norm(random):
    x, weight, residual = random(3, 6), random(6), random(3, 6)
    normed, stream = reference.rms_norm(x, weight, 1e-6, residual)
    assert torch.equal(stream, x + residual)
    torch.testing.assert_close(normed, F.rms_norm(x + residual, (6,), weight, 1e-6))
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-6, None)[0], F.rms_norm(x, (6,), weight, 1e-6))
    assert gradcheck(lambda x, w, r: reference.rms_norm(x, w, 1e-6, r), (x, weight, residual))


def test_silu_mul(random):
    gate, up = random(3, 6), random(3, 6)
    torch.testing.assert_close(reference.silu_mul(gate, up), F.silu(gate) * up)
    assert gradcheck(reference.silu_mul, (gate, up))


def test_rope_turns_each_pair_by_its_angle(random):
    x, positions = random(4, 2, 6), torch.tensor([0, 1, 5, 2])
    angles = torch.arange(8, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    turned = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(cos), angles)[positions][:, None]
    out = reference.rope(x, positions, cos, sin)
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1))
    assert gradcheck(lambda x: reference.rope(x, positions, cos, sin), (x,))


def test_attention_of_packed_sequences(random):
    lengths = [2, 1, 3]
    q, k, v = random(6, 4, 3), random(6, 2, 3), random(6, 2, 3)
    layout = AttentionLayout.of_sequences(lengths)
    torch.testing.assert_close(reference.attention(q, k, v, layout, 0.5), stock.attention(q, k, v, layout, 0.5))
    assert gradcheck(lambda q, k, v: reference.attention(q, k, v, layout, 0.5), (q, k, v), fast_mode=True)


def test_attention_finds_keys_in_interleaved_pages(random):
    layout, slots = paged(lengths=[1, 3], contexts=[5, 2], page_size=2)
    q, k, v = random(4, 2, 3), random(slots, 1, 3), random(slots, 1, 3)
    expected = stock.attention(q, k, v, layout, 0.7)
    torch.testing.assert_close(reference.attention(q, k, v, layout, 0.7), expected)


def distribution(values, **warp):
    """Probabilities of one row of logits under a warp."""
    warp = LogitsProcessing(**{name: torch.tensor(value) for name, value in warp.items()})
    z, possible = reference.processed_row(torch.tensor(values, dtype=torch.float64), warp, 0)
    p = torch.softmax(z, -1)
    assert ((p > 0) == possible).all()
    return p.tolist()


LN = [math.log(p) for p in (0.1, 0.4, 0.2, 0.2, 0.1)]


@pytest.mark.parametrize(
    ("warp", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.2, 0.1]),
        ({"temperature": [0.5]}, [x / 0.26 for x in (0.01, 0.16, 0.04, 0.04, 0.01)]),
        ({"top_k": [1]}, [0, 1, 0, 0, 0]),
        ({"top_k": [2]}, [0, 2 / 3, 1 / 3, 0, 0]),  # the lower id wins the tie
        ({"top_k": [9]}, [0.1, 0.4, 0.2, 0.2, 0.1]),
        ({"top_p": [0.39]}, [0, 1, 0, 0, 0]),
        ({"top_p": [0.41]}, [0, 2 / 3, 1 / 3, 0, 0]),  # the token that crosses stays
        ({"top_p": [0.85]}, [1 / 9, 4 / 9, 2 / 9, 2 / 9, 0]),
        ({"min_p": [0.3]}, [0, 0.5, 0.25, 0.25, 0]),
        ({"min_p": [1.0]}, [0, 1, 0, 0, 0]),
        ({"top_k": [3], "top_p": [0.7]}, [0, 2 / 3, 1 / 3, 0, 0]),  # top-p of what top-k left: 0.4 and 0.2 of 0.8
        ({"top_k": [0], "top_p": [1.0], "min_p": [0.0]}, [0.1, 0.4, 0.2, 0.2, 0.1]),  # all switched off
        ({"banned_start": [0, 1], "banned_ids": [1]}, [1 / 6, 0, 1 / 3, 1 / 3, 1 / 6]),
        ({"banned_start": [0, 1], "banned_ids": [1], "top_k": [1]}, [0, 0, 1, 0, 0]),
        ({"banned_start": [0, 1], "banned_ids": [1], "min_p": [0.9]}, [0, 0, 0.5, 0.5, 0]),
        # greedy: the raw distribution, whatever else is asked
        ({"temperature": [0.0], "top_k": [1], "banned_start": [0, 1], "banned_ids": [1]}, [0.1, 0.4, 0.2, 0.2, 0.1]),
    ],
)
def test_warp_follows_the_documented_order(warp, expected):
    assert distribution(LN, **warp) == pytest.approx(expected)


def test_zeros_of_either_sign_tie():
    assert distribution([-0.0, 0.0, -1.0], top_k=[1]) == [1, 0, 0]
    assert distribution([0.0, -0.0, -1.0], top_k=[1]) == [1, 0, 0]


WARP = LogitsProcessing(
    temperature=torch.tensor([1.0, 0.7, 0.0, 1.3]),
    top_k=torch.tensor([0, 6, 2, 0]),
    top_p=torch.tensor([1.0, 0.9, 0.5, 1.0]),
    min_p=torch.tensor([0.0, 0.05, 0.5, 0.0]),
    banned_start=torch.tensor([0, 0, 1, 1, 2]),
    banned_ids=torch.tensor([3, 3]),
)


def test_token_logprob(random):
    hidden, weight = random(4, 5), random(9, 5)
    p = torch.stack(
        [torch.softmax(reference.processed_row(row, WARP, t)[0], -1) for t, row in enumerate(hidden @ weight.T)]
    )
    targets = p.argmax(-1)
    logprobs, entropy = reference.token_logprob(hidden, weight, targets, WARP)
    torch.testing.assert_close(logprobs, p.gather(1, targets[:, None])[:, 0].log())
    torch.testing.assert_close(entropy, torch.special.entr(p).sum(-1))
    assert gradcheck(lambda h, w: reference.token_logprob(h, w, targets, WARP), (hidden, weight))


def test_an_impossible_target_sends_no_gradient(random):
    hidden, weight = random(4, 5), random(9, 5)
    logprobs, _ = reference.token_logprob(hidden, weight, torch.tensor([0, 0, 0, 3]), WARP)
    assert logprobs[3] == -torch.inf
    logprobs[3].backward()
    assert hidden.grad.abs().sum() == 0
    assert weight.grad.abs().sum() == 0


def test_sample_inverts_the_cumulative_distribution():
    logits = torch.tensor(LN).expand(1000, 5)
    warp = LogitsProcessing(top_k=torch.full((1000,), 3))
    ids, logprobs, raw = reference.sample(logits, warp, torch.full((1000,), 5), torch.arange(1000))
    counts = torch.bincount(ids, minlength=5)
    assert counts[[0, 4]].sum() == 0
    expected = torch.tensor([500.0, 250.0, 250.0])
    assert ((counts[1:4] - expected) ** 2 / expected).sum() < 15.2  # 2 degrees of freedom, 0.05% tail
    torch.testing.assert_close(logprobs, torch.tensor([0.5, 0.25, 0.25]).log()[ids - 1])
    torch.testing.assert_close(raw, torch.tensor([0.4, 0.2, 0.2]).log()[ids - 1])


def test_sample_refuses_rows_that_hold_no_distribution():
    with pytest.raises(ValueError, match="row 1"):
        reference.sample(
            torch.tensor([[0.0, 1.0], [0.0, torch.nan]]), LogitsProcessing(), torch.zeros(2).long(), torch.arange(2)
        )
