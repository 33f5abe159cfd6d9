"""`token_logprob` by the contract: against the oracle, bit by bit against itself, and its gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlloop.numerics import reference, stock
from rlloop.numerics.kernels.cpu import distribution as kernels
from rlloop.numerics.kernels.cpu.compiled.distribution import log
from rlloop.numerics.layout import LogitsProcessing
from rlloop.numerics.operators import distribution as logprob
from rlloop.numerics.operators.distribution import token_logprob
from tests.support.sampling_cases import bits, head, mixed, warp_of

VOCABULARIES = [17, 64, 1000, 4099, 32000]


def distribution(values, setting):
    """Logprobs of the whole vocabulary for one row of logits, through the op. [V]"""
    weight = torch.tensor(values, dtype=torch.float32)[:, None]
    size = len(weight)
    return token_logprob(torch.ones(size, 1), weight, torch.arange(size), warp_of([setting] * size))[0]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_agrees_with_the_oracle(vocabulary):
    rows = {17: 73, 64: 73, 1000: 20}.get(vocabulary, 8)
    hidden, weight = head(rows, vocabulary)
    warp, targets = mixed(rows), (hidden @ weight.T).argmax(-1)
    targets[::3] = torch.arange(0, rows, 3) % 17
    logprobs, entropy = token_logprob(hidden, weight, targets, warp)
    exact = reference.token_logprob(hidden.double(), weight.double(), targets, warp)
    assert torch.equal(logprobs.isinf(), exact[0].isinf())
    assert logprobs.isfinite().any()
    torch.testing.assert_close(logprobs.double(), exact[0], atol=4e-6, rtol=2e-6)
    torch.testing.assert_close(entropy.double(), exact[1], atol=4e-6, rtol=2e-6)


finite = st.floats(-30, 30, width=32)
tied = st.sampled_from([-0.0, 0.0, 0.5, 1.0, -3.0, 2.25])
rows_of_logits = st.one_of(st.lists(tied, min_size=1, max_size=40), st.lists(finite, min_size=1, max_size=40))


@settings(deadline=None, max_examples=80)
@given(
    rows_of_logits,
    st.sampled_from([0.0, 0.25, 1.0, 3.0]),
    st.integers(0, 45),
    st.sampled_from([0.01, 0.3, 0.5, 0.75, 0.99, 1.0]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.sets(st.integers(0, 39), max_size=5),
)
def test_any_row_agrees_with_the_oracle(values, temperature, top_k, top_p, min_p, banned):
    banned = sorted(token for token in banned if token < len(values) - 1)  # one token stays
    setting = (temperature, top_k, top_p, min_p, banned)
    logprobs = distribution(values, setting)
    z, possible = reference.processed_row(torch.tensor(values), warp_of([setting]), 0)
    assert (logprobs > -torch.inf).tolist() == possible.tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(z, -1), atol=4e-6, rtol=2e-6)


def test_exact_ties_go_to_the_lower_id():
    values = torch.zeros(4099)
    values[[5, 7]] = -0.0
    assert (distribution(values.tolist(), (1.0, 7, 1.0, 0.0, ())) > -torch.inf).nonzero()[:, 0].tolist() == [*range(7)]
    values[4000] = 3.0
    kept = (distribution(values.tolist(), (1.0, 3, 1.0, 0.0, (0,))) > -torch.inf).nonzero()[:, 0].tolist()
    assert kept == [1, 2, 4000]
    half = distribution([0.0] * 1024, (1.0, 0, 0.5, 0.0, ()))
    assert (half[:512] == math.log(np.float32(1 / 512))).all()
    assert half[512:].isinf().all()


def test_logits_of_any_size():
    huge = distribution([3e38, -3e38, 3e38, 1e-45, 0.0, -1e-45], (1.0, 2, 0.9, 0.0, ()))
    assert huge.exp().tolist() == [0.5, 0.0, 0.5, 0.0, 0.0, 0.0]
    tiny = distribution(
        [0.0, 1e-45, -1e-45, 1e-45], (1.0, 2, 1.0, 0.0, ())
    )  # tokens that only the last bit tells apart
    assert tiny.exp().tolist() == [0.0, 0.5, 0.0, 0.5]
    masked = distribution([-torch.inf, 1.0, -torch.inf], (0.5, 2, 0.9, 0.1, ()))
    assert masked.tolist() == [-torch.inf, 0.0, -torch.inf]
    low = distribution([0.0, -1000.0], (1.0, 0, 1.0, 0.0, ()))  # impossible to draw, and still no −inf
    assert low.tolist() == [0.0, -1000.0]


def test_min_p_of_one_keeps_the_ties_of_the_top():
    assert distribution([1.0, 2.0, 2.0, 0.0], (1.0, 0, 1.0, 1.0, ())).exp().tolist() == [0.0, 0.5, 0.5, 0.0]


def test_entropy_of_flat_and_of_certain_distributions():
    weight = torch.tensor([[1.0], [1.0], [1.0], [1.0], [-200.0]])
    warp = warp_of([(1.0, 0, 1.0, 0.0, ()), (1.0, 2, 1.0, 0.0, ()), (1.0, 1, 1.0, 0.0, ())])
    _, entropy = token_logprob(torch.ones(3, 1), weight, torch.zeros(3, dtype=torch.int64), warp)
    assert entropy.tolist() == pytest.approx([math.log(4), math.log(2), 0.0], abs=1e-7)


def test_rows_without_a_distribution_are_nan():
    weight = torch.tensor([[1.0], [2.0]])
    hidden = torch.tensor([[1.0], [torch.nan], [torch.inf]], requires_grad=True)
    logprobs, entropy = token_logprob(hidden, weight, torch.zeros(3, dtype=torch.int64), LogitsProcessing())
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, True, True]
    logprobs.sum().backward()
    assert hidden.grad[:, 0].isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("targets", [[-1], [5]])
def test_targets_outside_the_vocabulary_are_refused(targets):
    with pytest.raises(ValueError, match="from 0 to 4"):
        token_logprob(torch.ones(1, 2), torch.ones(5, 2), torch.tensor(targets), LogitsProcessing())


def test_banned_ids_outside_the_vocabulary_are_refused():
    warp = warp_of([(1.0, 0, 1.0, 0.0, (0, 5))])
    with pytest.raises(ValueError, match="banned ids run from 0 to 5; they must be from 0 to 4"):
        token_logprob(torch.ones(1, 2), torch.ones(5, 2), torch.tensor([0]), warp)


def test_no_rows():
    logprobs, entropy = token_logprob(torch.ones(0, 2), torch.ones(5, 2), torch.zeros(0).long(), LogitsProcessing())
    assert len(logprobs) == len(entropy) == 0


@pytest.mark.parametrize("vocabulary", [17, 1000, 4099])
def test_a_row_alone_has_the_bits_it_has_among_128(vocabulary):
    hidden, weight = head(128, vocabulary)
    warp, targets = mixed(128), torch.arange(128) % 17
    together = token_logprob(hidden, weight, targets, warp)
    for t in range(0, 128, 5):
        alone = token_logprob(hidden[t : t + 1], weight, targets[t : t + 1], warp.rows(t, t + 1))
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(bits(one), bits(all_[t : t + 1]))


def test_neither_chunks_nor_threads_change_a_bit(monkeypatch):
    hidden, weight = head(50, 1000)
    hidden.requires_grad_()
    weight.requires_grad_()
    targets, warp = torch.arange(50), mixed(50)
    whole = token_logprob(hidden, weight, targets, warp)
    gradients = torch.autograd.grad(whole[1].sum(), (hidden, weight))
    threads = torch.get_num_threads()
    for rows_at_once, count in [(1, 3), (7, 1), (50, 1)]:
        monkeypatch.setattr(kernels, "LOGITS_BYTES", rows_at_once * 4000 + 1)
        torch.set_num_threads(count)
        cut = token_logprob(hidden, weight, targets, warp)
        cut_gradients = torch.autograd.grad(cut[1].sum(), (hidden, weight))
        torch.set_num_threads(threads)
        for one, other in zip(cut, whole, strict=True):
            assert torch.equal(bits(one), bits(other))
        for one, other in zip(cut_gradients, gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_never_more_logits_alive_than_the_bound(monkeypatch):
    shapes = []
    linear = kernels.linear_float32
    monkeypatch.setattr(kernels, "linear_float32", lambda x, w: shapes.append((len(x), len(w))) or linear(x, w))
    monkeypatch.setattr(kernels, "LOGITS_BYTES", 10 * 64 * 4)
    hidden, weight = head(25, 64)
    token_logprob(hidden.requires_grad_(), weight, torch.arange(25), LogitsProcessing())[0].sum().backward()
    assert shapes == [(10, 64), (10, 64), (5, 64)] * 2


def test_stock_twin_has_other_bits():
    hidden, weight = head(128, 1000)
    targets = torch.arange(128)
    ours = token_logprob(hidden, weight, targets, LogitsProcessing())
    twin = stock.token_logprob(hidden, weight, targets, LogitsProcessing())
    torch.testing.assert_close(ours, twin, atol=1e-5, rtol=1e-5)
    assert not torch.equal(bits(ours[0]), bits(twin[0]))
    assert not torch.equal(bits(ours[1]), bits(twin[1]))


GRADIENT_CASES = {
    "plain": (1.0, 0, 1.0, 0.0, ()),
    "temperature": (0.6, 0, 1.0, 0.0, ()),
    "top_k": (1.0, 9, 1.0, 0.0, ()),
    "top_p": (1.0, 0, 0.9, 0.0, ()),
    "min_p": (1.0, 0, 1.0, 0.04, ()),
    "bans": (1.0, 0, 1.0, 0.0, (0, 3)),
    "everything": (1.4, 12, 0.9, 0.02, (0, 3)),
    "greedy": (0.0, 2, 0.5, 0.5, (0, 3)),
}


@pytest.mark.parametrize("case", GRADIENT_CASES)
@pytest.mark.parametrize("output", ["logprob", "entropy", "both"])
def test_gradients_are_those_of_the_oracle(case, output):
    hidden, weight = head(6, 40)
    weight[20] += 1  # unties it: where a cut separates equal tokens there is no derivative
    warp, targets = warp_of([GRADIENT_CASES[case]] * 6), (hidden @ weight[4:].T).argmax(-1) + 4
    generator = torch.Generator().manual_seed(3)
    by_logprob, by_entropy = torch.randn(2, 6, generator=generator) * torch.tensor(
        {"logprob": [[1.0], [0.0]], "entropy": [[0.0], [1.0]], "both": [[1.0], [1.0]]}[output]
    )

    def loss(implementation, hidden, weight):
        logprobs, entropy = implementation.token_logprob(hidden, weight, targets, warp)
        terms = {"logprob": logprobs @ by_logprob.to(logprobs), "entropy": entropy @ by_entropy.to(entropy)}
        return sum(terms.values()) if output == "both" else terms[output]

    ours = [x.clone().requires_grad_() for x in (hidden, weight)]
    loss(logprob, *ours).backward()
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    loss(reference, *exact).backward()
    for mine, theirs in zip(ours, exact, strict=True):
        assert theirs.grad.abs().max() > 0.01
        torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=2e-5, rtol=2e-5)

    # finite differences of the oracle in float64, along a random direction of each input
    for i in range(2):
        direction = torch.randn(exact[i].shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            ahead, behind = (
                loss(reference, *(x + s * direction if j == i else x for j, x in enumerate(exact)))
                for s in (1e-6, -1e-6)
            )
        slope = (ahead - behind) / 2e-6
        torch.testing.assert_close((ours[i].grad.double() * direction).sum(), slope, atol=2e-4, rtol=2e-4)


def test_an_impossible_target_sends_no_gradient():
    hidden, weight = (x.requires_grad_() for x in head(3, 40))
    targets = (hidden @ weight.T).argmin(-1)
    settings = [(1.0, 3, 1.0, 0.0, ()), (1.0, 0, 0.5, 0.0, ()), (1.0, 0, 1.0, 0.0, (int(targets[2]),))]
    logprobs, _ = token_logprob(hidden, weight, targets, warp_of(settings))
    assert logprobs.tolist() == [-torch.inf] * 3
    logprobs.sum().backward()
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_low_precision_logits_are_not_rounded():
    hidden, weight = (x.half() for x in head(40, 200, width=64))
    targets = torch.arange(40)
    ours = token_logprob(hidden, weight, targets, mixed(40))
    wide = token_logprob(hidden.float(), weight.float(), targets, mixed(40))
    for one, other in zip(ours, wide, strict=True):
        assert torch.equal(bits(one), bits(other))
    assert torch.equal(bits(logprob.logits(hidden, weight)), bits(logprob.logits(hidden.float(), weight.float())))


def test_low_precision_gradients_are_rounded_once():
    low = [x.half().requires_grad_() for x in head(40, 200, width=64)]
    wide = [x.detach().float().requires_grad_() for x in low]
    for inputs in (low, wide):
        sum(out.sum() for out in token_logprob(*inputs, torch.arange(40), LogitsProcessing())).backward()
    for one, other in zip(low, wide, strict=True):
        assert one.grad.dtype == torch.float16
        assert torch.equal(one.grad, other.grad.half())


def test_logarithm_is_the_nearest_float32():
    x = np.concatenate([np.geomspace(1e-38, 3e38, 3001), 1 + np.linspace(-1e-3, 1e-3, 1001)]).astype(np.float32)
    ours = np.array([log(value) for value in x], dtype=np.float32)
    exact = np.log(x.astype(np.longdouble)).astype(np.float32)
    assert (ours == exact).mean() > 0.999
    np.testing.assert_array_max_ulp(ours, exact, 1)


@pytest.mark.parametrize("warp", [mixed(73), LogitsProcessing()], ids=["mixed", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_pass_scores_raw_and_draws_with_the_samplers_bits(warp, dtype):
    hidden, weight = (x.to(dtype).requires_grad_() for x in head(73, 1000))
    seeds, positions = torch.arange(73) * 7 - 7, torch.arange(73) + 3  # the first seed is none
    drawn, sampled, raw = logprob.sample(logprob.logits(hidden, weight), warp, seeds.clamp(min=0), positions)
    found = logprob.token_redraw(hidden, weight, drawn, warp, seeds, positions)
    assert found[3].tolist() == [-1, *drawn.tolist()[1:]]
    assert torch.equal(bits(found[0]), bits(sampled))
    assert torch.equal(bits(found[2]), bits(raw))
    entropy = token_logprob(hidden, weight, drawn, warp)[1]
    assert torch.equal(bits(found[1]), bits(entropy))
    assert [each.requires_grad for each in found] == [True, True, False, False]
    gradients = torch.autograd.grad(found[0].sum() + found[1].sum(), (hidden, weight))
    again = token_logprob(hidden, weight, drawn, warp)
    expected = torch.autograd.grad(again[0].sum() + again[1].sum(), (hidden, weight))
    assert all(torch.equal(bits(a.float()), bits(b.float())) for a, b in zip(gradients, expected, strict=True))
    assert (logprob.token_redraw(hidden, weight, drawn, warp, None, positions)[3] == -1).all()


@pytest.mark.slow
def test_is_an_opaque_operation():
    hidden, weight = head(6, 40)
    targets = torch.arange(6)
    args = (hidden.requires_grad_(), weight.requires_grad_(), targets, *logprob.dense(mixed(6), 40, targets))
    scored = torch.ops.rlloop.token_logprob.default
    torch.library.opcheck(scored, (*args, None, None, False, *[None] * 4))
    torch.library.opcheck(scored, (*args, torch.arange(6), torch.arange(6), True, *[None] * 4))
