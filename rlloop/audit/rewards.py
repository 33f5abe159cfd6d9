"""Texts decoded again from their tokens, and rewards given again for them."""

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
    """Every text; and of the rewards a sample that nobody could foresee, or all of them."""

    name = "rewards"

    def __init__(self, parts: Parts, most: int | None) -> None:
        """`most` completions are judged again; None: all."""
        self.parts, self.most = parts, most
        self.texts, self.judged, self.seen, self.of_other_source = 0, 0, 0, 0
        self._here = None if parts.reward is None else reward_digest(parts.reward.reward)
        self._then: str | None = None  # the digest of the source that judged the step
        self.unclear: list[str] = []  # why a reward was not given again
        self._drawn: list[tuple[Row, Example]] = []
        self._random = random.SystemRandom()

    def at(self, step: Rollouts) -> list[str]:
        task = self.parts.task
        if task is None:
            return []
        self.texts += len(step.rows)
        problems = [
            f"{row.uid}: its text is not what its tokens say"
            for row in step.rows
            if row.text != task.decode(row.token_ids)
        ]
        judgeable = [
            (row, self.parts.examples[row.uid])
            for row in step.rows
            if not row.rejected and row.turns is None and row.uid in self.parts.examples
        ]
        self.parts.examples.clear()
        if step.line is not None and step.line.reward is not None:
            self._then = step.line.reward
        if self.parts.reward is None:
            return problems
        if self._then not in (None, self._here):
            self.of_other_source += len(judgeable)
            return problems
        if self.most is None:
            return problems + self._judge(judgeable)
        for each in judgeable:  # an even sample of a row whose end is not known
            self.seen += 1
            if len(self._drawn) < self.most:
                self._drawn.append(each)
            elif (place := self._random.randrange(self.seen)) < self.most:
                self._drawn[place] = each
        return problems

    def finish(self) -> list[str]:
        return self._judge(self._drawn) if self._drawn else []

    def _judge(self, chosen: Sequence[tuple[Row, Example]]) -> list[str]:
        """Those whose reward is another, if it is the same other one when asked once more."""
        self.judged += len(chosen)
        first = self._score(chosen)
        suspects = [(each, found) for each, found in zip(chosen, first, strict=True) if not _agrees(each[0], found)]
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

    def found(self) -> str:
        if self.parts.task is None:
            return f"texts and rewards not checked: {self.parts.no_task}"
        if self.parts.reward is None:
            return f"{self.texts} texts; rewards not given again: {self.parts.no_reward}"
        unclear = f", {len(self.unclear)} without an answer (first {self.unclear[0]})" if self.unclear else ""
        other = f", {self.of_other_source} by other source than is here: not" if self.of_other_source else ""
        return f"{self.texts} texts, {self.judged} rewards given again{unclear}{other}"


def _agrees(row: Row, found: object) -> bool:
    return (
        isinstance(found, RewardResult)
        and math.isclose(row.reward, found.reward, **CLOSE)
        and row.solved == found.solved
        and row.components.keys() == found.components.keys()
        and all(math.isclose(row.components[name], value, **CLOSE) for name, value in found.components.items())
    )
