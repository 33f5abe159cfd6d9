"""A pool of engines used as one: requests are distributed, and those of a failed engine are repeated on others.

A completion is a function of weights, prompt and seed, so work is split into chunks that any engine may compute. An
engine with room takes chunks whose prefix it served before, then other waiting chunks. Chunks of an engine that dies,
stalls or answers wrongly are repeated on others with the same seeds, hence the same bits. `membership` decides which
engines may serve. Engines are servers (`http_pool`) or Ray actors (`rlloop.launch.ray_pool`), under the same rules.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rlloop.errors import ConfigError
from rlloop.inputs import as_model_input
from rlloop.rollout.errors import BadAnswer, Busy, EngineLost, NoEngine, VersionUnavailable, WrongToken
from rlloop.rollout.fleet.client import EngineClient, LoopThread
from rlloop.rollout.fleet.membership import (
    Canary,
    Member,
    Membership,
    PoolClient,
    PoolSettings,
    Record,
    reason,
)
from rlloop.rollout.fleet.wire import EngineState
from rlloop.types import Completion, ModelInput, SamplingParams

T = TypeVar("T")
SESSIONS = 1 << 16  # sessions whose engines are remembered
TRIES = 10  # failed tries of a chunk, over at least `fleet.patience` seconds, before its batch fails
PASSING = (Busy, EngineLost, VersionUnavailable)  # temporary: the engine may be healthy


@dataclass(eq=False)
class _Batch:
    """One call of `EnginePool.generate`."""

    prompts: Sequence[ModelInput | list[int]]
    sampling: Sequence[SamplingParams]
    version: int
    completions: list[Completion | None]
    done: asyncio.Future[None]
    session: str | None = None


@dataclass(eq=False)
class _Chunk:
    """Prompts of a batch that one engine completes in one call."""

    batch: _Batch
    indices: list[int]  # of the batch's prompts
    prefix: bytes
    done: bool = False
    began: float = 0.0
    hedged: bool = False
    tries: int = 0  # that failed
    since: float = 0.0  # when the first of them did
    refused: dict[Member, Exception] = field(default_factory=dict)  # by engine; the request may be at fault

    def __len__(self) -> int:
        return len(self.indices)


class EnginePool:
    """Distributes requests over engines, in its own event loop. `generate` and `begin` may be called concurrently; each
    other method by one caller at a time."""

    def __init__(
        self,
        settings: PoolSettings,
        record: Record,
        connect: Callable[[str], PoolClient],
        *,
        run_id: str = "",
        objection: Callable[[EngineState], str | None] = lambda state: None,
    ) -> None:
        """`record` receives events. `connect` makes the client of an address. `run_id`: the run whose weights engines
        must have; "": any. `objection` returns the reason why an engine of this state must not serve, or None."""
        self.settings = settings
        self._members = Membership(settings, record, connect, objection, self._pump, run_id)
        self._queue: list[_Chunk] = []
        self._batches: set[_Batch] = set()
        self._sessions: OrderedDict[str, Member] = OrderedDict()  # the engine that has its tokens cached, latest last
        self._thread = LoopThread("engine pool")

    # ---------------------------------------------------------------------------------------------- for any thread

    def join(self, url: str, region: str) -> None:
        """Add an engine; a known one is checked at once."""
        self._thread.run(_run(lambda: self._members.join(url, region)))

    def leave(self, url: str) -> None:
        """Remove an engine that is shutting down."""
        self._thread.run(_run(lambda: self._members.leave(url)))

    def members(self) -> list[dict[str, Any]]:
        return self._thread.run(_run(self._members.listed))

    @property
    def version(self) -> int:
        """The current version, which engines serve or are loading; -1 before the first."""
        return self._members.version

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its completion may have together on every serving engine; 0 if none serves."""
        states = [member.last for member in self._members.serving()]
        return min((state.longest for state in states if state is not None and state.longest > 0), default=0)

    def serve_version(self, version: int, canary: Canary | None) -> dict[str, float]:
        """Serve only `version` from now on. Returns metrics once engines serve it; raises `NoEngine`."""
        return self._thread.run(self._members.serve_version(version, canary))

    def generate(
        self, prompts: Sequence[ModelInput | list[int]], sampling: Sequence[SamplingParams], version: int
    ) -> list[Completion]:
        """Whole completions in order, computed with the weights of `version`.

        Raises `NoEngine`; `VersionUnavailable` if the fleet serves another version or changes to one; and if every
        engine refuses the request: `ConfigError`, or `Fenced` when another process of the run has taken over."""
        return self._thread.run(self._generate(prompts, sampling, version))

    def begin(
        self,
        prompts: Sequence[ModelInput | list[int]],
        sampling: Sequence[SamplingParams],
        version: int,
        session: str | None = None,
    ) -> Future[list[Completion]]:
        """Like `generate`, without blocking the caller's thread. `session` names a conversation, whose turns go to the
        engine that served the last one and has the prefix cached, as long as it has room."""
        return self._thread.start(self._generate(prompts, sampling, version, session))

    def take_metrics(self) -> dict[str, float]:
        """The metrics `fleet/*` since the last call."""
        return self._thread.run(_run(self._members.take_metrics))

    def close(self) -> None:
        self._thread.run(self._close())
        self._thread.close()

    # ---------------------------------------------------------------------------------------------- work

    async def _close(self) -> None:
        self._batches.clear()  # nothing is repeated
        self._queue.clear()
        await self._members.close()

    async def _generate(
        self,
        prompts: Sequence[ModelInput | list[int]],
        sampling: Sequence[SamplingParams],
        version: int,
        session: str | None = None,
    ) -> list[Completion]:
        if not prompts:
            return []
        if version != self._members.version:
            raise VersionUnavailable(self._members.version, version, version)
        seeded = [
            params if params.seed is not None else dataclasses.replace(params, seed=secrets.randbits(63))
            for params in sampling
        ]  # engines can only repeat a completion with a known seed
        batch = _Batch(
            prompts, seeded, version, [None] * len(prompts), asyncio.get_running_loop().create_future(), session
        )  # fmt: skip
        self._batches.add(batch)
        self._queue += self._cut(batch)
        try:
            self._pump()
            idle = time.monotonic()
            while not batch.done.done():
                await asyncio.wait({batch.done}, timeout=0.2)
                self._members.check()
                self._pump()
                if self._members.serving():
                    idle = time.monotonic()
                elif time.monotonic() - idle > self.settings.patience:
                    raise NoEngine(f"no engine has served version {version} for {self.settings.patience:g} s")
            batch.done.result()
        finally:
            if not batch.done.cancel():  # it is done: its error has been seen, even if another ends the wait
                batch.done.exception()
            self._batches.discard(batch)
            self._queue = [chunk for chunk in self._queue if chunk.batch is not batch]
            for member in self._members.all():
                for call, chunk in list(member.calls.items()):
                    if chunk.batch is batch:
                        call.cancel()
        assert all(completion is not None for completion in batch.completions)
        return [completion for completion in batch.completions if completion is not None]

    def _cut(self, batch: _Batch) -> list[_Chunk]:
        """Split a batch into chunks; prompts with a common prefix stay together as far as the chunk size allows."""
        size = math.ceil(len(batch.prompts) / (max(1, len(self._members.serving())) * self.settings.calls))
        size = min(max(size, 1), self.settings.chunk)
        alike: dict[bytes, list[int]] = {}
        for index, prompt in enumerate(batch.prompts):
            each, first = as_model_input(prompt), self.settings.affinity
            prefix = repr(each.token_ids[:first]).encode() + each.content_key(0, first)
            alike.setdefault(prefix, []).append(index)
        chunks: list[_Chunk] = []
        for prefix, indices in alike.items():
            most = max(size, min(self.settings.together, self.settings.chunk))
            for start in range(0, len(indices), most):
                subset = indices[start : start + most]
                if chunks and len(chunks[-1].indices) + len(subset) <= size:
                    chunks[-1].indices += subset
                else:
                    chunks.append(_Chunk(batch, subset, prefix))
        return chunks

    def _pump(self) -> None:
        """Give waiting chunks to engines with room."""
        self._give_up_refused()
        while True:
            free = [member for member in self._members.serving() if len(member.calls) < self.settings.calls]
            if free and not self._queue:
                self._hedge(free)
            free = [member for member in free if any(member not in chunk.refused for chunk in self._queue)]
            if not free:
                return
            chunk = next((chunk for chunk in self._queue if self._holder(chunk) in free), None)
            if chunk is not None and (holder := self._holder(chunk)) is not None:
                self._queue.remove(chunk)
                self._start(holder, chunk)
                continue
            member = min(free, key=lambda each: each.load)
            may = [chunk for chunk in self._queue if member not in chunk.refused]
            chunk = next((chunk for chunk in may if self._home(chunk) is member), may[0])
            self._queue.remove(chunk)
            self._start(member, chunk)

    def _give_up_refused(self) -> None:
        """Fail batches that every engine refuses. One engine that refuses may be wrong, or smaller than others."""
        for chunk in [chunk for chunk in self._queue if chunk.refused]:
            hopes = [
                member.status
                for member in self._members.all()
                if member.status in ("serving", "behind", "joining") and member not in chunk.refused
            ]
            late = time.monotonic() - chunk.since > self.settings.patience
            if not hopes or (late and "serving" not in hopes):
                self._fail(chunk.batch, list(chunk.refused.values())[-1])

    def _holder(self, chunk: _Chunk) -> Member | None:
        """The engine that served the chunk's session last; None without a session, or where it refused the chunk."""
        member = self._sessions.get(chunk.batch.session or "")
        return None if member in chunk.refused else member

    def _home(self, chunk: _Chunk) -> Member:
        """The preferred engine of the chunk's prefix, by rendezvous hashing over the serving engines."""
        return max(
            self._members.serving(), key=lambda member: hashlib.blake2b(chunk.prefix + member.name.encode()).digest()
        )

    def _start(self, member: Member, chunk: _Chunk) -> None:
        chunk.began = time.monotonic()
        task = asyncio.create_task(self._call(member, chunk))
        member.calls[task] = chunk
        task.add_done_callback(partial(self._ended, member, chunk))  # runs even for a call that never began

    def _hedge(self, free: list[Member]) -> None:
        after, now = self.settings.hedge, time.monotonic()
        if after is None:
            return
        for member in self._members.serving():
            for chunk in list(member.calls.values()):
                others = [each for each in free if each is not member and each not in chunk.refused]
                others = [each for each in others if len(each.calls) < self.settings.calls]
                if others and not chunk.hedged and now - chunk.began > after:
                    chunk.hedged = True
                    self._members.counts["hedged"] += len(chunk.indices)
                    self._members.note("hedged", member, completions=len(chunk.indices))
                    self._start(min(others, key=lambda each: each.load), chunk)

    async def _call(self, member: Member, chunk: _Chunk) -> None:
        """Compute one chunk on one engine. Raises the error that prevented it."""
        batch = chunk.batch
        try:
            completions = await member.client.generate(
                [batch.prompts[index] for index in chunk.indices],
                [batch.sampling[index] for index in chunk.indices],
                lowest=batch.version,
                highest=batch.version,
                boot=member.boot,
            )
            if not all(completion.whole for completion in completions):
                raise Busy("its completions were cut short by a pause")
        except PASSING:
            await asyncio.sleep(0.1)
            raise
        self._take(member, chunk, completions)

    def _ended(self, member: Member, chunk: _Chunk, call: asyncio.Task[None]) -> None:
        """After every call its chunk is done, waits again, or its batch has failed."""
        del member.calls[call]
        failure = asyncio.CancelledError() if call.cancelled() else call.exception()
        try:
            if failure is not None and not chunk.done and chunk.batch in self._batches:
                self._again(member, chunk, failure)
            self._pump()
        except Exception as error:  # a bug must not leave callers waiting
            self._fail(chunk.batch, error)

    def _fail(self, batch: _Batch, error: Exception) -> None:
        if not batch.done.done():
            batch.done.set_exception(error)

    def _take(self, member: Member, chunk: _Chunk, completions: list[Completion]) -> None:
        batch = chunk.batch
        if chunk.done:
            return  # the other of two hedged calls was first
        origin = member.name if self.settings.origins else None
        for index, completion in zip(chunk.indices, completions, strict=True):
            batch.completions[index] = dataclasses.replace(completion, origin=origin)
        chunk.done = True
        if batch.session:
            self._sessions[batch.session] = member
            self._sessions.move_to_end(batch.session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        self._members.counts[f"{member.region}/completions"] += len(completions)
        for other in self._members.all():
            for call, theirs in list(other.calls.items()):
                if theirs is chunk and call is not asyncio.current_task():
                    call.cancel()
        if not batch.done.done() and all(each is not None for each in batch.completions):
            batch.done.set_result(None)

    def _again(self, member: Member, chunk: _Chunk, failure: BaseException) -> None:
        have, version = self._members.version, chunk.batch.version
        if have != version:  # no engine serves it any more
            self._fail(chunk.batch, VersionUnavailable(have, version, version))
            return
        why = reason(failure) if isinstance(failure, Exception) else "its engine is out of service"
        chunk.since = chunk.since if chunk.tries else time.monotonic()
        chunk.tries += 1
        passing = isinstance(failure, (asyncio.CancelledError, *PASSING))
        request_fault = isinstance(failure, ConfigError) and not isinstance(failure, WrongToken)  # as the engine says
        if isinstance(failure, Exception) and not passing and not isinstance(failure, BadAnswer | WrongToken):
            chunk.refused[member] = failure
        if member.status == "serving":  # its poll has not noticed yet
            if passing:
                self._members.out(member, "behind", why)  # it must pass a check first
                member.kick.set()
            elif not request_fault:
                self._members.condemn(member, why)
        if any(theirs is chunk for other in self._members.all() for theirs in other.calls.values()):
            return
        if chunk.tries >= TRIES and time.monotonic() - chunk.since > self.settings.patience:
            self._fail(chunk.batch, NoEngine(f"{len(chunk)} prompts failed in {chunk.tries} tries; the last: {why}"))
        chunk.hedged = False
        self._queue.insert(0, chunk)
        self._members.counts["reissued"] += len(chunk.indices)
        self._members.note("reissued", member, completions=len(chunk.indices), why=why[:500])


async def _run(work: Callable[[], T]) -> T:
    return work()


def http_pool(
    settings: PoolSettings,
    record: Record,
    *,
    token: str | None = None,
    ca_file: str | Path | None = None,
    holder: str = "",
    term: int = 0,
    vocabulary: int | None = None,
    objection: Callable[[EngineState], str | None] = lambda state: None,
) -> EnginePool:
    """A pool of engine servers, addressed by URLs. `holder` is the run, and `term` fences off its earlier processes
    (`rlloop.rollout.fleet.wire.Lease`). `vocabulary`: the model's vocabulary size, if known."""

    def connect(url: str) -> EngineClient:
        return EngineClient(url, token=token, ca_file=ca_file, holder=holder, term=term, vocabulary=vocabulary)

    return EnginePool(settings, record, connect, run_id=holder, objection=objection)
