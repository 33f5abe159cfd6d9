"""Serves OpenAI's routes and the one for token ids, with whole answers or server-sent events.

Tokens are streamed as the engine draws them; when a client disconnects, its requests are cancelled in the engine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from rlloop.errors import RlloopError
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.adapter_routes import AdapterRoutes
from rlloop.rollout.fleet.generation import Choice, Generation, Piece, Served, writer_for
from rlloop.rollout.fleet.openai_api import Completions, Dialect, Name
from rlloop.rollout.fleet.openai_chat import Chat
from rlloop.rollout.fleet.text import Tokenizer
from rlloop.rollout.fleet.token_api import Tokens
from rlloop.types import Completion, Part, PromptScores
from rlloop.web.requests import gone, refusal

LEFT = 499  # status: the client disconnected
Told = tuple[int, Part | Completion]  # index of the choice, and its new tokens; at its end all of it


async def outcome(
    service: EngineService, request: Request, future: Future[list[Completion]], keep: bool = False
) -> list[Completion] | None:
    """The completions; None if the client disconnected, which cancels them unless it may retry (`keep`)."""
    wrapped = asyncio.wrap_future(future)
    if await came(request, wrapped):
        return wrapped.result()
    wrapped.add_done_callback(
        lambda late: late.cancelled() or late.exception()
    )  # retrieved, so that asyncio does not warn
    if not keep:
        service.cancel(future)
    return None


async def came(request: Request, awaited: asyncio.Future[Any]) -> bool:
    """Wait for it; False if the client disconnected first."""
    left = asyncio.create_task(gone(request))
    await asyncio.wait({awaited, left}, return_when=asyncio.FIRST_COMPLETED)
    left.cancel()
    return awaited.done()


class Listening:
    """Listener of one request: forwards its tokens, and ends a choice where its text has a stop string."""

    def __init__(self, ask: Generation, tokenizer: Tokenizer | None, tell: Callable[[Told], None] | None) -> None:
        """`tell` receives tokens as they come, in the engine's thread; a choice's last ones with its end."""
        self._tell, self._left = tell, [params.max_tokens for params in ask.sampling]
        self._writers = [writer_for(index, ask, tokenizer) for index in range(len(ask.prompts))] if ask.stops else []
        self.stopped: set[int] = set()  # choices that a stop string ended
        self.scores: dict[int, PromptScores] = {}

    def scored(self, index: int, scores: PromptScores) -> None:
        self.scores[index] = scores

    def made(self, index: int, part: Part) -> int | None:
        kept = None
        if self._writers and (writer := self._writers[index]) is not None:
            writer.write(part.token_ids)
            if writer.stop is not None:
                kept = writer.count
                self.stopped.add(index)
        self._left[index] -= len(part.token_ids)
        if self._tell is not None and kept is None and self._left[index] > 0:  # else its end follows, with this part
            self._tell((index, part))
        return kept

    def finished(self, index: int, completion: Completion) -> None:
        if self._tell is not None:
            self._tell((index, completion))


class Post:
    """Brings news from the engine's thread to queues of an event loop. All news of one step come by one or two wakes of
    the loop: a wake costs the engine a system call, and its turn."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._sent = deque[tuple[asyncio.Queue[Told | None], Told | None]]()
        self._woken = False

    def send(self, queue: asyncio.Queue[Told | None], news: Told | None) -> None:
        """Send from any thread."""
        self._sent.append((queue, news))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # first, so that what is sent from now on is either seen below or wakes again
        while self._sent:
            queue, news = self._sent.popleft()
            queue.put_nowait(news)


def written(
    dialect: Dialect,
    ask: Generation,
    completions: Sequence[Completion],
    tokenizer: Tokenizer | None,
    heard: Listening | None = None,
) -> bytes:
    """The whole answer as JSON. `heard`: scores and choices ended by a stop string, if the request had a listener."""
    scores, stopped = (heard.scores, heard.stopped) if heard is not None else ({}, set[int]())
    pieces = [
        Choice(index, ask, tokenizer).end(completion, scores.get(index), index in stopped)
        for index, completion in enumerate(completions)
    ]
    content = dialect.whole(secrets.token_hex(12), ask, pieces, _names(ask, tokenizer))
    return msgspec.json.encode({**content, "usage": ask.usage(completions)})


def _names(ask: Generation, tokenizer: Tokenizer | None) -> Name:
    if tokenizer is None or ask.names_are_ids:
        return lambda id: f"token_id:{id}"
    return functools.cache(lambda id: tokenizer.decode([id]))


class OpenAiRoutes:
    """`/v1/*` and `/inference/v1/generate`, over an engine service."""

    def __init__(self, service: EngineService, served: Served, adapter_root: Path | None = None) -> None:
        self._service, self._served, self._started = service, served, int(time.time())
        self._adapters = AdapterRoutes(service, served.model, adapter_root)
        self._post: Post | None = None  # once there is an event loop
        self.routes: Sequence[BaseRoute] = [
            *self._adapters.routes,
            Route("/v1/completions", self._answering(Completions()), methods=["POST"]),
            Route("/v1/chat/completions", self._answering(Chat()), methods=["POST"]),
            Route("/inference/v1/generate", self._answering(Tokens()), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._model),
        ]

    # ---------------------------------------------------------------------------------------------- models

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._cards()})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        card = next((each for each in self._cards() if each["id"] == name), None)
        return self._unknown(name) if card is None else JSONResponse(card)

    def _cards(self) -> list[dict[str, Any]]:
        served = self._served
        card = {
            "id": served.model, "object": "model", "created": self._started, "owned_by": "rlloop",
            "root": served.root or served.model, "max_model_len": served.longest,
        }  # fmt: skip
        return [card, *self._adapters.cards(served.longest)]

    def _unknown(self, name: str) -> Response:
        others = "".join(f", {each!r}" for each in self._service.adapters)
        text = f"model {name!r} is not served here; {self._served.model!r}{others} {'are' if others else 'is'}"
        return refusal(404, "model_not_found", text, param="model")

    # ---------------------------------------------------------------------------------------------- completions

    def _answering(self, dialect: Dialect) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            body = await request.body()
            ask = await run_in_threadpool(dialect.parse, body, self._served)  # text may be long
            if ask.model != self._served.model and ask.model not in self._service.adapters:
                return self._unknown(ask.model)
            return await (self._stream if ask.stream else self._whole)(request, dialect, ask)

        return answer

    async def _whole(self, request: Request, dialect: Dialect, ask: Generation) -> Response:
        listener = Listening(ask, self._served.tokenizer, None)
        needed = ask.stops or ask.score is not None  # otherwise no step needs a listener
        completions = await outcome(self._service, request, self._submit(ask, listener if needed else None))
        if completions is None:
            return Response(status_code=LEFT)

        answer = partial(written, dialect, ask, completions, self._served.tokenizer, listener)
        return Response(await run_in_threadpool(answer), media_type="application/json")

    async def _stream(self, request: Request, dialect: Dialect, ask: Generation) -> Response:
        told = asyncio.Queue[Told | None]()
        self._post = self._post or Post()
        tell = partial(self._post.send, told)
        listener = Listening(ask, self._served.tokenizer, tell)
        future = self._submit(ask, listener)
        future.add_done_callback(lambda _: tell(None))
        first = asyncio.ensure_future(told.get())
        if not await came(request, first):
            first.cancel()
            self._service.cancel(future)
            return Response(status_code=LEFT)
        if first.result() is None:
            future.result()  # raises what was wrong with the request
        events = self._events(dialect, ask, listener, future, first.result(), told)
        return _Events(events, lambda: self._service.cancel(future))

    async def _events(
        self, dialect: Dialect, ask: Generation, listener: Listening, future: Future[list[Completion]],
        news: Told | None, told: asyncio.Queue[Told | None],
    ) -> AsyncIterator[bytes]:  # fmt: skip
        tokenizer = self._served.tokenizer
        id, name = secrets.token_hex(12), _names(ask, tokenizer)
        choices = [Choice(index, ask, tokenizer) for index in range(len(ask.prompts))]
        more = {"usage": None} if ask.usage_in_stream else {}

        def chunk(pieces: list[Piece]) -> bytes:
            return _event({**dialect.chunk(id, ask, pieces, name), **more})

        while news is not None:
            index, got = news
            if isinstance(got, Completion):
                piece = choices[index].end(got, listener.scores.get(index), index in listener.stopped)
            else:
                piece = choices[index].more(got, listener.scores.get(index))
            yield chunk([piece])
            news = await told.get()
        try:
            completions = future.result()
        except Exception as error:  # its status is gone already, so it comes as an event
            if not isinstance(error, RlloopError):
                logging.getLogger(__name__).error("a stream broke off", exc_info=error)
            content = {"message": str(error), "type": "server_error", "param": None, "code": "engine_failed"}
            yield _event({"error": content})
            return
        if ask.usage_in_stream:
            yield _event({**dialect.chunk(id, ask, [], name), "usage": ask.usage(completions)})
        yield b"data: [DONE]\n\n"

    def _submit(self, ask: Generation, listener: Listening | None) -> Future[list[Completion]]:
        adapters = () if ask.model == self._served.model else [ask.model] * len(ask.prompts)
        return self._service.submit(
            ask.asked, ask.sampling, ask.lowest, ask.highest,
            listener=listener, top=ask.logprobs or 0, score=ask.score, only_score=ask.only_score,
            adapters=adapters,
        )  # fmt: skip


class _Events(StreamingResponse):
    """`left` is called however it ends."""

    def __init__(self, events: AsyncIterator[bytes], left: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
