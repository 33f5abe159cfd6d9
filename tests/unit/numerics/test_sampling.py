"""`sample`: draws what the oracle draws, with the very logprobs that the trainer computes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlloop.numerics import reference, stock
from rlloop.numerics.layout import LogitsProcessing
from rlloop.numerics.operators import distribution as logprob
from rlloop.numerics.operators.distribution import sample, token_logprob
from rlloop.numerics.ops import ops_for
from rlloop.numerics.profile import IMPLEMENTATIONS, NumericsProfile
from tests.support.sampling_cases import COMBINATIONS, bits, head, mixed, warp_of

VOCABULARIES = [17, 64, 1000, 4099, 32000]


def names(rows, seed=11):
    """Seeds and positions of that many draws."""
    return torch.full((rows,), seed), torch.arange(rows)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_logprobs_are_the_trainers_bits(vocabulary):
    rows = 128 if vocabulary < 5000 else 40
    hidden, weight = head(rows, vocabulary)
    warp = mixed(rows)
    ids, logprobs, raw = sample(logprob.logits(hidden, weight), warp, *names(rows))
    assert torch.equal(bits(logprobs), bits(token_logprob(hidden, weight, ids, warp)[0]))
    assert torch.equal(bits(raw), bits(token_logprob(hidden, weight, ids, LogitsProcessing())[0]))


@pytest.mark.parametrize("setting", COMBINATIONS)
def test_each_combination_alone_and_among_128_is_the_trainers_bits(setting):
    hidden, weight = head(128, 300)
    everyone = [COMBINATIONS[t * 29 % len(COMBINATIONS)] for t in range(128)]
    everyone[77] = setting
    warp, (seeds, positions) = warp_of(everyone), names(128)
    among = sample(logprob.logits(hidden, weight), warp, seeds, positions)

    row = slice(77, 78)
    alone = sample(logprob.logits(hidden[row], weight), warp_of([setting]), seeds[row], positions[row])
    assert alone[0].item() == among[0][77].item()
    assert torch.equal(bits(alone[1]), bits(among[1][row]))
    assert torch.equal(bits(alone[2]), bits(among[2][row]))
    trained = token_logprob(hidden, weight, among[0], warp)[0]
    assert torch.equal(bits(trained[row]), bits(alone[1]))


def test_stock_twin_is_not_the_trainers_bits():
    hidden, weight = head(128, 1000)
    ids, logprobs, _ = sample(logprob.logits(hidden, weight), mixed(128), *names(128))
    twin = stock.token_logprob(hidden, weight, ids, mixed(128))[0]
    torch.testing.assert_close(logprobs, twin, atol=1e-5, rtol=1e-5)
    assert not torch.equal(bits(logprobs), bits(twin))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_draws_what_the_oracle_draws(vocabulary):
    rows = {17: 150, 64: 73, 1000: 20}.get(vocabulary, 8)
    hidden, weight = head(rows, vocabulary)
    logits = logprob.logits(hidden, weight)
    ours = sample(logits, mixed(rows), *names(rows))
    theirs = reference.sample(logits.double(), mixed(rows), *names(rows))
    assert torch.equal(ours[0], theirs[0])
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-6, rtol=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([-0.0, 0.0, 0.5, 1.0, -3.0, 2.25]), min_size=1, max_size=40),
    st.sampled_from(COMBINATIONS),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**40),
)
def test_any_row_is_drawn_as_the_oracle_draws_it(values, setting, seed, position):
    setting = (*setting[:4], [token for token in setting[4] if token < len(values) - 1])
    logits, seeds, positions = torch.tensor([values]), torch.tensor([seed]), torch.tensor([position])
    ours, theirs = (f(logits, warp_of([setting]), seeds, positions) for f in (sample, reference.sample))
    assert ours[0].item() == theirs[0].item()
    torch.testing.assert_close(ours[1:], theirs[1:], atol=4e-6, rtol=2e-6)


@pytest.mark.parametrize("setting", [(1.0, 0, 1.0, 0.0, ()), (0.7, 9, 0.9, 0.03, (4,)), (2.0, 0, 1.0, 0.0, (0, 16))])
@pytest.mark.parametrize("vocabulary", [17, 1500])
def test_tokens_come_as_often_as_their_probability_says(setting, vocabulary):
    draws = 20_000
    row = head(1, vocabulary, seed=4)
    logits = (row[0] @ row[1].T / 2).expand(draws, vocabulary)
    ids, _, _ = sample(logits, warp_of([setting] * draws), *names(draws))
    z, _ = reference.processed_row(logits[0], warp_of([setting]), 0)
    p, order = torch.softmax(z.double(), -1).sort(descending=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(vocabulary))
    assert p[place[ids]].min() > 0
    cell = ((p.cumsum(0) - p) * 16).long().clamp(max=15)  # tokens of like probability, in cells of about 1/16
    counts = torch.zeros(16, dtype=torch.float64).index_add(0, cell[place[ids]], torch.ones(draws).double())
    expected = torch.zeros(16, dtype=torch.float64).index_add(0, cell, p) * draws
    filled = expected > 0
    chi_square = ((counts - expected)[filled] ** 2 / expected[filled]).sum()
    assert chi_square < 40  # at most 15 degrees of freedom, 0.05% tail


def test_positions_and_seeds_draw_apart():
    logits = torch.zeros(3, 32000)
    ids, _, _ = sample(logits, LogitsProcessing(), torch.tensor([1, 1, 2]), torch.tensor([0, 1, 0]))
    assert len(set(ids.tolist())) == 3
    again, _, _ = sample(logits[:1], LogitsProcessing(), torch.tensor([1]), torch.tensor([1]))
    assert again.item() == ids[1].item()


def test_threads_change_nothing():
    hidden, weight = head(100, 1000)
    logits, before = logprob.logits(hidden, weight), torch.get_num_threads()
    torch.set_num_threads(3)
    many = sample(logits, mixed(100), *names(100))
    torch.set_num_threads(1)
    one = sample(logits, mixed(100), *names(100))
    torch.set_num_threads(before)
    assert torch.equal(many[0], one[0])
    assert torch.equal(bits(torch.stack(many[1:])), bits(torch.stack(one[1:])))


def test_temperature_zero_takes_the_lowest_of_the_largest_and_its_raw_logprob():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [-0.0, 0.0, -0.0, -1.0], [0.0, 1.0, 1.0, -1.0]])
    ids, logprobs, raw = sample(logits, warp_of([(0.0, 2, 0.5, 0.9, ())] * 3), *names(3))
    assert ids.tolist() == [1, 0, 1]
    assert torch.equal(bits(logprobs), bits(raw))
    torch.testing.assert_close(raw, logits.log_softmax(-1)[range(3), ids])


@pytest.mark.parametrize("implementation", [logprob, reference, stock])
def test_temperature_zero_never_takes_a_banned_token(implementation):
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0]])
    ids, logprobs, raw = implementation.sample(logits, warp_of([(0.0, 0, 1.0, 0.0, (1,))]), *names(1))
    assert ids.tolist() == [2]
    assert logprobs.tolist() == raw.tolist() == pytest.approx([logits.log_softmax(-1)[0, 2].item()])


def test_top_k_of_one_is_certain():
    hidden, weight = head(30, 500)
    logits = logprob.logits(hidden, weight)
    ids, logprobs, raw = sample(logits, LogitsProcessing(top_k=torch.ones(30, dtype=torch.int64)), *names(30))
    assert torch.equal(ids, logits.argmax(-1))
    assert (logprobs == 0).all()
    assert (raw < 0).all()


@pytest.mark.parametrize(
    ("row", "setting", "says"),
    [
        ([0.0, torch.nan, 1.0], (1.0, 0, 1.0, 0.0, ()), "1 of its logits are NaN"),
        ([0.0, torch.inf, 1.0], (1.0, 0, 1.0, 0.0, ()), "largest is inf"),
        ([0.0, torch.nan, 1.0], (0.0, 0, 1.0, 0.0, ()), "1 of its logits are NaN"),
        ([1.0, 2.0, 3.0], (1.0, 0, 1.0, 0.0, (0, 1, 2)), "must not be banned"),
        ([1.0, 2.0, 3.0], (0.0, 0, 1.0, 0.0, (0, 1, 2)), "must not be banned"),
        ([1.0, 2.0, 3.0], (1e-39, 0, 1.0, 0.0, ()), "divided by the temperature"),
    ],
)
def test_a_row_that_holds_no_distribution_is_named(row, setting, says):
    logits = torch.tensor([[0.0, 1.0, 2.0], row])
    with pytest.raises(ValueError, match=r"row 1 of 2 holds no distribution") as caught:
        sample(logits, warp_of([(1.0, 0, 1.0, 0.0, ()), setting]), *names(2))
    assert says in str(caught.value)


def test_no_rows():
    ids, logprobs, raw = sample(torch.zeros(0, 5), LogitsProcessing(), *names(0))
    assert len(ids) == len(logprobs) == len(raw) == 0


def test_is_an_opaque_operation():
    args = (torch.zeros(4, 40), *names(4), *logprob.dense(mixed(4), 40, torch.arange(4)))
    torch.library.opcheck(torch.ops.rlloop.sample.default, args)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_logits_of_a_profile_are_those_its_token_logprob_uses(implementation):
    ops = ops_for(NumericsProfile(token_logprob=implementation))
    hidden, weight = (x.bfloat16() for x in head(20, 50))
    ids, logprobs, _ = ops.sample(ops.logits(hidden, weight), LogitsProcessing(), *names(20))
    torch.testing.assert_close(
        logprobs, ops.token_logprob(hidden, weight, ids, LogitsProcessing())[0], atol=1e-6, rtol=1e-6
    )
