"""The settings of a profile: each has bits of its own, which depend on the row alone, and the right gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rlloop.numerics.layout import AttentionLayout
from rlloop.numerics.ops import Ops
from rlloop.numerics.probe import probe, same_bits
from rlloop.numerics.profile import CPU_SETTINGS, SETTINGS, NumericsProfile

OURS = Ops(NumericsProfile())
HALF = torch.bfloat16


def under(implementation: str = "rlloop", **settings: str) -> Ops:
    every = dict.fromkeys(NumericsProfile.operations(), implementation)
    return Ops(NumericsProfile(**{**every, **settings}))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------------------- attention splits

LENGTHS = [1, 64, 65, 200]
WHOLE = AttentionLayout.of_sequences(LENGTHS)


def queries_keys_values(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (draw(sum(LENGTHS), heads, 24, seed=seed, dtype=dtype) for seed, heads in enumerate((4, 2, 2)))
    return q, k, v


def test_a_query_that_sees_one_part_has_the_bits_of_no_split_and_others_have_their_own() -> None:
    plain, longest = OURS.attention(*queries_keys_values(), WHOLE, 0.3), max(LENGTHS)
    for split in (64, 256):
        made = under(attention_splits=str(split)).attention(*queries_keys_values(), WHOLE, 0.3)
        one = WHOLE.positions < split
        assert same_bits(made[one], plain[one])
        assert same_bits(made, plain) == (split > longest)
        torch.testing.assert_close(made, plain)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("chunk", [1, 50])
def test_parts_end_where_they_do_whatever_the_chunk_and_page(dtype: torch.dtype, page: int, chunk: int) -> None:
    ops, length = under(attention_splits="64"), LENGTHS[-1]
    q, k, v = queries_keys_values(dtype)
    whole = ops.attention(q, k, v, WHOLE, 0.3)[-length:]
    q, k, v = q[-length:], k[-length:], v[-length:]
    blocks = torch.randperm(-(-length // page), generator=torch.Generator().manual_seed(page))
    at = torch.arange(length)
    slots = blocks[at // page] * page + at % page
    stores = [torch.full((len(blocks) * page, *x.shape[1:]), torch.nan, dtype=dtype) for x in (k, v)]
    stores[0][slots], stores[1][slots] = k, v
    for begin in (0, 63, 64, 65, 127, 128, 129, 150, length - chunk):
        rows = slice(begin, begin + chunk)
        layout = AttentionLayout(
            torch.tensor([0, chunk]), torch.tensor([begin]), blocks[None] * page, page, contiguous=False
        )
        assert same_bits(ops.attention(q[rows], *stores, layout, 0.3), whole[rows])


@pytest.mark.parametrize("split", ["64", "256"])
def test_sparse_attention_splits_by_places_among_the_selected(split: str) -> None:
    ops, (q, k, v) = under(attention_splits=split), queries_keys_values()
    k, v = k[:, :1], v[:, :1]
    every = torch.arange(200).expand(len(q), -1).where(torch.arange(200) <= WHOLE.positions[:, None], -1)
    assert same_bits(ops.sparse_attention(q, k, v, every, WHOLE, 0.3), ops.attention(q, k, v, WHOLE, 0.3))
    some = every.where(every % 3 != 1, -1).sort(-1, descending=True)[0]  # up to 134 places, of which 0 is one
    counts = (some >= 0).sum(-1, keepdim=True)
    some = some.gather(1, (counts - 1 - torch.arange(200)) % 200).where(torch.arange(200) < counts, -1)  # ascending
    exact = under("reference", attention_splits=split)
    expected = exact.sparse_attention(*(x.double() for x in (q, k, v)), some, WHOLE, 0.3)
    made = ops.sparse_attention(q, k, v, some, WHOLE, 0.3)
    torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=1e-5)
    assert same_bits(made, OURS.sparse_attention(q, k, v, some, WHOLE, 0.3)) == (split == "256")


# ---------------------------------------------------------------------------------------------- residual and norm


def test_the_norm_of_the_sum_before_it_is_rounded() -> None:
    x, residual, weight = (draw(*shape, seed=seed, dtype=HALF) for seed, shape in enumerate([(67, 200)] * 2 + [(200,)]))
    exact = under(residual_norm="float32")
    normed, stream = exact.rms_norm(x, weight, 1e-6, residual)
    rounded, same = OURS.rms_norm(x, weight, 1e-6, residual)
    assert same_bits(stream, same), "what is stored is the same"
    assert 0.1 < (normed != rounded).float().mean() < 0.9
    sums = x.double() + residual.double()
    truth = sums / (sums.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert (normed - truth).abs().mean() < 0.75 * (rounded - truth).abs().mean()
    for begin, end in ((0, 1), (66, 67), (3, 19)):
        alone = exact.rms_norm(x[begin:end], weight, 1e-6, residual[begin:end])[0]
        assert same_bits(alone, normed[begin:end])
    assert same_bits(exact.rms_norm(x, weight, 1e-6)[0], OURS.rms_norm(x, weight, 1e-6)[0]), "nothing is added"
    wide = x.float(), weight.float(), 1e-6, residual.float()
    assert same_bits(exact.rms_norm(*wide)[0], OURS.rms_norm(*wide)[0]), "nothing is rounded"


# ------------------------------------------------------------------------------------------------ sums over ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_float32_sums_of_the_ranks_in_one_tree(ranks: int) -> None:
    x, weight, bias = draw(670, 960, dtype=HALF), draw(400, 960, seed=1, dtype=HALF), draw(400, seed=2, dtype=HALF)
    made = under(tp_segments=str(ranks)).linear(x, weight, bias, across=True)
    size = 960 // ranks
    sums = [OURS.logits(x[:, at : at + size], weight[:, at : at + size]) for at in range(0, 960, size)]

    def tree(parts: list[Tensor]) -> Tensor:  # what any rank has of it is a subtree
        half = len(parts) // 2
        return tree(parts[:half]) + tree(parts[half:]) if half else parts[0]

    assert same_bits(made, (tree(sums) + bias.float()).to(HALF))
    assert not same_bits(made, OURS.linear(x, weight, bias))
    assert same_bits(under(tp_segments=str(ranks)).linear(x, weight, bias), OURS.linear(x, weight, bias)), "not across"


def test_rounded_sums_of_the_ranks_in_order() -> None:
    x, weight, bias = draw(67, 96, dtype=HALF), draw(40, 96, seed=1, dtype=HALF), draw(40, seed=2, dtype=HALF)
    made = under(tp_segments="4", all_reduce="rounded_chain").linear(x, weight, bias, across=True)
    total = OURS.linear(x[:, :24], weight[:, :24], bias).float()
    for at in (24, 48, 72):
        total = total + OURS.linear(x[:, at : at + 24], weight[:, at : at + 24]).float()
    assert same_bits(made, total.to(HALF))
    tree = under(tp_segments="4").linear(x, weight, bias, across=True)
    truth = x.double() @ weight.double().T + bias.double()
    assert (tree - truth).abs().mean() < 0.8 * (made - truth).abs().mean()


@pytest.mark.parametrize("all_reduce", SETTINGS["all_reduce"])
def test_a_row_of_such_a_sum_has_its_bits_alone(all_reduce: str) -> None:
    ops, x, weight = under(tp_segments="4", all_reduce=all_reduce), draw(67, 96), draw(40, 96, seed=1)
    whole = ops.linear(x, weight, across=True)
    for begin, end in ((0, 1), (66, 67), (3, 19)):
        assert same_bits(ops.linear(x[begin:end], weight, across=True), whole[begin:end])


def test_terms_that_ranks_cannot_share() -> None:
    with pytest.raises(ValueError, match=r"tp_segments is 4.*30 terms"):
        under(tp_segments="4").linear(draw(2, 30), draw(3, 30), across=True)


# ----------------------------------------------------------------------------------------------------- all of them

CASES = {
    "attention": lambda o, q, k, v: o.attention(q, k, v, AttentionLayout.of_sequences([2, 135]), 0.3),
    "rms_norm": lambda o, x, w, r: torch.cat(o.rms_norm(x, w, 1e-6, r)),
    "linear": lambda o, x, w, b: o.linear(x, w, b, across=True),
}
SHAPES = {
    "attention": [(137, 4, 6), (137, 2, 6), (137, 2, 6)],
    "rms_norm": [(4, 20), (20,), (4, 20)],
    "linear": [(7, 16), (5, 16), (5,)],
}
EACH = [
    ("attention_splits", "64", "attention"),
    ("residual_norm", "float32", "rms_norm"),
    ("tp_segments", "4", "linear"),
]


@pytest.mark.parametrize(("knob", "value", "case"), [*EACH, ("all_reduce", "rounded_chain", "linear")])
def test_gradients_are_the_reference_in_float64(knob: str, value: str, case: str) -> None:
    settings = {"tp_segments": "4", knob: value}

    def gradients(ops: Ops, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [draw(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(SHAPES[case])]
        out = CASES[case](ops, *leaves)
        return torch.autograd.grad(out, leaves, draw(*out.shape, seed=9).to(dtype))

    plain = gradients(under("reference"), torch.float64)
    for exact, expected in zip(gradients(under("reference", **settings), torch.float64), plain, strict=True):
        torch.testing.assert_close(exact, expected)
    for ours, expected in zip(gradients(under(**settings), torch.float32), plain, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=2e-4, atol=2e-4)
    for ours, expected in zip(gradients(under(**settings), HALF), plain, strict=True):
        assert (ours.double() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_the_probe_passes_every_setting(dtype: torch.dtype) -> None:
    for values in itertools.zip_longest(*(SETTINGS[knob][1:] for knob in CPU_SETTINGS)):
        chosen = {knob: value for knob, value in zip(CPU_SETTINGS, values, strict=True) if value}
        assert probe(under(**chosen), dtype) == {}
