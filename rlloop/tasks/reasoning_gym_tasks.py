"""Generated problems of the library `reasoning-gym`: `task=reasoning_gym task.name=DATASET`, with their own scores."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlloop.chat import ChatTokenizer, Template
from rlloop.config.instantiate import needs
from rlloop.errors import ConfigError
from rlloop.tasks.epochs import in_epochs
from rlloop.types import Example, RewardResult

SYSTEM = "Solve the problem. End with the final answer between <answer> and </answer>."


class ReasoningGym:
    """A data set's problems. Training and evaluation use different seeds, so they share problems only by
    chance."""

    def __init__(
        self,
        seed: int,
        model_path: str | None,
        *,
        name: str,
        max_tokens: int,
        max_sequence_tokens: int,
        arguments: Mapping[str, Any] | None = None,
        system: str | None = None,
        template: Template = "auto",
        train_size: int = 4096,
        eval_size: int = 256,
        solved_at: float = 1.0,
    ) -> None:
        """`name` and `arguments` are `reasoning_gym.create_dataset`'s. `system`: the system message; None: `SYSTEM`,
        which asks for `<answer>`; "": none. `train_size` problems make an epoch. `solved_at`: the score that counts as
        solved. Raises `ConfigError` for an unknown name or argument, and for prompts that have no room."""
        needs("reasoning_gym", "task=reasoning_gym", "reasoning-gym")
        from rlloop.models.config import read_config  # imports torch

        if model_path is None:
            raise ConfigError("model.path must be given: task=reasoning_gym brings no model")
        for key, value in (("train_size", train_size), ("eval_size", eval_size)):
            if value < 1:
                raise ConfigError(f"task.{key} is {value}; it must be at least 1")
        self.seed, self.name, self.path = seed, name, Path(model_path)
        self._system = SYSTEM if system is None else system or None
        self._solved_at = solved_at
        config = read_config(self.path)
        self.chat = ChatTokenizer(self.path, template=template, eos_token_ids=config.eos_token_ids)
        self._room = min(config.max_positions, max_sequence_tokens) - max_tokens
        self._more = {"arguments": json.dumps(dict(arguments or {}), sort_keys=True)}
        self._sizes = {"train": (seed % (1 << 30), train_size), "eval": (seed % (1 << 30) + (1 << 30), eval_size)}
        self._check()
        self._example("train", 0)  # a prompt without room stops the run before it starts

    def model_folder(self) -> Path:
        return self.path

    def train_examples(self, step: int, count: int) -> list[Example]:
        return [self._example("train", index) for index in in_epochs(self.seed, self._sizes["train"][1], step, count)]

    def eval_examples(self, count: int) -> list[Example]:
        return [self._example("eval", index % self._sizes["eval"][1]) for index in range(count)]

    def decode(self, token_ids: list[int]) -> str:
        return self.chat.decode(token_ids)

    def _check(self) -> None:
        import reasoning_gym

        if self.name not in (known := reasoning_gym.factory.DATASETS):
            raise ConfigError(f"task.name is {self.name!r}; reasoning_gym has {', '.join(sorted(known))}")
        try:
            for seed, size in self._sizes.values():
                _problems(self.name, seed, size, **self._more)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"task.arguments do not fit reasoning_gym's {self.name}: {error}") from error

    def _example(self, split: str, index: int) -> Example:
        seed, size = self._sizes[split]
        entry = _problems(self.name, seed, size, **self._more)[index]
        text, ids = self.chat.prompt(entry["question"], self._system)
        if len(ids) > self._room:
            raise ConfigError(
                f"{self.name}, problem {index}: the prompt has {len(ids)} tokens, and {self._room} have room beside "
                "rollout.max_tokens; shorten the problems by task.arguments, or raise trainer.max_batch_tokens"
            )
        data = {
            "problem": {"name": self.name, "seed": seed, "size": size, "index": index, **self._more},
            "answer": str(entry["answer"]),
            "solved_at": self._solved_at,
        }
        return Example(id=f"{self.name}/{split}/{index}", prompt_ids=ids, prompt=text, data=data)


def reward(prompt: str, completion: str, example: Example) -> RewardResult:
    """The data set's own score of the text between the last `<answer>` and `</answer>`, or of all of it without."""
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(completion, tag_name="answer")
    problem = dict(example.data["problem"])
    index = problem.pop("index")
    problems = _problems(**problem)  # generated again, since a score may need data that are not JSON
    score = float(problems.score_answer(answer if answer is not None else completion.strip(), problems[index]))
    return RewardResult(score, score >= example.data["solved_at"], {"answered": float(answer is not None)})


@functools.lru_cache(64)
def _problems(name: str, seed: int, size: int, arguments: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(arguments))
