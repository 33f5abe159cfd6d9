"""Conversations with the recipe `images`' model, whose environment shows the picture in its replies."""

from __future__ import annotations

from collections.abc import Sequence

from rlloop.loop.environments import Message, Reply
from rlloop.recipes.images.pictures import Question
from rlloop.recipes.images.task import Pictures
from rlloop.types import Example


class Shows:
    """Answers two turns with the picture and the question; the third must have the answer."""

    def __init__(self, example: Example) -> None:
        self.question, self.bad, self.turn = Question(**example.data["question"]), example.data["bad"], 0

    def step(self, message: str) -> Reply:
        self.turn += 1
        if self.turn > 2:
            right = message.removesuffix("<|end|>").strip() == self.question.answer
            return Reply(reward=float(right), done=True, solved=right)
        picture = b"no picture" if self.bad else self.question.picture()
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": self.question.text}]
        return Reply([{"role": "user", "content": parts}])


class Talks(Pictures):
    environment = Shows
    max_turns, max_conversation_tokens = 3, 200
    first = False  # the prompt has the picture, too
    some_bad = False

    def between(self, messages: Sequence[Message], stop: int | None) -> list[int]:
        return self._prompts.chat.between(messages, stop)

    def _example(self, question: Question) -> Example:
        asked = None
        text, ids = self._prompts.chat.prompt(question.text)
        if self.first:
            text, asked = self._prompts.prompt(question)
            ids = asked.token_ids
        data = {"question": vars(question), "bad": self.some_bad and question.seed % 2 == 0}
        return Example(id=question.id, prompt_ids=ids, prompt=text, data=data, model_input=asked)


class PicturedTalks(Talks):
    first = True


class BadTalks(Talks):
    some_bad = True
