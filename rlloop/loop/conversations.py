"""Completions of a batch of examples: single ones, or conversations with environments.

A conversation is one sample. Its tokens are kept as ids from the first to the last: the policy's as it sampled them,
the environment's as the task renders them. The policy's tokens are compared and trained, the environment's only read.
Each turn is sampled with the whole conversation so far as its prompt (the engine's prefix cache has most of it), so the
trainer's one forward over the conversation gives the bits of every turn.

Each conversation advances on its own: as soon as its environment has replied, its next turn is submitted to the engine,
whatever the others wait for. A completion is a function of weights, prompt and seed, so the order in which turns end
changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from rlloop.chat import Message
from rlloop.loop.environments import ConversationTask, Environment, EnvironmentSteps, Reply
from rlloop.loop.turns import Turns, turns_of
from rlloop.parity.asked import Vocabulary, fault_of
from rlloop.protocols import Engine, Task
from rlloop.rewards.event_loop import POLL
from rlloop.rewards.runner import RewardFailure
from rlloop.types import Completion, Example, FinishReason, SamplingParams


@dataclass(frozen=True)
class Played:
    """The completion of one example."""

    example: Example  # of a conversation: with the environment's verdict in `data["episode"]`
    completion: Completion
    text: str  # everything after the prompt, decoded
    broken: str | None = None  # why it did not come to an end
    fault: str | None = None  # in what it is not what the engine was asked for


def cut_short(completion: Completion) -> str:
    """The reason for rejecting a completion that did not come to its own end."""
    return f"its completion was cut short: finish_reason is {completion.finish_reason!r}"


class SingleTurn:
    """One completion for each example."""

    def __init__(self, task: Task, vocabulary: Vocabulary) -> None:
        self.task, self.vocabulary = task, vocabulary

    def play(self, engine: Engine, examples: Sequence[Example], sampling: Sequence[SamplingParams]) -> list[Played]:
        completions = engine.generate([example.prompt_ids for example in examples], list(sampling))
        return [
            Played(
                example,
                completion,
                self.task.decode(completion.token_ids),
                fault=fault(completion, example.prompt_ids, params, self.vocabulary),
            )
            for example, params, completion in zip(examples, sampling, completions, strict=True)
        ]

    def close(self) -> None:
        pass


class Conversations:
    """Conversations of several turns: the policy writes, an environment replies, until it is done."""

    def __init__(
        self,
        task: ConversationTask,
        vocabulary: Vocabulary,
        *,
        timeout: float = 60.0,
        concurrency: int = 64,
        retries: int = 0,
    ) -> None:
        """`timeout` (seconds), `concurrency` and `retries` of the environments' steps: the section `scoring`."""
        self.task, self.vocabulary = task, vocabulary
        self._new_steps = partial(EnvironmentSteps, timeout=timeout, concurrency=concurrency, retries=retries)
        self._steps = self._new_steps()

    def play(self, engine: Engine, examples: Sequence[Example], sampling: Sequence[SamplingParams]) -> list[Played]:
        """Play one conversation for each example, to its end.

        Raises what the engine raises, with nothing left in flight.
        """
        under_way = UnderWay(self.task, self.vocabulary, self._steps)
        talks = [under_way.begin(example, params) for example, params in zip(examples, sampling, strict=True)]
        try:
            under_way.advance(engine)
        finally:
            self._steps.settle()
        return [talk.played(self.task.decode) for talk in talks]

    def under_way(self) -> UnderWay:
        """Conversations whose environments are nobody else's; to be closed."""
        return UnderWay(self.task, self.vocabulary, self._new_steps())

    def close(self) -> None:
        self._steps.close()


class UnderWay:
    """Conversations that advance while `advance` is called, and may outlive the weights that they began with.

    Between two calls their environments go on; whoever would write next waits. So each turn is of one version.
    """

    version: int | None = None  # that turns must be of; None: any

    def __init__(self, task: ConversationTask, vocabulary: Vocabulary, steps: EnvironmentSteps) -> None:
        self.task, self.vocabulary, self._steps = task, vocabulary, steps
        self._ready: SimpleQueue[Iterator[Future[Any]]] = SimpleQueue()
        self._turns: Turns | None = None
        self._closed: Future[None] | None = None  # while no further turns go to the engine: done once they do again
        self._going = self._at_engine = 0

    def begin(self, example: Example, sampling: SamplingParams) -> Talk:
        talk = Talk(example, self.task.environment(example), sampling, example.prompt_ids, self.version)
        self._ready.put(self._converse(talk))
        self._going += 1
        return talk

    def advance(self, engine: Engine, enough: Callable[[], bool] = lambda: False) -> None:
        """Play to the end of all conversations, or until there are `enough`: then turns end that the engine has.

        This thread drives the engine where that needs it (`Turns.work`), and advances each conversation whose turn or
        reply is there.
        """
        turns, steps, ready = turns_of(engine), self._steps, self._ready
        self._turns, advanced = turns, time.monotonic()
        self._hold(enough())
        try:
            while self._at_engine or (self._going and self._closed is None):
                if turns.has_work:  # environments that are quick join the next batch
                    patience = max(0.0, advanced + turns.linger - time.monotonic()) if steps.busy else 0.0
                else:
                    patience = POLL
                try:
                    conversation = ready.get(timeout=patience)
                except Empty:
                    if turns.has_work:
                        turns.work()
                    steps.check()
                    continue
                awaited, advanced = next(conversation, None), time.monotonic()
                if awaited is None:
                    self._going -= 1
                    self._hold(self._closed is not None or enough())
                else:
                    awaited.add_done_callback(lambda _, conversation=conversation: ready.put(conversation))
        finally:
            turns.close()

    def close(self) -> None:
        self._steps.close()

    def _hold(self, hold: bool) -> None:
        """Send no further turns to the engine, or again those that waited for it."""
        closed = self._closed
        if hold and closed is None:
            self._closed = Future()
        elif closed is not None and not hold:
            self._closed = None
            closed.set_result(None)

    def _converse(self, talk: Talk) -> Iterator[Future[Any]]:
        """One conversation from its first turn to its last; yields each future that it waits for."""
        yield from self._take_turns(talk)
        if hasattr(talk.environment, "close"):
            yield self._steps.end(talk.environment)
        talk.ended = True

    def _take_turns(self, talk: Talk) -> Iterator[Future[Any]]:
        while True:
            while self._closed is not None:
                yield self._closed
            if talk.broken is not None:
                return
            assert self._turns is not None, "only `advance` advances"
            turn = self._turns.submit(talk.ids, talk.sampling)
            self._at_engine += 1
            yield turn
            self._at_engine -= 1
            talk.hear(turn.result(), self.vocabulary, self.version)
            if talk.broken is not None:
                return
            name = f"{talk.example.id}/{talk.sampling.seed}/{len(talk.turns)}"
            reply = self._steps.submit(talk.environment, self.task.decode(talk.turns[-1].token_ids), name)
            yield reply
            if talk.broken is not None or not self._goes_on(talk, reply.result()):
                return

    def _goes_on(self, talk: Talk, reply: Reply | RewardFailure) -> bool:
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


@dataclass
class Talk:
    """The state of one conversation."""

    example: Example
    environment: Environment
    sampling: SamplingParams  # the same seed for all turns: a token is drawn by the seed and its position
    ids: list[int]  # the conversation so far
    version: int | None = None  # of the weights when it began, where that is known
    turns: list[Completion] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    broken: str | None = None  # set from outside, it ends the conversation before its next turn
    fault: str | None = None  # the first turn's that has one
    ended: bool = False

    def hear(self, turn: Completion, vocabulary: Vocabulary, version: int | None) -> None:
        """`version`: that was asked for; None: any."""
        self.fault = self.fault or fault(turn, self.ids, self.sampling, vocabulary)
        if self.fault is None and version not in (None, turn.policy_version):
            self.fault = f"its weights are of version {turn.policy_version}, and it was asked for of version {version}"
        self.broken = None if turn.whole else cut_short(turn)  # no environment is to answer half a turn
        self.turns.append(turn)
        self.ids = [*turn.prompt_ids, *turn.token_ids]

    def played(self, decode: Callable[[list[int]], str]) -> Played:
        ended = bool(self.replies) and self.replies[-1].done
        completion = joined(
            self.turns or [_nothing(self.ids, self.sampling, self.version or 0)],
            "abort" if self.broken else "stop" if ended else "length",
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
            "conversation": recorded(completion, decode, self.replies),
        }
        example = dataclasses.replace(self.example, data={**self.example.data, "episode": episode})
        return Played(example, completion, decode(completion.token_ids), self.broken, self.fault)


def recorded(
    completion: Completion, decode: Callable[[list[int]], str], replies: Sequence[Reply] = ()
) -> list[dict[str, Any]]:
    """A conversation by turn, as JSON values; docs/agents.md has the keys.

    `replies`: the environment's, one for each turn that it answered.
    """
    turns, conversation = completion.turns or ((0, len(completion.token_ids)),), list[dict[str, Any]]()
    for index, (start, end) in enumerate(turns):
        entry: dict[str, Any] = {"tokens": [start, end], "text": decode(completion.token_ids[start:end])}
        if completion.versions is not None:
            entry["version"] = completion.versions[index]
        if index + 1 < len(turns):
            entry["read"] = [end, turns[index + 1][0]]
        if index < len(replies):
            reply = replies[index]
            entry |= {"reward": float(reply.reward), "messages": [_as_recorded(each) for each in reply.messages]}
            if reply.components:
                entry["components"] = {name: float(value) for name, value in reply.components.items()}
        conversation.append(entry)
    return conversation


def _as_recorded(message: Message) -> dict[str, str]:
    """What a record keeps of a message: text alone."""
    kept = {name: message[name] for name in ("role", "name", "arguments", "content") if name in message}
    return {name: each if isinstance(each, str) else json.dumps(each, default=str) for name, each in kept.items()}


def joined(turns: Sequence[Completion], finish_reason: FinishReason) -> Completion:
    """One completion of a conversation's turns, each of whose prompts begins with all tokens of the turn before.

    Turns of several versions have no choices of experts: each version read the tokens before its turns again.
    """
    first, begin = turns[0], len(turns[0].prompt_ids)
    versions = tuple(turn.policy_version for turn in turns)
    mixed = len(set(versions)) > 1
    return dataclasses.replace(
        first,
        policy_version=min(versions),
        versions=versions if mixed else None,
        token_ids=[*turns[-1].prompt_ids[begin:], *turns[-1].token_ids],
        logprobs=np.concatenate([turn.logprobs for turn in turns]),
        raw_logprobs=np.concatenate([turn.raw_logprobs for turn in turns]),
        routed_experts=None if mixed else _as_first_read([turn.routed_experts for turn in turns]),
        selected=None if mixed else _as_first_read([turn.selected for turn in turns]),
        finish_reason=finish_reason,
        turns=tuple(
            (len(turn.prompt_ids) - begin, len(turn.prompt_ids) - begin + len(turn.token_ids)) for turn in turns
        ),
    )


def _nothing(prompt_ids: list[int], sampling: SamplingParams, version: int) -> Completion:
    return Completion(prompt_ids, [], np.zeros(0, np.float32), np.zeros(0, np.float32), version, "abort", sampling)


def fault(turn: Completion, prompt_ids: list[int], sampling: SamplingParams, vocabulary: Vocabulary) -> str | None:
    assert len(turn.token_ids) == len(turn.logprobs) == len(turn.raw_logprobs), "a logprob for each token"
    return fault_of(turn, prompt_ids, sampling, vocabulary)


def _as_first_read(turns: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """The turns' arrays [tokens, ...] joined, each without the tokens that earlier turns had read already.

    A token's choice is the one that it was first read with, since what followed was sampled over it; when it reads a
    token again, a stock engine may choose otherwise.
    """
    first_read, known = list[np.ndarray](), 0
    for each in turns:
        if each is None:
            return None
        first_read.append(each[known:])
        known = len(each)
    return np.concatenate(first_read)


class Player(Protocol):
    """Completes examples: in one turn, in conversations, or as another library plays them."""

    def play(self, engine: Engine, examples: Sequence[Example], sampling: Sequence[SamplingParams]) -> list[Played]: ...

    def close(self) -> None: ...


def player_for(task: Task, vocabulary: Vocabulary, *, timeout: float, concurrency: int, retries: int = 0) -> Player:
    """The task's own player, where it brings one (`task.player`, a function of vocabulary, timeout and concurrency);
    conversations where it has an environment; else single completions."""
    if (player := getattr(task, "player", None)) is not None:
        return player(vocabulary, timeout=timeout, concurrency=concurrency)
    if getattr(task, "environment", None) is None:
        return SingleTurn(task, vocabulary)
    return Conversations(task, vocabulary, timeout=timeout, concurrency=concurrency, retries=retries)  # pyright: ignore[reportArgumentType]
