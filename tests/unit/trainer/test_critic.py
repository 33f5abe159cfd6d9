"""The critic: advantages by token, its own weights, and a checkpoint that repeats it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rlloop.config.algorithm import AlgorithmConfig, CriticConfig
from rlloop.config.layout import LayoutConfig
from rlloop.config.rollout import RolloutConfig
from rlloop.config.run import Launch, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.models import load_model
from rlloop.recipes.custom.tiny import write_tiny
from rlloop.trainer.batching import TrainSequence
from rlloop.trainer.critic import Critic, token_rewards
from rlloop.types import Completion, Example, RewardResult, Sample, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("critic") / "model"
    write_tiny(path, [str(digit) for digit in range(10)], hidden_size=16, num_layers=1)
    return path


def critic(folder, **settings) -> Critic:
    return Critic(load_model(folder), CriticConfig(**{"lr": 1e-2, **settings}), TrainerConfig(max_batch_tokens=32))


def talk(uid: str, digit: int, rewards=(0.0, 1.0)) -> Sample:
    """Two turns of two tokens each, with a token of the environment's between them."""
    zeros = np.zeros(4, np.float32)
    ids = [6 + digit, 1, 5, 6 + digit, 1]
    completion = Completion(
        [4, 7], ids, zeros, zeros, 0, "stop", SamplingParams(max_tokens=2, seed=0), turns=((0, 2), (3, 5))
    )
    data = {"episode": {"conversation": [{"reward": reward} for reward in rewards]}}
    total = float(sum(rewards))
    return Sample(uid, Example(uid, [4, 7], "", data), completion, "", RewardResult(total), 0, total)


def test_each_turn_is_paid_at_its_last_token_and_the_rest_at_the_end():
    sample = talk("a", 0, rewards=(-0.1, 1.0))
    assert token_rewards(sample).tolist() == [0.0, -0.1, 0.0, 1.0]
    shaped = dataclasses.replace(sample, advantage=0.4)  # 0.5 taken for length, say
    assert token_rewards(shaped).tolist() == pytest.approx([0.0, -0.1, 0.0, 0.5])
    whole = dataclasses.replace(sample.completion, token_ids=[6, 1, 5, 6], turns=None)
    single = dataclasses.replace(sample, example=Example("b", [4, 7], "", {"episode": "pilot"}), completion=whole)
    assert token_rewards(single)[-1] == sample.advantage


def test_advantages_are_by_token_and_reach_the_loss(folder):
    made = critic(folder, normalize=False, lam=1.0).advantages([talk("a", 0), talk("b", 1, (0.0, 0.0))])
    assert all(each.token_advantages is not None for each in made)
    assert made[0].token_advantages.tolist() == [1.0] * 4  # an untrained critic has the value 0 everywhere
    assert TrainSequence.of_sample(made[0]).advantages.tolist() == [1.0] * 4
    assert made[0].advantage == 1.0  # the reward stays what is recorded
    [first, second] = critic(folder).advantages([talk("a", 0), talk("b", 1, (0.0, 0.0))])
    flat = np.concatenate([first.token_advantages, second.token_advantages])
    assert abs(flat.mean()) < 1e-6
    assert abs(flat.std() - 1) < 1e-5


def test_it_learns_what_decides_the_return_and_leaves_the_policy_alone(folder):
    policy = load_model(folder)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    learner = critic(folder, clip=0.0)
    samples = [talk(str(n), n % 2, (0.0, float(n % 2))) for n in range(12)]
    explained = []
    for _ in range(30):
        learner.advantages(samples)
        metrics = learner.update(samples)
        explained.append(metrics["critic/explained_variance"])
    # the token before the first is the same in all: what follows is known only once the digit is there
    assert explained[0] == 0.0
    assert 0.6 < explained[-1] < 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def test_a_restored_critic_repeats_its_bits(folder, tmp_path):
    samples = [talk(str(n), n, (0.0, n / 4)) for n in range(4)]

    def steps(learner: Critic, count: int) -> list[float]:
        learnt = []
        for _ in range(count):
            learner.advantages(samples)
            learnt.append(learner.update(samples)["critic/loss"])
        return learnt

    whole, first, second = critic(folder, epochs=2), critic(folder, epochs=2), critic(folder, epochs=2)
    losses = steps(whole, 4)
    assert steps(first, 2) == losses[:2]
    first.save(tmp_path)
    second.restore(tmp_path)
    assert steps(second, 2) == losses[2:]
    for one, other in zip(whole.values(samples), second.values(samples), strict=True):
        assert one.tobytes() == other.tobytes()


def test_what_a_critic_does_not_go_with_is_named():
    with pytest.raises(ConfigError, match=r"algorithm.advantage is 'group_norm'; it must be raw with a critic"):
        AlgorithmConfig(loss="ppo", advantage="group_norm", critic=CriticConfig(lr=1e-3))
    algorithm = AlgorithmConfig(loss="ppo", advantage="raw", critic=CriticConfig(lr=1e-3))
    with pytest.raises(ConfigError, match=r"algorithm.critic is not for a pipeline, and trainer.layout.pp is 2; set"):
        RunConfig(
            algorithm=algorithm,
            trainer=TrainerConfig(layout=LayoutConfig(pp=2)),
            rollout=RolloutConfig(layout=LayoutConfig(pp=2)),
        )
    RunConfig(algorithm=algorithm, launch=Launch.ray, trainer=TrainerConfig(layout=LayoutConfig(dp_shard=2)))
