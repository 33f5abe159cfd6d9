"""Decodes texts again from their tokens, and calls the reward again for them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from rlloop.audit.completions import CLOSE
from rlloop.audit.history import Rollouts, Row
from rlloop.audit.parts import Parts
from rlloop.rewards.digest import reward_digest
from rlloop.types import Example, RewardResult


class Rewards:
    """Checks every text, and the rewards of all completions or of an unpredictable sample."""

    name = "rewards"

    def __init__(self, parts: Parts, most: int | None) -> None:
        """`most` completions are scored again; None: all."""
        self.parts, self.most = parts, most
        self.texts, self.scored, self.seen, self.of_other_source = 0, 0, 0, 0
        self._source_here = None if parts.reward is None else reward_digest(parts.reward.reward)
        self._source_then: str | None = None  # digest of the source that scored the step
        self.unclear: list[str] = []  # reasons why a reward could not be compared
        self._drawn: list[tuple[Row, Example]] = []
        self._random = random.SystemRandom()

    def check(self, step: Rollouts) -> list[str]:
        task = self.parts.task
        if task is None:
            return []
        self.texts += len(step.rows)
        problems = [
            f"{row.uid}: its text is not what its tokens say"
            for row in step.rows
            if row.text != task.decode(row.token_ids)
        ]
        scorable = [
            (row, self.parts.examples[row.uid])
            for row in step.rows
            if not row.rejected and row.turns is None and row.uid in self.parts.examples
        ]
        self.parts.examples.clear()
        if step.line is not None and step.line.reward is not None:
            self._source_then = step.line.reward
        if self.parts.reward is None:
            return problems
        if self._source_then not in (None, self._source_here):
            self.of_other_source += len(scorable)
            return problems
        if self.most is None:
            return problems + self._compare(scorable)
        for each in scorable:  # reservoir sampling: the number of completions is not known yet
            self.seen += 1
            if len(self._drawn) < self.most:
                self._drawn.append(each)
            elif (index := self._random.randrange(self.seen)) < self.most:
                self._drawn[index] = each
        return problems

    def finish(self) -> list[str]:
        return self._compare(self._drawn) if self._drawn else []

    def _compare(self, chosen: Sequence[tuple[Row, Example]]) -> list[str]:
        """Completions whose reward is not the recorded one, if a second call gives the same again."""
        self.scored += len(chosen)
        first = self._score(chosen)
        suspects = [(each, result) for each, result in zip(chosen, first, strict=True) if not _agrees(each[0], result)]
        second = self._score([each for each, _ in suspects])
        problems = []
        for ((row, _), once), again in zip(suspects, second, strict=True):
            if not isinstance(once, RewardResult):
                self.unclear.append(f"{row.uid}: {getattr(once, 'message', once)}")
            elif once != again:
                self.unclear.append(f"{row.uid}: the reward is another each time")
            else:
                stored = RewardResult(row.reward, row.solved, row.components)
                problems.append(f"{row.uid}: recorded is {stored}, the reward gives {once}")
        return problems

    def _score(self, chosen: Sequence[tuple[Row, Example]]) -> Sequence[object]:
        assert self.parts.reward is not None
        return self.parts.reward.score([(example.prompt, row.text, example) for row, example in chosen])

    def summary(self) -> str:
        if self.parts.task is None:
            return f"texts and rewards not checked: {self.parts.no_task}"
        if self.parts.reward is None:
            return f"{self.texts} texts; rewards not given again: {self.parts.no_reward}"
        unclear = f", {len(self.unclear)} without an answer (first {self.unclear[0]})" if self.unclear else ""
        other = f", {self.of_other_source} by other source than is here: not" if self.of_other_source else ""
        return f"{self.texts} texts, {self.scored} rewards given again{unclear}{other}"


def _agrees(row: Row, result: object) -> bool:
    return (
        isinstance(result, RewardResult)
        and math.isclose(row.reward, result.reward, **CLOSE)
        and row.solved == result.solved
        and row.components.keys() == result.components.keys()
        and all(math.isclose(row.components[name], value, **CLOSE) for name, value in result.components.items())
    )
