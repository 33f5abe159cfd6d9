"""Guess a number from 1 to N in a few turns. An example of an environment: `NumberGuessing` is all there is to one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.cache import made_once
from rlloop.chat import ChatTokenizer
from rlloop.errors import ConfigError
from rlloop.loop.environments import Message, Reply
from rlloop.types import Example

from ..custom.tiny import tiny_config, write_tiny


class NumberGuessing:
    """Says higher or lower. A right guess is worth 1; what is no number of the game is answered by `what`."""

    def __init__(self, example: Example) -> None:
        self.secret, self.largest = example.data["secret"], example.data["largest"]

    def step(self, message: str) -> Reply:
        word = message.strip()
        guess = int(word) if word.isascii() and word.isdigit() and len(word) < 10 else 0
        if not 1 <= guess <= self.largest:
            return Reply([{"role": "tool", "content": "what"}], components={"nonsense": 1.0})
        if guess == self.secret:
            return Reply(reward=1.0, done=True, solved=True, components={"nonsense": 0.0})
        answer = "higher" if self.secret > guess else "lower"
        return Reply([{"role": "tool", "content": answer}], components={"nonsense": 0.0})


class Guess:
    """Every number in turn is the secret. Without a `model_path`: a small random model, made once and cached."""

    environment = NumberGuessing  # made anew for each conversation

    def __init__(
        self,
        seed: int,
        model_path: str | None = None,
        *,
        numbers: int = 7,
        max_turns: int = 3,
        max_conversation_tokens: int = 512,
    ) -> None:
        for name, value, least in (("numbers", numbers, 2), ("max_turns", max_turns, 1)):
            if not least <= value <= 1000:
                raise ConfigError(f"task.{name} is {value}; it must be from {least} to 1000")
        self.seed, self.numbers, self.max_turns = seed, numbers, max_turns
        self.max_conversation_tokens = max_conversation_tokens
        self._given = None if model_path is None else Path(model_path)

    def model_folder(self) -> Path:
        if self._given is not None:
            return self._given
        return made_once(f"guess-{self.numbers}-v1", lambda folder: write_tiny(folder, self._words))

    def model_config(self) -> Mapping[str, Any]:
        return tiny_config(self._words)

    @property
    def _words(self) -> list[str]:
        return ["guess", "to", "higher", "lower", "what", *map(str, range(1, self.numbers + 1))]

    def train_examples(self, step: int, count: int) -> list[Example]:
        rng = np.random.default_rng((self.seed, step))
        rounds = -(-count // self.numbers)
        return [self._example(int(n)) for n in np.concatenate([rng.permutation(self.numbers) for _ in range(rounds)])][
            :count
        ]

    def eval_examples(self, count: int) -> list[Example]:
        return [self._example(index % self.numbers) for index in range(count)]

    def between(self, messages: Sequence[Message], stop: int | None) -> list[int]:
        return self._chat.between(messages, stop)

    def decode(self, token_ids: list[int]) -> str:
        return self._chat.decode(token_ids)

    @functools.cached_property
    def _chat(self) -> ChatTokenizer:
        from rlloop.models.config import read_config  # imports torch

        folder = self.model_folder()
        config = read_config(folder)
        self.max_conversation_tokens = min(self.max_conversation_tokens, config.max_positions)
        return ChatTokenizer(folder, eos_token_ids=config.eos_token_ids)

    @functools.cached_property
    def _prompt(self) -> tuple[str, list[int]]:
        return self._chat.prompt(f"guess 1 to {self.numbers}")

    def _example(self, index: int) -> Example:
        text, ids = self._prompt
        return Example(
            id=f"secret-{index + 1}", prompt_ids=ids, prompt=text, data={"secret": index + 1, "largest": self.numbers}
        )
