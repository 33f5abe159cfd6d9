"""Processing of a step's samples from completions to minibatches: seeds, rewards, selection and metrics."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from rlloop.config.run import RunConfig
from rlloop.loop.conversations import Played, cut_short
from rlloop.protocols import Scorer
from rlloop.types import RewardResult, Sample, SamplingParams, changed

Untrained = tuple[Sample, str]  # a sample that is not trained, and why


def completion_seed(run_seed: int, purpose: str, step: int, prompt: int, index: int) -> int:
    """The seed, below 2**63, of a prompt's `index`-th completion: a hash of its coordinates, independent of the order
    of work."""
    name = f"{run_seed}/{purpose}/{step}/{prompt}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def training_sampling(config: RunConfig, step: int, prompt: int, index: int) -> SamplingParams:
    """The sampling parameters of one completion: a function of the configuration and its coordinates."""
    rollout = config.rollout
    settings = _settings(
        rollout.max_tokens, rollout.min_tokens, rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p
    )
    return changed(settings, seed=completion_seed(config.seed, "train", step, prompt, index))


_settings = functools.lru_cache(maxsize=16)(SamplingParams)  # checked once, not for each completion


def new_sample(uid: str, played: Played, group: int) -> Sample:
    """A sample without reward and advantage. A completion that was cut short, by any engine, is marked broken."""
    completion, broken = played.completion, played.broken
    if broken is None and not completion.whole:
        broken = cut_short(completion)
    return Sample(uid, played.example, completion, played.text, RewardResult(0.0), group=group, broken=broken)


def outcomes_of(scorer: Scorer, samples: Sequence[Sample]) -> list[RewardResult | str]:
    """The reward of each sample, or the reason why it has none."""
    whole = [sample for sample in samples if not (sample.fault or sample.broken)]
    scores = iter(scorer.score([(sample.example.prompt, sample.text, sample.example) for sample in whole]))
    outcomes: list[RewardResult | str] = []
    for sample in samples:
        outcome = sample.fault or sample.broken or next(scores)
        known = isinstance(outcome, RewardResult | str)
        outcomes.append(outcome if known else f"reward {outcome.kind}: {outcome.message}")
    return outcomes


def full_batch(samples: Sequence[Sample], keep: Sequence[bool], count: int) -> tuple[list[Sample], list[Untrained]]:
    """The kept samples of the first `count` groups that have any, to be trained; and the others."""
    groups = list(dict.fromkeys(sample.group for sample, kept in zip(samples, keep, strict=True) if kept))
    batch = set(groups[:count])
    trained, dropped = list[Sample](), list[Untrained]()
    for sample, kept in zip(samples, keep, strict=True):
        if kept and sample.group in batch:
            trained.append(sample)
        else:
            dropped.append((sample, "dropped: the batch is full" if kept else "dropped: no signal in its group"))
    return trained, dropped


def minibatches(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Indices of `samples`, cut into `count` minibatches of whole groups, about equal; empty ones are left out."""
    groups = list(dict.fromkeys(sample.group for sample in samples))
    minibatch_of = {group: index * count // len(groups) for index, group in enumerate(groups)}
    indices: list[list[int]] = [[] for _ in range(count)]
    for index, sample in enumerate(samples):
        indices[minibatch_of[sample.group]].append(index)
    return [each for each in indices if each]


def rollout_metrics(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """`rollout/*` of all sampled completions; `version` is the trainer's."""
    turns = [len(sample.completion.turns) for sample in samples if sample.completion.turns is not None]
    return ({"rollout/turns_mean": float(np.mean(turns))} if turns else {}) | {
        "rollout/length_mean": float(np.mean([len(sample.completion.logprobs) for sample in samples])),
        "rollout/truncated": float(np.mean([sample.completion.finish_reason == "length" for sample in samples])),
        "rollout/faults": sum(sample.fault is not None for sample in samples),
        "rollout/version_lag": float(np.mean([version - sample.completion.policy_version for sample in samples])),
    }


def reward_metrics(accepted: Sequence[Sample]) -> dict[str, float]:
    """`reward/*` of the samples that have a reward."""
    rewards = np.array([sample.result.reward for sample in accepted])
    by_group: dict[int, set[float]] = {}
    components: dict[str, list[float]] = {}
    for sample in accepted:
        by_group.setdefault(sample.group, set()).add(sample.result.reward)
        for name, value in sample.result.components.items():
            components.setdefault(f"reward/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in components.items()} | {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/solved": float(np.mean([sample.result.solved for sample in accepted])),
        "reward/groups_without_signal": float(np.mean([len(distinct) == 1 for distinct in by_group.values()])),
    }
