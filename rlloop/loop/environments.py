"""Conversations of several turns: the policy writes, an environment answers, until the environment is done.

A conversation is one sample. Its tokens are kept as ids from the first to the last: what the policy wrote as it sampled
it, what the environment said as the task renders it. The policy's tokens are compared and trained, the environment's
only read. Each turn is sampled with the whole conversation so far as its prompt (the engine's prefix cache has most of
it), so the trainer's one forward over the conversation gives the bits of every turn.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlloop.chat import Message
from rlloop.protocols import Engine, Task
from rlloop.rewards.runner import RewardFailure, RewardRunner
from rlloop.types import Completion, Example, SamplingParams


@dataclass(frozen=True)
class Reply:
    """An environment's answer to one turn of the policy."""

    messages: Sequence[Message] = ()  # at least one, unless done
    reward: float = 0.0  # of this turn; a conversation's reward is their sum
    done: bool = False
    solved: bool = False  # counts where any turn says so
    components: Mapping[str, float] = field(default_factory=dict)  # logged as reward/<name>; added over the turns


class Environment(Protocol):
    """The other side of one conversation, made anew for each by `ConversationTask.environment`.

    What it draws at random, it draws from the example, so that a resumed run repeats it. A step that raises or outlasts
    `scoring.timeout` breaks the conversation: its sample is rejected with the reason.
    """

    def step(self, message: str) -> Reply | Awaitable[Reply]:
        """`message`: what the policy wrote in this turn. All environments of a task are sync, or all async."""
        ...


class ConversationTask(Task, Protocol):
    """A task whose examples are only how a conversation begins."""

    @property
    def max_turns(self) -> int:
        """Of the policy, each of up to `rollout.max_tokens`."""
        ...

    @property
    def max_conversation_tokens(self) -> int:
        """A conversation in which another whole turn would not fit ends there."""
        ...

    def environment(self, example: Example) -> Environment: ...

    def between(self, messages: Sequence[Message], stop: int | None) -> list[int]:
        """`messages` as what stands between two turns of the policy: see `rlloop.chat.ChatTokenizer.between`."""
        ...


@dataclass(frozen=True)
class Played:
    """What came of one example."""

    example: Example  # of a conversation: with the environment's verdict in `data["episode"]`
    completion: Completion
    text: str  # everything after the prompt, decoded
    broken: str | None = None  # why it did not come to an end


def cut_short(completion: Completion) -> str:
    """Why it is rejected."""
    return f"its completion was cut short: finish_reason is {completion.finish_reason!r}"


class SingleTurn:
    """One completion an example."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def play(self, engine: Engine, examples: Sequence[Example], sampling: Sequence[SamplingParams]) -> list[Played]:
        completions = engine.generate([example.prompt_ids for example in examples], list(sampling))
        return [
            Played(example, completion, self.task.decode(completion.token_ids))
            for example, completion in zip(examples, completions, strict=True)
        ]

    def close(self) -> None:
        pass


class Conversations:
    """All conversations of a batch, turn by turn together."""

    def __init__(self, task: ConversationTask, *, timeout: float = 60.0, concurrency: int = 64) -> None:
        """`timeout` (seconds) and `concurrency` of the environments' steps, as for a reward."""
        self.task = task
        self._limits = {"timeout": timeout, "concurrency": concurrency}
        self._runner: RewardRunner | None = None

    def play(self, engine: Engine, examples: Sequence[Example], sampling: Sequence[SamplingParams]) -> list[Played]:
        talks = [
            _Talk(example, self.task.environment(example), params, example.prompt_ids)
            for example, params in zip(examples, sampling, strict=True)
        ]
        going = talks
        while going:
            turns = engine.generate([talk.ids for talk in going], [talk.sampling for talk in going])
            for talk, turn in zip(going, turns, strict=True):
                talk.hear(turn)
            going = [talk for talk in going if talk.broken is None]
            if not going:
                break
            spoken = [(talk.environment, self.task.decode(talk.turns[-1].token_ids)) for talk in going]
            going = [
                talk
                for talk, reply in zip(going, self._runner_for(going[0]).score(spoken), strict=True)
                if self._goes_on(talk, reply)
            ]
        return [talk.played(self.task.decode(talk.ids[len(talk.example.prompt_ids) :])) for talk in talks]

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()

    def _goes_on(self, talk: _Talk, reply: Reply | RewardFailure) -> bool:
        """Take the reply into the conversation; whether the policy is to write another turn."""
        if isinstance(reply, RewardFailure):
            talk.broken = f"environment {reply.kind}: {reply.message}"
            return False
        talk.replies.append(reply)
        if reply.done or len(talk.turns) == self.task.max_turns:
            return False
        last = talk.turns[-1]
        ids = self.task.between(reply.messages, last.token_ids[-1] if last.finish_reason == "stop" else None)
        assert ids, "nothing stands between two turns, so they would be one"
        if len(talk.ids) + len(ids) + talk.sampling.max_tokens > self.task.max_conversation_tokens:
            return False
        talk.ids = [*talk.ids, *ids]
        return True

    def _runner_for(self, talk: _Talk) -> RewardRunner:
        if self._runner is None:
            step = _step_async if inspect.iscoroutinefunction(talk.environment.step) else _step
            self._runner = RewardRunner(step, accept=as_reply, **self._limits)
        return self._runner


@dataclass
class _Talk:
    """One conversation on its way."""

    example: Example
    environment: Environment
    sampling: SamplingParams  # the same seed for all turns: a token is drawn by the seed and its position
    ids: list[int]  # the conversation so far
    turns: list[Completion] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    broken: str | None = None

    def hear(self, turn: Completion) -> None:
        self.broken = None if turn.whole else cut_short(turn)  # no environment is to answer half a turn
        self.turns.append(turn)
        self.ids = [*turn.prompt_ids, *turn.token_ids]

    def played(self, text: str) -> Played:
        first, begin = self.turns[0], len(self.example.prompt_ids)
        assert all(turn.policy_version == first.policy_version for turn in self.turns), "weights changed in between"
        ended = bool(self.replies) and self.replies[-1].done
        completion = dataclasses.replace(
            first,
            token_ids=self.ids[begin:],
            logprobs=np.concatenate([turn.logprobs for turn in self.turns]),
            raw_logprobs=np.concatenate([turn.raw_logprobs for turn in self.turns]),
            routed_experts=_as_first_read([turn.routed_experts for turn in self.turns]),
            selected=_as_first_read([turn.selected for turn in self.turns]),
            finish_reason="abort" if self.broken else "stop" if ended else "length",
            turns=tuple(
                (len(turn.prompt_ids) - begin, len(turn.prompt_ids) - begin + len(turn.token_ids))
                for turn in self.turns
            ),
        )
        components: dict[str, float] = {}
        for reply in self.replies:
            for name, value in reply.components.items():
                components[name] = components.get(name, 0.0) + float(value)
        episode = {
            "reward": float(sum(reply.reward for reply in self.replies)),
            "solved": any(reply.solved for reply in self.replies),
            "components": components,
            "turns": len(self.turns),
        }
        example = dataclasses.replace(self.example, data={**self.example.data, "episode": episode})
        return Played(example, completion, text, self.broken)


def _as_first_read(turns: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Each turn's array [tokens, ...] begins with what earlier turns had read already. What counts is the choice that a
    token was first read with, since what followed was sampled over it; read again, a stock engine may choose otherwise.
    """
    parts, known = list[np.ndarray](), 0
    for each in turns:
        if each is None:
            return None
        parts.append(each[known:])
        known = len(each)
    return np.concatenate(parts)


def player_for(task: Task, *, timeout: float, concurrency: int) -> SingleTurn | Conversations:
    """Conversations where the task has an environment, else single completions."""
    if getattr(task, "environment", None) is None:
        return SingleTurn(task)
    return Conversations(task, timeout=timeout, concurrency=concurrency)  # pyright: ignore[reportArgumentType]


def as_reply(value: Any) -> Reply | RewardFailure:
    if not isinstance(value, Reply):
        return RewardFailure("invalid", f"step returned {value!r:.80}; it must return a Reply")
    if not value.done and not value.messages:
        return RewardFailure("invalid", "step returned no messages and was not done; the policy has nothing to answer")
    if not all(map(math.isfinite, [value.reward, *value.components.values()])):
        return RewardFailure("invalid", f"step returned a number that is not finite: {value!r:.80}")
    return value


def _step(environment: Environment, message: str) -> Any:
    return environment.step(message)


async def _step_async(environment: Environment, message: str) -> Any:
    step = environment.step(message)
    assert isinstance(step, Awaitable)
    return await step
