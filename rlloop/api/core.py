"""State shared by all parts of the training API: the service, futures, the committer, limits and settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future as Made
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rlloop.api.calls import failure
from rlloop.api.futures import Futures, Outcome
from rlloop.api.inputs import TEXT_ONLY, InputReader
from rlloop.api.keys import Keys, Quota
from rlloop.api.log import CommandLog, Committer, Record, write_bytes
from rlloop.errors import ConfigError, RlloopError
from rlloop.runs.journal import decoded
from rlloop.training.service import TrainingService
from rlloop.training.types import Parity

AGAIN_SECONDS = 0.5  # until a record is written again that could not be

log = logging.getLogger("rlloop.api")


class Refused(RlloopError):
    """A request that is refused at once with the HTTP status `status`, 4xx or 5xx."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Settings:
    folder: Path  # sessions, command logs
    model_name: str  # under which the base is offered
    model_folder: Path
    inputs: InputReader = TEXT_ONLY  # of the model's folder
    max_body: int = 64 << 20  # bytes of a request, unpacked
    quota: Quota = field(default_factory=Quota)
    parity: Parity = "require"
    idle_seconds: float = 900.0  # without a heartbeat, after which a session ends
    state_every: int = 50  # updates of a model between states in its log
    poll_seconds: float = 20.0  # a result is waited for, before the client asks again

    @property
    def base_models(self) -> tuple[str, ...]:
        return (self.model_name, str(self.model_folder), self.model_folder.name)


class Base(msgspec.Struct):
    """`base.json`: the model that a folder's logs were made with, and the settings that decide bits."""

    folder: str
    name: str
    settings: dict[str, Any]


def keep_base(folder: Path, base: Base) -> None:
    """Write `base.json`, or compare with an existing one. Raises `ConfigError` if the logs' commands would give other
    bits, `RunError` for a damaged file."""
    file = folder / "base.json"
    if not file.exists():
        write_bytes(file, msgspec.json.encode(base))
        return
    before = decoded(file.read_bytes(), file, Base)
    if (before.folder, before.settings) != (base.folder, base.settings):
        raise ConfigError(
            f"--folder {folder} has logs of {before.folder} with {before.settings}, and this server has {base.folder} "
            f"with {base.settings}: their replay would give other weights. Give the same settings, or another --folder"
        )


class Core:
    def __init__(self, service: TrainingService, settings: Settings, keys: Keys) -> None:
        self.service, self.settings, self.keys = service, settings, keys
        self.futures = Futures()
        self.committer = Committer()
        self.threads = ThreadPoolExecutor(2, thread_name_prefix="api")
        self.loop: asyncio.AbstractEventLoop | None = None  # set when the server runs
        self.refused = 0  # requests answered 429
        self.restoring: dict[str, asyncio.Task[Any]] = {}  # by sequence of before the restart: the service learns of it
        self._tasks = set[asyncio.Task[Any]]()

    def admit(self, client: str, nbytes: int, *, urgent: bool = False) -> None:
        """Raises `Refused` (429) when the client has too much in flight. `urgent`: the request that its others wait
        for, which must be admitted to avoid a deadlock."""
        futures, held = self.futures.load(client)
        quota = self.settings.quota
        if urgent or (futures < quota.futures and held + nbytes <= quota.bytes):
            return
        self.refused += 1
        raise Refused(
            429,
            f"{futures} requests with {held} bytes are in flight; {quota.futures} with {quota.bytes} are allowed: "
            "collect results before you send more",
        )

    def task(self, work: Any) -> asyncio.Task[Any]:
        """Run a coroutine, whose error is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the training API failed", exc_info=error)

    def keep(self, commands: CommandLog, record: Record) -> asyncio.Task[None]:
        """Append a record that a replay must find, again and again while the disk is full."""
        return self.task(self._kept(commands, record, commands.append(record)))

    async def _kept(self, commands: CommandLog, record: Record, written: Made[None]) -> None:
        warned = False
        while True:
            try:
                await asyncio.wrap_future(written)
                return
            except OSError as error:
                if not warned:
                    log.error("%s cannot be written, and will be tried again: %s", commands.folder, error)
                warned = True
            await asyncio.sleep(AGAIN_SECONDS)
            written = commands.append(record)

    def when_done(
        self,
        future: Made[Any],
        encode: Callable[[Any], Outcome],
        settle: Callable[[Outcome], Any],
        *,
        small: bool = False,
    ) -> None:
        """Call `settle` in the event loop with the outcome of a service's future. `encode` runs in a thread, or for a
        `small` result in the service's, which spares the hop."""

        def complete() -> None:
            try:
                outcome = encode(future.result())
            except BaseException as error:
                if not isinstance(error, RlloopError):
                    log.error("a request failed in the server", exc_info=error)
                outcome = failure(error)
            assert self.loop is not None
            self.loop.call_soon_threadsafe(settle, outcome)

        future.add_done_callback(lambda _: complete() if small else self.threads.submit(complete))

    def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.committer.close()
