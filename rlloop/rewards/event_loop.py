"""An event loop in a thread of its own, for untrusted coroutines: they may block it, raise SystemExit or never end."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")
POLL = 0.1  # seconds between checks that the loop still answers
GRACE = 0.5  # seconds for a cancelled coroutine to end


# The owner of a task, inherited by every task that it starts.
OWNER: ContextVar[Any] = ContextVar("owner", default=None)


class LoopBlocked(TimeoutError):
    """The loop has not answered in time; `owner` is the owner of the task that it is running."""

    def __init__(self, owner: Any) -> None:
        super().__init__("the event loop is blocked")
        self.owner = owner


class EventLoop:
    """One loop for a reward's lifetime, so that connection pools and process pools outlive a step.

    All its threads are daemons, `asyncio.to_thread`'s included, so that none keeps the process from ending.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(_Daemons())
        self._loop.set_task_factory(self._new_task)
        self._owners = weakref.WeakKeyDictionary[asyncio.Task[Any], Any]()
        self._stopped = False
        self._ask()
        threading.Thread(target=self._run, daemon=True, name="rlloop-reward").start()

    def _new_task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        self._owners[task] = OWNER.get()
        return task

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # raised by a task; the others continue
                continue
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def check(self, patience: float) -> None:
        """Raises `LoopBlocked` if the loop has not answered for `patience` seconds. Call it every `POLL` seconds, or as
        often as you like: each question wakes the loop's thread, so it is asked every `POLL` seconds at most."""
        since = time.monotonic() - self._asked
        if self._answered.is_set():
            if since >= min(POLL, patience):
                self._ask()
        elif since > patience:
            task = asyncio.current_task(self._loop)
            raise LoopBlocked(None if task is None else self._owners[task])

    def run(self, work: Coroutine[Any, Any, T], patience: float) -> T:
        """Run `work` and return its result. Raises `LoopBlocked` if the loop does not answer for `patience` seconds."""
        future = self.start(work)
        try:
            self._ask()
            while not wait([future], min(POLL, patience)).done:
                self.check(patience)
            return future.result()
        finally:
            future.cancel()  # if an interrupt ended the wait

    def _ask(self) -> None:
        self._asked, self._answered = time.monotonic(), threading.Event()
        self._loop.call_soon_threadsafe(self._answered.set)

    def stop(self) -> None:
        """Stop the loop, as soon as it is not blocked. Running tasks are cancelled and have `GRACE` seconds to end."""
        asyncio.run_coroutine_threadsafe(self._finish(), self._loop)

    async def _finish(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=GRACE)
        self._stopped = True
        self._loop.stop()


class _Daemons(ThreadPoolExecutor):
    """A daemon thread for each call: at its end the process would wait for the standard pool's threads."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # raised in the caller
                future.set_exception(error)

        threading.Thread(target=call, daemon=True, name="rlloop-reward").start()
        return future


class OnThisLoop(Generic[T]):
    """An object that belongs to an event loop (a semaphore, a connection pool), created again on another loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._held: tuple[asyncio.AbstractEventLoop, T] | None = None  # as one, for loops in several threads

    def get(self) -> T:
        held, loop = self._held, asyncio.get_running_loop()
        if held is None or held[0] is not loop:
            held = self._held = loop, self._make()
        return held[1]

    def pop(self) -> T | None:
        """The object, if there is one, which is not kept any longer."""
        held, self._held = self._held, None
        return None if held is None else held[1]
