"""A task of conversations over the fakes' vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlloop.loop.environments import Message, Reply
from rlloop.parity.asked import Vocabulary
from rlloop.testing import FakeTask
from rlloop.types import Example

KNOWN = Vocabulary(8, (0,))


class Countdown:
    """Done after as many turns as the example says; what it counts is the reward."""

    def __init__(self, example: Example) -> None:
        self.left = example.data["turns"]
        self.heard: list[str] = []

    def step(self, message: str) -> Reply:
        self.heard.append(message)
        self.left -= 1
        if self.left:
            return Reply([{"role": "tool", "content": "7"}], reward=1.0, components={"steps": 1.0})
        return Reply(reward=0.5, done=True, solved=True, components={"steps": 1.0})


class TalkTask(FakeTask):
    max_turns, max_conversation_tokens = 4, 200
    environment = Countdown

    def between(self, messages: Sequence[Message], stop: int | None) -> list[int]:
        return [*(int(message["content"]) for message in messages), 5 if stop is None else 6]

    def _example(self, name: str, index: int) -> Example:
        made = super()._example(name, index)
        return dataclasses.replace(made, data={**made.data, "turns": 1 + index % 3})


def example(turns: int) -> Example:
    return Example("e", [1, 2, 3], "p", {"turns": turns})
