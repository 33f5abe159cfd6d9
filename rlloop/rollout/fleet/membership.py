"""Membership of a pool of engines, and admission to service.

An engine serves once its weights are of the requested version and its canary, a few completions, has the bits expected
of its hardware class. An engine that fails is quarantined until it restarts, or until the next version.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from rlloop.errors import RlloopError
from rlloop.rollout.errors import BadAnswer, Busy, EngineLost, NoEngine, VersionUnavailable
from rlloop.rollout.fleet.wire import EngineState
from rlloop.types import Completion, ModelInput, SamplingParams

Status = Literal["joining", "behind", "serving", "quarantined", "lost"]
Record = Callable[[Mapping[str, Any]], object]  # receives an event


class PoolClient(Protocol):
    """One engine of a pool, wherever it runs: over HTTP (`client.EngineClient`) or in an actor (`launch.ray_pool`).

    Raises `EngineLost` if the engine cannot be reached, or if its process was replaced during the call.
    """

    async def state(self, timeout: float | None = None) -> EngineState: ...

    async def lease(self, timeout: float | None = None) -> None:
        """Take over the engine."""
        ...

    async def wake(self, version: int, wait: float) -> EngineState:
        """Make the engine load the weights of `version`; returns its state then, or after `wait` seconds."""
        ...

    async def generate(
        self,
        prompts: Sequence[ModelInput | list[int]],
        sampling: Sequence[SamplingParams],
        *,
        lowest: int | None = None,
        highest: int | None = None,
        boot: str | None = None,
    ) -> list[Completion]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class PoolSettings:
    heartbeat: float = 1.0  # seconds between health checks of an engine
    timeout: float = 3.0  # limit of one check in seconds; after three failed ones an engine counts as lost
    patience: float = 120.0  # seconds without a serving engine after which the run stops
    settle: float = 10.0  # seconds that a new version waits for slower engines, once one serves
    calls: int = 2  # at a time to one engine
    chunk: int = 128  # prompts of one call, at most
    hedge: float | None = None  # seconds after which an unanswered call is repeated on another engine
    affinity: int = 16  # number of leading tokens that group prompts
    together: int = 32  # limit of prompts with a common prefix kept in one call
    canary_every_version: bool = True  # False: only when an engine joins or has restarted
    canary_seconds: float | None = 30.0  # seconds for the canary's completions; None: no limit
    origins: bool = True  # True: completions name the engine that computed them


@dataclass(frozen=True)
class Canary:
    """Completions that every engine of a hardware class must reproduce, bit for bit."""

    prompts: Sequence[ModelInput | list[int]]
    sampling: list[SamplingParams]
    hardware: str | None = None  # None: unknown; the first engine of each class sets them for the others
    expected: list[Completion] | None = None
    reference: Callable[[], Awaitable[list[Completion]]] | None = None  # computes `expected`, once an engine needs it


@dataclass(eq=False)
class Member:
    """The pool's state of one engine."""

    url: str
    region: str
    client: PoolClient
    status: Status = "joining"
    boot: str = ""
    hardware: str = ""
    version: int = -1
    condemned: int | None = None  # the version whose canary it failed
    proven: str = ""  # the boot whose canary had the right bits
    calls: dict[asyncio.Task[None], Any] = field(default_factory=dict)  # each one's chunk; its length is prompts
    kick: asyncio.Event = field(default_factory=asyncio.Event)
    caretaker: asyncio.Task[None] | None = None
    seen: float = 0.0
    why: str = ""  # reason why it is out of service
    last: EngineState | None = None

    @property
    def name(self) -> str:
        return f"{self.region}/{self.url.rpartition('://')[2]}"

    @property
    def load(self) -> int:
        """Number of prompts in flight."""
        return sum(map(len, self.calls.values()))


class Membership:
    """The engines of a fleet, for one event loop. `came` is called when an engine begins to serve."""

    def __init__(
        self,
        settings: PoolSettings,
        record: Record,
        connect: Callable[[str], PoolClient],
        objection: Callable[[EngineState], str | None],
        came: Callable[[], None],
        run_id: str = "",
    ) -> None:
        self.settings, self._record, self._connect, self._objection = settings, record, connect, objection
        self._came, self._run_id = came, run_id
        self.version = -1
        self.counts: Counter[str] = Counter()
        self._all: dict[str, Member] = {}
        self._published = 0.0
        self._canary: Canary | None = None
        self._references: dict[str, list[Completion]] = {}
        self._changed = asyncio.Event()
        self._synced: dict[str, dict[str, float]] = {}  # member -> cost of its last sync
        self._leaving: list[asyncio.Task[None]] = []
        self._unwritten: Exception | None = None

    def all(self) -> Iterable[Member]:
        return self._all.values()

    def join(self, url: str, region: str) -> None:
        url = url.rstrip("/")
        member = self._all.get(url)
        if member is None:
            member = self._all[url] = Member(url, region, self._connect(url))
            member.caretaker = asyncio.create_task(self._attend(member))
        member.kick.set()

    def leave(self, url: str) -> None:
        member = self._all.pop(url.rstrip("/"), None)
        if member is not None:
            self.out(member, "lost", "it left")
            assert member.caretaker is not None
            member.caretaker.cancel()
            self._leaving = [task for task in self._leaving if not task.done()]
            self._leaving.append(asyncio.create_task(_let_go(member)))

    def listed(self) -> list[dict[str, Any]]:
        return [
            {"url": member.url, "region": member.region, "status": member.status, "version": member.version,
             "load": member.load, "boot": member.boot}
            for member in self._all.values()
        ]  # fmt: skip

    async def _attend(self, member: Member) -> None:
        """Poll an engine as long as it is a member."""
        settings = self.settings
        while True:
            member.kick.clear()
            began = time.monotonic()
            try:
                if member.boot and member.status in ("behind", "lost") and self.version >= 0:
                    state = await member.client.wake(self.version, wait=settings.heartbeat)
                else:
                    state = await member.client.state(settings.timeout)
                await self._look(member, state)
            except (EngineLost, Busy, VersionUnavailable) as error:
                if time.monotonic() - member.seen > settings.timeout or not member.boot:
                    self.out(member, "lost", str(error))
            except Exception as error:  # a bad answer, a refusal, or an unexpected error
                self.condemn(member, reason(error))
            left = settings.heartbeat - (time.monotonic() - began)
            if left > 0:
                await _at_most(left, member.kick)

    async def _look(self, member: Member, state: EngineState) -> None:
        member.seen, member.last, member.version = time.monotonic(), state, state.version
        if state.boot != member.boot:
            if member.boot:
                self.out(member, "joining", "it was restarted")
            await member.client.lease(self.settings.timeout)
            member.boot, member.condemned = state.boot, None
            member.hardware = hardware_class(state.fingerprint)
            self.note("joined", member, boot=state.boot, hardware=member.hardware)
        if member.status == "quarantined" and member.condemned == self.version:
            return
        objection = self._objection(state) if state.status != "failed" else f"its weights failed: {state.error}"
        if self._is_other(state.follows):
            objection = f"it follows run {state.follows}, and this is {self._run_id}; start it anew, or with --any-run"
        if objection is not None:
            self.condemn(member, objection)
        elif self.version < 0 or state.version != self.version or self._is_other(state.run_id):
            what = f"{state.run_id}/{state.version}" if state.run_id else f"{state.version}"
            self.out(member, "behind", f"it has version {what} of {self.version}: {state.error}".rstrip(": "))
        elif member.status != "serving":
            await self._admit(member)

    def _is_other(self, run_id: str) -> bool:
        return bool(run_id and self._run_id) and run_id != self._run_id

    async def _admit(self, member: Member) -> None:
        """Put an engine into service if its canary has the right bits."""
        version, canary = self.version, self._canary
        if canary is not None and (self.settings.canary_every_version or member.proven != member.boot):
            await self._prove(member, version, canary)
        if version != self.version:
            return
        member.proven = member.boot
        member.status, member.why = "serving", ""
        self.note("serving", member, boot=member.boot)
        self._synced[member.name] = self._sync_facts(member)
        self._came()
        self._changed.set()

    async def _prove(self, member: Member, version: int, canary: Canary) -> None:
        """Raises if the engine's canary is late, cut short, or has other bits than its hardware class."""
        seconds = self.settings.canary_seconds
        asked = member.client.generate(
            canary.prompts, canary.sampling, lowest=version, highest=version, boot=member.boot
        )
        try:
            completions = await asyncio.wait_for(asked, seconds)
        except TimeoutError:  # a partition proves nothing, and no other check of this engine runs meanwhile
            raise EngineLost(f"its canary took more than {seconds:g} s") from None
        if version != self.version:
            return
        if not all(completion.whole for completion in completions):
            raise Busy("its canary was cut short by a pause")
        references = self._references
        if canary.reference is not None and member.hardware == canary.hardware and member.hardware not in references:
            references[member.hardware] = await canary.reference()
        known = references.setdefault(member.hardware, completions)
        if not all(same_bits(mine, theirs) for mine, theirs in zip(known, completions, strict=True)):
            raise BadAnswer(f"the bits of its canary at version {version} are not those of {member.hardware}")

    def out(self, member: Member, status: Status, why: str) -> None:
        """Take a member out of service; its calls are repeated on other engines."""
        if member.status == status:
            return
        was, member.status, member.why = member.status, status, why[:500]
        if status in ("lost", "quarantined") and not (status == "lost" and was == "joining" and not member.boot):
            self.counts[status] += 1
            self.note(status, member, why=member.why, calls=len(member.calls))
        if status in ("lost", "quarantined", "joining"):
            for call in list(member.calls):
                call.cancel()
        self._changed.set()

    def condemn(self, member: Member, why: str) -> None:
        """Quarantine a member until it restarts, or until the next version."""
        member.condemned = self.version
        self.out(member, "quarantined", why)

    def note(self, event: str, member: Member, **facts: Any) -> None:
        """Record an event. Never raises, since a full disk is not an engine's fault; `check` raises later."""
        try:
            self._record({"event": event, "engine": member.name, "version": self.version, "time": time.time(), **facts})
        except Exception as error:
            self._unwritten = error
            self._changed.set()

    def check(self) -> None:
        """Raises the error that kept an event from being recorded, if any."""
        if self._unwritten is not None:
            raise self._unwritten

    def serving(self) -> list[Member]:
        """From any thread."""
        return [member for member in list(self._all.values()) if member.status == "serving"]

    # ---------------------------------------------------------------------------------------------- versions

    async def serve_version(self, version: int, canary: Canary | None) -> dict[str, float]:
        began = time.monotonic()
        if version != self.version:
            self.version, self._canary, self._references, self._synced = version, canary, {}, {}
            self._published = time.monotonic()
            if canary is not None and canary.hardware is not None and canary.expected is not None:
                self._references[canary.hardware] = canary.expected
            for member in self._all.values():
                if member.status in ("serving", "behind"):
                    member.status, member.why = "behind", "it was asked for the new version"
                member.kick.set()
        one = None
        while True:
            self._changed.clear()
            self.check()
            serving = self.serving()
            awaited = [member for member in self._all.values() if member.status in ("behind", "joining")]
            now = time.monotonic()
            one = now if serving and one is None else one
            if serving and (not awaited or (one is not None and now - one > self.settings.settle)):
                break
            if not serving and now - began > self.settings.patience:
                listed = "; ".join(f"{member.name} is {member.status}: {member.why}" for member in self._all.values())
                raise NoEngine(
                    f"no engine came to serve version {version} within fleet.patience={self.settings.patience:g} s "
                    f"(engines: {listed or 'none'})"
                )
            await _at_most(0.2, self._changed)
        return {"sync/live_seconds": time.monotonic() - began}

    def _sync_facts(self, member: Member) -> dict[str, float]:
        facts = {"seconds": time.monotonic() - self._published}
        weights = member.last.weights if member.last is not None else None
        if weights is not None and weights.version == self.version:
            facts |= {**weights.seconds(), "fetched_bytes": float(weights.wire_bytes)}
        return facts

    def take_metrics(self) -> dict[str, float]:
        counts, self.counts = self.counts, Counter()
        metrics: dict[str, float] = {f"fleet/{name}": float(count) for name, count in counts.items()}
        for name in ("reissued", "hedged", "lost", "quarantined"):
            metrics.setdefault(f"fleet/{name}", 0.0)
        metrics["fleet/engines"] = float(len(self.serving()))
        for region in {member.region for member in self._all.values()}:
            mine = [member for member in self._all.values() if member.region == region]
            metrics[f"fleet/{region}/engines"] = float(sum(member.status == "serving" for member in mine))
            took = [self._synced[member.name] for member in mine if member.name in self._synced]
            for fact in {fact for each in took for fact in each}:
                metrics[f"fleet/{region}/sync_{fact}"] = max(each[fact] for each in took if fact in each)
        return metrics

    async def close(self) -> None:
        for member in self._all.values():
            assert member.caretaker is not None
            member.caretaker.cancel()
            for call in member.calls:
                call.cancel()
        await asyncio.gather(*map(_let_go, self._all.values()))


async def _at_most(seconds: float, event: asyncio.Event) -> None:
    """Wait for the event, at most that long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _let_go(member: Member) -> None:
    """Close its client once its cancelled calls have told the engine so."""
    await asyncio.gather(*member.calls, return_exceptions=True)
    await member.client.close()


def reason(error: BaseException) -> str:
    """The reason why an engine is out of service: the message of rlloop's own errors, type and message of others."""
    return str(error) if isinstance(error, RlloopError) else f"{type(error).__name__}: {error}"


def same_bits(a: Completion, b: Completion) -> bool:
    return a.token_ids == b.token_ids and all(
        mine.tobytes() == theirs.tobytes()
        for mine, theirs in ((a.logprobs, b.logprobs), (a.raw_logprobs, b.raw_logprobs))
    )


def hardware_class(fingerprint: Mapping[str, Any]) -> str:
    """The hardware class of an engine: engines of one class must produce the same bits."""
    return hashlib.blake2b(msgspec.json.encode(fingerprint, order="deterministic"), digest_size=8).hexdigest()
