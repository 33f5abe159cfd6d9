"""Given completions as a task: demonstrations to imitate, preferences to learn. Nothing of them is sampled.

The engine scores the given tokens, the trainer computes them again, and the two are compared as for samples: to the
bit. Held-out prompts are sampled, so that an evaluation tells what the policy does with what it learned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from rlloop.chat import ChatTokenizer, Template
from rlloop.errors import ConfigError
from rlloop.loop.conversations import Played, SingleTurn
from rlloop.parity.asked import Vocabulary
from rlloop.protocols import Engine
from rlloop.tasks.epochs import in_epochs
from rlloop.types import Completion, Example, RewardResult, SamplingParams

from ..custom.data import DataSection, Row, is_messages, read_rows, row_id

Kind = Literal["demonstrations", "preferences", "verdicts"]
FIELDS: dict[str, tuple[str, ...]] = {
    "demonstrations": ("completion",), "preferences": ("chosen", "rejected"),
    "verdicts": ("chosen", "rejected"),
}  # fmt: skip


class Given:
    """Rows of data with completions, each once an epoch in an order of the seed.

    demonstrations: `prompt` and `completion`; or `messages`, all of whose assistant turns are trained, with a mask over
    everything else. preferences: `prompt`, `chosen`, `rejected`; of a group's two samples the first is the chosen one.
    verdicts: likewise, and only a verdict token after each completion is predicted, as for a reward model.
    """

    gives_completions = True  # to rlloop verify: neither rollout.max_tokens nor a stop token bounds those

    def __init__(
        self,
        seed: int,
        model_path: str | None,
        *,
        kind: Kind,
        data: Mapping[str, Any],
        max_tokens: int,
        max_sequence_tokens: int,
        group_size: int,
        template: Template = "auto",
        verdict: str | None = None,
    ) -> None:
        """`verdict`: the text whose first token is a completion's verdict; None: the end-of-sequence token.

        Raises `ConfigError` for rows that lack a field or do not fit, before anything starts.
        """
        from rlloop.models.config import read_config  # imports torch

        if model_path is None:
            raise ConfigError("model.path must be given: a Hugging Face folder with a tokenizer")
        if group_size != (size := 1 if kind == "demonstrations" else 2):
            raise ConfigError(f"rollout.group_size is {group_size}; with task.kind={kind} it must be {size}")
        self.seed, self.kind, self.path = seed, kind, Path(model_path)
        config = read_config(self.path)
        if not config.eos_token_ids:
            raise ConfigError(f"{self.path} has no end-of-sequence token, with which a given completion ends")
        self.chat = ChatTokenizer(self.path, template=template, eos_token_ids=config.eos_token_ids)
        ids = [config.eos_token_ids[0]] if verdict is None else self.chat.ids(verdict)
        self._end, self._verdict = self.chat.closing(config.eos_token_ids), ids[0]
        self._longest, self._room = min(config.max_positions, max_sequence_tokens), max_tokens
        section = DataSection.of({**data, "prompt_key": self._prompt_key(data)})
        rows, held_out = read_rows(section)
        self._training = [self._example(section, row, f"{section.path}, row {number}", True) for number, row in rows]
        source = section.eval_path or section.path
        self._held_out = [self._example(section, row, f"{source}, row {number}", False) for number, row in held_out]

    @property
    def gives_pairs(self) -> bool:
        """To rlloop train: losses of pairs may learn from it."""
        return self.kind != "demonstrations"

    def model_folder(self) -> Path:
        return self.path

    def train_examples(self, step: int, count: int) -> list[Example]:
        return [self._training[index] for index in in_epochs(self.seed, len(self._training), step, count)]

    def eval_examples(self, count: int) -> list[Example]:
        return [self._held_out[index % len(self._held_out)] for index in range(count)]

    def decode(self, token_ids: list[int]) -> str:
        return self.chat.decode(token_ids)

    def player(self, vocabulary: Vocabulary, *, timeout: float, concurrency: int) -> GivenPlayer:
        return GivenPlayer(self, vocabulary)

    def _prompt_key(self, data: Mapping[str, Any]) -> str:
        return str(data.get("prompt_key", "prompt"))

    def _example(self, section: DataSection, row: Row, where: str, training: bool) -> Example:
        """Raises `ConfigError` naming the row."""
        content = row[section.prompt_key]
        if is_messages(content) and content[-1]["role"] == "assistant" and self.kind == "demonstrations":
            return self._talk(row_id(row, section.id_key), list(content), section.system, where, training)
        if not isinstance(content, str) and not is_messages(content):
            raise ConfigError(f"{where}: {section.prompt_key} is {content!r:.60}; it must be text or messages")
        text, ids = self.chat.prompt(cast("str | list[Any]", content), section.system)
        completions: dict[str, Any] = {}
        for name in FIELDS[self.kind]:
            if name not in row:
                raise ConfigError(f"{where} has no field {name!r}; it has {', '.join(map(str, row))}{self._other(row)}")
            answer = row[name]
            if not isinstance(answer, str) or not answer:
                raise ConfigError(f"{where}: {name} is {answer!r:.60}; it must be text, for task.kind={self.kind}")
            tokens = [*self.chat.ids(answer), self._end]
            completions[name] = {"ids": tokens, "turns": [[0, len(tokens)]]}
            if self.kind == "verdicts":
                completions[name] = {"ids": [*tokens, self._verdict], "turns": [[len(tokens), len(tokens) + 1]]}
            self._check_room(len(ids) + len(completions[name]["ids"]), where)
        answer = row[FIELDS[self.kind][0]]
        data: dict[str, Any] = {"answer": answer, "given": completions} if training else {"answer": answer}
        if not training and self.kind == "verdicts":
            data["compared"] = completions
        return Example(row_id(row, section.id_key), ids, text if not isinstance(content, str) else content, data)

    def _other(self, row: Row) -> str:
        """The recipe for which the row has the fields, as a sentence; empty if there is none."""
        if self.kind == "demonstrations":
            return ". For pairs use --config-name offline/preferences" if row.keys() >= {"chosen", "rejected"} else ""
        return ". For demonstrations use --config-name offline" if "completion" in row else ""

    def _talk(self, id: str, messages: list[Any], system: str | None, where: str, training: bool) -> Example:
        """A conversation: its prompt is what stands before the first assistant turn, and every such turn is trained."""
        first = next(at for at, each in enumerate(messages) if each["role"] == "assistant")
        text, ids = self.chat.prompt(messages[:first], system)
        tokens: list[int] = []
        turns: list[list[int]] = []
        between: list[Any] = []
        for message in messages[first:]:
            if message["role"] != "assistant":
                between.append(message)
                continue
            if turns and not between:
                raise ConfigError(f"{where}: two assistant messages follow each other; join them")
            if between:
                tokens += self.chat.between(between, self._end)
                between = []
            written = [*self.chat.ids(str(message["content"])), self._end]
            turns.append([len(tokens), len(tokens) + len(written)])
            tokens += written
        self._check_room(len(ids) + len(tokens), where)
        data: dict[str, Any] = {"answer": str(messages[first]["content"])}
        if training:
            data["given"] = {"completion": {"ids": tokens, "turns": turns}}
        return Example(id, ids, text, data)

    def _check_room(self, length: int, where: str) -> None:
        if length > self._longest:
            raise ConfigError(
                f"{where} has {length} tokens with its prompt, and {self._longest} have room "
                "(trainer.max_batch_tokens, the model's positions); shorten it, or leave it out"
            )


class GivenPlayer:
    """Scores given completions; samples those of examples without any."""

    def __init__(self, task: Given, vocabulary: Vocabulary) -> None:
        self.task, self._sampled = task, SingleTurn(task, vocabulary)

    def play(self, engine: Engine, examples: Sequence[Example], sampling: Sequence[SamplingParams]) -> list[Played]:
        has_completions = bool(examples) and not {"given", "compared"}.isdisjoint(examples[0].data)
        if not has_completions:
            return self._sampled.play(engine, examples, sampling)
        score = getattr(engine, "score", None)
        if score is None:
            raise ConfigError(
                "given completions are scored by the engine in the trainer's process: set launch=local, fleet=node and "
                "rollout.engine=embedded"
            )
        names, seen = FIELDS[self.task.kind], Counter[str]()
        played = []
        for example, params in zip(examples, sampling, strict=True):
            if "compared" in example.data:
                played.append(self._compared(score, engine.policy_version, example, params))
                continue
            index = seen[example.id] % len(names)
            seen[example.id] += 1
            played.append(self._scored(score, engine.policy_version, example, names[index], params))
        return played

    def close(self) -> None:
        pass

    def _compared(self, score: Any, version: int, example: Example, params: SamplingParams) -> Played:
        """The chosen completion of a held-out pair, solved where its verdict is the likelier one."""
        chosen, rejected = (
            self._scored(score, version, example, name, params, "compared") for name in ("chosen", "rejected")
        )
        margin = float(chosen.completion.logprobs.sum() - rejected.completion.logprobs.sum())
        verdict = {"reward": margin, "solved": margin > 0, "components": {"margin": margin}, "turns": 1}
        data = {**example.data, "episode": verdict}
        return Played(Example(example.id, example.prompt_ids, example.prompt, data), chosen.completion, chosen.text)

    def _scored(
        self, score: Any, version: int, example: Example, name: str, params: SamplingParams, key: str = "given"
    ) -> Played:
        recorded = example.data[key][name]
        ids, turns = list(recorded["ids"]), tuple((start, end) for start, end in recorded["turns"])
        logprobs = score([*example.prompt_ids, *ids]).logprobs  # of all tokens but the first
        written = np.array([index for start, end in turns for index in range(start, end)])
        values = logprobs[len(example.prompt_ids) - 1 + written]
        total = float(values.sum())
        good = name != "rejected"
        verdict = {"reward": 1.0 if good else -1.0, "solved": good, "components": {"logprob": total}, "turns": 1}
        example = Example(example.id, example.prompt_ids, example.prompt, {**example.data, "episode": verdict})
        completion = Completion(example.prompt_ids, ids, values, values, version, "stop", params, turns=turns)
        return Played(example, completion, self.task.decode(ids))


def verdict(prompt: str, completion: str, example: Example) -> RewardResult:
    """Of a given completion: 1, of a rejected one −1. Of a sampled one: whether it is the held-out row's answer."""
    episode = example.data.get("episode")
    if episode is not None:
        return RewardResult(episode["reward"], episode["solved"], episode["components"])
    right = completion.strip() == example.data["answer"].strip()
    return RewardResult(float(right), right)
