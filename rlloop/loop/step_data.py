"""What a step does with samples beside sampling and learning: seeds, minibatches, and the metrics they add up to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from rlloop.config.run import RunConfig
from rlloop.loop.conversations import Played, cut_short
from rlloop.types import RewardResult, Sample, SamplingParams


def completion_seed(run_seed: int, purpose: str, step: int, prompt: int, place: int) -> int:
    """The seed of one completion, below 2**63: a hash of its coordinates, so that no order of work can change it."""
    name = f"{run_seed}/{purpose}/{step}/{prompt}/{place}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def training_sampling(config: RunConfig, step: int, prompt: int, place: int) -> SamplingParams:
    """How a step asks for one completion: a function of the configuration and its coordinates."""
    sampled = config.rollout
    return SamplingParams(
        max_tokens=sampled.max_tokens,
        min_tokens=sampled.min_tokens,
        temperature=sampled.temperature,
        top_p=sampled.top_p,
        top_k=sampled.top_k,
        min_p=sampled.min_p,
        seed=completion_seed(config.seed, "train", step, prompt, place),
    )


def minibatches(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Indices of `samples`, cut into `count` parts of whole groups, about equal; empty parts are left out."""
    groups = list(dict.fromkeys(sample.group for sample in samples))
    part_of = {group: index * count // len(groups) for index, group in enumerate(groups)}
    parts: list[list[int]] = [[] for _ in range(count)]
    for index, sample in enumerate(samples):
        parts[part_of[sample.group]].append(index)
    return [part for part in parts if part]


def new_sample(uid: str, played: Played, group: int) -> Sample:
    """Its reward and advantage are still to come. Whatever engine made it, one that was cut short is broken."""
    made, broken = played.completion, played.broken
    if broken is None and not made.whole:
        broken = cut_short(made)
    return Sample(uid, played.example, made, played.text, RewardResult(0.0), group=group, broken=broken)


def rollout_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    turns = [len(sample.completion.turns) for sample in samples if sample.completion.turns is not None]
    return ({"rollout/turns_mean": float(np.mean(turns))} if turns else {}) | {
        "rollout/length_mean": float(np.mean([len(sample.completion.logprobs) for sample in samples])),
        "rollout/truncated": float(np.mean([sample.completion.finish_reason == "length" for sample in samples])),
        "rollout/faults": sum(sample.fault is not None for sample in samples),
        "rollout/version_lag": float(np.mean([version - sample.completion.policy_version for sample in samples])),
    }


def reward_metrics(accepted: Sequence[Sample]) -> dict[str, float]:
    rewards = np.array([sample.result.reward for sample in accepted])
    by_group: dict[int, set[float]] = {}
    components: dict[str, list[float]] = {}
    for sample in accepted:
        by_group.setdefault(sample.group, set()).add(sample.result.reward)
        for name, value in sample.result.components.items():
            components.setdefault(f"reward/{name}", []).append(value)
    return {name: float(np.mean(parts)) for name, parts in components.items()} | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/solved": float(np.mean([sample.result.solved for sample in accepted])),
        "reward/groups_without_signal": float(np.mean([len(seen) == 1 for seen in by_group.values()])),
    }
