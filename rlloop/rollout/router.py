"""Many remote engines as one: who serves, who gets which request, and what happens to those who fail.

A request's completion is a function of weights, prompt and seed. So work is cut into chunks that any engine may make:
an engine with room takes the chunks whose prompts begin like what it served before, then what waits for others. What
an engine leaves behind when it dies, stalls or answers nonsense is made again elsewhere, with the same seeds: the same
bits.

An engine serves after its weights are of the version asked for and its canary, a few completions, has the bits that its
hardware class must have. One that fails that is quarantined: out until it is started anew, or until the next version.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from rlloop.errors import ConfigError, RlloopError
from rlloop.rollout.remote import EngineClient, EngineLost, Fenced, LoopThread
from rlloop.rollout.service import Busy, VersionUnavailable
from rlloop.rollout.wire import BadAnswer, EngineState
from rlloop.types import Completion, SamplingParams

Status = Literal["joining", "behind", "serving", "quarantined", "lost"]
Record = Callable[[Mapping[str, Any]], None]

T = TypeVar("T")


class NoEngine(RlloopError):
    """No engine came to serve what was asked for, for as long as was allowed."""


@dataclass(frozen=True)
class RouterSettings:
    heartbeat: float = 1.0  # seconds between looks at an engine
    timeout: float = 3.0  # seconds without an answer to a look, after which an engine counts as lost
    patience: float = 120.0  # seconds without any engine that serves, after which the run stops
    settle: float = 10.0  # seconds that a new version waits for the slower engines, once one serves
    calls: int = 2  # at a time to one engine
    chunk: int = 128  # prompts of one call, at most
    hedge: float | None = None  # seconds after which an unanswered call is made elsewhere as well
    affinity: int = 16  # leading tokens by which prompts are alike
    together: int = 32  # prompts that are alike stay in one call, up to so many


@dataclass(frozen=True)
class Canary:
    """What every engine must make of some prompts, bit for bit, if it is of `hardware`."""

    prompts: list[list[int]]
    sampling: list[SamplingParams]
    hardware: str | None = None  # None: nothing is known; the first engine of each class sets what the others must make
    expected: list[Completion] | None = None


@dataclass(eq=False)
class Member:
    """One engine, as the router knows it."""

    url: str
    region: str
    client: EngineClient
    status: Status = "joining"
    boot: str = ""
    hardware: str = ""
    version: int = -1
    condemned: int | None = None  # the version whose canary it failed
    calls: dict[asyncio.Task[None], _Chunk] = field(default_factory=dict)
    kick: asyncio.Event = field(default_factory=asyncio.Event)
    caretaker: asyncio.Task[None] | None = None
    seen: float = 0.0
    last: EngineState | None = None

    @property
    def name(self) -> str:
        return f"{self.region}/{self.url.partition('://')[2]}"

    @property
    def load(self) -> int:
        return sum(len(chunk.places) for chunk in self.calls.values())


@dataclass(eq=False)
class _Batch:
    """One call of `Router.generate`."""

    prompts: Sequence[list[int]]
    sampling: Sequence[SamplingParams]
    lowest: int
    highest: int | None
    may_be_newer: bool
    made: list[Completion | None]
    done: asyncio.Future[None]


@dataclass(eq=False)
class _Chunk:
    """Some places of a batch, made by one engine in one call."""

    batch: _Batch
    places: list[int]
    prefix: bytes
    highest: int | None
    made: bool = False
    began: float = 0.0
    hedged: bool = False


class Router:
    """For one caller at a time in each method; all the work is done in an event loop of its own."""

    def __init__(
        self,
        settings: RouterSettings,
        record: Record,
        *,
        token: str | None = None,
        ca_file: str | Path | None = None,
        holder: str = "",
        term: int = 0,
        objection: Callable[[EngineState], str | None] = lambda state: None,
    ) -> None:
        """`record` is told what happens. `objection` says why an engine must not serve, by its own account of itself.
        `holder` and `term` fence off earlier processes of the same run (`rlloop.rollout.wire.Lease`)."""
        self.settings, self._record, self._objection = settings, record, objection
        self._client = {"token": token, "ca_file": ca_file, "holder": holder, "term": term}
        self._members: dict[str, Member] = {}
        self._queue: list[_Chunk] = []
        self._batches: set[_Batch] = set()
        self._version = -1
        self._published = 0.0
        self._canary: Canary | None = None
        self._references: dict[str, list[Completion]] = {}
        self._changed = asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._synced: dict[str, dict[str, float]] = {}  # member -> what its last sync took
        self._leaving: list[asyncio.Task[None]] = []
        self._thread = LoopThread("router")

    # ---------------------------------------------------------------------------------------------- for any thread

    def join(self, url: str, region: str) -> None:
        """Attend to an engine from now on; one that is known is looked at now."""
        self._thread.run(_run(lambda: self._join(url, region)))

    def leave(self, url: str) -> None:
        """The engine is about to go."""
        self._thread.run(_run(lambda: self._leave(url)))

    def members(self) -> list[dict[str, Any]]:
        return self._thread.run(_run(self._listed))

    @property
    def version(self) -> int:
        """What serves, or is to; -1 before the first."""
        return self._version

    def serve_version(self, version: int, canary: Canary | None) -> dict[str, float]:
        """From now on only `version` serves. Returns metrics once engines serve it; raises `NoEngine`."""
        return self._thread.run(self._serve_version(version, canary))

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sequence[SamplingParams],
        version: int,
        *,
        may_be_newer: bool = False,
    ) -> list[Completion]:
        """Completions in order, made with the weights of `version`; where no engine has those any more, of a later one
        if it `may_be_newer`. Raises `NoEngine`, and `Fenced` where another process of the run has taken over."""
        return self._thread.run(self._generate(prompts, sampling, version, may_be_newer))

    def take_metrics(self) -> dict[str, float]:
        """What happened since the last call."""
        return self._thread.run(_run(self._take_metrics))

    def close(self) -> None:
        self._thread.run(self._close())
        self._thread.close()

    # ---------------------------------------------------------------------------------------------- members

    def _join(self, url: str, region: str) -> None:
        url = url.rstrip("/")
        member = self._members.get(url)
        if member is None:
            member = self._members[url] = Member(url, region, EngineClient(url, **self._client))
            member.caretaker = asyncio.create_task(self._attend(member))
        member.kick.set()

    def _leave(self, url: str) -> None:
        member = self._members.pop(url.rstrip("/"), None)
        if member is not None:
            self._out(member, "lost", "it left")
            assert member.caretaker is not None
            member.caretaker.cancel()
            self._leaving = [task for task in self._leaving if not task.done()]
            self._leaving.append(asyncio.create_task(member.client.close()))

    def _listed(self) -> list[dict[str, Any]]:
        return [
            {"url": member.url, "region": member.region, "status": member.status, "version": member.version,
             "load": member.load, "boot": member.boot}
            for member in self._members.values()
        ]  # fmt: skip

    async def _attend(self, member: Member) -> None:
        """Looks at one engine for as long as it is a member."""
        settings = self.settings
        while True:
            member.kick.clear()
            began = time.monotonic()
            try:
                if member.boot and member.status in ("behind", "lost") and self._version >= 0:
                    state = await member.client.wake(self._version, wait=settings.heartbeat)
                else:
                    state = await member.client.state(settings.timeout)
                await self._look(member, state)
            except (EngineLost, Busy, VersionUnavailable) as error:
                if time.monotonic() - member.seen > settings.timeout or not member.boot:
                    self._out(member, "lost", str(error))
            except (BadAnswer, ConfigError, Fenced) as error:
                self._out(member, "quarantined", str(error))
                member.condemned = self._version
            left = settings.heartbeat - (time.monotonic() - began)
            if left > 0:
                await asyncio.gather(asyncio.wait_for(member.kick.wait(), left), return_exceptions=True)

    async def _look(self, member: Member, state: EngineState) -> None:
        member.seen, member.last, member.version = time.monotonic(), state, state.version
        if state.boot != member.boot:
            if member.boot:
                self._out(member, "joining", "it was restarted")
            await member.client.lease()
            member.boot, member.condemned = state.boot, None
            member.hardware = hardware_class(state.fingerprint)
            self._note("joined", member, boot=state.boot, hardware=member.hardware)
        if member.status == "quarantined" and member.condemned == self._version:
            return
        objection = self._objection(state) if state.status != "failed" else f"its weights failed: {state.error}"
        if objection is not None:
            self._out(member, "quarantined", objection)
            member.condemned = self._version
        elif self._version < 0 or state.version != self._version:
            self._out(member, "behind", f"it has version {state.version} of {self._version}")
        elif member.status != "serving":
            await self._admit(member)

    async def _admit(self, member: Member) -> None:
        """Into service, if its canary has the right bits."""
        version, canary = self._version, self._canary
        if canary is not None:
            made = await member.client.generate(
                canary.prompts, canary.sampling, lowest=version, highest=version, boot=member.boot
            )
            if version != self._version:
                return
            known = self._references.setdefault(member.hardware, made)
            if not all(same_bits(mine, theirs) for mine, theirs in zip(known, made, strict=True)):
                raise BadAnswer(f"the bits of its canary at version {version} are not those of {member.hardware}")
        member.status = "serving"
        self._note("serving", member, boot=member.boot)
        self._synced[member.name] = self._sync_facts(member)
        self._pump()
        self._changed.set()

    def _out(self, member: Member, status: Status, why: str) -> None:
        """Takes a member out of service. Its calls are made elsewhere."""
        if member.status == status:
            return
        was, member.status = member.status, status
        if status in ("lost", "quarantined") and not (status == "lost" and was == "joining" and not member.boot):
            self._counts[status] += 1
            self._note(status, member, why=why, calls=len(member.calls))
        if status in ("lost", "quarantined", "joining"):
            for call in list(member.calls):
                call.cancel()
        self._changed.set()

    def _note(self, event: str, member: Member, **facts: Any) -> None:
        self._record({"event": event, "engine": member.name, "version": self._version, "time": time.time(), **facts})

    def _serving(self) -> list[Member]:
        return [member for member in self._members.values() if member.status == "serving"]

    # ---------------------------------------------------------------------------------------------- versions

    async def _serve_version(self, version: int, canary: Canary | None) -> dict[str, float]:
        began = time.monotonic()
        if version != self._version:
            self._version, self._canary, self._references, self._synced = version, canary, {}, {}
            self._published = time.time()
            if canary is not None and canary.hardware is not None and canary.expected is not None:
                self._references[canary.hardware] = canary.expected
            for member in self._members.values():
                if member.status in ("serving", "behind"):
                    member.status = "behind"
                member.kick.set()
        one = None
        while True:
            self._changed.clear()
            serving = self._serving()
            awaited = [member for member in self._members.values() if member.status in ("behind", "joining")]
            now = time.monotonic()
            one = now if serving and one is None else one
            if serving and (not awaited or (one is not None and now - one > self.settings.settle)):
                break
            if not serving and now - began > self.settings.patience:
                listed = ", ".join(f"{member.name} is {member.status}" for member in self._members.values()) or "none"
                raise NoEngine(
                    f"no engine came to serve version {version} within fleet.patience={self.settings.patience:g} s "
                    f"(engines: {listed})"
                )
            await asyncio.gather(asyncio.wait_for(self._changed.wait(), 0.2), return_exceptions=True)
        return {"sync/live_seconds": time.monotonic() - began}

    def _sync_facts(self, member: Member) -> dict[str, float]:
        facts = {"seconds": time.time() - self._published}
        weights = member.last.weights if member.last is not None else None
        if weights is not None and weights.version == self._version:
            facts |= {"pause_seconds": weights.pause_seconds, "drain_seconds": weights.drain_seconds}
            facts |= {"fetch_seconds": weights.fetch_seconds, "stage_seconds": weights.stage_seconds}
            facts |= {"fetched_bytes": float(weights.wire_bytes)}
        return facts

    # ---------------------------------------------------------------------------------------------- work

    async def _generate(
        self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], version: int, may_be_newer: bool
    ) -> list[Completion]:
        if not prompts:
            return []
        seeded = [
            params if params.seed is not None else dataclasses.replace(params, seed=secrets.randbits(63))
            for params in sampling
        ]  # two engines can only make the same completion of a seed that is known
        batch = _Batch(
            prompts, seeded, version, version, may_be_newer, [None] * len(prompts),
            asyncio.get_running_loop().create_future(),
        )  # fmt: skip
        self._batches.add(batch)
        self._queue += self._cut(batch)
        try:
            self._pump()
            idle = time.monotonic()
            while not batch.done.done():
                await asyncio.wait({batch.done}, timeout=0.2)
                self._pump()
                if self._serving():
                    idle = time.monotonic()
                elif time.monotonic() - idle > self.settings.patience:
                    raise NoEngine(f"no engine has served version {version} for {self.settings.patience:g} s")
            batch.done.result()
        finally:
            self._batches.discard(batch)
            self._queue = [chunk for chunk in self._queue if chunk.batch is not batch]
            for member in self._members.values():
                for call, chunk in list(member.calls.items()):
                    if chunk.batch is batch:
                        call.cancel()
        assert all(made is not None for made in batch.made)
        return [made for made in batch.made if made is not None]

    def _cut(self, batch: _Batch) -> list[_Chunk]:
        """Prompts that begin alike stay together as far as chunks of a good size allow."""
        size = math.ceil(len(batch.prompts) / (max(1, len(self._serving())) * self.settings.calls))
        size = min(max(size, 1), self.settings.chunk)
        alike: dict[bytes, list[int]] = {}
        for place, prompt in enumerate(batch.prompts):
            alike.setdefault(repr(prompt[: self.settings.affinity]).encode(), []).append(place)
        chunks: list[_Chunk] = []
        for prefix, places in alike.items():
            most = max(size, min(self.settings.together, self.settings.chunk))
            for start in range(0, len(places), most):
                part = places[start : start + most]
                if chunks and len(chunks[-1].places) + len(part) <= size:
                    chunks[-1].places += part
                else:
                    chunks.append(_Chunk(batch, part, prefix, batch.highest))
        return chunks

    def _pump(self) -> None:
        """Give waiting chunks to engines with room."""
        while True:
            free = [member for member in self._serving() if len(member.calls) < self.settings.calls]
            if not free:
                return
            if not self._queue:
                self._hedge(free)
                return
            member = min(free, key=lambda each: each.load)
            mine = [chunk for chunk in self._queue if self._home(chunk) is member]
            chunk = (mine or self._queue)[0]
            self._queue.remove(chunk)
            self._start(member, chunk)

    def _home(self, chunk: _Chunk) -> Member:
        """The engine that serves what begins like this, as long as the same engines serve."""
        return max(self._serving(), key=lambda member: hashlib.blake2b(chunk.prefix + member.name.encode()).digest())

    def _start(self, member: Member, chunk: _Chunk) -> None:
        chunk.began = time.monotonic()
        task = asyncio.create_task(self._call(member, chunk))
        member.calls[task] = chunk

    def _hedge(self, free: list[Member]) -> None:
        after, now = self.settings.hedge, time.monotonic()
        if after is None:
            return
        for member in self._serving():
            for chunk in list(member.calls.values()):
                others = [each for each in free if each is not member and len(each.calls) < self.settings.calls]
                if others and not chunk.hedged and now - chunk.began > after:
                    chunk.hedged = True
                    self._counts["hedged"] += len(chunk.places)
                    self._note("hedged", member, completions=len(chunk.places))
                    self._start(min(others, key=lambda each: each.load), chunk)

    async def _call(self, member: Member, chunk: _Chunk) -> None:
        """One chunk at one engine. Whatever comes of it, the chunk is made, waits again, or its batch has failed."""
        batch, task = chunk.batch, asyncio.current_task()
        assert task is not None
        why = None
        try:
            made = await member.client.generate(
                [batch.prompts[place] for place in chunk.places],
                [batch.sampling[place] for place in chunk.places],
                lowest=batch.lowest,
                highest=chunk.highest,
                boot=member.boot,
            )
            self._take(member, chunk, made)
        except asyncio.CancelledError:
            why = "its engine is out of service"
        except EngineLost as error:
            why = str(error)
        except VersionUnavailable as error:
            why = str(error)
            if error.passed and batch.may_be_newer:
                chunk.highest = None
        except Busy as error:
            why = str(error)
            await asyncio.sleep(0.1)
        except BadAnswer as error:
            why = str(error)
        except RlloopError as error:  # the request's own fault, or another process of the run took over
            if not batch.done.done():
                batch.done.set_exception(error)
        finally:
            del member.calls[task]
        if why is not None and not chunk.made and batch in self._batches:
            self._again(member, chunk, why)
        self._pump()

    def _take(self, member: Member, chunk: _Chunk, made: list[Completion]) -> None:
        batch = chunk.batch
        if chunk.made:
            return  # the other of two calls was first
        chunk.made = True
        for place, completion in zip(chunk.places, made, strict=True):
            batch.made[place] = dataclasses.replace(completion, origin=member.name)
        self._counts[f"{member.region}/completions"] += len(made)
        for other in self._members.values():
            for call, theirs in list(other.calls.items()):
                if theirs is chunk and call is not asyncio.current_task():
                    call.cancel()
        if not batch.done.done() and all(each is not None for each in batch.made):
            batch.done.set_result(None)

    def _again(self, member: Member, chunk: _Chunk, why: str) -> None:
        still = any(theirs is chunk for other in self._members.values() for theirs in other.calls.values())
        if not still:
            chunk.hedged = False
            self._queue.insert(0, chunk)
            self._counts["reissued"] += len(chunk.places)
            self._note("reissued", member, completions=len(chunk.places), why=why)
        if member.status == "serving":  # seen before its caretaker did: it must show that it is in order
            self._out(member, "behind", why)
            member.kick.set()

    def _take_metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        metrics: dict[str, float] = {f"fleet/{name}": float(count) for name, count in counts.items()}
        for name in ("reissued", "hedged", "lost", "quarantined"):
            metrics.setdefault(f"fleet/{name}", 0.0)
        metrics["fleet/engines"] = float(len(self._serving()))
        for region in {member.region for member in self._members.values()}:
            mine = [member for member in self._members.values() if member.region == region]
            metrics[f"fleet/{region}/engines"] = float(sum(member.status == "serving" for member in mine))
            took = [self._synced[member.name] for member in mine if member.name in self._synced]
            for fact in {fact for each in took for fact in each}:
                metrics[f"fleet/{region}/sync_{fact}"] = max(each[fact] for each in took if fact in each)
        return metrics

    async def _close(self) -> None:
        for member in self._members.values():
            assert member.caretaker is not None
            member.caretaker.cancel()
            for call in list(member.calls):
                call.cancel()
        await asyncio.gather(*(member.client.close() for member in self._members.values()))


async def _run(work: Callable[[], T]) -> T:
    return work()


def same_bits(a: Completion, b: Completion) -> bool:
    return a.token_ids == b.token_ids and all(
        mine.tobytes() == theirs.tobytes()
        for mine, theirs in ((a.logprobs, b.logprobs), (a.raw_logprobs, b.raw_logprobs))
    )


def hardware_class(fingerprint: Mapping[str, Any]) -> str:
    """Engines of one class must make the same bits."""
    return hashlib.blake2b(msgspec.json.encode(fingerprint, order="deterministic"), digest_size=8).hexdigest()
