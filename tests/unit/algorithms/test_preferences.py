"""Losses of pairs and of whole sequences: by hand, and what they refuse."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlloop.algorithms import LossBatch, best_of_groups, get_loss
from rlloop.algorithms.presets import PRESETS
from rlloop.algorithms.registry import advantages_for, loss_for
from rlloop.config.algorithm import AlgorithmConfig
from rlloop.errors import ConfigError

LENGTHS = (3, 2, 4, 1)  # chosen, rejected, chosen, rejected
SIGNS = (1.0, -1.0, 1.0, -1.0)


def batch(seed: int = 0, signs: tuple[float, ...] = SIGNS) -> LossBatch:
    rng = np.random.default_rng(seed)
    count = sum(LENGTHS)
    flat = lambda: torch.tensor(rng.normal(-2.0, 1.0, count), dtype=torch.float32)  # noqa: E731
    logprobs = flat().requires_grad_()
    return LossBatch(
        logprobs=logprobs,
        entropy=torch.zeros(count),
        old_logprobs=logprobs.detach(),
        rollout_logprobs=logprobs.detach(),
        ref_logprobs=flat(),
        advantages=torch.tensor(np.repeat(signs, LENGTHS), dtype=torch.float32),
        sequence=torch.tensor(np.repeat(range(4), LENGTHS)),
        mask=torch.ones(count, dtype=torch.bool),
        total_tokens=count,
        total_sequences=4,
    )


def sums(values: torch.Tensor) -> list[float]:
    return [float(part.double().sum()) for part in values.detach().split(LENGTHS)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpo_by_hand():
    given = batch()
    assert given.ref_logprobs is not None
    ratios = [a - b for a, b in zip(sums(given.logprobs), sums(given.ref_logprobs), strict=True)]
    margins = [ratios[0] - ratios[1], ratios[2] - ratios[3]]
    out = get_loss("dpo", kl_coef=0.3)(given)
    assert out.loss.item() == pytest.approx(np.mean([-math.log(sigmoid(0.3 * h)) for h in margins]), abs=1e-9)
    assert out.metrics["loss/reward_margin"].value == pytest.approx(0.3 * np.mean(margins), abs=1e-9)
    smooth = get_loss("dpo", kl_coef=0.3, label_smoothing=0.1)(given).loss.item()
    expected = [-0.9 * math.log(sigmoid(0.3 * h)) - 0.1 * math.log(sigmoid(-0.3 * h)) for h in margins]
    assert smooth == pytest.approx(np.mean(expected), abs=1e-9)
    hinge = get_loss("dpo", kl_coef=0.3, variant="hinge")(given).loss.item()
    assert hinge == pytest.approx(np.mean([max(0, 1 - 0.3 * h) for h in margins]), abs=1e-9)
    means = [ratio / length for ratio, length in zip(ratios, LENGTHS, strict=True)]
    ipo = get_loss("dpo", kl_coef=0.3, variant="ipo")(given).loss.item()
    assert ipo == pytest.approx(
        np.mean([(means[0] - means[1] - 1 / 0.6) ** 2, (means[2] - means[3] - 1 / 0.6) ** 2]), abs=1e-9
    )


def test_dpos_gradient_makes_the_chosen_likelier():
    given = batch()
    get_loss("dpo")(given).loss.backward()
    assert given.logprobs.grad is not None
    assert (given.logprobs.grad.sign() == -given.advantages).all()


def test_kto_by_hand():
    given = batch()
    assert given.ref_logprobs is not None
    ratios = [a - b for a, b in zip(sums(given.logprobs), sums(given.ref_logprobs), strict=True)]
    z = max(0.0, float(np.mean(ratios)))
    losses = [
        2.0 * (1 - sigmoid(0.5 * (r - z))) if sign > 0 else 1 - sigmoid(0.5 * (z - r))
        for r, sign in zip(ratios, SIGNS, strict=True)
    ]
    assert get_loss("kto", kl_coef=0.5, desirable=2.0)(given).loss.item() == pytest.approx(np.mean(losses), abs=1e-9)


def test_bradley_terry_by_hand():
    given = batch()
    rewards = sums(given.logprobs)
    margins = [rewards[0] - rewards[1], rewards[2] - rewards[3]]
    out = get_loss("bradley_terry", center_coef=0.01)(given)
    centre = 0.01 * np.mean([(rewards[0] + rewards[1]) ** 2, (rewards[2] + rewards[3]) ** 2])
    assert out.loss.item() == pytest.approx(np.mean([-math.log(sigmoid(h)) for h in margins]) + centre, abs=1e-8)
    assert out.metrics["loss/reward_accuracy"].value == np.mean([h > 0 for h in margins])


def test_distillations_gradient_is_the_reverse_kls_of_each_token():
    given = batch()
    assert given.ref_logprobs is not None
    get_loss("distillation", kl_coef=2.0)(given).loss.backward()
    expected = 2.0 * (given.logprobs - given.ref_logprobs).detach() / given.total_tokens
    assert given.logprobs.grad is not None
    assert torch.allclose(given.logprobs.grad, expected, atol=1e-7)


@pytest.mark.parametrize("name", ["dpo", "bradley_terry"])
def test_pairs_that_are_none_are_refused(name):
    with pytest.raises(ConfigError, match="a chosen completion"):
        get_loss(name)(batch(signs=(1.0, 1.0, -1.0, -1.0)))


@pytest.mark.parametrize("name", ["dpo", "kto", "distillation"])
def test_without_a_reference_they_say_so(name):

    with pytest.raises(ConfigError, match="kl_coef is"):
        get_loss(name)(dataclasses.replace(batch(), ref_logprobs=None))


@pytest.mark.parametrize("name", ["dpo", "kto", "bradley_terry", "sft"])
def test_what_compares_sequences_asks_for_the_whole_step_through_what_wraps_it(name):
    preset = next(each for each in PRESETS.values() if each.loss == name)
    assert getattr(loss_for(preset), "whole_step", False) == (name != "sft")
    if name != "sft":
        with pytest.raises(ConfigError, match="compares whole sequences"):
            loss_for(AlgorithmConfig(loss=name, advantage="raw", loss_args=preset.loss_args, correction={"tis": {}}))


def test_rejection_sampling_keeps_the_best_of_groups_that_differ():
    rewards, groups = [0.0, 1.0, 1.0, 0.5, 0.5, 2.0, 1.0], [0, 0, 0, 1, 1, 2, 2]
    assert best_of_groups(rewards, groups).tolist() == [False, True, True, False, False, True, False]
    _, keep = advantages_for(PRESETS["rejection_sampling"], 8, 2)(rewards, groups, [1] * 7, None)
    assert keep == [False, True, True, False, False, True, False]


# What TRL 1.16.0 computes from the logits of `from_logits`: DPOTrainer and RewardTrainer, by their `_compute_loss`,
# with beta 0.3 and a centring coefficient of 0.01; the reward is the sum of a sequence's logprobs. SFTTrainer's is
# PyTorch's cross-entropy over the completions' tokens.
TRL = {
    "sigmoid": 0.4585959077625768,
    "ipo": 3.962535757952275,
    "hinge": 0.4768504440182426,
    "bradley_terry": 7.2631937211092445,
    "sft": 2.7752008581907575,
}


def from_logits() -> LossBatch:
    """Four sequences of two prompt tokens and `LENGTHS` completion tokens, of a vocabulary of 11."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 11, (4, 6), generator=generator)
    policy, reference = (torch.randn(4, 6, 11, generator=generator, dtype=torch.float64) for _ in range(2))

    def flat(logits: torch.Tensor) -> torch.Tensor:
        scored = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        return torch.cat([scored[row, 1 : 1 + length] for row, length in enumerate(LENGTHS)])

    given = batch()
    return dataclasses.replace(given, logprobs=flat(policy), ref_logprobs=flat(reference))


@pytest.mark.parametrize("name", TRL)
def test_losses_are_trls_on_the_same_logits(name):
    losses = {
        "bradley_terry": get_loss("bradley_terry", center_coef=0.01),
        "sft": get_loss("sft"),
        **{kind: get_loss("dpo", kl_coef=0.3, variant=kind) for kind in ("sigmoid", "ipo", "hinge")},
    }
    assert losses[name](from_logits()).loss.item() == pytest.approx(TRL[name], abs=1e-6)
