"""An event loop in a thread of its own, for coroutines that may do anything: block it, exit, never end."""

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
POLL = 0.1  # seconds between two looks at whether the loop still answers
GRACE = 0.5  # seconds that a coroutine has to end when it is cancelled


# Whose a task is, and every task that it starts.
OWNER: ContextVar[Any] = ContextVar("owner", default=None)


class LoopBlocked(TimeoutError):
    """The loop has not answered for too long; `owner` is that of the task that it is in."""

    def __init__(self, owner: Any) -> None:
        super().__init__("the event loop is blocked")
        self.owner = owner


class EventLoop:
    """One loop for a reward's life, so that connection pools and process pools outlive a step.

    All its threads are daemons, `asyncio.to_thread`'s included: none keeps the process from ending.
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
            except (SystemExit, KeyboardInterrupt):  # of a task that a reward started; the others go on
                continue
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def check(self, patience: float) -> None:
        """Raises `LoopBlocked` where the loop has not answered for `patience` seconds; to be called every `POLL`."""
        now = time.monotonic()
        if self._answered.is_set():
            self._ask()
        elif now - self._asked > patience:
            task = asyncio.current_task(self._loop)
            raise LoopBlocked(None if task is None else self._owners[task])

    def run(self, work: Coroutine[Any, Any, T], patience: float) -> T:
        """What `work` returns. Raises `LoopBlocked` where the loop does not answer for `patience` seconds."""
        future = self.start(work)
        try:
            self._ask()
            while not wait([future], min(POLL, patience)).done:
                self.check(patience)
            return future.result()
        finally:
            future.cancel()  # what an interrupt leaves behind

    def _ask(self) -> None:
        self._asked, self._answered = time.monotonic(), threading.Event()
        self._loop.call_soon_threadsafe(self._answered.set)

    def stop(self) -> None:
        """At once, or when it is no longer blocked. What still runs there is cancelled, and has a while to end."""
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
    """A thread for each call: those of the standard pool are waited for when the process ends."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # carried to the caller
                future.set_exception(error)

        threading.Thread(target=call, daemon=True, name="rlloop-reward").start()
        return future


class OnThisLoop(Generic[T]):
    """What belongs to an event loop (a semaphore, a pool of connections), made anew on another."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None
        self._held: T | None = None

    def get(self) -> T:
        loop = asyncio.get_running_loop()
        if self._held is None or self._loop is not loop:
            self._loop, self._held = loop, self._make()
        return self._held

    def pop(self) -> T | None:
        """What is held, for the last time."""
        held, self._held = self._held, None
        return held
