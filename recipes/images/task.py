"""Questions about drawn pictures. Without a `model_path`: a small Qwen3-VL, warm-started and cached."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.errors import ConfigError
from rlloop.types import Example, ModelInput, RewardResult

from .pictures import COLOURS, NUMBERS, PLACES, SHAPES, Question, questions

HELD_OUT = 1 << 32  # seed of the held-out pictures
ANSWERS = frozenset((*NUMBERS, *COLOURS, *SHAPES, *PLACES))


class Pictures:
    """A picture of one to four shapes, all alike, and a question: how many, of which colour, which shape, or where.

    The answer is one word. A model of the user's is prompted in its own chat template, with the picture first.
    """

    def __init__(
        self, seed: int, model_path: str | None = None, *, demonstrations: int = 2000, warm_steps: int = 170
    ) -> None:
        for name, value in (("demonstrations", demonstrations), ("warm_steps", warm_steps)):
            if value < 1:
                raise ConfigError(f"task.{name} is {value}; it must be at least 1")
        self.seed, self.demonstrations, self.warm_steps = seed, demonstrations, warm_steps
        self._given = None if model_path is None else Path(model_path)

    def model_folder(self) -> Path:
        if self._given is not None:
            return self._given
        from .warm_start import warm_started  # imports torch

        return warm_started(self.demonstrations, self.warm_steps)

    def model_config(self) -> Mapping[str, Any]:
        from .warm_start import model_config  # imports torch

        return model_config()

    def train_examples(self, step: int, count: int) -> list[Example]:
        return [self._example(each) for each in islice(questions(np.random.default_rng((self.seed, step))), count)]

    def eval_examples(self, count: int) -> list[Example]:
        """The first `count` of a fixed stream of pictures; no seed enters."""
        return [self._example(each) for each in islice(questions(np.random.default_rng(HELD_OUT)), count)]

    def decode(self, token_ids: list[int]) -> str:
        return self._prompts.decode(token_ids)

    def _example(self, question: Question) -> Example:
        text, asked = self._prompts.prompt(question)
        return Example(
            id=question.id, prompt_ids=asked.token_ids, prompt=text, data={"answer": question.answer}, model_input=asked
        )

    @functools.cached_property
    def _prompts(self) -> Prompts:
        return Prompts(self.model_folder())


class Prompts:
    """Prompts of a model's folder: its chat template and its image processor."""

    def __init__(self, folder: Path) -> None:
        from rlloop.chat import ChatTokenizer
        from rlloop.models.config import read_config  # imports torch
        from rlloop.models.vision_processor import ImageProcessor

        self._asked: dict[str, tuple[str, list[int]]] = {}  # by the question: a template is slow to render
        self.processor = ImageProcessor.of_folder(folder)
        self.chat = ChatTokenizer(folder, eos_token_ids=read_config(folder).eos_token_ids)

    def asked(self, question: Question) -> tuple[str, list[int]]:
        """The prompt's text and its ids, with one placeholder for the picture."""
        if question.text not in self._asked:
            content = [{"type": "image"}, {"type": "text", "text": question.text}]
            self._asked[question.text] = self.chat.prompt([{"role": "user", "content": content}])
        return self._asked[question.text]

    def prompt(self, question: Question) -> tuple[str, ModelInput]:
        text, ids = self.asked(question)
        return text, self.processor.prompt(ids, [self.processor.image(question.picture())])

    def decode(self, token_ids: list[int]) -> str:
        return self.chat.decode(token_ids)


def answer_reward(prompt: str, completion: str, example: Example) -> RewardResult:
    """1 for the right word. Component: `word`, whether it is an answer to any question."""
    said = completion.strip()
    right = said == example.data["answer"]
    return RewardResult(float(right), right, {"word": float(said in ANSWERS)})
