"""Each loss against its equation, worked by hand, and against finite differences."""

import math
from dataclasses import replace

import pytest
import torch

from rlloop.algorithms import (
    cispo,
    dapo,
    dr_grpo,
    dro,
    get_loss,
    grpo,
    gspo,
    importance_sampling,
    kl_estimate,
    ppo,
    reinforce,
    reinforce_pp,
    rloo,
    sft,
)
from rlloop.errors import ConfigError
from tests.support.loss_batches import POLICY_LOSSES, gradient, make_batch, random_batch

# Two completions: of 2 tokens with advantage 1, of 3 tokens with advantage −2. Ratios to old and rollout:
RATIOS = [[1.5, 0.5], [1.5, 0.5, 1.0]]
OLD = [[-1.0, -2.0], [-3.0, -1.0, -0.5]]
LOGPROBS = [[o + math.log(r) for o, r in zip(*rows, strict=True)] for rows in zip(OLD, RATIOS, strict=True)]
ADVANTAGES = [[1.0, 1.0], [-2.0, -2.0, -2.0]]


@pytest.fixture
def batch():
    return make_batch(LOGPROBS, old=OLD, rollout=OLD, advantages=ADVANTAGES)


def value(output):
    return output.loss.item()


def test_grpo(batch):
    # clip(1.5) is 1.2 and clip(0.5) is 0.8; A > 0 takes the smaller, A = −2 the more negative product.
    first = (1.2 + 0.5) / 2
    second = (-2 * 1.5 + -2 * 0.8 + -2 * 1.0) / 3
    assert value(grpo(batch)) == pytest.approx(-(first + second) / 2)


def test_dr_grpo(batch):
    total = (1.2 + 0.5) + (-3.0 - 1.6 - 2.0)
    assert value(dr_grpo(batch)) == pytest.approx(-total / 2)
    assert value(dr_grpo(batch, max_tokens=10)) == pytest.approx(-total / (2 * 10))


def test_dapo(batch):
    assert value(dapo(batch)) == pytest.approx(-((1.28 + 0.5) + (-3.0 - 1.6 - 2.0)) / 5)


@pytest.mark.parametrize("loss", [dapo, ppo])
def test_dual_clip_bounds_what_a_bad_likely_token_can_do(batch, loss):
    output = loss(batch, clip_high=0.28, dual_clip=1.4)
    assert value(output) == pytest.approx(-((1.28 + 0.5) + (-2 * 1.4 - 1.6 - 2.0)) / 5)
    assert output.metrics["loss/clip_dual"].value == 1 / 5
    assert gradient(batch, lambda b: loss(b, dual_clip=1.4))[2] == 0
    assert gradient(batch, loss)[2] != 0


@pytest.mark.parametrize(("advantage", "bounded"), [(0.0, 0.0), (0.5, 0.5 * 1.2), (2.0, 2.0 * 1.2)])
def test_dual_clip_leaves_tokens_that_are_not_bad(advantage, bounded):
    output = dapo(make_batch([[-0.1]], old=[[-2.0]], advantages=[[advantage]]), clip_high=0.2, dual_clip=3.0)
    assert value(output) == pytest.approx(-bounded)
    assert output.metrics["loss/clip_dual"].value == 0
    assert output.metrics["loss/tokens_discarded"].value == (advantage > 0)


@pytest.mark.parametrize("loss", [grpo, dr_grpo, dapo, ppo, reinforce_pp])
def test_each_side_is_clipped_at_its_own_bound(loss):
    ratios, advantages = [[1.35, 0.65], [1.35, 0.65]], [[1.0, 1.0], [-1.0, -1.0]]
    old = [[-1.0, -1.0], [-1.0, -1.0]]
    logprobs = [[o + math.log(r) for o, r in zip(*rows, strict=True)] for rows in zip(old, ratios, strict=True)]
    batch = make_batch(logprobs, old=old, rollout=old, advantages=advantages)
    kept = gradient(batch, lambda b: loss(b, clip_low=0.4, clip_high=0.4)) != 0
    assert kept.tolist() == [True, True, True, True]
    only_high = gradient(batch, lambda b: loss(b, clip_low=0.4, clip_high=0.3)) != 0
    assert only_high.tolist() == [False, True, True, True]
    only_low = gradient(batch, lambda b: loss(b, clip_low=0.3, clip_high=0.4)) != 0
    assert only_low.tolist() == [True, True, True, False]
    bounded = value(loss(batch, clip_low=0.3, clip_high=0.4)) - value(loss(batch, clip_low=0.4, clip_high=0.4))
    denominator = 2 if loss is dr_grpo else 4  # sequences of two tokens each: a mean of means is the mean over tokens
    assert bounded == pytest.approx((0.7 - 0.65) / denominator)


@pytest.mark.parametrize("loss", [ppo, reinforce_pp])
def test_ppo_and_reinforce_pp(batch, loss):
    assert value(loss(batch)) == pytest.approx(-((1.2 + 0.5) + (-3.0 - 1.6 - 2.0)) / 5)


def test_gspo(batch):
    first, second = math.sqrt(1.5 * 0.5), (1.5 * 0.5 * 1.0) ** (1 / 3)
    assert value(gspo(batch, clip_low=0.05, clip_high=0.05)) == pytest.approx(-(first - 2 * max(second, 0.95)) / 2)
    assert value(gspo(batch, clip_low=0.2, clip_high=0.2)) == pytest.approx(-(first - 2 * second) / 2)


def test_gspo_clips_whole_sequences(batch):
    metrics = gspo(batch).metrics  # sequence ratios 0.866 (A > 0: kept) and 0.909 (A < 0, below 1 − 3e-4: clipped)
    assert metrics["loss/clip_high"].value == 0
    assert metrics["loss/clip_low"].value == 3 / 5
    assert metrics["loss/tokens_discarded"].value == 3 / 5
    assert gradient(batch, gspo).tolist()[2:] == [0, 0, 0]


def test_cispo(batch):
    output = cispo(batch, clip_low=0.2, clip_high=0.28)
    weights = [[1.28, 0.8], [1.28, 0.8, 1.0]]
    total = sum(w * logprob for w, logprob in zip(weights[0], LOGPROBS[0], strict=True))
    total += sum(-2 * w * logprob for w, logprob in zip(weights[1], LOGPROBS[1], strict=True))
    assert value(output) == pytest.approx(-total / 5)
    assert gradient(batch, lambda b: cispo(b, clip_low=0.2, clip_high=0.28)).tolist() == pytest.approx(
        [-1.28 / 5, -0.8 / 5, 2 * 1.28 / 5, 2 * 0.8 / 5, 2 * 1.0 / 5]
    )
    assert output.metrics["loss/clip_high"].value == 2 / 5
    assert output.metrics["loss/clip_low"].value == 2 / 5
    assert output.metrics["loss/tokens_discarded"].value == 0, "a bounded weight still teaches"


def test_cispo_has_no_lower_bound_by_default(batch):
    assert cispo(batch).metrics["loss/clip_low"].value == 0
    assert gradient(batch, cispo)[1].item() == pytest.approx(-0.5 / 5)


def test_dro(batch):
    drift = [[math.log(r) for r in row] for row in RATIOS]
    policy = [sum(LOGPROBS[0]), -2 * sum(LOGPROBS[1])]
    by_sequence = sum(policy) - 0.3 / 2 * (sum(drift[0]) ** 2 + sum(drift[1]) ** 2)
    assert value(dro(batch, beta=0.3)) == pytest.approx(-by_sequence / 2)
    by_token = sum(policy) - 0.3 / 2 * sum(d * d for row in drift for d in row)
    assert value(dro(batch, beta=0.3, level="token")) == pytest.approx(-by_token / 5)


@pytest.mark.parametrize("loss", [reinforce, rloo])
def test_reinforce_and_rloo(batch, loss):
    assert value(loss(batch)) == pytest.approx(-(sum(LOGPROBS[0]) - 2 * sum(LOGPROBS[1])) / 2)
    assert gradient(batch, loss).tolist() == [-0.5, -0.5, 1.0, 1.0, 1.0]


def test_importance_sampling_divides_by_the_rollout_not_by_old(batch):
    elsewhere = replace(batch, old_logprobs=batch.old_logprobs - 7)
    assert value(importance_sampling(elsewhere)) == pytest.approx(-((1.5 + 0.5) - 2 * (1.5 + 0.5 + 1.0)) / 5)


def test_sft(batch):
    assert value(sft(batch)) == pytest.approx(-(sum(LOGPROBS[0]) + sum(LOGPROBS[1])) / 5)


def test_clip_fractions_are_by_the_sign_of_the_advantage(batch):
    metrics = grpo(batch).metrics
    # Of five tokens, 1.5 with A > 0 is clipped above and 0.5 with A < 0 below; the other 1.5 and 0.5 are not.
    assert (metrics["loss/clip_high"].total, metrics["loss/clip_high"].count) == (1, 5)
    assert (metrics["loss/clip_low"].total, metrics["loss/clip_low"].count) == (1, 5)
    assert metrics["loss/tokens_discarded"].value == 2 / 5
    assert (gradient(batch, grpo) == 0).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("loss", [grpo, dr_grpo, dapo, ppo, reinforce_pp, gspo, cispo])
def test_a_ratio_at_a_bound_is_not_clipped(loss):
    batch = make_batch([[-1.0], [-2.0]], advantages=[[1.0], [-1.0]])
    metrics = loss(batch, clip_low=0.0, clip_high=0.0).metrics
    assert metrics["loss/clip_high"].value == metrics["loss/clip_low"].value == 0
    if loss in (dapo, ppo):
        assert loss(batch, dual_clip=1.0).metrics["loss/clip_dual"].value == 0


def test_a_zero_advantage_is_not_clipping():
    batch = make_batch([[-0.1, -3.0]], old=[[-1.0, -1.0]], advantages=[[0.0, 0.0]])
    metrics = grpo(batch).metrics
    assert metrics["loss/clip_high"].value == metrics["loss/clip_low"].value == 0
    assert metrics["loss/tokens_discarded"].value == 0


def test_policy_metric_is_the_loss_without_penalties(batch):
    batch = replace(batch, ref_logprobs=batch.old_logprobs - 0.3)
    for name in ["grpo", "dr_grpo", "dapo", "gspo", "reinforce"]:
        args = {"max_tokens": 10} if name == "dr_grpo" else {}
        bare = get_loss(name, **args)(batch)
        penalised = get_loss(name, **args, kl_coef=0.1, entropy_coef=0.2)(batch)
        assert bare.metrics["loss/policy"].value == pytest.approx(value(bare))
        assert penalised.metrics["loss/policy"] == bare.metrics["loss/policy"]
        assert value(penalised) != pytest.approx(value(bare))


def test_penalties_by_hand():
    batch = make_batch(
        [[-1.0, -2.0], [-3.0]],
        ref=[[-1.5, -2.0], [-2.0]],
        entropy=[[0.5, 1.0], [2.0]],
        advantages=[[0.0, 0.0], [0.0]],
    )
    k3 = [math.exp(-0.5) - 1 + 0.5, 0.0, math.exp(1.0) - 1 - 1.0]
    output = dapo(batch, kl_coef=0.1, entropy_coef=0.01)
    assert value(output) == pytest.approx(0.1 * sum(k3) / 3 - 0.01 * 3.5 / 3)
    assert output.metrics["loss/kl_ref"].value == pytest.approx(sum(k3) / 3)
    assert output.metrics["loss/entropy"].value == pytest.approx(3.5 / 3)
    by_sequence = grpo(batch, kl_coef=0.1, entropy_coef=0.01)
    assert value(by_sequence) == pytest.approx(0.1 * ((k3[0] + k3[1]) / 2 + k3[2]) / 2 - 0.01 * (1.5 / 2 + 2.0) / 2), (
        "penalties share the loss's own denominator"
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_the_penalty_is_of_the_kind_that_was_asked_for(name, kl):
    batch = random_batch(seed=5)
    asked, bare = (get_loss(name, kl_coef=coef, kl=kl)(batch) for coef in (0.5, 0.0))
    tokens = kl_estimate(batch.logprobs, batch.ref_logprobs, kl)[batch.mask]
    assert asked.metrics["loss/kl_ref"].value == pytest.approx(tokens.mean().item())
    if name in ("dapo", "ppo", "reinforce_pp", "cispo", "importance_sampling"):  # means over tokens
        assert value(asked) - value(bare) == pytest.approx(0.5 * tokens.mean().item())


def test_on_policy_ratio_is_exactly_one():
    batch = make_batch([[-1.1, -2.3], [-0.7]], advantages=[[1.5, 1.5], [-0.5]], dtype=torch.float32)
    expected = torch.tensor([-1.5 / 3, -1.5 / 3, 0.5 / 3], dtype=torch.float64).float()
    for loss in (ppo, dapo, reinforce_pp, cispo, importance_sampling):
        assert torch.equal(gradient(batch, loss), expected), loss.__name__


def test_metrics_that_do_not_apply_are_absent(batch):
    assert "loss/kl_ref" not in grpo(batch).metrics
    assert "loss/clip_high" not in reinforce(batch).metrics
    assert "loss/clip_dual" not in dapo(batch).metrics


def test_a_kl_coefficient_without_a_reference_is_refused(batch):
    with pytest.raises(ConfigError, match="no reference logprobs"):
        grpo(batch, kl_coef=0.1)


# cispo stops the gradient of its weight, so its value has another derivative; its gradient is worked out above.
@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "cispo"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_gradient_by_finite_differences(name, kl):
    batch = random_batch(seed=3)
    loss = get_loss(name, kl_coef=0.3, kl=kl, entropy_coef=0.07)
    for field in ("logprobs", "entropy"):
        at = getattr(batch, field).detach()
        analytic = torch.autograd.grad(loss(batch).loss, getattr(batch, field))[0]
        numeric = torch.zeros_like(at)
        for i in range(len(at)):
            step = torch.zeros_like(at)
            step[i] = 1e-6
            up, down = (loss(replace(batch, **{field: at + sign * step})).loss for sign in (1, -1))
            numeric[i] = (up - down) / 2e-6
        assert torch.allclose(analytic, numeric, rtol=1e-6, atol=1e-9), field
        assert analytic.abs().max() > 1e-3


def test_gspo_token_advantages_reach_their_own_tokens():
    batch = make_batch([[-1.0, -2.0]], advantages=[[1.0, 3.0]])
    assert gradient(batch, gspo).tolist() == pytest.approx([-1.0 / 2, -3.0 / 2])
