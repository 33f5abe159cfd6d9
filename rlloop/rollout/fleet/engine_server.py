"""An engine over HTTP.

    POST /v1/completions             OpenAI's (rlloop.rollout.fleet.openai_api)      GET /v1/models, /v1/models/{model}
    POST /v1/chat/completions        OpenAI's (rlloop.rollout.fleet.openai_chat)
    POST /v1/load_lora_adapter, /v1/unload_lora_adapter   vLLM's (rlloop.rollout.fleet.adapter_routes)
    POST /inference/v1/generate      token ids both ways, as vLLM has it (rlloop.rollout.fleet.token_api)
    POST /rlloop/generate            exact float32 logprobs, seeds, versions (rlloop.rollout.fleet.wire)
    DELETE /rlloop/requests/{key}    cancel a request
    POST /rlloop/lease               fencing: take over driving the engine
    GET  /rlloop/state               version, load, fingerprint
    GET  /rlloop/weights             state of the replica
    POST /rlloop/weights/wake        look for new weights now; `?version=N&wait=S` answers when they serve
    POST /rlloop/pause               `?mode=wait|abort|keep`: answers once computing has stopped; new requests wait
    POST /rlloop/resume
    GET  /health                     503 until the newest weights serve
    GET  /metrics                    Prometheus

A request for a version that is not served is refused with 409, and the replica looks for that version. A request with
an `Idempotency-Key` is computed once; a retry, for example after a broken connection, gets the same answer.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import msgspec
from anyio import CapacityLimiter, to_thread
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from rlloop.errors import ConfigError, RlloopError
from rlloop.models.vision_processor import ImageProcessor
from rlloop.rollout.engine.service import EngineService, PauseMode
from rlloop.rollout.engine.validation import adapter_for_each, one_for_each
from rlloop.rollout.errors import Busy, VersionUnavailable
from rlloop.rollout.fleet import wire
from rlloop.rollout.fleet.answering import LEFT, OpenAiRoutes, outcome
from rlloop.rollout.fleet.generation import BadField, LogprobsMode, Served
from rlloop.rollout.fleet.text import Tokenizer
from rlloop.types import Completion, ModelInput
from rlloop.web.requests import parsed, refusal, whole_number

REMEMBERED = 1024  # completions in answers that are kept for retries
WAITING = 64  # calls that may wait for weights; a client has as many connections
PAUSE_MODES: dict[str, PauseMode] = {mode: mode for mode in get_args(PauseMode)}

COUNTED = (  # of `EngineStats`
    "steps", "requests", "prompt_tokens", "made_tokens", "cached_tokens", "preemptions", "adapter_waits",
    "adapter_swaps", "adapter_swap_bytes", "adapter_swap_seconds",
)  # fmt: skip


class Follower(Protocol):
    """Keeps the engine's weights at the newest version (`rlloop.rollout.fleet.weight_follower`)."""

    @property
    def status(self) -> Literal["ready", "behind", "failed"]: ...

    @property
    def error(self) -> str: ...

    @property
    def progress(self) -> wire.Progress | None: ...

    @property
    def run_id(self) -> str: ...

    @property
    def follows(self) -> str: ...

    def wake(self) -> None: ...

    def wait_for(self, version: int, seconds: float) -> None:
        """Wait until this version or a later one serves, or for at most `seconds`."""
        ...


class EngineServer:
    """The application; `app` is what a server runs."""

    def __init__(
        self,
        service: EngineService,
        *,
        name: str,
        region: str = "",
        model: str = "rlloop",
        tokenizer: Tokenizer | None = None,
        logprobs_mode: LogprobsMode = "processed_logprobs",
        follower: Follower | None = None,
        lifespan: Callable[[EngineServer], AbstractAsyncContextManager[None]] | None = None,
        beside: Sequence[BaseRoute] = (),
        adapter_root: Path | None = None,
        images: ImageProcessor | None = None,
        root: Path | None = None,
    ) -> None:
        """`model`: the name for OpenAI's clients; `logprobs_mode`: the default logprobs for them, those sampled with or
        the raw ones. `lifespan` is entered while the server runs. `beside`: more routes. `adapter_root`: the folder
        that clients may load adapters from; None: loading is refused. `images`: the model's image processor; None: it
        reads text only. `root`: the model's folder, as `/v1/models` says it."""
        self.service, self.name, self.region, self.follower = service, name, region, follower
        self.boot = secrets.token_hex(8)
        self._fingerprint = service.fingerprint()
        self._lease = wire.Lease("", 0)
        self._remembered: OrderedDict[str, tuple[bytes, Future[list[Completion]]]] = OrderedDict()
        self._refused = 0
        self._pausing = False  # a pause waits for requests in flight
        self._waiting = CapacityLimiter(WAITING)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Numbers(self))

        @asynccontextmanager
        async def run(app: Starlette) -> AsyncIterator[None]:
            if lifespan is None:
                yield
            else:
                async with lifespan(self):
                    yield

        served = Served(model, tokenizer, service.longest, logprobs_mode, images, None if root is None else str(root))
        self.app = Starlette(
            routes=[
                *OpenAiRoutes(service, served, adapter_root).routes,
                Route("/rlloop/generate", self._generate, methods=["POST"]),
                Route("/rlloop/requests/{key}", self._forget, methods=["DELETE"]),
                Route("/rlloop/lease", self._take_lease, methods=["POST"]),
                Route("/rlloop/state", self._state),
                Route("/rlloop/weights", self._weights),
                Route("/rlloop/weights/wake", self._wake, methods=["POST"]),
                Route("/rlloop/pause", self._pause, methods=["POST"]),
                Route("/rlloop/resume", self._resume, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                *beside,
            ],
            exception_handlers={
                ConfigError: _bad_request,
                Busy: lambda _, error: refusal(429, "busy", str(error)),
                VersionUnavailable: self._unavailable,
                RlloopError: lambda _, error: refusal(500, "engine_failed", str(error)),
                HTTPException: _refused,
                Exception: lambda _, error: refusal(500, "engine_failed", f"{type(error).__name__}: {error}"),
            },
            lifespan=run,
        )

    # ---------------------------------------------------------------------------------------------- completions

    async def _generate(self, request: Request) -> Response:
        body = await request.body()
        read = await run_in_threadpool(_read, request.headers, body)  # pictures are hashed
        if read is None:
            return _damaged()
        ask, asked, digest = read
        if await request.is_disconnected():  # it may have cancelled a key that was not known yet
            return Response(status_code=LEFT)
        each = one_for_each(ask.prompts, ask.sampling)
        names = () if ask.adapters is None else adapter_for_each(ask.prompts, ask.adapters)
        submit = partial(self.service.submit, asked, each, ask.lowest, ask.highest, adapters=names)
        if ask.holder == self._lease.holder and ask.term < self._lease.term:
            return self._fenced(ask.term)
        key = request.headers.get("idempotency-key")
        if key is None:
            future = submit()
        else:
            known, future = self._remembered.get(key, (digest, None))
            if known != digest:
                return refusal(422, "key_reused", f"idempotency key {key} came before, with another request")
            if future is None or (future.done() and future.exception() is not None):  # a refusal may have passed
                future = submit()
                future.add_done_callback(_without_inputs)
                self._remembered[key] = (digest, future)
                self._forget_oldest()
        completions = await outcome(self.service, request, future, keep=key is not None)
        if completions is None:
            return Response(status_code=LEFT)
        answer = wire.Answer([wire.pack(completion) for completion in completions], self.boot)
        return await run_in_threadpool(_packed, answer)

    def _forget_oldest(self) -> None:
        room = REMEMBERED  # a completion may be a megabyte if it lists its experts
        for key, (_, future) in reversed(list(self._remembered.items())):
            if future.done():
                room -= 1 if future.exception() is not None else max(1, len(future.result()))
                if room < 0:
                    del self._remembered[key]

    async def _forget(self, request: Request) -> Response:
        known = self._remembered.pop(request.path_params["key"], None)
        if known is None:
            return refusal(404, "unknown_key", "no request has this idempotency key")
        self.service.cancel(known[1])
        return JSONResponse({})

    # ---------------------------------------------------------------------------------------------- fencing

    async def _take_lease(self, request: Request) -> Response:
        body = await request.body()
        if not wire.arrived(request.headers, body):
            return _damaged()
        lease = parsed(body, wire.Lease, packed=True)
        if lease.holder == self._lease.holder and lease.term < self._lease.term:
            return self._fenced(lease.term)
        if lease != self._lease:  # requests of the former holder are no longer awaited
            for _, future in self._remembered.values():
                self.service.cancel(future)
            self._remembered.clear()
            self._lease = lease
        return JSONResponse({"boot": self.boot})

    def _fenced(self, term: int) -> Response:
        self._refused += 1
        text = f"term {term} of {self._lease.holder} is over: term {self._lease.term} drives this engine"
        return refusal(409, "fenced", text, term=self._lease.term)

    # ---------------------------------------------------------------------------------------------- pausing

    async def _pause(self, request: Request) -> Response:
        asked = request.query_params.get("mode", "wait")
        if (mode := PAUSE_MODES.get(asked)) is None:
            raise ConfigError(f"mode is {asked!r}; it must be one of {', '.join(PAUSE_MODES)}")
        if self._pausing:
            return self._waits_already()
        self._pausing = True
        try:
            await run_in_threadpool(self.service.pause, mode)
        finally:
            self._pausing = False
        return self._paused()

    async def _resume(self, request: Request) -> Response:
        if self._pausing:
            return self._waits_already()
        await run_in_threadpool(self.service.resume)
        return self._paused()

    def _paused(self) -> Response:
        return JSONResponse({"paused": self.service.paused, "load": self.service.load})

    def _waits_already(self) -> Response:
        return refusal(409, "pausing", f"another pause waits for what is in flight: {self.service.load} requests")

    # ---------------------------------------------------------------------------------------------- weights and facts

    def state(self) -> wire.EngineState:
        follower = self.follower
        return wire.EngineState(
            self.boot,
            self.name,
            self.region,
            "ready" if follower is None else follower.status,
            self.service.version,
            self.service.load,
            self._fingerprint,
            None if follower is None else follower.progress,
            "" if follower is None else follower.error,
            self.service.paused,
            "" if follower is None else follower.run_id,
            "" if follower is None else follower.follows,
            self.service.longest,
        )

    async def _unavailable(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, VersionUnavailable)
        self._refused += 1
        if self.follower is not None and not error.passed:
            self.follower.wake()
        return refusal(409, "version_passed" if error.passed else "version_behind", str(error), have=error.have)

    async def _state(self, request: Request) -> Response:
        return _packed(self.state())

    async def _weights(self, request: Request) -> Response:
        state = self.state()
        return JSONResponse(
            {"version": state.version, "status": state.status, "error": state.error,
             "last": state.weights and msgspec.structs.asdict(state.weights)}
        )  # fmt: skip

    async def _wake(self, request: Request) -> Response:
        version = whole_number(request.query_params.get("version"), "version", -1)
        try:
            seconds = min(float(request.query_params.get("wait", "0")), 60.0)
        except ValueError:
            raise ConfigError("wait must be a number of seconds") from None
        if self.follower is not None:  # otherwise its weights never change
            self.follower.wake()
            if seconds > 0:
                if self._waiting.available_tokens < 1:
                    raise Busy(f"{WAITING} calls wait for weights, the most allowed")
                wait = partial(self.follower.wait_for, version, seconds)
                await to_thread.run_sync(wait, limiter=self._waiting)  # not in a thread that other requests need
        return await self._state(request)

    async def _health(self, request: Request) -> Response:
        state = self.state()
        content = {"status": state.status, "version": state.version, "error": state.error, "paused": state.paused}
        return JSONResponse(content, 200 if state.status == "ready" else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def metrics(self) -> Sequence[Metric]:
        """Values for Prometheus, read when it asks."""
        service, stats = self.service, self.service.stats()
        progress = self.follower.progress if self.follower is not None else None
        gauges: dict[str, tuple[str, float]] = {
            "rlloop_policy_version": ("version of the weights that serve", service.version),
            "rlloop_requests_waiting": ("requests in flight or waiting", service.load),
            "rlloop_weights_ready": ("1 where the newest weights serve", self.state().status == "ready"),
            "rlloop_paused": ("1 while the engine is paused", service.paused),
        }
        if progress is not None:
            gauges["rlloop_sync_wire_bytes"] = ("bytes of the last change of weights", progress.wire_bytes)
            gauges["rlloop_sync_pause_seconds"] = ("how long it paused the engine", progress.pause_seconds)
        counters: dict[str, tuple[str, float]] = {
            f"rlloop_{name}": (f"{name.replace('_', ' ')} since the start", getattr(stats, name)) for name in COUNTED
        }
        counters["rlloop_refused"] = ("requests refused for their version or term", self._refused)
        return [
            *(GaugeMetricFamily(name, text, value=float(value)) for name, (text, value) in gauges.items()),
            *(CounterMetricFamily(name, text, value=float(value)) for name, (text, value) in counters.items()),
        ]


def _packed(content: msgspec.Struct) -> Response:
    body = msgspec.msgpack.encode(content)
    return Response(body, media_type=wire.CONTENT_TYPE, headers=wire.digest_of(body))


def _read(headers: Mapping[str, str], body: bytes) -> tuple[wire.Ask, Sequence[ModelInput | list[int]], bytes] | None:
    """A request, the engine's inputs, and a digest that tells the request from others; None: it was damaged."""
    if not wire.arrived(headers, body):
        return None
    ask = parsed(body, wire.Ask, packed=True)
    return ask, ask.asked, hashlib.blake2b(body, digest_size=16).digest()


def _without_inputs(future: Future[list[Completion]]) -> None:
    """Drops the prompts' pictures, which a retry needs no more than a client that has them."""
    if future.exception() is None:
        future.result()[:] = [replace(completion, model_input=None) for completion in future.result()]


def _damaged() -> Response:
    return refusal(400, "damaged", "the body is not the one that its Content-Digest is of; send it again")


def _bad_request(request: Request, error: Exception) -> Response:
    code, param = (error.code, error.param) if isinstance(error, BadField) else ("bad_request", None)
    return refusal(400, code, str(error), param=param)


def _refused(request: Request, error: Exception) -> Response:
    """Error answers of the router (unknown path, wrong method) and of the guard before it (body too large)."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed", 408: "stalled", 413: "too_large"}
    text = f"{request.method} {request.scope['path']}: {error.detail}"
    answer = refusal(error.status_code, codes.get(error.status_code, "bad_request"), text)
    answer.headers.update(error.headers or {})
    return answer


class _Numbers(Collector):
    def __init__(self, server: EngineServer) -> None:
        self._server = server

    def collect(self) -> Any:
        return self._server.metrics()
