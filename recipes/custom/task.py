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
from rlloop.loop.environments import Environment, Message, opening_of
from rlloop.types import Example

from .data import DataSection, Problems, Row, RowProblem, Rows, is_messages, read_rows, row_id
from .mixture import Curriculum, Mixture, Source, weights_of
from .streaming import OnDemand

OVERLONG = "too long"


def environment_factory(config: Mapping[str, Any]) -> Callable[[Example], Environment]:
    """The function or class that `config` names, called with an example. Raises `ConfigError` for what does not fit."""
    return bind(config, "task.environment", ("example",))


class Custom:
    """Rows of data as examples: each prompt once an epoch, in an order of the seed and the epoch; several sources by
    weight, or from easy to hard (`rlloop.recipes.custom.mixture`).

    All rows are read, rendered and measured at construction, so that those that cannot work are listed before the run
    starts. A row's fields are its example's `data`, for the reward. With `data.streaming` rows stay on the disk.
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
        sections = DataSection.several(data)
        if max_turns < 1:
            raise ConfigError(f"task.max_turns is {max_turns}; it must be at least 1")
        self.environment = environment_factory(environment) if environment else None
        self._opening = opening_of(self.environment)
        config = read_config(self.path)
        self.max_turns = max_turns
        self.max_conversation_tokens = min(config.max_positions, max_sequence_tokens)
        self._vocabulary = config.vocab_size
        self._room = self.max_conversation_tokens - max_tokens
        if self._room < 1:
            bound = f"trainer.max_batch_tokens={max_sequence_tokens}"
            if config.max_positions <= max_sequence_tokens:
                bound = f"the model's {config.max_positions} positions"
            raise ConfigError(f"rollout.max_tokens={max_tokens} leaves no room for a prompt in {bound}; lower it")
        self._room_is = (
            f"the model's {config.max_positions} positions and trainer.max_batch_tokens={max_sequence_tokens} leave, "
            f"less rollout.max_tokens={max_tokens}"
        )
        self.chat = ChatTokenizer(
            self.path, template=template, arguments=template_args, eos_token_ids=config.eos_token_ids
        )
        self._training, sources, held_out = list[Sequence[Example]](), list[Source](), list[Sequence[Example]]()
        for name, section in sections.items():
            rows, kept = read_rows(section)
            self._training.append(self._examples(name, section, rows, section.path))
            held_out.append(self._examples(name, section, kept, section.eval_path or section.path))
            weight = (data.get("mix") or {}).get(name, {}).get("weight", 1.0)
            sources.append(_source(name, section, self._training[-1], weights_of(name, weight)))
        self._mixture = Mixture(seed, sources)
        self._held_out = held_out

    def model_folder(self) -> Path:
        return self.path

    def train_examples(self, step: int, count: int) -> list[Example]:
        """The next `count` of an endless row of epochs: a function of (seed, step)."""
        return [self._training[source][row] for source, row in self._mixture.draw(step, count)]

    def eval_examples(self, count: int) -> list[Example]:
        """The first `count` held-out rows, over and over; of several sources in turn."""
        sources = len(self._held_out)
        turns = (divmod(index, sources) for index in range(count))
        return [self._held_out[source][at % len(self._held_out[source])] for at, source in turns]

    def decode(self, token_ids: list[int]) -> str:
        return self.chat.decode(token_ids)

    def between(self, messages: Sequence[Message], stop: int | None) -> list[int]:
        return self.chat.between(messages, stop)

    def _examples(self, name: str, data: DataSection, rows: Rows, source: str) -> Sequence[Example]:
        """Raises `ConfigError` listing the rows that cannot work."""
        limit = min(data.max_prompt_tokens, self._room)
        problems, kept, examples = Problems(source), list[int](), list[Example]()
        for index, (number, row) in enumerate(rows):
            try:
                example = self._example(name, data, row)
                self._check(data, example, limit)
            except RowProblem as problem:
                if problem.kind != OVERLONG or data.overlong == "error":
                    problems.add(number, problem)
                continue
            kept.append(index)
            if not data.streaming:
                examples.append(example)
        problems.raise_any(len(rows))
        if dropped := len(rows) - len(kept):
            print(f"{source}: left out {dropped} of {len(rows)} rows, longer than {limit} tokens", file=sys.stderr)
        if not kept:
            raise ConfigError(f"{source}: all of its {len(rows)} prompts are longer than {limit} tokens")
        if not data.streaming:
            return examples
        return OnDemand(rows, np.array(kept, np.int64), lambda numbered: self._example(name, data, numbered[1]))

    def _check(self, data: DataSection, example: Example, limit: int) -> None:
        """Raises `RowProblem`."""
        length = len(example.prompt_ids)
        if not length:
            raise RowProblem("empty prompt", ": the prompt has no tokens")
        if (largest := max(example.prompt_ids)) >= self._vocabulary:
            raise RowProblem(
                "tokens that the model does not have",
                f": its tokenizer gives the id {largest}, and the model has {self._vocabulary} tokens; the tokenizer "
                f"in {self.path} is another model's",
            )
        if length > limit:
            by_key = limit == data.max_prompt_tokens
            reason, remedy = (
                ("data.max_prompt_tokens", "raise it") if by_key else (self._room_is, "lower rollout.max_tokens")
            )
            raise RowProblem(
                OVERLONG,
                f": the prompt has {length} tokens, more than {limit} ({reason}); {remedy}, shorten the row, or "
                "leave such rows out with data.overlong=drop",
            )

    def _example(self, name: str, data: DataSection, row: Row) -> Example:
        """Raises `RowProblem`. `name`: of the row's source, where there are several."""
        content = row[data.prompt_key]
        if not isinstance(content, str) and not is_messages(content):
            raise RowProblem(
                f"{data.prompt_key} that is neither text nor messages",
                f": {data.prompt_key} is {content!r:.80}; it must be a string, or a list of messages with role and "
                "content",
            )
        if not (content if isinstance(content, str) else content[-1]["content"]):
            raise RowProblem("empty prompt", f": {data.prompt_key} is empty")
        if not isinstance(content, str) and content[-1]["role"] == "assistant":
            raise RowProblem(
                "a last message of the assistant's",
                ": the last message is the assistant's, and it is the policy's turn to write",
            )
        id = row_id(row, data.id_key)
        id, tools = f"{name}/{id}" if name else id, ()
        if self._opening is not None:
            opening = self._opening(Example(id, [], content if isinstance(content, str) else "", row))
            content, tools = _opened(content, opening.observation), opening.tools
        rendered, ids = self.chat.prompt(cast("str | list[Any]", content), data.system, tools)
        text = content if isinstance(content, str) else rendered
        return Example(id=id, prompt_ids=ids, prompt=text, data=row)


def _opened(content: Any, observation: str | None) -> Any:
    """A prompt with what its environment observes first."""
    if observation is None:
        return content
    if isinstance(content, str):
        return content + observation
    *before, last = content
    return [*before, {**last, "content": last["content"] + observation}]


def _source(name: str, data: DataSection, examples: Sequence[Example], weights: list[tuple[int, float]]) -> Source:
    """Raises `ConfigError` for rows whose difficulty is no number."""
    if data.curriculum is None:
        return Source(name, len(examples), weights)
    curriculum = Curriculum.of(data.curriculum)
    levels = [example.data.get(curriculum.key) for example in examples]
    wrong = [at for at, level in enumerate(levels) if isinstance(level, bool) or not isinstance(level, int | float)]
    if wrong:
        raise ConfigError(
            f"{data.path}: {len(wrong)} of {len(levels)} rows have no number under {curriculum.key!r} "
            f"(data.curriculum.key), the first {examples[wrong[0]].id}: {levels[wrong[0]]!r:.40}"
        )
    return Source(name, len(examples), weights, curriculum, np.argsort(np.array(levels, float), kind="stable"))
