"""Invariance of losses to the division of a step into micro-batches, to packing, and to values at masked tokens.

Each defect that other frameworks were found to have has its test here.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlloop.algorithms import corrected, dapo, get_correction, get_loss, grpo, gspo, measured
from rlloop.algorithms.batch import Counts
from rlloop.algorithms.losses import LOSSES
from rlloop.metrics import Max, Min, merge, values
from tests.support.loss_batches import POLICY_LOSSES, WHOLE_STEP, gradient, make_batch, random_batch, take

PENALISED = {"kl_coef": 0.3, "entropy_coef": 0.05}


CORRECTION = get_correction({"tis": {"level": "sequence"}, "mask": {"level": "token", "low": 0.7, "high": 1.5}})
EVERY_LOSS = {
    name: get_loss(name, **(PENALISED if name in POLICY_LOSSES else {})) for name in LOSSES if name not in WHOLE_STEP
}
EVERY_LOSS["gspo corrected"] = measured(corrected(EVERY_LOSS["gspo"], CORRECTION))
every_loss = pytest.mark.parametrize("loss", EVERY_LOSS.values(), ids=EVERY_LOSS.keys())


@every_loss
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), assignment=st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_micro_batches_add_up_to_the_step(loss, seed, assignment):
    """Any distribution of whole sequences over micro-batches: same loss, same metrics, the same bits of gradient."""
    step = random_batch(seed, dtype=torch.float32)
    whole = loss(step)
    expected = gradient(step, loss)
    parts, found = [], torch.zeros_like(expected)
    of_token = torch.tensor(assignment)[step.sequence]
    for number in range(3):
        index = (of_token == number).nonzero().flatten()
        part = take(step, index)
        parts.append(loss(part))
        found[index] = gradient(part, loss)
    assert torch.equal(found, expected)
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), abs=1e-12)
    merged, once = values(merge([part.metrics for part in parts])), values(whole.metrics)
    assert merged.keys() == once.keys()
    for name in once:
        assert merged[name] == (once[name] if isinstance(once[name], dict) else pytest.approx(once[name], abs=1e-12))


@every_loss
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_packing_order_does_not_matter(loss, seed, data):
    """Sequences in another order, their tokens interleaved: the loss and each token's gradient stay."""
    step = random_batch(seed)
    order = torch.tensor(data.draw(st.permutations(range(len(step.sequence)))))
    packed = take(step, order)
    assert loss(packed).loss.item() == pytest.approx(loss(step).loss.item(), abs=1e-12)
    assert torch.allclose(gradient(packed, loss), gradient(step, loss)[order], rtol=1e-12, atol=1e-15)


def test_a_sequence_adds_up_to_the_same_bits_among_any_neighbours():
    step = random_batch(lengths=(300, 200, 500)).unmasked()  # long enough for a sort to swap equals, were it free to
    sums = step.sequence_sum(step.logprobs)
    for number in range(3):
        alone = take(step, (step.sequence == number).nonzero().flatten())
        assert torch.equal(alone.sequence_sum(alone.logprobs), sums[number : number + 1])


@every_loss
def test_masked_tokens_are_inert(loss):
    """Neither their numbers nor their infinities reach the loss, a gradient or a metric."""
    step = random_batch(seed=1)
    step = replace(step, weights=torch.linspace(0.5, 1.5, len(step.mask), dtype=torch.float64))
    bare = take(step, step.mask.nonzero().flatten())
    poison = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e30])
    spoiled = {}
    for name in ("logprobs", "entropy", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "weights"):
        tensor = getattr(step, name).detach().clone()
        tensor[~step.mask] = poison.repeat(len(tensor))[: int((~step.mask).sum())].double()
        spoiled[name] = tensor
    batch = replace(step, **spoiled)
    batch.logprobs.requires_grad_()
    batch.entropy.requires_grad_()
    assert loss(batch).loss.item() == loss(bare).loss.item()
    assert loss(batch).metrics == loss(bare).metrics
    assert torch.equal(gradient(batch, loss)[step.mask], gradient(bare, loss))
    assert not gradient(batch, loss)[~step.mask].any()


@every_loss
def test_a_micro_batch_without_tokens_adds_nothing(loss):
    step = random_batch(seed=2)
    empty = replace(step, mask=torch.zeros_like(step.mask))
    output = loss(empty)
    assert output.loss.item() == 0
    assert output.metrics == {}
    assert not gradient(empty, loss).any()


def with_counts(batch):
    """As the trainer makes it, with a last sequence that has no token."""
    tokens = torch.bincount(batch.sequence[batch.mask], minlength=int(batch.sequence.max()) + 2).tolist()
    return replace(batch, known=Counts(tokens, batch.mask, batch.sequence))


@every_loss
@pytest.mark.parametrize("masked", [0, 1, 6])
def test_counts_that_the_host_knows_change_nothing(loss, masked):
    batch = random_batch(3)
    mask = torch.arange(len(batch.mask)) >= masked
    batch = replace(batch, mask=mask, total_tokens=int(mask.sum()), total_sequences=len(batch.sequence[mask].unique()))
    known = with_counts(batch)
    assert known.unmasked().counts is not None
    assert torch.equal(known.sequence_lengths, batch.sequence_lengths)
    assert torch.equal(gradient(known, loss), gradient(batch, loss))
    assert values(loss(known).metrics) == values(loss(batch).metrics)


@every_loss
def test_a_loss_may_mask_tokens_that_the_trainer_counted(loss):
    batch = random_batch(4)
    batch = with_counts(replace(batch, mask=torch.ones_like(batch.mask)))
    fewer = replace(batch, mask=torch.arange(len(batch.mask)) % 3 > 0)
    assert torch.equal(gradient(fewer, loss), gradient(replace(fewer, known=None), loss))
    assert gradient(fewer, loss)[::3].count_nonzero() == 0


def test_defect_a_sequence_mean_that_counts_masked_tokens():
    batch = make_batch(
        [[-1.0, -1.0, -1.0, -1.0], [-1.0]],
        advantages=[[1.0, 1.0, 1.0, 1.0], [3.0]],
        mask=[[True, False, False, False], [True]],
    )
    assert grpo(batch).loss.item() == pytest.approx(-(1.0 + 3.0) / 2)  # not −(1/4 + 3)/2
    assert gspo(batch).loss.item() == pytest.approx(-(1.0 + 3.0) / 2)


def test_defect_a_sequence_ratio_that_counts_masked_tokens():
    batch = make_batch([[-1.0, -9.0]], old=[[-1.5, -1.0]], advantages=[[1.0, 1.0]], mask=[[True, False]])
    assert gspo(batch, clip_high=9.0).loss.item() == pytest.approx(-(2.718281828459045**0.5))


def test_defect_a_clip_fraction_that_counts_masked_tokens():
    batch = make_batch(
        [[-0.1, -1.0, -0.1, -0.1]],
        old=[[-1.0, -1.0, -1.0, -1.0]],
        advantages=[[1.0, 1.0, 1.0, 1.0]],
        mask=[[True, True, False, False]],
    )
    metrics = dapo(batch).metrics
    assert (metrics["loss/clip_high"].total, metrics["loss/clip_high"].count) == (1, 2)
    assert (metrics["loss/tokens_discarded"].total, metrics["loss/tokens_discarded"].count) == (1, 2)


def test_defect_a_mean_of_means():
    """One token in the first micro-batch, three in the second: the fraction is 1/4, their means' mean 1/2."""
    step = make_batch([[-0.1], [-1.0, -1.0, -1.0]], old=[[-1.0], [-1.0] * 3], advantages=[[1.0], [1.0] * 3])
    parts = [dapo(take(step, torch.tensor(index))).metrics for index in ([0], [1, 2, 3])]
    assert values(merge(parts))["loss/clip_high"] == 1 / 4


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_defect_penalties_off_at_zero_advantage(name):
    """A group without signal still pays for leaving the reference, and its tokens still earn their entropy."""
    batch = random_batch(seed=4)
    batch = replace(batch, advantages=torch.zeros_like(batch.advantages), rollout_logprobs=batch.logprobs.detach())
    output = get_loss(name, **PENALISED)(batch)
    by_logprob, by_entropy = torch.autograd.grad(output.loss, [batch.logprobs, batch.entropy])
    assert (by_logprob[batch.mask] != 0).all()
    assert (by_entropy[batch.mask] < 0).all()


def test_defect_penalties_off_where_clipped_or_dropped():
    batch = make_batch([[-0.1, -1.0]], old=[[-2.0, -1.0]], ref=[[-3.0, -3.0]], advantages=[[1.0, 1.0]])
    batch = replace(batch, weights=torch.tensor([1.0, 0.0]))
    assert gradient(batch, grpo).tolist() == [0, 0]
    assert (gradient(batch, lambda b: grpo(b, kl_coef=0.1)) > 0).all()
    assert grpo(batch).metrics["loss/tokens_discarded"].value == 1


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_defect_normalising_twice(name):
    """A loss takes advantages as they are: without penalties it is linear in their size."""
    loss = get_loss(name, beta=0.0) if name == "dro" else get_loss(name)
    batch = random_batch(seed=5)
    twice = replace(batch, advantages=2 * batch.advantages)
    assert loss(twice).loss.item() == pytest.approx(2 * loss(batch).loss.item(), rel=1e-12)
    assert torch.allclose(gradient(twice, loss), 2 * gradient(batch, loss), rtol=1e-12)


def test_metrics_merge_by_their_own_rule():
    assert values(merge([{"a": Max(1.0), "b": Min(1.0)}, {"a": Max(3.0), "b": Min(-1.0)}])) == {"a": 3.0, "b": -1.0}
