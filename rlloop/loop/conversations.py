"""Completions of a batch of examples: single turns, or conversations with environments.

A conversation is one sample, kept as token ids: the policy's as sampled, the environment's as rendered by the task. The
policy's tokens are compared and trained, the environment's are masked. Each turn is sampled with the whole conversation
so far as its prompt (mostly in the engine's prefix cache), so one forward of the trainer over the conversation gives
the bits of every turn.

Each conversation advances on its own: as soon as its environment has replied, its next turn is submitted to the engine.
A completion is a function of weights, prompt and seed, so the order in which turns end changes nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlloop.errors import RlloopError
from rlloop.loop.environments import ConversationTask, Environment, EnvironmentSteps, Reply
from rlloop.loop.joining import Turn, joined, recorded
from rlloop.loop.pictures import ReplyReader, as_recorded, taken, text_of
from rlloop.loop.turns import Turns, turns_of
from rlloop.parity.asked import Vocabulary, fault_of
from rlloop.protocols import Engine, Task
from rlloop.rewards.event_loop import POLL
from rlloop.rewards.runner import RewardFailure
from rlloop.types import Completion, Example, ModelInput, SamplingParams, as_model_input


@dataclass(frozen=True)
class Played:
    """The completion of one example."""

    example: Example  # of a conversation: with the environment's verdict in `data["episode"]`
    completion: Completion
    text: str  # everything after the prompt, decoded
    broken: str | None = None  # reason why it did not finish
    fault: str | None = None  # difference from the engine's request


def cut_short(completion: Completion) -> str:
    """The reason for rejecting a completion that was cut short."""
    return f"its completion was cut short: finish_reason is {completion.finish_reason!r}"


class SingleTurn:
    """One completion for each example."""

    def __init__(self, task: Task, vocabulary: Vocabulary) -> None:
        self.task, self.vocabulary = task, vocabulary

    def play(self, engine: Engine, examples: Sequence[Example], sampling: Sequence[SamplingParams]) -> list[Played]:
        completions = engine.generate([example.asked for example in examples], list(sampling))
        return [
            Played(
                example,
                completion,
                self.task.decode(completion.token_ids),
                fault=fault(completion, example.prompt_ids, params, self.vocabulary),
            )
            for example, params, completion in zip(examples, sampling, completions, strict=True)
        ]

    def under_way(self, slice_tokens: int) -> UnderWay:
        return UnderWay(self.task, self.vocabulary, EnvironmentSteps(), slice_tokens)

    def close(self) -> None:
        pass


class Conversations:
    """Conversations of several turns: policy and environment alternate until the environment is done."""

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

    def under_way(self, slice_tokens: int) -> UnderWay:
        """Conversations with their own environments; the caller must close them."""
        return UnderWay(self.task, self.vocabulary, self._new_steps(), slice_tokens)

    def close(self) -> None:
        self._steps.close()


class UnderWay:
    """Conversations that advance during `advance`, and may continue under newer weights.

    Between two calls environments continue, and the policy's next turns wait. So each turn is of one version, or with
    `slice_tokens` each slice of that many tokens.
    """

    version: int | None = None  # that turns must be of; None: any

    def __init__(
        self, task: Task | ConversationTask, vocabulary: Vocabulary, steps: EnvironmentSteps, slice_tokens: int = 0
    ) -> None:
        """A task without an environment has conversations of one turn."""
        self.task, self.vocabulary, self._steps, self.slice_tokens = task, vocabulary, steps, slice_tokens
        self._ready: SimpleQueue[Iterator[Future[Any]]] = SimpleQueue()
        self._turns: Turns | None = None
        self._closed: Future[None] | None = None  # while submission is on hold: done once it resumes
        self._going = self._at_engine = 0
        self._reader = ReplyReader(lambda: task.model_folder())

    def begin(self, example: Example, sampling: SamplingParams) -> Talk:
        new = getattr(self.task, "environment", None)
        talk = Talk(example, None if new is None else new(example), sampling, example.prompt_ids, self.version)
        self._ready.put(self._converse(talk))
        self._going += 1
        return talk

    def advance(self, engine: Engine, enough: Callable[[], bool] = lambda: False) -> None:
        """Play until all conversations have ended, or `enough` have; then finish the turns that the engine has.

        This thread drives the engine if necessary (`Turns.work`), and advances each conversation whose turn or reply
        has come.
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
        """Hold or resume the submission of turns to the engine."""
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
            yield from self._turn(talk)
            if talk.broken is not None or talk.environment is None:
                return
            name = f"{talk.example.id}/{talk.sampling.seed}/{len(talk.turns)}"
            reply = self._steps.submit(talk.environment, self.task.decode(talk.turns[-1].token_ids), name)
            yield reply
            if talk.broken is not None or not self._goes_on(talk, reply.result()):
                return

    def _turn(self, talk: Talk) -> Iterator[Future[Any]]:
        """The policy's next turn, in one piece or several."""
        talk.turn = Turn(talk.ids, talk.sampling)
        while talk.turn is not None:
            while self._closed is not None:
                yield self._closed
            if talk.broken is not None:
                return
            assert self._turns is not None, "only `advance` advances"
            asked = talk.turn.next_piece(self.slice_tokens)
            piece = self._turns.submit(talk.asked(talk.turn.ids, self.vocabulary.placeholders), asked)
            self._at_engine += 1
            yield piece
            self._at_engine -= 1
            talk.hear(piece.result(), asked, self.vocabulary, self.version)

    def _goes_on(self, talk: Talk, reply: Reply | RewardFailure) -> bool:
        """Add the reply to the conversation; True if the policy takes another turn."""
        if isinstance(reply, RewardFailure):
            talk.broken = f"environment {reply.kind}: {reply.message}"
            return False
        task: Any = self.task
        more, pictures, last = ModelInput([]), list[Any](), talk.turns[-1]
        reads = not (reply.done or len(talk.turns) == task.max_turns)
        try:
            if reads:
                messages, pictures = taken(reply.messages)
                ids = task.between(messages, last.token_ids[-1] if last.finish_reason == "stop" else None)
                assert ids, "nothing stands between two turns, so they would be one"
                more = self._reader.read(ids, pictures) if pictures else ModelInput(ids)
        except RlloopError as error:
            if not pictures:  # of the task itself
                raise
            talk.broken = f"environment error: a picture in the reply of {type(talk.environment).__name__}: {error}"
            return False
        talk.replies.append(
            dataclasses.replace(reply, messages=as_recorded(reply.messages, [each.digest for each in more.images]))
        )
        if not reads:
            return False
        if wrong := text_of(more).intersection(self.vocabulary.placeholders):
            talk.broken = (
                f"environment error: its reply has token {min(wrong)}, which stands for an image or a video, as text; "
                "let it reply without, or give the picture as a part of the message"
            )
            return False
        if len(talk.ids) + len(more) + talk.sampling.max_tokens > task.max_conversation_tokens:
            return False
        talk.follow(more)
        return True


@dataclass
class Talk:
    """The state of one conversation."""

    example: Example
    environment: Environment | None  # None: there is one turn
    sampling: SamplingParams  # the same seed for all turns: a token is drawn by the seed and its position
    ids: list[int]  # the conversation so far
    version: int | None = None  # version of the weights when it began, if known
    read: ModelInput | None = None  # its first tokens, up to the last picture that was replied; None: the prompt
    turns: list[Completion] = field(default_factory=list)
    turn: Turn | None = None  # that is being made
    replies: list[Reply] = field(default_factory=list)
    broken: str | None = None
    fault: str | None = None  # the first turn's that has one
    ended: bool = False

    @property
    def made(self) -> list[int]:
        """The versions that sampled its tokens."""
        pieces = [] if self.turn is None else self.turn.pieces
        return [version for each in (*self.turns, *pieces) for _, _, version in each.runs]

    def asked(self, ids: list[int], placeholders: Collection[int]) -> ModelInput | list[int]:
        """The engine's input for the conversation, whose tokens are `ids`; `placeholders` as of `asked_with`."""
        if self.read is None:
            return self.example.asked_with(ids, placeholders)
        return self.read.followed_by(ids[len(self.read) :])

    def follow(self, more: ModelInput) -> None:
        """Add what the environment replied."""
        if more.contents:
            read = self.read or as_model_input(self.example.asked)
            self.read = read.followed_by(self.ids[len(read) :]).followed_by(more)
        self.ids = [*self.ids, *more.token_ids]

    def drop(self, why: str) -> None:
        """End it before its next turn."""
        self.broken = self.broken or why

    def hear(self, piece: Completion, asked: SamplingParams, vocabulary: Vocabulary, version: int | None) -> None:
        """Add the engine's result. `version`: the requested version; None: any."""
        assert self.turn is not None
        self.fault = self.fault or fault(piece, self.turn.ids, asked, vocabulary)
        if self.fault is None and version not in (None, piece.policy_version):
            self.fault = f"its weights are of version {piece.policy_version}, and it was asked for of version {version}"
        if not piece.whole:  # environments must not answer half a turn
            self.broken = cut_short(piece)
        ends = self.turn.add(piece)
        if ends or self.fault is not None:
            self._end_turn()

    def _end_turn(self) -> None:
        if self.turn is not None and self.turn.pieces:
            self.turns.append(self.turn.completion())
            self.ids = self.turn.ids
        self.turn = None

    def played(self, decode: Callable[[list[int]], str]) -> Played:
        self._end_turn()  # that was dropped in the middle
        none = np.zeros(0, np.float32)
        turns = self.turns or [Completion(self.ids, [], none, none, self.version or 0, "abort", self.sampling)]
        if self.environment is None:
            completion = dataclasses.replace(turns[0], finish_reason="abort") if self.broken else turns[0]
            return Played(self.example, completion, decode(completion.token_ids), self.broken, self.fault)
        ended = bool(self.replies) and self.replies[-1].done
        completion = joined(turns, "abort" if self.broken else "stop" if ended else "length")
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


def fault(turn: Completion, prompt_ids: list[int], sampling: SamplingParams, vocabulary: Vocabulary) -> str | None:
    assert len(turn.token_ids) == len(turn.logprobs) == len(turn.raw_logprobs), "a logprob for each token"
    return fault_of(turn, prompt_ids, sampling, vocabulary)


class Player(Protocol):
    """Completes examples: in one turn, in conversations, or by another library."""

    def play(self, engine: Engine, examples: Sequence[Example], sampling: Sequence[SamplingParams]) -> list[Played]: ...

    def close(self) -> None: ...


class Carried(Protocol):
    """One conversation that may continue in later steps."""

    version: int | None  # of the weights when it began
    ended: bool
    broken: str | None

    @property
    def made(self) -> Sequence[int]:
        """The versions that sampled its tokens."""
        ...

    def drop(self, why: str) -> None:
        """End it before its next turn."""
        ...

    def played(self, decode: Callable[[list[int]], str]) -> Played:
        """The result of a conversation that has ended or was dropped."""
        ...


class Carriage(Protocol):
    """Conversations under way: see `UnderWay`."""

    version: int | None

    def begin(self, example: Example, sampling: SamplingParams) -> Carried: ...

    def advance(self, engine: Engine, enough: Callable[[], bool] = ...) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class CarryingPlayer(Player, Protocol):
    """A player whose conversations may continue in later steps. A task with such a player has the attribute
    `carries = True`."""

    def under_way(self, slice_tokens: int) -> Carriage: ...


def player_for(task: Task, vocabulary: Vocabulary, *, timeout: float, concurrency: int, retries: int = 0) -> Player:
    """The task's own player if it has one (`task.player`, a function of vocabulary, timeout and concurrency);
    conversations if it has an environment; else single completions."""
    if (player := getattr(task, "player", None)) is not None:
        return player(vocabulary, timeout=timeout, concurrency=concurrency)
    if getattr(task, "environment", None) is None:
        return SingleTurn(task, vocabulary)
    return Conversations(task, vocabulary, timeout=timeout, concurrency=concurrency, retries=retries)  # pyright: ignore[reportArgumentType]
