"""State of the dashboard's server: the runs, their rollout indices, and clients that wait for changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool

from rlloop.dashboard.rollouts import RolloutIndex, cache_folder
from rlloop.dashboard.runs import Run, Runs
from rlloop.dashboard.training_api import TrainingApi

POLL = 1.0  # seconds between checks of the runs' files, while a client listens
SEARCH = 5  # every so many checks also look for new runs
HEARTBEAT = 15.0  # seconds of silence after which a comment keeps the connection open


class Dashboard:
    """`root`: folder with runs. `cache`: of rollout indices; None: the user's cache. `note`: shown on all pages.
    `api`: a training API, which has a page."""

    def __init__(
        self, root: Path, *, cache: Path | None = None, note: str = "", api: TrainingApi | None = None
    ) -> None:
        self.runs, self.api = Runs(root), api
        self.note = note
        self._cache = cache or cache_folder()
        self._indices: dict[str, RolloutIndex] = {}
        self._indexing = threading.Lock()
        self._watchers: set[asyncio.Queue[str]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    def index(self, run: Run) -> RolloutIndex:
        """From any thread."""
        with self._indexing:
            if run.id not in self._indices:
                self._indices[run.id] = RolloutIndex(run.path, self._cache)
            return self._indices[run.id]

    async def events(self) -> AsyncIterator[str]:
        """Server-sent events: first all runs, then those that change."""
        queue: asyncio.Queue[str] = asyncio.Queue()
        self._watchers.add(queue)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look())
        try:
            yield _event("runs", await run_in_threadpool(lambda: [run.overview() for run in self.runs.find()]))
            while not self._closing.is_set():
                try:
                    yield await asyncio.wait_for(queue.get(), timeout=HEARTBEAT)
                except TimeoutError:
                    yield ": nothing new\n\n"
        finally:
            self._watchers.discard(queue)

    async def _look(self) -> None:
        """Check the runs' files for changes as long as a client listens."""
        seen: dict[str, tuple[Any, str]] = {}  # run -> its files' signature, its status
        known: list[str] = []
        rounds = 0
        while self._watchers and not self._closing.is_set():
            ids, changed = await run_in_threadpool(self._changes, seen, rounds % SEARCH == 0)
            if changed or ids != known:
                for queue in self._watchers:
                    queue.put_nowait(_event("changed", {"ids": ids, "runs": changed}))
            known = ids
            rounds += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), timeout=POLL)

    def _changes(self, seen: dict[str, tuple[Any, str]], search: bool) -> tuple[list[str], list[dict[str, Any]]]:
        """(all ids, overviews of the runs that changed). A run that stops writing changes its status, not its files."""
        changed = []
        runs = self.runs.find() if search else self.runs.known()
        for run in runs:
            signature, (before, status) = run.signature(), seen.get(run.id, (None, ""))
            if signature != before or (search and status == "live"):
                overview = run.overview()
                if signature != before or overview["status"] != status:
                    changed.append(overview)
                seen[run.id] = signature, overview["status"]
        return [run.id for run in runs], changed

    def close(self) -> None:
        """End the event streams, so that the server can stop."""
        self._closing.set()
        for queue in self._watchers:
            queue.put_nowait(": closing\n\n")
        for index in list(self._indices.values()):
            index.close()
        if self.api is not None:
            self.api.close()


def to_json(content: Any) -> bytes:
    """JSON with null for numbers that are not finite, and numpy's numbers as numbers."""
    return msgspec.json.encode(content, enc_hook=lambda value: value.item())


def _event(name: str, content: Any) -> str:
    return f"event: {name}\ndata: {to_json(content).decode()}\n\n"
