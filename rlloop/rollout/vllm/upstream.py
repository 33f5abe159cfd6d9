"""HTTP client of vLLM's server: its routes and the shape of its answers."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import httpx
import msgspec

from rlloop.errors import UNREADABLE, ConfigError, RlloopError, readable
from rlloop.rollout.fleet.client import MAX_ANSWER, LoopThread
from rlloop.rollout.vllm.messages import Facts
from rlloop.web.clients import CONNECT_SECONDS, async_client

T = TypeVar("T")
START = (
    "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment and the options --worker-extension-cls "
    "rlloop.rollout.vllm.worker_replica.Following and, where it has that one (0.32), --enable-scale-out"
)


class UpstreamError(RlloopError):
    """vLLM's server does not answer, or not as it should."""


class Logprob(msgspec.Struct):
    logprob: float
    token_id: int | None = None
    token: str = ""  # 0.26 says "token_id:7" in place of it

    @property
    def id(self) -> int:
        return int(self.token.removeprefix("token_id:")) if self.token_id is None else self.token_id


class Content(msgspec.Struct):
    logprob: float
    top_logprobs: list[Logprob]


class Logprobs(msgspec.Struct):
    content: list[Content]


class Weights(msgspec.Struct):
    version: str


class Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: Literal["stop", "length", "abort"]
    weight_versions: list[Weights] | None = None


class Answer(msgspec.Struct):
    choices: list[Choice]


class Upstream:
    """The routes of vLLM's server, for callers in any thread."""

    def __init__(self, url: str, key: str | None = None, timeout: float = 600.0) -> None:
        """`key`: what vLLM was started with (--api-key). `timeout`: seconds that one answer may take."""
        self.url = url.rstrip("/")
        self._thread = LoopThread(f"client of {url}")
        self._http = async_client(
            token=key,
            most=MAX_ANSWER,
            base_url=self.url,
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    def start(self, path: str, body: Any) -> Future[bytes]:
        return self._thread.start(self._post(path, body, {}))

    def post(self, path: str, body: Any = None, **params: str) -> bytes:
        return self._thread.run(self._post(path, body, params))

    def rpc(self, kind: type[T], method: str, *arguments: str) -> T:
        """Call a method of the worker, of which there is one."""
        answer = self.post("/collective_rpc", {"method": method, "args": arguments})
        with self._reading(method):
            return msgspec.convert(msgspec.json.decode(answer)["results"][0], readable(kind))

    def models(self) -> list[str]:
        """The names it serves its model under."""
        content = self._thread.run(self._send("GET", "/v1/models"))
        with self._reading("/v1/models"):
            return [each["id"] for each in msgspec.json.decode(content)["data"]]

    def close(self) -> None:
        self._thread.run(self._http.aclose())
        self._thread.close()

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        try:
            yield
        except (*UNREADABLE, LookupError, TypeError) as error:
            raise UpstreamError(f"vLLM at {self.url} answers {what} with something else: {error!r}") from None

    def _post(self, path: str, body: Any, params: Mapping[str, str]) -> Coroutine[Any, Any, bytes]:
        return self._send("POST", path, json=body, params=params)

    async def _send(self, method: str, path: str, **request: Any) -> bytes:
        try:
            reply = await self._http.request(method, path, **request)
        except httpx.TransportError as error:
            raise UpstreamError(f"vLLM at {self.url} does not answer: {type(error).__name__} {error}") from None
        if not reply.is_success:
            raise UpstreamError(f"vLLM at {self.url} answers {path} with {reply.status_code}: {reply.text[:500]}")
        return reply.content


def facts_of(upstream: Upstream) -> Facts:
    """Raises `ConfigError` where vLLM was not started for this."""
    try:
        facts = upstream.rpc(Facts, "rlloop_facts")
        upstream.post(abort_route(facts), {"request_ids": ["nobody's"]})
    except UpstreamError as error:
        raise ConfigError(f"{error}; {START}") from None
    if facts.refused:
        raise ConfigError(f"vLLM at {upstream.url} cannot be followed: {facts.refused}")
    return facts


def abort_route(facts: Facts) -> str:
    return "/inference/v1/abort_requests" if facts.says_weights else "/abort_requests"
