"""Episodes that another library plays: it asks for turns over HTTP on loopback, this process's engine makes them.

The library's tasks run in an event loop of their own; each asks `POST /inference/v1/generate` for its turns, under an
`X-Session-ID` of its own. The thread that drives the engine takes them as they come, so every episode advances by
itself, and keeps the completions, with the engine's own logprobs, versions and experts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlloop.errors import ConfigError, RlloopError
from rlloop.loop.turns import turns_of
from rlloop.protocols import Engine
from rlloop.rollout.fleet.answering import written
from rlloop.rollout.fleet.generation import BadField, Served
from rlloop.rollout.fleet.token_api import Tokens
from rlloop.types import Completion, SamplingParams
from rlloop.web.requests import refusal
from rlloop.web.server import BackgroundServer, Listen

T = TypeVar("T")
POLL = 0.05  # seconds between looks whether all episodes have ended


@dataclass(eq=False)
class _Asked:
    session: str
    prompt_ids: list[int]
    sampling: SamplingParams
    answer: Future[Completion] = field(default_factory=Future)


class EpisodeServer:
    """The engine of a step behind a loopback address, and the event loop in which episodes run."""

    def __init__(self, model: str, longest: int, eos_token_ids: Sequence[int] = ()) -> None:
        """`model`: the name that clients ask for; `longest`: tokens of a prompt and its completion. `eos_token_ids`:
        what ends a turn anyway, so that a client which names them asks for nothing more."""
        self._eos = frozenset(eos_token_ids)
        self.key = secrets.token_hex(16)
        self._served, self._dialect = Served(model, None, longest), Tokens()
        self._asked: SimpleQueue[_Asked] = SimpleQueue()
        self._turns: dict[str, list[Completion]] = {}  # by session
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="episodes")
        self._thread.start()
        app = Starlette(
            routes=[
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/v1/models", self._models),
            ],
            exception_handlers={
                ConfigError: lambda _, error: refusal(400, "bad_request", str(error)),
                RlloopError: lambda _, error: refusal(500, "engine_failed", str(error)),
            },
        )
        self._server = BackgroundServer(app, Listen(token=self.key))
        self.url = self._server.url

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """In the episodes' event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def play(self, engine: Engine, episodes: list[Coroutine[Any, Any, T]]) -> list[T | Exception]:
        """Runs all episodes to their end, and the engine in this thread. An episode that raises gives its exception;
        an error of the engine's is raised, with nothing left in flight."""
        self._turns = {}
        turns, ended = turns_of(engine), Future[Any]()
        running = [asyncio.run_coroutine_threadsafe(each, self._loop) for each in episodes]
        left = len(running)
        lock = threading.Lock()

        def count(_: Future[T]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left == 0:
                    ended.set_result(None)

        for each in running:
            each.add_done_callback(count)
        try:
            while running and not ended.done():
                try:
                    asked = self._asked.get(timeout=turns.linger if turns.has_work else POLL)
                except Empty:
                    if turns.has_work:
                        turns.work()
                    continue
                try:
                    made = turns.submit(asked.prompt_ids, asked.sampling)
                except RlloopError as error:  # of this request alone
                    asked.answer.set_exception(error)
                else:
                    made.add_done_callback(lambda made, asked=asked: self._keep(asked, made))
        finally:
            for each in running:
                each.cancel()
            turns.close()
            while not self._asked.empty():
                self._asked.get().answer.cancel()
        return [each.exception() or each.result() for each in running]  # pyright: ignore[reportReturnType]

    def turns(self, session: str) -> list[Completion]:
        """Of one session of the last `play`, in the order in which they were asked for."""
        return self._turns.get(session, [])

    def close(self) -> None:
        self._server.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _keep(self, asked: _Asked, made: Future[Completion]) -> None:
        if (error := made.exception()) is not None:
            asked.answer.set_exception(error)
            return
        kept, completion = self._turns.setdefault(asked.session, []), made.result()
        if kept and kept[-1].prompt_ids == completion.prompt_ids:  # asked again, after a broken connection say
            kept.pop()
        kept.append(completion)
        asked.answer.set_result(completion)

    async def _generate(self, request: Request) -> Response:
        session = request.headers.get("x-session-id")
        if not session:
            raise BadField("X-Session-ID", "the header X-Session-ID is missing; it names the episode of a turn")
        ask = self._dialect.parse(await request.body(), self._served)
        if len(ask.prompts) != 1 or ask.stream or ask.score is not None or (ask.logprobs or 0) > 1:
            raise BadField("sampling_params", "n, stream, prompt_logprobs and logprobs above 1 are not for training")
        stops = tuple(id for id in ask.sampling[0].stop_token_ids if id not in self._eos)
        asked = _Asked(session, ask.prompts[0], dataclasses.replace(ask.sampling[0], stop_token_ids=stops))
        self._asked.put(asked)
        completion = await asyncio.wrap_future(asked.answer)
        return Response(written(self._dialect, ask, [completion], None), media_type="application/json")

    async def _models(self, request: Request) -> Response:
        card = {"id": self._served.model, "object": "model", "max_model_len": self._served.longest}
        return JSONResponse({"object": "list", "data": [card]})
