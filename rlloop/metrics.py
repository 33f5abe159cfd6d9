"""Metrics that carry their reduction, sinks that receive them, and their names in other frameworks.

A metric is kept as sums and counts until all micro-batches, minibatches and ranks of a step are merged, so that a mean
of means cannot happen. A metric that does not apply is absent, never 0. docs/metrics.md has names, formulas and signs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import add
from typing import Any, Protocol, Self


def number_of(value: Any) -> float | None:
    """A value of a record as a number; None for what is none, or too large for a float."""
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:
        return None


class Reduction(Protocol):
    """Merges with `+`, which is associative and commutative but for rounding; `.value` is the result."""

    def __add__(self, other: Any, /) -> Self: ...

    @property
    def value(self) -> Any: ...


Number = float | Any  # or a tensor of one number, on a device that need not be waited for yet (`settled`)


@dataclass(frozen=True, slots=True)
class Mean:
    """`total / count`, each summed over parts. `count` is the number of tokens, sequences or groups averaged over.

    Example: `Mean(3.0, 4) + Mean(1.0, 1)` is `Mean(4.0, 5)`, of value 0.8.
    """

    total: Number
    count: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return float(self.total) / self.count


@dataclass(frozen=True, slots=True)
class Sum:
    total: Number

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True, slots=True)
class Max:
    largest: float

    def __add__(self, other: Max) -> Max:
        return Max(max(self.largest, other.largest))

    @property
    def value(self) -> float:
        return self.largest


@dataclass(frozen=True, slots=True)
class Min:
    smallest: float

    def __add__(self, other: Min) -> Min:
        return Min(min(self.smallest, other.smallest))

    @property
    def value(self) -> float:
        return self.smallest


@dataclass(frozen=True, slots=True)
class EffectiveSampleSize:
    """Kish's effective sample size as a fraction of the sample: (sum r)^2 / (n sum r^2). 1 means equal weights."""

    total: float  # sum of r
    squares: float  # sum of r^2
    count: int  # n

    def __add__(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
        return EffectiveSampleSize(self.total + other.total, self.squares + other.squares, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total * self.total / (self.count * self.squares)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts between fixed edges, open at both ends: `counts[i]` counts edges[i-1] <= x < edges[i]."""

    edges: tuple[float, ...]  # ascending
    counts: tuple[int, ...]  # one more than edges

    def __add__(self, other: Histogram) -> Histogram:
        assert self.edges == other.edges
        return Histogram(self.edges, tuple(map(add, self.counts, other.counts)))

    @property
    def value(self) -> dict[str, list[float] | list[int]]:
        return {"edges": list(self.edges), "counts": list(self.counts)}


# Edges of d = ln r: half decades from 1e-6 to 10 on either side of 0, which separate rounding from collapse.
_HALF_DECADES = tuple(10.0 ** (k / 2) for k in range(-12, 3))
LOG_RATIO_EDGES = (*(-edge for edge in reversed(_HALF_DECADES)), *_HALF_DECADES)


def settled(metrics: Mapping[str, Reduction]) -> dict[str, Reduction]:
    """With numbers in place of tensors, whose devices are waited for."""

    def number(each: Reduction) -> Reduction:
        return replace(each, total=float(each.total)) if isinstance(each, Mean | Sum) else each

    return {name: number(each) for name, each in metrics.items()}


def merge(mappings: Iterable[Mapping[str, Reduction]]) -> dict[str, Reduction]:
    """One dictionary out of many; metrics of the same name are added."""
    merged: dict[str, Reduction] = {}
    for mapping in mappings:
        for name, metric in mapping.items():
            merged[name] = merged[name] + metric if name in merged else metric
    return merged


def values(metrics: Mapping[str, Reduction]) -> dict[str, Any]:
    """The values for a record: name -> number (of a histogram, edges and counts)."""
    return {name: metric.value for name, metric in metrics.items()}


def is_timing(name: str) -> bool:
    """True for metrics of time or of the machines used, which differ between two runs with the same bits."""
    elsewhere = ("time/", "perf/", "system/", "memory/", "fleet/", "sync/wire", "sync/ratio", "sync/changed")
    return name.startswith(elsewhere) or name.rpartition("/")[2].endswith("seconds")


def pass_or_fail(rewards: Iterable[tuple[float, float]], offline: str | None = None) -> bool:
    """True if completions pass or fail, so that pass@1 says something, as far as `rewards` tell: (mean reward, fraction
    solved) of steps and evaluations, or (reward, solved) of completions.

    Something was solved, and no reward is above 1, which is what a plain number needs to count as solved. Else rewards
    are continuous, or nothing has been solved yet: their mean says more. True where nothing is known, and of pairs that
    a reward model orders. `offline`: as of `held_out_names`.
    """
    if offline == "verdicts":
        return True
    known = [pair for pair in rewards if not any(map(math.isnan, pair))]
    return not known or (any(solved > 0 for _, solved in known) and all(reward <= 1 for reward, _ in known))


def outcome_names(offline: str | None = None) -> list[tuple[str, str]]:
    """Metrics of (mean reward, fraction solved): of the step's training batch, and held out. Of a run on given
    completions, held out alone."""
    held_out = ("eval/reward", "eval/solved")
    return [held_out] if offline else [("reward/mean", "reward/solved"), held_out]


def outcomes(metrics: Mapping[str, Any], offline: str | None = None) -> list[tuple[float, float]]:
    """The `outcome_names` that a record has."""
    pairs = [tuple(metrics.get(name) for name in pair) for pair in outcome_names(offline)]
    return [(reward, solved) for reward, solved in pairs if reward is not None and solved is not None]


# What a run on given completions (recipe `offline`) has of each step in place of rewards, with its label.
OBJECTIVE = {
    "loss/total": "loss",
    "loss/reward_accuracy": "preference accuracy",
    "loss/reward_margin": "reward margin",
    "loss/reward_good": "reward of good ones",
    "loss/reward_bad": "reward of bad ones",
}


def held_out_names(offline: str | None) -> tuple[str, str]:
    """Names of `eval/reward` and `eval/solved` for people. `offline`: the kind of given completions, if a run's are; a
    reward model (verdicts) is evaluated by pairs."""
    return ("margin", "preference accuracy") if offline == "verdicts" else ("reward", "pass@1")


class Sink(Protocol):
    """Receives each record besides the run folder: wandb, TensorBoard, ..."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


# Framework -> its metric -> rlloop's metrics, each with its factor; their sum is the framework's value.
PEER_NAMES: dict[str, dict[str, dict[str, float]]] = {
    "verl": {
        "rollout_corr/kl": {"parity/k1": 1.0},
        "rollout_corr/k3_kl": {"parity/k3": 1.0},
        "rollout_corr/chi2_token": {"parity/chi2": 1.0},
        "rollout_corr/ppl_ratio": {"parity/ppl_ratio": 1.0},
        "rollout_corr/rollout_is_mean": {"is/ratio_mean": 1.0},
        "rollout_corr/rollout_is_max": {"is/ratio_max": 1.0},
        "rollout_corr/rollout_is_min": {"is/ratio_min": 1.0},
        "rollout_corr/rollout_is_eff_sample_size": {"is/ess": 1.0},
        "rollout_corr/rollout_is_ratio_fraction_high": {"is/truncated_high": 1.0},
        "rollout_corr/rollout_is_ratio_fraction_low": {"is/truncated_low": 1.0},
        "actor/pg_loss": {"loss/policy": 1.0},
        "actor/pg_clipfrac": {"loss/clip_high": 1.0, "loss/clip_low": 1.0},
        "actor/pg_clipfrac_lower": {"loss/clip_dual": 1.0},
        "actor/entropy": {"loss/entropy": 1.0},
        "actor/grad_norm": {"loss/grad_norm": 1.0},
        "critic/rewards/mean": {"reward/mean": 1.0},
        "response_length/mean": {"rollout/length_mean": 1.0},
        "response_length/clip_ratio": {"rollout/truncated": 1.0},
    },
    "torchtitan": {
        "bit_wise/ratio_tokens_different": {"parity/tokens_different": 1.0},
        "bit_wise/logprob_diff/mean": {"parity/k1": -1.0},
        "bit_wise/logprob_diff/max": {"parity/logprob_diff_max": 1.0},
    },
    "slime": {"train/train_rollout_logprob_abs_diff": {"parity/logprob_diff_mean": 1.0}},
    "skyrl": {
        "policy/rollout_train_logprobs_abs_diff_mean": {"parity/logprob_diff_mean": 1.0},
        "policy/rollout_train_logprobs_abs_diff_max": {"parity/logprob_diff_max": 1.0},
    },
    "prime-rl": {"mismatch_kl/mean": {"parity/k3": 1.0}},
    "fireworks": {"inference_k3": {"parity/k3": 1.0}},
    "openrlhf": {"is_oob_ratio": {"is/truncated_high": 1.0}},
}


def as_peer(metrics: Mapping[str, float], peer: str) -> dict[str, float]:
    """The same numbers under another framework's names and signs, without metrics that it does not have.

    Example: `as_peer({"parity/k1": 0.5}, "torchtitan") == {"bit_wise/logprob_diff/mean": -0.5}`.
    """
    names = PEER_NAMES.get(peer)
    if names is None:
        raise ValueError(f"no metric names are known for {peer!r}; known are {', '.join(sorted(PEER_NAMES))}")
    return {
        theirs: sum(factor * metrics[name] for name, factor in ours.items())
        for theirs, ours in names.items()
        if ours.keys() <= metrics.keys()
    }
