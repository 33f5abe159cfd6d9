"""The order of training rows: epochs, mixing of several sources by weights, and curricula.

Every draw is a function of (seed, step), so a resumed run goes on with the very next sample, and nothing has to be
stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlloop.errors import ConfigError


@dataclass(frozen=True)
class Curriculum:
    """Rows by ascending difficulty: the easiest `start` of them at first, all of them from step `steps` on.

    Rows are drawn with replacement among those that are open, each draw by a seed of its own.
    """

    key: str  # the row's field with its difficulty, a number
    steps: int
    start: float = 0.1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Curriculum:
        try:
            curriculum = cls(**config)
        except TypeError as error:
            raise ConfigError(f"data.curriculum is {dict(config)!r}; it takes key, steps and start: {error}") from None
        if curriculum.steps < 1 or not 0 < curriculum.start <= 1:
            raise ConfigError(
                f"data.curriculum is {dict(config)!r}; steps must be at least 1, start above 0 and at most 1"
            )
        return curriculum

    def open(self, step: int, size: int) -> int:
        """Number of rows, of `size` in ascending order, that step `step` (from 1) may draw from."""
        share = self.start + (1.0 - self.start) * min(1.0, (step - 1) / self.steps)
        return max(1, round(share * size))


@dataclass(frozen=True)
class Source:
    """Rows of one data set, by index."""

    name: str
    size: int
    weights: Sequence[tuple[int, float]] = ((0, 1.0),)  # (step, weight), linear in between
    curriculum: Curriculum | None = None
    by_difficulty: np.ndarray | None = None  # [size] int64: indices from the easiest on, for a curriculum

    def weight(self, step: int) -> float:
        steps, weights = zip(*self.weights, strict=True)
        return float(np.interp(step, steps, weights))


def weights_of(name: str, value: Any) -> list[tuple[int, float]]:
    """`weight` of a source: a number, or [[step, number], ...] with ascending steps. Raises `ConfigError`."""
    points = [(0, value)] if isinstance(value, int | float) else value
    try:
        schedule = [(int(step), float(weight)) for step, weight in points]
    except (TypeError, ValueError):
        schedule = []
    steps = [step for step, _ in schedule]
    if not schedule or steps != sorted(set(steps)) or min(weight for _, weight in schedule) < 0:
        raise ConfigError(
            f"data.mix.{name}.weight is {value!r:.80}; it must be a number of 0 or more, or [[step, number], ...] with "
            "ascending steps, linear in between"
        )
    return schedule


class Mixture:
    """Draws rows of several sources.

    Of each step's prompts a source has its share by weight: cumulated shares are kept to within one prompt, so that a
    weight of 1% counts in steps of 8 prompts, too. Within a source each row comes once an epoch.
    """

    def __init__(self, seed: int, sources: Sequence[Source]) -> None:
        """Raises `ConfigError` where all weights are 0 at some step."""
        self.seed, self.sources = seed, list(sources)
        for step in sorted({step for source in sources for step, _ in source.weights}):
            if not any(source.weight(step) for source in sources):
                raise ConfigError(f"data.mix: all weights are 0 at step {step}; leave one above 0")
        self._count = 0  # of a step's prompts, which `_drawn` is for
        self._drawn = [np.zeros(len(self.sources), np.int64)]  # [sources] after each step
        self._due = np.zeros(len(self.sources))  # [sources], by weight, up to the last step of `_drawn`
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # by source: an epoch and its order

    def draw(self, step: int, count: int) -> list[tuple[int, int]]:
        """(source, row) of each of the `count` prompts of step `step`, from 1."""
        before, after = self._totals(step, count)
        chosen = [
            (source_index, self._row(source_index, step, position))
            for source_index, (first, end) in enumerate(zip(before.tolist(), after.tolist(), strict=True))
            for position in range(first, end)
        ]
        if len(self.sources) == 1:
            return chosen
        order = np.random.default_rng((self.seed, 1, step)).permutation(len(chosen))
        return [chosen[index] for index in order]

    def _totals(self, step: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows drawn from each source before and after a step."""
        if count != self._count:
            self._count, self._drawn, self._due = count, self._drawn[:1], np.zeros(len(self.sources))
        while len(self._drawn) <= step:
            at, drawn = len(self._drawn), self._drawn[-1]
            shares = np.array([source.weight(at) for source in self.sources])
            self._due = self._due + count * shares / shares.sum()
            due = self._due - drawn
            taken = np.where(shares > 0, np.maximum(np.floor(due), 0), 0).astype(np.int64)
            while (left := count - int(taken.sum())) != 0:
                rest = np.where(shares > 0, due - taken, -np.inf)
                source_index = int(np.argmax(rest) if left > 0 else np.argmin(np.where(taken > 0, rest, np.inf)))
                taken[source_index] += 1 if left > 0 else -1
            self._drawn.append(drawn + taken)
        return self._drawn[step - 1], self._drawn[step]

    def _row(self, source_index: int, step: int, position: int) -> int:
        """The row that a source gives as its `position`-th."""
        source, names = self.sources[source_index], () if len(self.sources) == 1 else (2, source_index)
        if source.curriculum is not None:
            assert source.by_difficulty is not None
            limit = source.curriculum.open(step, source.size)
            return int(
                source.by_difficulty[np.random.default_rng((self.seed, 3, source_index, position)).integers(limit)]
            )
        epoch, at = divmod(position, source.size)
        if (known := self._orders.get(source_index)) is None or known[0] != epoch:
            order = np.random.default_rng((self.seed, epoch, *names)).permutation(source.size)
            known = self._orders[source_index] = epoch, order
        return int(known[1][at])
