"""The user's own task: prompts from data, through the model's own tokenizer and chat template."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlloop.chat import ChatTokenizer, Template
from rlloop.config.instantiate import bind
from rlloop.errors import ConfigError
from rlloop.loop.environments import Environment, Message
from rlloop.types import Example

from .data import DataSection, Row, Rows, is_messages, read_rows, row_id


def environment_factory(config: Mapping[str, Any]) -> Callable[[Example], Environment]:
    """The function or class that `config` names, called with an example. Raises `ConfigError` for what does not fit."""
    return bind(config, "task.environment", ("example",))


class Custom:
    """Rows of data as examples: each prompt once an epoch, in an order of the seed and the epoch.

    All rows are read, rendered and measured at construction, so that one that cannot work stops the run before it
    starts. A row's fields are its example's `data`, for the reward.
    """

    def __init__(
        self,
        seed: int,
        model_path: str | None,
        *,
        data: Mapping[str, Any],
        max_tokens: int,
        max_sequence_tokens: int,
        template: Template = "auto",
        template_args: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        max_turns: int = 8,
    ) -> None:
        """`max_tokens` of a completion and `max_sequence_tokens` of it and its prompt are the run's; prompts must fit.

        `environment`: `_target_`, called with the example and its other keys, makes a conversation
        (`rlloop.loop.environments.Environment`); None or empty: single completions.

        Raises `ConfigError`.
        """
        from rlloop.models.config import read_config  # imports torch

        if model_path is None:
            raise ConfigError("model.path must be given: a Hugging Face folder with a tokenizer")
        self.seed = seed
        self.path = Path(model_path)
        self.data = DataSection.of(data)
        if max_turns < 1:
            raise ConfigError(f"task.max_turns is {max_turns}; it must be at least 1")
        self.environment = environment_factory(environment) if environment else None
        config = read_config(self.path)
        self.max_turns = max_turns
        self.max_conversation_tokens = min(config.max_positions, max_sequence_tokens)
        self._vocabulary = config.vocab_size
        self._room = min(config.max_positions, max_sequence_tokens) - max_tokens
        self._room_is = (
            f"the model's {config.max_positions} positions and trainer.max_batch_tokens={max_sequence_tokens} leave, "
            f"less rollout.max_tokens={max_tokens}"
        )
        rows, held_out = read_rows(self.data)
        self.chat = ChatTokenizer(
            self.path, template=template, arguments=template_args, eos_token_ids=config.eos_token_ids
        )
        self._training = self._examples(rows, self.data.path)
        self._held_out = self._examples(held_out, self.data.eval_path or self.data.path)

    def model_folder(self) -> Path:
        return self.path

    def train_examples(self, step: int, count: int) -> list[Example]:
        """The next `count` of an endless row of epochs: a function of (seed, step)."""
        size = len(self._training)
        first = (step - 1) * count
        orders = {
            epoch: np.random.default_rng((self.seed, epoch)).permutation(size)
            for epoch in range(first // size, (first + count - 1) // size + 1)
        }
        return [self._training[orders[at // size][at % size]] for at in range(first, first + count)]

    def eval_examples(self, count: int) -> list[Example]:
        """The first `count` held-out rows, over and over."""
        return [self._held_out[index % len(self._held_out)] for index in range(count)]

    def decode(self, token_ids: list[int]) -> str:
        return self.chat.decode(token_ids)

    def between(self, messages: Sequence[Message], stop: int | None) -> list[int]:
        return self.chat.between(messages, stop)

    def _examples(self, rows: Rows, source: str) -> list[Example]:
        """Raises `ConfigError` naming the first row that cannot work."""
        limit = min(self.data.max_prompt_tokens, self._room)
        if limit < 1:
            raise ConfigError(f"no prompt has room: {self._room} tokens are what {self._room_is}")
        examples, dropped = [], 0
        for number, row in rows:
            where = f"{source}, row {number}"
            example = self._example(row, where)
            length = len(example.prompt_ids)
            if not length:
                raise ConfigError(f"{where}: the prompt has no tokens")
            if (largest := max(example.prompt_ids)) >= self._vocabulary:
                raise ConfigError(
                    f"{where}: its tokenizer gives the id {largest}, and the model has {self._vocabulary} tokens; "
                    f"the tokenizer in {self.path} is another model's"
                )
            if length > limit and self.data.overlong == "error":
                reason = "data.max_prompt_tokens" if limit == self.data.max_prompt_tokens else self._room_is
                raise ConfigError(
                    f"{where}: the prompt has {length} tokens, more than {limit} ({reason}); "
                    "raise the limit, shorten the row, or leave such rows out with data.overlong=drop"
                )
            if length > limit:
                dropped += 1
            else:
                examples.append(example)
        if dropped:
            print(f"{source}: left out {dropped} of {len(rows)} rows, longer than {limit} tokens", file=sys.stderr)
        if not examples:
            raise ConfigError(f"{source}: all of its {len(rows)} prompts are longer than {limit} tokens")
        return examples

    def _example(self, row: Row, where: str) -> Example:
        data = self.data
        content = row[data.prompt_key]
        if not isinstance(content, str) and not is_messages(content):
            raise ConfigError(
                f"{where}: {data.prompt_key} is {content!r:.80}; it must be a string, or a list of messages with role "
                "and content"
            )
        if not isinstance(content, str) and content[-1]["role"] == "assistant":
            raise ConfigError(f"{where}: the last message is the assistant's, and it is the policy's turn to write")
        rendered, ids = self.chat.prompt(cast("str | list[Any]", content), data.system)
        text = content if isinstance(content, str) else rendered
        return Example(id=row_id(row, data.id_key), prompt_ids=ids, prompt=text, data=row)
