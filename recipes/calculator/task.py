"""Arithmetic with tools: the policy calls `add`, `subtract` and `multiply`, one turn each, then writes the answer.

    user        calculate 3 + 4 * 5
    assistant   <tool_call> {"name": "multiply", "arguments": {"a": 4 , "b": 5 }} </tool_call>
    tool        20
    assistant   <tool_call> {"name": "add", "arguments": {"a": 3 , "b": 20 }} </tool_call>
    tool        23
    assistant   answer 23

The prompt gives no hint of precedence or of the tools: a few demonstrations do, and reinforcement learns the rest.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.chat import ChatTokenizer
from rlloop.errors import ConfigError
from rlloop.loop.environments import Message, Reply
from rlloop.rollout.fleet.chat_parsing import ToolCall, parse
from rlloop.types import Example

LARGEST = 40  # the largest number with a token
OPERANDS = range(1, 10)
TOOLS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
}  # fmt: skip
SIGNS = {"+": "add", "-": "subtract", "*": "multiply"}
WORDS = [
    "calculate", "answer", "error", *SIGNS,
    "<tool_call>", "</tool_call>", '{"name":', *(f'"{name}",' for name in TOOLS),
    '"arguments":', '{"a":', ",", '"b":', "}}", *map(str, range(LARGEST + 1)),
]  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """a op b op c, the product first. No number on the way is negative or above `LARGEST`."""

    text: str
    calls: tuple[tuple[str, int, int], ...]  # (tool, a, b): a right way to the answer
    answer: int

    @property
    def held_out(self) -> bool:
        """True for a tenth of all problems, by a hash of the text."""
        return int.from_bytes(blake2b(self.text.encode(), digest_size=4).digest(), "little") % 10 == 0


@functools.cache
def problems() -> tuple[Problem, ...]:
    accepted = []
    for a, b, c in ((a, b, c) for a in OPERANDS for b in OPERANDS for c in OPERANDS):
        for left, right in ((left, right) for left in SIGNS for right in SIGNS):
            if right == "*" and left != "*":
                inner = TOOLS[SIGNS[right]](b, c)
                calls = (SIGNS[right], b, c), (SIGNS[left], a, inner)
            else:
                inner = TOOLS[SIGNS[left]](a, b)
                calls = (SIGNS[left], a, b), (SIGNS[right], inner, c)
            name, x, y = calls[1]
            answer = TOOLS[name](x, y)
            if min(inner, answer) >= 0 and max(inner, answer) <= LARGEST:
                accepted.append(Problem(f"calculate {a} {left} {b} {right} {c}", calls, answer))
    return tuple(accepted)


class Calculator:
    """Runs the calls of a turn; a turn without a call is the answer.

    Rewards by turn: -0.1 for a turn with a call that fails, 1 for the right answer. Calling a tool earns nothing.
    """

    def __init__(self, example: Example) -> None:
        self._answer = example.data["answer"]

    def step(self, message: str) -> Reply:
        calls = parse(message, tools=True, reasoning=False).calls
        if not calls:
            right = message.split() == ["answer", str(self._answer)]
            return Reply(reward=float(right), done=True, solved=right, components={"tool_errors": 0.0})
        results = [self._result(call) for call in calls]
        errors = results.count("error")
        messages = [
            {"role": "tool", "name": call.name, "arguments": call.arguments, "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        return Reply(messages, reward=-0.1 * (errors > 0), components={"tool_errors": float(errors)})

    def _result(self, call: ToolCall) -> str:
        try:
            arguments = json.loads(call.arguments)
            result = TOOLS[call.name](int(arguments["a"]), int(arguments["b"]))
        except (KeyError, TypeError, ValueError):
            return "error"
        return str(result) if 0 <= result <= LARGEST else "error"


class Calculate:
    """Problems of three numbers and two signs; a tenth of them is held out.

    Without a `model_path`: a small Qwen3 that has seen `demonstrations` of them for `warm_steps` updates, made once and
    cached.
    """

    environment = Calculator  # made anew for each conversation

    def __init__(
        self,
        seed: int,
        model_path: str | None = None,
        *,
        demonstrations: int = 1000,
        warm_steps: int = 150,
        max_turns: int = 4,
        max_conversation_tokens: int = 512,
    ) -> None:
        for name, value in (("demonstrations", demonstrations), ("warm_steps", warm_steps), ("max_turns", max_turns)):
            if value < 1:
                raise ConfigError(f"task.{name} is {value}; it must be at least 1")
        self.seed, self.max_turns, self.max_conversation_tokens = seed, max_turns, max_conversation_tokens
        self._warm = demonstrations, warm_steps
        self._given = None if model_path is None else Path(model_path)
        self._training = [each for each in problems() if not each.held_out]
        held_out = [each for each in problems() if each.held_out]
        self._held_out = [held_out[i] for i in np.random.default_rng(0).permutation(len(held_out))]

    def model_folder(self) -> Path:
        if self._given is not None:
            return self._given
        from .warm_start import warm_started  # imports torch

        return warm_started(*self._warm)

    def model_config(self) -> Mapping[str, Any]:
        from ..custom.tiny import tiny_config
        from .warm_start import LAYERS  # imports torch

        return tiny_config(WORDS, num_layers=LAYERS)

    def train_examples(self, step: int, count: int) -> list[Example]:
        chosen = np.random.default_rng((self.seed, step)).choice(len(self._training), count, replace=False)
        return [self._example(self._training[index]) for index in chosen]

    def eval_examples(self, count: int) -> list[Example]:
        return [self._example(self._held_out[index % len(self._held_out)]) for index in range(count)]

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

    def _example(self, problem: Problem) -> Example:
        text, ids = self._chat.prompt(problem.text)
        return Example(id=problem.text, prompt_ids=ids, prompt=text, data={"answer": problem.answer})
