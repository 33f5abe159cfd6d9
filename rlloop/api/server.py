"""The training API's server: Tinker's protocol, as of client 0.38, over rlloop's training service.

Under /api/v1, POST unless said otherwise:

    create_session, session_heartbeat, sessions/{id}/finish          sessions
    create_model, get_info, forward_backward, optim_step             commands of a model, each a future
    save_weights, save_weights_for_sampler, save_weights_external, load_weights
    create_custom_loss                                               a traced loss, checked and kept
    create_sampling_session, join_sampling_session, GET samplers/{id}, asample
    retrieve_future, retrieve_futures, cancel_future                 results
    client/config, client/dynamic_config, telemetry                  telemetry is accepted and dropped
    GET get_server_capabilities, GET healthz

`rlloop.api.checkpoints` has the routes of checkpoints and training runs, `rlloop.api.status` /status and /metrics.
An invalid request of a model is accepted and its future fails, so that a model's request numbers have no gaps and later
requests continue.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlloop.api import requests
from rlloop.api.calls import failed, result
from rlloop.api.checkpoints import Checkpoints
from rlloop.api.core import Core, Refused, Settings, log
from rlloop.api.keys import Client, Keys
from rlloop.api.requests import decoded
from rlloop.api.sampling import Target
from rlloop.api.sessions import Sessions
from rlloop.api.status import Status
from rlloop.api.wire import names_of, unpacked
from rlloop.errors import ConfigError, RlloopError
from rlloop.training.service import TrainingService

Handler = Callable[[Request, Client, bytes], Awaitable[Response]]
SWEEP_SECONDS = 1.0
DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
TESTED_CLIENT = "0.38"


class ApiServer:
    """The application; `app` is what a server runs."""

    def __init__(self, service: TrainingService, settings: Settings, keys: Keys, *, local: bool = True) -> None:
        """`local`: clients are on this machine, so that their requests need no compression."""
        self.core = Core(service, settings, keys)
        self.sessions = Sessions(self.core)
        self._local = local
        self.replayed = 0  # requests of the last server that were executed or known again
        self.checkpoints = Checkpoints(self.core, self.sessions)
        status = Status(self.core, self.sessions)
        posts: dict[str, Handler] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish_session,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "unload_model": self._unload_model,
            "forward_backward": self._forward_backward,
            "optim_step": self._command,
            "save_weights": self._command,
            "save_weights_external": self._command,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "create_custom_loss": self._create_custom_loss,
            "create_sampling_session": self._create_sampling_session,
            "join_sampling_session": self._join_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "retrieve_futures": self._retrieve_many,
            "cancel_future": self._cancel,
        }
        gets: dict[str, Handler] = {
            "get_server_capabilities": self._capabilities,
            "healthz": self._health,
            "samplers/{sampler_id}": self._sampler,
        }
        routes = [Route(f"/api/v1/{path}", self._guarded(each), methods=["POST"]) for path, each in posts.items()]
        routes += [Route(f"/api/v1/{path}", self._guarded(each)) for path, each in gets.items()]
        routes += [
            Route(f"/api/v1/{path}", self._guarded(each), methods=[method])
            for method, path, each in self.checkpoints.handlers
        ]
        routes += [Route("/api/v1/files/{path:path}", self.checkpoints.file)]  # by a signed address
        routes += [Route(path, self._guarded(each)) for path, each in status.handlers.items()]

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.core.loop = asyncio.get_running_loop()
            self.replayed = self.sessions.restore()
            sweeper = asyncio.ensure_future(self._sweep())
            try:
                yield
            finally:
                sweeper.cancel()
                self.core.close()

        self.app = Starlette(
            routes=routes,
            exception_handlers={
                Refused: _refused,
                ConfigError: lambda _, error: _error(422, str(error)),
                HTTPException: _http_error,
                RlloopError: lambda _, error: _error(500, str(error)),
                OSError: _os_error,
                Exception: _unexpected,
            },
            lifespan=lifespan,
        )

    def admits(self, request: Request) -> bool:
        """True for a request with a key, or for a download's signed address."""
        return self.core.keys.client_of(request.headers) is not None or self.checkpoints.is_signed(request)

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            client = self.core.keys.client_of(request.headers)
            if client is None:
                return _error(401, "send a key of this server in X-API-Key; a key begins with tml-")
            raw = await request.body()
            return await handler(request, client, unpacked(raw, request.headers.get("content-encoding", ""),
                                                           self.core.settings.max_body))  # fmt: skip

        return answer

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                self.core.futures.sweep()
                self.sessions.sweep()
                loop, delete_expired = asyncio.get_running_loop(), self.core.service.delete_expired
                for path in await loop.run_in_executor(self.core.threads, delete_expired):
                    self.sessions.checkpoint_gone(path)
            except Exception as error:  # of a full disk, for example: the next round tries again
                log.error("what is over cannot be cleared away: %s", error, exc_info=not isinstance(error, OSError))

    # ------------------------------------------------------------------------------------------------ clients

    async def _client_config(self, request: Request, client: Client, body: bytes) -> Response:
        return JSONResponse(
            {
                "parallel_fwdbwd_chunks": True,
                "proto_compress_fwdbwd": not self._local,
                "custom_loss_server_side": True,
                "sample_join_sampling_session": True,
                "sample_max_concurrent_requests": min(2000, self.core.settings.quota.futures),
            }
        )

    async def _dynamic_config(self, request: Request, client: Client, body: bytes) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def _telemetry(self, request: Request, client: Client, body: bytes) -> Response:
        return JSONResponse({"status": "accepted"})

    async def _capabilities(self, request: Request, client: Client, body: bytes) -> Response:
        models = msgspec.to_builtins(self.core.service.capabilities().supported_models)
        return JSONResponse({"supported_models": models})

    async def _health(self, request: Request, client: Client, body: bytes) -> Response:
        return JSONResponse({"status": "ok"})

    # ------------------------------------------------------------------------------------------------ sessions

    async def _create_session(self, request: Request, client: Client, body: bytes) -> Response:
        asked = decoded(body, requests.CreateSession)
        session = self.sessions.create(client, asked)
        warning = None
        if not asked.sdk_version.startswith(TESTED_CLIENT):
            warning = f"this server is tested with Tinker's client {TESTED_CLIENT}, and yours is {asked.sdk_version}"
        return JSONResponse({"type": "create_session", "session_id": session.id, "warning_message": warning})

    async def _heartbeat(self, request: Request, client: Client, body: bytes) -> Response:
        self.sessions.find(decoded(body, requests.Heartbeat).session_id, client)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish_session(self, request: Request, client: Client, body: bytes) -> Response:
        session = self.sessions.find(request.path_params["session_id"], client)
        self.sessions.end(session, f"its client finished it: {body[:200].decode(errors='replace')}")
        return Response(status_code=204)

    # ------------------------------------------------------------------------------------------------ commands

    async def _create_model(self, request: Request, client: Client, body: bytes) -> Response:
        asked = decoded(body, requests.CreateModel)
        session = self.sessions.find(asked.session_id, client)
        return _future(await session.create_model(asked.model_seq_id, "create_model", _key(request), body))

    async def _load_weights(self, request: Request, client: Client, body: bytes) -> Response:
        asked = decoded(body, requests.LoadWeights)
        if asked.session_id is None:
            return await self._command(request, client, body)
        if asked.model_seq_id is None or asked.model_id is not None or asked.seq_id is not None:
            raise Refused(422, "load_weights names a model by model_id and seq_id, or by session_id and model_seq_id")
        session = self.sessions.find(asked.session_id, client)
        return _future(await session.create_model(asked.model_seq_id, "load_weights", _key(request), body))

    async def _command(self, request: Request, client: Client, body: bytes) -> Response:
        """A request of a model in JSON, whose route is its kind."""
        named = decoded(body, requests.ModelRequest)
        return await self._submit(request, client, named.model_id, named.seq_id, body)

    async def _forward_backward(self, request: Request, client: Client, body: bytes) -> Response:
        if not request.headers.get("content-type", "").startswith("application/x-protobuf"):
            raise Refused(415, "forward_backward takes application/x-protobuf")
        return await self._submit(request, client, *names_of(body), body)

    async def _submit(self, request: Request, client: Client, model_id: str, seq_id: int, body: bytes) -> Response:
        if seq_id < 1:
            raise Refused(422, f"seq_id is {seq_id}; the requests of a model are numbered from 1")
        _, model = self.sessions.model(model_id, client)
        kind = request.url.path.rpartition("/")[2]
        return _future(await model.submit(seq_id, kind, _key(request), body), model_id)

    async def _save_for_sampler(self, request: Request, client: Client, body: bytes) -> Response:
        asked = decoded(body, requests.SaveForSampler)
        session, _ = self.sessions.model(asked.model_id, client)
        if asked.path is not None and asked.sampling_session_seq_id is not None:
            raise Refused(422, "save_weights_for_sampler has a path and a sampling_session_seq_id; give one of the two")
        if asked.path is None and asked.sampling_session_seq_id is not None:
            name = self.core.settings.model_name
            target = Target(name, model_id=asked.model_id, inflight=asked.kind == "inflight")
            session.expect_sampling(asked.sampling_session_seq_id, target)
        return await self._command(request, client, body)

    async def _get_info(self, request: Request, client: Client, body: bytes) -> Response:
        model_id = decoded(body, requests.ModelId).model_id
        self.sessions.model(model_id, client)
        info = self.core.service.info(model_id)
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model_id,
                "model_data": msgspec.to_builtins(info.model_data),
                "model_name": info.model_name,
                "is_lora": info.is_lora,
                "lora_rank": info.lora_rank,
            }
        )

    async def _unload_model(self, request: Request, client: Client, body: bytes) -> Response:
        session, model = self.sessions.model(decoded(body, requests.ModelId).model_id, client)
        session.drop(model)
        return JSONResponse({"type": "unload_model", "model_id": model.model_id})

    async def _create_custom_loss(self, request: Request, client: Client, body: bytes) -> Response:
        asked = decoded(body, requests.CreateLoss)
        session = self.sessions.find(asked.session_id, client)
        request_id = f"{session.id}:loss:{asked.custom_loss_seq_id}"
        if self.core.futures.get(request_id, client.name) is None:
            self.core.admit(client.name, len(body))
            future = self.core.futures.add(request_id, client.name, "create_custom_loss", 0)
            try:
                outcome = result(type="create_custom_loss", loss_id=session.create_loss(asked, body))
            except ConfigError as error:
                outcome = failed(str(error), "user")
            except BaseException:  # it could not be kept; left pending, the request could not be repeated
                self.core.futures.discard(future)
                raise
            self.core.futures.resolve(future, outcome)
        return _future(request_id)

    # ------------------------------------------------------------------------------------------------ sampling

    async def _create_sampling_session(self, request: Request, client: Client, body: bytes) -> Response:
        asked = decoded(body, requests.CreateSampling)
        session = self.sessions.find(asked.session_id, client)
        if asked.model_path is None and asked.base_model is None:
            raise Refused(422, "create_sampling_session has neither a model_path nor a base_model; give one")
        target = Target(asked.base_model or self.core.settings.model_name, asked.model_path)
        sampling = session.create_sampling(asked.sampling_session_seq_id, target)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampling.id})

    async def _join_sampling_session(self, request: Request, client: Client, body: bytes) -> Response:
        _, sampling = self.sessions.sampling(decoded(body, requests.JoinSampling).sampling_session_id, client)
        sampling.clients += 1
        return JSONResponse({"type": "join_sampling_session", "client_counter": sampling.clients - 1})

    async def _sampler(self, request: Request, client: Client, body: bytes) -> Response:
        _, sampling = self.sessions.sampling(request.path_params["sampler_id"], client)
        return JSONResponse(
            {
                "sampler_id": sampling.id,
                "base_model": sampling.target.base_model,
                "model_path": sampling.target.path,
            }
        )

    async def _sample(self, request: Request, client: Client, body: bytes) -> Response:
        asked = decoded(body, requests.Sample)
        if asked.sampling_session_id is None:
            raise Refused(422, "asample has no sampling_session_id; create a sampling session first")
        session, sampling = self.sessions.sampling(asked.sampling_session_id, client)
        future, names = await session.samples.submit(sampling, asked, body, _key(request))
        return JSONResponse({"request_id": future.request_id, "sample_sequence_ids": names})

    # ------------------------------------------------------------------------------------------------ results

    async def _retrieve(self, request: Request, client: Client, body: bytes) -> Response:
        asked = decoded(body, requests.Retrieve)
        future = self.core.futures.get(asked.request_id, client.name)
        if future is None:
            session_id = asked.request_id.partition(":")[0]
            self.sessions.find(session_id, client)  # 404 for another client's
            raise Refused(410, f"the result of {asked.request_id} is not here any more, or never was: send it again")
        outcome = await self.core.futures.wait(future, self.core.settings.poll_seconds)
        if outcome is None:
            waiting = {"type": "try_again", "request_id": future.request_id, "queue_state": "active"}
            return JSONResponse(waiting, 408)
        self.core.futures.collected(future)
        return Response(outcome.body, media_type=outcome.media)

    async def _retrieve_many(self, request: Request, client: Client, body: bytes) -> Response:
        asked = decoded(body, requests.RetrieveMany)
        _, sampling = self.sessions.sampling(asked.target.sampling_session_id, client)
        for request_id in asked.retrieved_request_ids:
            if (future := self.core.futures.get(request_id, client.name)) is not None:
                self.core.futures.collected(future)
        seconds = self.core.settings.poll_seconds
        if asked.timeout is not None:
            seconds = min(seconds, max(0.0, asked.timeout))
        ids, cursor = await sampling.done_since(asked.target.cloned_sampler_id, asked.prev_cursor, seconds)
        return JSONResponse({"completions": [self._completion(name, client) for name in ids], "cursor": cursor})

    def _completion(self, request_id: str, client: Client) -> dict[str, Any]:
        future = self.core.futures.get(request_id, client.name)
        outcome = None if future is None else future.outcome
        if outcome is None or outcome.failed:
            return {"state": "failed", "request_id": request_id}
        size = len(outcome.body)
        return {"state": "finished", "request_id": request_id, "response_payload_uncompressed_size": size}

    async def _cancel(self, request: Request, client: Client, body: bytes) -> Response:
        """Cancels a sample; other requests stay, since later ones build on them."""
        future = self.core.futures.get(decoded(body, requests.RequestId).request_id, client.name)
        if future is not None and future.kind == "asample":
            self.core.futures.resolve(future, failed("it was cancelled", "user"))
        return Response(status_code=204)


def _key(request: Request) -> str:
    return request.headers.get("x-idempotency-key", "")[:200]


def _future(request_id: str, model_id: str | None = None) -> Response:
    return JSONResponse({"request_id": request_id, "model_id": model_id})


def _error(status: int, message: str) -> Response:
    headers = {"Retry-After": "1"} if status in (429, 503) else {}
    category = "server" if status >= 500 else "user"
    return JSONResponse({"error": message, "category": category}, status, headers)


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _error(error.status, str(error))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


def _os_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    if error.errno not in DISK_FULL:
        return _unexpected(request, error)
    log.error("%s: %s", request.url.path, error)
    return _error(503, f"the server cannot write ({error.strerror}): free space on its disk, then repeat the request")


def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s failed in the server", request.url.path, exc_info=error)
    return _error(500, f"{type(error).__name__}: {error}")
