"""The trainer's server in a fleet: its versions of the weights, and the routes by which engines join.

    GET  /latest, /blobs/{hash}   the store (rlloop.sync.http); POST /squash/{version}, too
    POST /fleet/join              {"url": ..., "region": ...}: repeated every few seconds, as a heartbeat
    POST /fleet/leave             {"url": ...}
    GET  /fleet/engines           the members and their status
    GET  /health, /metrics

And, for trainers that are not rlloop's (`rlloop serve trainer`), which publish and sample through it:

    POST /fleet/publish?step=N    the weights as safetensors: publishes them, and answers once engines serve them
    POST /fleet/generate          rlloop.rollout.fleet.wire.Ask -> Answer, from engines that serve the version
    POST /inference/v1/generate   token ids both ways (rlloop.rollout.fleet.token_api); requests of one X-Session-ID go
                                  to the engine that has the session's prefix
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlloop.config.fleet import is_address
from rlloop.errors import ConfigError, RlloopError
from rlloop.rollout.engine.validation import one_for_each
from rlloop.rollout.errors import NoEngine, VersionUnavailable
from rlloop.rollout.fleet import wire
from rlloop.rollout.fleet.answering import LEFT, came, written
from rlloop.rollout.fleet.generation import BadField, Served
from rlloop.rollout.fleet.pool import EnginePool
from rlloop.rollout.fleet.token_api import Tokens
from rlloop.sync.http import StoreRoutes
from rlloop.sync.store import Store
from rlloop.types import Completion, ModelInput, SamplingParams
from rlloop.web.requests import body_of, parsed, refusal, whole_number

Publish = Callable[[bytes, int], Mapping[str, float]]  # safetensors, step -> metrics; returns when it is served


class Joining(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    region: str = "home"


def trainer_app(
    store: Store, pool: EnginePool, squash: Callable[[int], bool], publish: Publish | None = None
) -> Starlette:
    """The server's application. `squash`: the publisher's. `publish`: for other frameworks' trainers; without it the
    routes for publishing and sampling are absent."""
    served = StoreRoutes(store, squash)
    registry = CollectorRegistry()
    Gauge("rlloop_store_served_bytes", "bytes of weights given out", registry=registry).set_function(
        lambda: served.served_bytes
    )
    engines = Gauge("rlloop_engines", "engines by region and status", ["region", "status"], registry=registry)
    publishing = asyncio.Lock()

    async def join(request: Request) -> Response:
        joining = parsed(await body_of(request), Joining)
        if not is_address(joining.url) or not joining.region or "/" in joining.region:
            raise ConfigError("joining takes the engine's http(s) address and a region's name without /")
        await run_in_threadpool(pool.join, joining.url, joining.region)
        return JSONResponse({})

    async def leave(request: Request) -> Response:
        await run_in_threadpool(pool.leave, parsed(await body_of(request), Joining).url)
        return JSONResponse({})

    async def listed(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(pool.members))

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ready"})

    async def metrics(request: Request) -> Response:
        engines.clear()
        for member in await run_in_threadpool(pool.members):
            engines.labels(member["region"], member["status"]).inc()
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def publish_weights(request: Request) -> Response:
        assert publish is not None
        step = whole_number(request.query_params.get("step"), "step, as in /fleet/publish?step=3,")
        async with publishing:  # before the body is read: it is as large as the model
            return JSONResponse(dict(await run_in_threadpool(publish, await request.body(), step)))

    def serving(lowest: int | None, highest: int | None) -> int:
        """The version to sample with. Raises `VersionUnavailable` if it is not the one that is asked for."""
        have, least = pool.version, max(lowest or 0, 0)
        if have < least or (highest is not None and have > highest):
            raise VersionUnavailable(have, least, highest)
        return have

    async def sampled(
        request: Request, prompts: Sequence[ModelInput | list[int]], sampling: Sequence[SamplingParams], version: int,
        session: str | None = None,
    ) -> list[Completion] | None:  # fmt: skip
        """None if the client has gone, which stops the generation. Not in the thread pool, which serves the weights
        and joins that this may wait for."""
        future = asyncio.wrap_future(pool.begin(prompts, sampling, version, session))
        if await came(request, future):
            return future.result()
        future.cancel()
        return None

    async def generate(request: Request) -> Response:
        ask = parsed(await body_of(request), wire.Ask, packed=True)
        asked = await run_in_threadpool(lambda: ask.asked)
        if any(ask.adapters or ()):
            raise ConfigError("the pool samples from the policy alone; ask an engine for an adapter")
        each = one_for_each(ask.prompts, ask.sampling)
        completions = await sampled(request, asked, each, serving(ask.lowest, ask.highest))
        if completions is None:
            return Response(status_code=LEFT)
        answer = wire.Answer([wire.pack(completion) for completion in completions], "fleet")
        return Response(msgspec.msgpack.encode(answer), media_type=wire.CONTENT_TYPE)

    async def tokens(request: Request) -> Response:
        body, session = await body_of(request), request.headers.get("x-session-id")
        if (longest := pool.longest) == 0:
            raise NoEngine("no engine serves yet; ask again once one has joined and has the newest weights")
        ask = Tokens().parse(body, Served("rlloop", None, longest))
        if ask.score is not None or ask.stream or ask.logprobs not in (None, 0, 1):
            raise BadField("sampling_params", "here are neither streams, prompt_logprobs nor logprobs above 1")
        if ask.model != "rlloop":
            return refusal(
                404, "model_not_found", f"model {ask.model!r} is not served here; 'rlloop' is", param="model"
            )
        version = serving(ask.lowest, ask.highest)
        completions = await sampled(request, ask.prompts, ask.sampling, version, session)
        if completions is None:
            return Response(status_code=LEFT)
        return Response(written(Tokens(), ask, completions, None), media_type="application/json")

    async def models(request: Request) -> Response:
        card = {"id": "rlloop", "object": "model", "owned_by": "rlloop", "max_model_len": pool.longest or None}
        return JSONResponse({"object": "list", "data": [card]})

    foreign = [
        Route("/fleet/publish", publish_weights, methods=["POST"]),
        Route("/fleet/generate", generate, methods=["POST"]),
        Route("/inference/v1/generate", tokens, methods=["POST"]),
        Route("/v1/models", models),
    ]

    return Starlette(
        routes=[
            *served.routes,
            Route("/fleet/join", join, methods=["POST"]),
            Route("/fleet/leave", leave, methods=["POST"]),
            Route("/fleet/engines", listed),
            Route("/health", health),
            Route("/metrics", metrics),
            *(foreign if publish is not None else []),
        ],
        exception_handlers={
            **served.handlers,
            VersionUnavailable: _unavailable,
            RlloopError: lambda _, error: refusal(503, "fleet_failed", str(error)),
        },
    )


def _unavailable(_: Request, error: Exception) -> Response:
    assert isinstance(error, VersionUnavailable)
    return refusal(409, "version_passed" if error.passed else "version_behind", str(error), have=error.have)
