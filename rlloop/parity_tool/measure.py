"""Compares two sides' logprobs of the same tokens, by type of token.

Notation of docs/metrics.md, with A as the engine and B as the trainer: mu = A's logprob, pi = B's, d = pi − mu. k1 and
k3 estimate the KL: the means of −d, and of exp(d) − 1 − d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlloop.errors import ConfigError
from rlloop.parity_tool.sides import Scored, Tokens

ALL = "all"


@dataclass(frozen=True)
class Difference:
    """Statistics of all tokens, or of those of one type."""

    tokens: int
    different: int  # tokens with other bits
    k1: float
    k3: float
    mean: float  # of abs(d)
    largest: float  # abs(d)
    top_flips: int | None  # tokens at which the most likely token differs; None: not known of both sides
    expert_flips: float | None  # fraction of (token, layer) whose set of experts differs; None: likewise

    @property
    def equal(self) -> bool:
        return self.different == 0


@dataclass(frozen=True)
class Comparison:
    by_type: dict[str, Difference]  # "all" first, then each type
    worst: int  # index of the sequence with the largest difference
    first: int | None  # index of the first sequence with a difference

    @property
    def all(self) -> Difference:
        return self.by_type[ALL]

    def as_dict(self) -> dict[str, Any]:
        return {name: asdict(difference) for name, difference in self.by_type.items()}


def measure(sequences: Sequence[Tokens], a: Sequence[Scored], b: Sequence[Scored]) -> Comparison:
    """Compare scores of the same sequences. Raises `ConfigError` if no token has a logprob on both sides."""
    columns = [_of_sequence(*each) for each in zip(sequences, a, b, strict=True)]
    flat = {key: np.concatenate([each[key] for each in columns]) for key in columns[0]}
    if not len(flat["mu"]):
        raise ConfigError("the two sides have logprobs of no token in common, so there is nothing to compare")
    types = list(dict.fromkeys(flat["type"].tolist()))
    by_type = {ALL: _difference(flat, np.ones(len(flat["mu"]), bool))}
    by_type |= {name: _difference(flat, flat["type"] == name) for name in types}
    gaps = [np.abs(each["pi"] - each["mu"]).max(initial=0.0) for each in columns]
    differing = [i for i, each in enumerate(columns) if each["different"].any()]
    return Comparison(by_type, int(np.argmax(gaps)), differing[0] if differing else None)


def _of_sequence(sequence: Tokens, a: Scored, b: Scored) -> dict[str, np.ndarray]:
    """Columns [n] over the n tokens with a logprob on both sides."""
    both = ~(np.isnan(a.logprobs) | np.isnan(b.logprobs))
    at = np.flatnonzero(both)
    tops = experts = np.full(len(at), -1.0)  # −1: not known of both sides
    if a.top is not None and b.top is not None:
        known = (a.top[at] >= 0) & (b.top[at] >= 0)
        tops = np.where(known, a.top[at] != b.top[at], -1.0)
    if a.experts is not None and b.experts is not None:
        before = at - 1  # the token whose forward predicted this one
        mine, theirs = (np.sort(each[before], axis=-1) for each in (a.experts, b.experts))
        experts = (mine != theirs).any(-1).mean(-1)
    mu, pi = a.logprobs[at], b.logprobs[at]
    return {
        "mu": mu.astype(np.float64),
        "pi": pi.astype(np.float64),
        "different": mu.view(np.int32) != pi.view(np.int32),
        "top": tops,
        "experts": experts,
        "type": np.array(sequence.labels, dtype=object)[at],
    }


def _difference(flat: dict[str, np.ndarray], where: np.ndarray) -> Difference:
    d = flat["pi"][where] - flat["mu"][where]
    tops, experts = flat["top"][where], flat["experts"][where]
    return Difference(
        tokens=int(where.sum()),
        different=int(flat["different"][where].sum()),
        k1=0.0 - float(d.mean()),
        k3=float((np.expm1(d) - d).mean()),
        mean=float(np.abs(d).mean()),
        largest=float(np.abs(d).max()),
        top_flips=int(tops.clip(0).sum()) if (tops >= 0).any() else None,
        expert_flips=float(experts.clip(0).mean()) if (experts >= 0).any() else None,
    )
