"""An environment: the other side of a conversation, made anew for each example."""

from rlloop.loop.environments import Reply
from rlloop.types import Example


class Insisting:
    """Says `word` until the policy has written `turns` turns; longer turns are worth more."""

    def __init__(self, example: Example, turns: int, word: str = "more") -> None:
        self.left, self.word = turns, word

    def step(self, message: str) -> Reply:
        self.left -= 1
        said = [{"role": "tool", "content": self.word}]
        return Reply(said, reward=len(message) / 100, done=not self.left, components={"length": float(len(message))})
