"""Clients of an engine server: `RemoteEngine` for a loop, `EngineClient` for a pool.

Only idempotent requests are retried: a generation carries an idempotency key, so its engine computes it once; all other
requests read state or set it to the same value.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import threading
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import msgspec
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from rlloop.errors import ConfigError, RlloopError
from rlloop.parallel.interrupts import result_of
from rlloop.rollout.engine.validation import adapter_for_each, one_for_each
from rlloop.rollout.errors import BadAnswer, Busy, EngineLost, Fenced, VersionUnavailable, WrongToken
from rlloop.rollout.fleet.wire import (
    CONTENT_TYPE,
    Answer,
    Ask,
    EngineState,
    Lease,
    arrived,
    decode,
    digest_of,
    error_of,
    pack_prompts,
    parts_of,
    reading,
    unpack,
)
from rlloop.types import Completion, ModelInput, SamplingParams
from rlloop.web.clients import CONNECT_SECONDS, async_client

PROMPTS_PER_CALL = 256
MAX_ANSWER = 1 << 30  # bytes
GRACE = 10.0  # seconds for cancelled work to end

T = TypeVar("T")


class EngineClient:
    """Client of one engine, for one event loop."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: str | Path | None = None,
        timeout: float = 600.0,
        holder: str = "",
        term: int = 0,
        vocabulary: int | None = None,
        attempts: int = 3,
    ) -> None:
        """`timeout`: seconds that one answer may take. `holder` and `term`: see `rlloop.rollout.fleet.wire.Lease`.
        `vocabulary`: tokens that the model has, where that is known."""
        self.url, self._lease, self._attempts = url.rstrip("/"), Lease(holder, term), attempts
        self._timeout, self._vocabulary = timeout, vocabulary
        self._telling: set[asyncio.Task[None]] = set()  # cancellations being sent
        self._http = async_client(
            token=token,
            ca_file=ca_file,
            most=MAX_ANSWER,
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=64, max_keepalive_connections=16),
        )

    async def state(self, timeout: float | None = None) -> EngineState:
        content = await self._send("GET", "/rlloop/state", timeout=timeout)
        return decode(content, EngineState, f"the state of {self.url}")

    async def lease(self, timeout: float | None = None) -> None:
        """Take over the engine. Raises `Fenced` if a process of a later term has."""
        await self._send("POST", "/rlloop/lease", timeout=timeout, **_body(self._lease))

    async def wake(self, version: int, wait: float) -> EngineState:
        """Make the engine look for new weights; returns its state once `version` serves, or after `wait` seconds."""
        params = {"version": version, "wait": wait}
        content = await self._send("POST", "/rlloop/weights/wake", params=params, timeout=wait + 10.0)
        return decode(content, EngineState, f"the state of {self.url}")

    async def generate(
        self,
        prompts: Sequence[ModelInput | list[int]],
        sampling: Sequence[SamplingParams],
        *,
        lowest: int | None = None,
        highest: int | None = None,
        boot: str | None = None,
        adapters: Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Completions in order. `boot`: identity of the expected engine process. `adapters`: names of loaded adapters,
        one for each prompt; None: none.

        Raises `EngineLost`, `VersionUnavailable`, `Fenced`, `Busy` (try later or elsewhere), `BadAnswer` (the engine is
        at fault) or `ConfigError` (the request is). If cancelled, it tells the engine to stop.
        """
        names = None if adapters is None or not any(adapters) else list(adapters)

        def asks() -> list[tuple[Ask, dict[str, Any]]]:
            made = [
                Ask(
                    **pack_prompts(prompts[part]), sampling=list(sampling[part]), lowest=lowest, highest=highest,
                    holder=self._lease.holder, term=self._lease.term, adapters=names and names[part],
                )
                for part in parts_of(prompts)
            ]  # fmt: skip
            return [(ask, _body(ask)) for ask in made]

        bodies = await asyncio.to_thread(asks)  # megabytes of pictures are copied and hashed: not on the loop
        completions = await _joined(self._complete(ask, body, boot) for ask, body in bodies)
        return [
            dataclasses.replace(made, model_input=prompt)
            if isinstance(prompt, ModelInput) and not prompt.is_text
            else made
            for made, prompt in zip(completions, prompts, strict=True)
        ]

    async def _complete(self, ask: Ask, body: dict[str, Any], boot: str | None) -> list[Completion]:
        key = secrets.token_hex(16)
        request = {**body, "headers": {**body["headers"], "Idempotency-Key": key, "Content-Type": CONTENT_TYPE}}
        try:
            content = await self._send("POST", "/rlloop/generate", **request)
        except asyncio.CancelledError:
            task = asyncio.create_task(self._forget(key))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
            raise
        answer = decode(content, Answer, f"the answer of {self.url}")
        if boot is not None and answer.boot != boot:
            raise EngineLost(f"{self.url} was restarted")
        return unpack(ask, answer, self._vocabulary)

    async def close(self) -> None:
        await asyncio.gather(*self._telling)
        await self._http.aclose()

    async def _forget(self, key: str) -> None:
        with contextlib.suppress(httpx.HTTPError):  # a lost engine has nothing to stop
            await self._http.delete(f"/rlloop/requests/{key}", timeout=2.0)

    async def _send(self, method: str, path: str, *, timeout: float | None = None, **request: Any) -> bytes:
        """The answer's body. Raises one of the errors of `generate`."""
        if timeout is not None:
            request["timeout"] = httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS))

        async def once() -> httpx.Response:
            try:
                async with asyncio.timeout(timeout or self._timeout):  # even if bytes arrive slowly
                    reply = await self._http.request(method, path, **request)
            except TimeoutError:
                raise httpx.ReadTimeout("the answer takes too long") from None
            if not arrived(reply.headers, reply.content):
                raise httpx.ReadError("the answer arrived damaged")
            if reply.status_code == 400 and error_of(reply.content).get("code") == "damaged":
                raise httpx.WriteError("the request arrived damaged")
            return reply

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(httpx.TransportError),
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=0.1, max=1.0),
            reraise=True,
        )
        with reading(f"the answer of {self.url}"):
            try:
                reply: httpx.Response = await retrying(once)
            except httpx.TransportError as error:
                raise EngineLost(f"{self.url} cannot be reached: {type(error).__name__} {error}") from None
        if reply.is_success:
            return reply.content
        raise _refusal(self.url, reply)


def _body(value: Ask | Lease) -> dict[str, Any]:
    """Arguments of a request: the value in bytes, and the header with their digest."""
    content = msgspec.msgpack.encode(value)
    return {"content": content, "headers": digest_of(content)}


def _refusal(url: str, reply: httpx.Response) -> RlloopError:
    error = error_of(reply.content)
    code, have = error.get("code"), error.get("have")
    message = f"{url}: {error.get('message', f'HTTP {reply.status_code}')!s:.500}"
    if code in ("version_behind", "version_passed") and isinstance(have, int):
        unavailable = VersionUnavailable(have, None, None)
        unavailable.passed, unavailable.args = code == "version_passed", (message,)
        return unavailable
    if code == "fenced":
        return Fenced(message)
    if reply.status_code in (429, 503):
        return Busy(message)
    if reply.status_code == 401:
        return WrongToken(f"{url} refuses the token; give the one that its server was started with")
    if reply.status_code < 500:
        return ConfigError(message) if error else BadAnswer(f"{message}, as no server of rlloop does")
    return EngineLost(message)


async def _joined(calls: Iterable[Coroutine[Any, Any, list[T]]]) -> list[T]:
    """The calls' results end to end, in order. The first error is raised once the other calls have ended, cancelled."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return [each for results in await asyncio.gather(*tasks) for each in results]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class LoopThread:
    """An event loop in a thread, for callers in any thread that are not asynchronous."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._starting, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name=name)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self.start(work)
        try:
            return result_of(future)
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Raises `RlloopError` once it is closed: on a loop that is being stopped, the work would never end."""
        with self._starting:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RlloopError(f"the {self._thread.name} is closed")

    def close(self) -> None:
        """Cancel all work, which has `GRACE` seconds to end."""
        with self._starting:
            self._closed = True
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE):
            while others := asyncio.all_tasks() - {asyncio.current_task()}:  # a task that ends may start others
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)


class RemoteEngine:
    """An engine behind `rlloop serve engine`, as the Engine of a loop. Not thread-safe.

    Requests exactly `policy_version`, which `set_version` sets; None, the initial value, accepts any version.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: str | Path | None = None,
        timeout: float = 600.0,
    ) -> None:
        """`timeout`: limit in seconds for an answer, and for the engine to reach a version."""
        self._timeout = timeout
        self._version: int | None = None
        self._thread = LoopThread(f"client of {url}")
        self._client = EngineClient(url, token=token, ca_file=ca_file, timeout=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def policy_version(self) -> int:
        return self._thread.run(self._client.state()).version if self._version is None else self._version

    def set_version(self, version: int) -> None:
        self._version = version

    def generate(
        self,
        prompts: Sequence[ModelInput | list[int]],
        sampling: SamplingParams | list[SamplingParams],
        adapters: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """As `rlloop.Engine.generate`; `adapters` are names of ones that the server has loaded."""
        each, names = one_for_each(prompts, sampling), adapter_for_each(prompts, adapters)
        return self._thread.run(self._generate(prompts, each, names))

    def fingerprint(self) -> dict[str, Any]:
        return self._thread.run(self._client.state()).fingerprint

    def close(self) -> None:
        self._thread.run(self._client.close())
        self._thread.close()

    async def _generate(
        self, prompts: Sequence[ModelInput | list[int]], each: list[SamplingParams], names: list[str | None]
    ) -> list[Completion]:
        chunks = [slice(start, start + PROMPTS_PER_CALL) for start in range(0, len(prompts), PROMPTS_PER_CALL)]
        return await _joined(self._call(prompts[chunk], each[chunk], names[chunk]) for chunk in chunks)

    async def _call(
        self, prompts: Sequence[ModelInput | list[int]], each: list[SamplingParams], names: list[str | None]
    ) -> list[Completion]:
        version, clock = self._version, asyncio.get_running_loop().time
        deadline = clock() + self._timeout
        while True:
            try:
                return await self._client.generate(prompts, each, lowest=version, highest=version, adapters=names)
            except VersionUnavailable as unavailable:
                if unavailable.passed or version is None or clock() > deadline:
                    raise
                try:
                    serves = (await self._client.wake(version, wait=min(10.0, self._timeout))).version == version
                except Busy:  # others wait for weights there already
                    serves = False
                if not serves:  # the engine may have answered at once
                    await asyncio.sleep(0.5)
            except Busy:
                if clock() > deadline:
                    raise
                await asyncio.sleep(0.5)
