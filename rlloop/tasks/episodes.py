"""Episodes run by another library, which requests turns over HTTP on loopback from this process's engine.

The library's tasks run in a separate event loop; each requests its turns from `POST /inference/v1/generate`, under its
own `X-Session-ID`. The thread that drives the engine serves them on arrival, so episodes advance independently, and
keeps the completions with the engine's own logprobs, versions and experts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rlloop.errors import ConfigError, RlloopError
from rlloop.loop.joining import Turn
from rlloop.loop.turns import Turns, turns_of
from rlloop.protocols import Engine
from rlloop.rollout.fleet.answering import written
from rlloop.rollout.fleet.client import LoopThread
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
    turn: Turn
    answer: Future[Completion] = field(default_factory=Future)


_Event = _Asked | tuple[_Asked, Future[Completion]] | None  # a turn is asked for, a piece of one is there, an end


class Episodes(Generic[T]):
    """Episodes that advance during `advance`, and may continue under newer weights.

    Between two calls tools continue, time limits are suspended, and requests for turns wait.
    """

    def __init__(self, thread: LoopThread, url: str, slice_tokens: int = 0) -> None:
        """`url`: at which they ask for turns. `slice_tokens`: as of `rlloop.loop.conversations.UnderWay`."""
        self.url, self._thread, self._slice = url, thread, slice_tokens
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._turns: dict[str, list[Completion]] = {}  # by session
        self._making: dict[str, _Asked] = {}  # by session
        self._running: list[Future[T]] = []
        self._at_engine = 0
        self._limits: dict[asyncio.Timeout, float] = {}  # seconds that are left, where they stand still
        self._paused = False

    def begin(self, episode: Coroutine[Any, Any, T]) -> Future[T]:
        running = self._thread.start(episode)
        self._running.append(running)
        running.add_done_callback(lambda _: self._events.put(None))
        return running

    def advance(self, engine: Engine, enough: Callable[[], bool] = lambda: False) -> None:
        """Run the engine in this thread until all episodes have ended, or until there are `enough`: then turns end, or
        pieces of them, that the engine has. Raises what the engine raises, with nothing left in flight."""
        turns, hold, later, advanced = turns_of(engine), enough(), list[_Asked](), 0.0
        self._at_engine = 0
        self._thread.start(self._resume())
        try:
            while self._at_engine or (self._running and not hold):
                patience = max(0.0, advanced + turns.linger - time.monotonic()) if turns.has_work else POLL
                try:
                    event, advanced = self._events.get(timeout=patience), time.monotonic()
                except Empty:
                    if turns.has_work:
                        turns.work()
                    continue
                if event is None:
                    self._running = [each for each in self._running if not each.done()]
                    hold = hold or enough()
                    continue
                asked = self._heard(*event) if isinstance(event, tuple) else event
                if asked is not None and hold:
                    later.append(asked)
                elif asked is not None:
                    self._submit(turns, asked)
        except BaseException:
            self.cancel()
            raise
        finally:
            turns.close()
            for asked in later:
                self._events.put(asked)
            self._thread.start(self._pause())

    def turns(self, session: str) -> list[Completion]:
        """The turns of one session, in the order in which they were asked for."""
        return self._turns.get(session, [])

    def versions(self, session: str) -> list[int]:
        """The versions that sampled a session's tokens."""
        versions = [run[2] for turn in self.turns(session) for run in turn.runs]
        making = self._making.get(session)
        return versions if making is None else [*versions, *(piece.policy_version for piece in making.turn.pieces)]

    def forget(self, session: str) -> None:
        self._turns.pop(session, None)

    def cancel(self) -> None:
        """End all episodes, without answering pending requests."""
        for each in self._running:
            each.cancel()
        while not self._events.empty():
            asked = self._events.get()
            if isinstance(asked, _Asked) and not asked.answer.cancel():
                asked.answer.set_exception(RlloopError("the run has ended"))

    @asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """A time limit that is suspended while nothing advances. For code in the episodes' event loop."""
        async with asyncio.timeout(None if self._paused else seconds) as limit:
            self._limits[limit] = seconds
            try:
                yield
            finally:
                del self._limits[limit]

    def ask(self, session: str, prompt_ids: list[int], sampling: SamplingParams) -> Future[Completion]:
        """Request a turn of a session."""
        asked = _Asked(session, Turn(prompt_ids, sampling))
        self._events.put(asked)
        return asked.answer

    def _submit(self, turns: Turns, asked: _Asked) -> None:
        answer = asked.answer
        if not answer.running() and not answer.set_running_or_notify_cancel():
            return  # the client has disconnected
        try:
            piece = turns.submit(asked.turn.ids, asked.turn.next_piece(self._slice))
        except RlloopError as error:  # of this request alone
            answer.set_exception(error)
            return
        self._at_engine += 1
        self._making[asked.session] = asked
        piece.add_done_callback(lambda piece: self._events.put((asked, piece)))

    def _heard(self, asked: _Asked, piece: Future[Completion]) -> _Asked | None:
        """Answer a complete turn, or return it to be continued."""
        self._at_engine -= 1
        if (error := piece.exception()) is not None:
            asked.answer.set_exception(error)
        elif not asked.turn.add(piece.result()):
            return asked
        else:
            kept, completion = self._turns.setdefault(asked.session, []), asked.turn.completion()
            if kept and kept[-1].prompt_ids == completion.prompt_ids:  # asked again, after a broken connection say
                kept.pop()
            kept.append(completion)
            asked.answer.set_result(completion)
        self._making.pop(asked.session, None)
        return None

    async def _resume(self) -> None:
        self._paused, now = False, asyncio.get_running_loop().time()
        for limit, left in self._limits.items():
            if not limit.expired():
                limit.reschedule(now + left)

    async def _pause(self) -> None:
        self._paused, now = True, asyncio.get_running_loop().time()
        for limit in self._limits:
            if (when := limit.when()) is not None and not limit.expired():
                self._limits[limit] = when - now
                limit.reschedule(None)


class EpisodeServer:
    """The engine of a step behind a loopback address, and the event loop in which episodes run."""

    def __init__(self, model: str, longest: int, eos_token_ids: Sequence[int] = ()) -> None:
        """`model`: the name that clients ask for; `longest`: tokens of a prompt and its completion. `eos_token_ids`:
        what ends a turn anyway, so that a client which names them asks for nothing more."""
        self._eos = frozenset(eos_token_ids)
        self.key = secrets.token_hex(16)
        self._served, self._dialect = Served(model, None, longest), Tokens()
        self._players: dict[str, Episodes[Any]] = {}  # by the path at which they ask
        self._thread = LoopThread("event loop of episodes")
        app = Starlette(
            routes=[
                Route("/{player}/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/{player}/v1/models", self._models),
            ],
            exception_handlers={
                ConfigError: lambda _, error: refusal(400, "bad_request", str(error)),
                RlloopError: lambda _, error: refusal(500, "engine_failed", str(error)),
            },
        )
        self._server = BackgroundServer(app, Listen(token=self.key))
        self.url = self._server.url

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the episodes' event loop."""
        return self._thread.run(work)

    def episodes(self, slice_tokens: int = 0) -> Episodes[Any]:
        """Episodes with an address of their own."""
        name = str(len(self._players))
        self._players[name] = Episodes(self._thread, f"{self._server.url}/{name}", slice_tokens)
        return self._players[name]

    def close(self) -> None:
        """End all episodes, from any thread."""
        self._server.close()
        self._thread.close()

    async def _generate(self, request: Request) -> Response:
        session = request.headers.get("x-session-id")
        if not session:
            raise BadField("X-Session-ID", "the header X-Session-ID is missing; it names the episode of a turn")
        ask = self._dialect.parse(await request.body(), self._served)
        if len(ask.prompts) != 1 or ask.stream or ask.score is not None or (ask.logprobs or 0) > 1:
            raise BadField("sampling_params", "n, stream, prompt_logprobs and logprobs above 1 are not for training")
        stops = tuple(id for id in ask.sampling[0].stop_token_ids if id not in self._eos)
        if (player := self._players.get(request.path_params["player"])) is None:
            raise BadField(None, f"{request.url.path} is the address of no episodes")
        sampling = dataclasses.replace(ask.sampling[0], stop_token_ids=stops)
        completion = await asyncio.wrap_future(player.ask(session, ask.prompts[0], sampling))
        return Response(written(self._dialect, ask, [completion], None), media_type="application/json")

    async def _models(self, request: Request) -> Response:
        card = {"id": self._served.model, "object": "model", "max_model_len": self._served.longest}
        return JSONResponse({"object": "list", "data": [card]})
