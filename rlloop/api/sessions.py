"""Sessions of clients, stored on disk so that a restarted server continues them.

SESSIONS/ID/session.json          owner, metadata, and whether it has ended
SESSIONS/ID/samplers/N.json       a sampling session
SESSIONS/ID/losses/ID.json        a custom loss, as it was sent
SESSIONS/ID/samples/              the log of its sampling requests
SESSIONS/ID/models/N/             the command log of a model
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rlloop.api import requests
from rlloop.api.calls import HIDDEN, OBSERVE, Context, service_path, session_of
from rlloop.api.core import Core, Refused, log
from rlloop.api.keys import Client
from rlloop.api.log import write_bytes
from rlloop.api.models import Trained
from rlloop.api.sampling import Samples, SamplingSession, Target
from rlloop.errors import ConfigError, RunError
from rlloop.runs.journal import decoded

ENDED = "ended"  # a file in the folder of a model that its client has dropped
NUMBERS = 1 << 20  # that models of a session may have
SAMPLING_NUMBERS = 1 << 63
NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


class Card(msgspec.Struct):
    """`session.json`."""

    client: str
    created: float  # seconds since 1970
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    ended: str | None = None  # the reason


class Session:
    def __init__(self, core: Core, sessions: Sessions, session_id: str, card: Card, folder: Path) -> None:
        self.core, self._all, self.id, self.card, self.folder = core, sessions, session_id, card, folder
        self.seen = time.monotonic()
        self.models: dict[int, Trained] = {}
        self.sampling: dict[int, SamplingSession] = {}
        self.inflight: dict[str, str] = {}  # model -> sampler of its newest inflight save
        self.samples = Samples(core, card.client, folder / "samples", self.sampler_of)

    # ------------------------------------------------------------------------------------------------ models

    async def create_model(self, number: int, kind: str, key: str, body: bytes) -> str:
        """Log and begin the command that makes model `number`; returns its future's id. Raises `Refused`."""
        if number not in self.models:
            if not 0 <= number < NUMBERS:
                raise Refused(422, f"model_seq_id is {number!s:.20}; it counts from 0, up to {NUMBERS - 1}")
            if (self.folder / "models" / str(number) / ENDED).exists():
                raise Refused(410, f"model {number} of session {self.id} was unloaded; give the new one another number")
            quota = self.core.settings.quota.models
            if sum(len(session.models) for session in self._all.of(self.card.client)) >= quota:
                raise Refused(
                    403, f"this key has {quota} models, which is its quota; end a session that is not needed any more"
                )
            self.models[number] = self._open(number)
        return await self.models[number].submit(0, kind, key, body)

    def _open(self, number: int) -> Trained:
        parity = (self.card.user_metadata or {}).get(OBSERVE, self.core.settings.parity)
        context = Context(
            f"{self.id}:train:{number}",
            self.core.settings.base_models,
            "observe" if parity == "observe" else "require",
            partial(self._all.path_for, self.card.client),
            self.card.client,
            self.core.settings.inputs,
        )
        folder = self.folder / "models" / str(number)
        return Trained(self.core, self.card.client, folder, context, self._sampler_made)

    def drop(self, model: Trained) -> None:
        """End a model; its log and its checkpoints stay."""
        (model.log.folder / ENDED).touch()  # first, since a full disk refuses it and the client asks again
        model.close()
        self._give_up(f"model {model.model_id} was unloaded", model.model_id)
        del self.models[int(model.model_id.rpartition(":")[2])]

    # ------------------------------------------------------------------------------------------------ sampling

    def _give_up(self, reason: str, model_id: str | None = None) -> None:
        """Fail the requests of sampling sessions, of one model or all, whose weights will never be there."""
        for session in self.sampling.values():
            if not session.ready.is_set() and model_id in (None, session.target.model_id):
                session.error = reason
                session.ready.set()

    def create_sampling(self, number: int, target: Target) -> SamplingSession:
        """A sampling session of the base or a checkpoint; the same one if it was asked for before. Raises
        `ConfigError`."""
        known = self.sampling.get(number)
        if known is not None:
            if known.target != target:
                raise Refused(422, f"sampling session {number} was created before, with another model")
            return known
        if target.path is not None:
            self._all.path_for(self.card.client, target.path, None)
        elif target.base_model not in self.core.settings.base_models:
            raise ConfigError(f"base_model is {target.base_model!r}; this server has {self.core.settings.model_name!r}")
        session = self._add_sampling(number, target)
        self._begin_sampling(session)
        return session

    def expect_sampling(self, number: int, target: Target) -> None:
        """A sampling session whose weights a command that is about to be logged will freeze. Raises `Refused`."""
        known = self.sampling.get(number)
        if known is None:
            self._add_sampling(number, target)
        elif known.target != target:
            raise Refused(422, f"sampling session {number} was created before, with another model")

    def _add_sampling(self, number: int, target: Target) -> SamplingSession:
        if not 0 <= number < SAMPLING_NUMBERS:
            raise Refused(422, f"sampling_session_seq_id is {number!s:.20}; it counts from 0")
        folder = self.folder / "samplers"
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{number}.json", target)
        session = self.sampling[number] = SamplingSession(f"{self.id}:sample:{number}", target)
        return session

    def _begin_sampling(self, session: SamplingSession) -> None:
        """Have the service load what the session samples from, unless a command will."""
        if session.target.model_id is not None:
            return
        if session.target.path is None:
            session.ready.set()
            return

        def loaded(error: BaseException | None) -> None:
            if session.error is not None:  # it was given up meanwhile
                self._drop_sampler(session)
                return
            session.error = None if error is None else str(error)
            session.ready.set()

        try:
            path = self._all.path_for(self.card.client, session.target.path, None)
        except ConfigError as error:  # it was deleted while the server did not run
            loaded(error)
            return
        future = self.core.service.create_sampler(path, sampler=session.id)
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda done: loop.call_soon_threadsafe(loaded, done.exception()))

    def checkpoint_gone(self, path: str) -> None:
        """Drop the weights of a checkpoint, whose path in the service this was."""
        for session in self.sampling.values():
            if session.target.path is not None and service_path(session.target.path) == path and session.error is None:
                session.error = f"the checkpoint {session.target.path} was deleted, or is expired; sample from another"
                session.ready.set()
                self._drop_sampler(session)

    def _drop_sampler(self, session: SamplingSession) -> None:
        with suppress(ConfigError):  # it was never made, or is gone
            self.core.service.drop_sampler(session.id)

    def _sampler_made(self, sampling_id: str, error: str | None) -> None:
        session = self.sampling.get(int(sampling_id.rpartition(":")[2]))
        if session is not None and self.card.ended is not None:  # too late
            self._drop_sampler(session)
            return
        if session is not None:
            session.error = error
            if session.target.inflight and session.target.model_id is not None and error is None:
                self.inflight[session.target.model_id] = sampling_id
            session.ready.set()

    def sampler_of(self, session: SamplingSession) -> str | None:
        """The service's name of what a sampling session samples from; None: the base."""
        target = session.target
        if target.inflight and target.model_id is not None:
            return self.inflight.get(target.model_id, session.id)
        return session.id if target.path is not None or target.model_id is not None else None

    def create_loss(self, body: requests.CreateLoss, raw: bytes) -> str:
        """The id of a custom loss, which the session's models can use. Raises `ConfigError` for one that is not
        allowed."""
        loss_id = self.core.service.create_custom_loss(*body.loss())
        (self.folder / "losses").mkdir(exist_ok=True)
        write_bytes(self.folder / "losses" / f"{loss_id}.json", raw)
        return loss_id

    # ------------------------------------------------------------------------------------------------ restart and end

    def restore(self) -> int:
        """Continue where the last server stopped; returns the number of requests executed again or restored."""
        for file in sorted((self.folder / "samplers").glob("*.json")):
            target = decoded(file.read_bytes(), file, Target)
            self.sampling[int(file.stem)] = SamplingSession(f"{self.id}:sample:{file.stem}", target)
        count = 0
        sampler_ids = set[str]()
        for file in (self.folder / "losses").glob("*.json"):
            self.core.service.create_custom_loss(*decoded(file.read_bytes(), file, requests.CreateLoss).loss())
        for folder in sorted((self.folder / "models").glob("*"), key=lambda folder: int(folder.name)):
            if (folder / ENDED).exists():
                continue
            try:
                model = self.models[int(folder.name)] = self._open(int(folder.name))
            except RunError as error:
                log.error("%s", error)
                continue
            if model.log.replay.dropped:
                log.warning("%s: %d bytes at its end were not acknowledged and are dropped", folder,
                            model.log.replay.dropped)  # fmt: skip
            count += model.replay()
            sampler_ids.update(model.samplers_to_come())
        for session in self.sampling.values():
            if session.target.model_id is not None and session.id not in sampler_ids:
                session.error = (
                    f"the weights of {session.id} were not on disk when the server stopped; "
                    "save weights for a sampler again"
                )
                session.ready.set()
            self._begin_sampling(session)
        return count + self.samples.replay({session.id: session for session in self.sampling.values()})

    def end(self, reason: str) -> None:
        """Drop models and samplers; logs and checkpoints stay. The first reason counts."""
        if self.card.ended is not None:
            return
        ended = msgspec.structs.replace(self.card, ended=reason)
        write_json(self.folder / "session.json", ended)  # first, since a full disk refuses it and the client asks again
        self.card = ended
        for model in self.models.values():
            model.close()
        self._give_up("the session has ended")
        self.samples.log.close()
        for session in self.sampling.values():
            if self.sampler_of(session) is not None:
                self._drop_sampler(session)


class Sessions:
    def __init__(self, core: Core) -> None:
        self.core, self._folder = core, core.settings.folder / "sessions"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sessions: dict[str, Session] = {}
        self.ended: dict[str, Card] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def of(self, client: str) -> list[Session]:
        return [session for session in self._sessions.values() if session.card.client == client]

    def create(self, client: Client, body: requests.CreateSession) -> Session:
        """Raises `Refused` beyond the quota."""
        quota = self.core.settings.quota.sessions
        if len(self.of(client.name)) >= quota:
            raise Refused(429, f"this key has {quota} sessions, which is its quota; end one, or wait until one is idle")
        session_id = f"s-{secrets.token_hex(8)}"
        card = Card(client.name, time.time(), body.tags, body.user_metadata, body.display_name)
        folder = self._folder / session_id
        (folder / "models").mkdir(parents=True)
        session = Session(self.core, self, session_id, card, folder)
        try:
            write_json(folder / "session.json", card)  # last, since a restarted server continues what has one
        except OSError:
            session.samples.log.close()
            raise
        self._sessions[session_id] = session
        return session

    def find(self, session_id: str, client: Client) -> Session:
        """Raises `Refused`: 404 for one that is not known or another client's, 410 for one that has ended."""
        session = self._sessions.get(session_id)
        if session is not None and session.card.client == client.name:
            session.seen = time.monotonic()
            return session
        card = self.ended.get(session_id)
        if card is not None and card.client == client.name:
            raise Refused(410, f"session {session_id} has ended: {card.ended}")
        raise Refused(404, f"there is no session {session_id!r} of this key")

    def model(self, model_id: str, client: Client) -> tuple[Session, Trained]:
        """Raises `Refused`."""
        session = self.find(session_of(model_id), client)
        number = numbered(model_id)
        model = None if number is None else session.models.get(number)
        if model is None:
            raise Refused(404, f"there is no model {model_id!r} in session {session.id}")
        return session, model

    def sampling(self, sampling_id: str, client: Client) -> tuple[Session, SamplingSession]:
        """Raises `Refused`."""
        session = self.find(sampling_id.rpartition(":sample:")[0], client)
        number = numbered(sampling_id)
        sampling = None if number is None else session.sampling.get(number)
        if sampling is None:
            raise Refused(404, f"there is no sampling session {sampling_id!r}")
        return session, sampling

    def owner_of(self, model_id: str) -> str | None:
        """The client's name whose session, perhaps an ended one, made a model."""
        session_id = session_of(model_id)
        session = self._sessions.get(session_id)
        card = session.card if session is not None else self.ended.get(session_id)
        return None if card is None else card.client

    def path_for(self, client: str, path: str, token: str | None) -> str:
        """A checkpoint's path in the service, if this client may read it, or the client of the key `token`.

        Raises `ConfigError`.
        """
        if token is not None:
            other = self.core.keys.client_of({"x-api-key": token})
            client = client if other is None else other.name
        model_id, in_service = path.removeprefix("tinker://").partition("/")[0], service_path(path)
        hidden = in_service.rpartition("/")[2].startswith(HIDDEN)  # without it the log cannot be resumed
        if not path.startswith("tinker://") or self.owner_of(model_id) != client or hidden:
            raise ConfigError(
                f"there is no checkpoint {path!r} of this key; a path is tinker://MODEL_ID/weights/NAME, "
                "tinker://MODEL_ID/sampler_weights/NAME or tinker://MODEL_ID/external_weights/NAME"
            )
        self.core.service.checkpoint_folder(in_service)  # raises for one that is gone
        return in_service

    def restore(self) -> int:
        """Sessions that the last server left; returns the number of requests that are executed or known again."""
        count = 0
        for file in sorted(self._folder.glob("*/session.json")):
            card = decoded(file.read_bytes(), file, Card)
            if card.ended is not None:
                self.ended[file.parent.name] = card
                continue
            session = self._sessions[file.parent.name] = Session(self.core, self, file.parent.name, card, file.parent)
            count += session.restore()
        return count

    def end(self, session: Session, reason: str) -> None:
        session.end(reason)
        self.ended[session.id] = session.card
        del self._sessions[session.id]

    def checkpoint_gone(self, path: str) -> None:
        """A checkpoint was deleted: its weights go, too. `path`: in the service."""
        for session in self:
            session.checkpoint_gone(path)

    def sweep(self) -> None:
        """End sessions without a heartbeat, and delete checkpoints whose time is over."""
        limit = time.monotonic() - self.core.settings.idle_seconds
        for session in [each for each in self if each.seen < limit]:
            self.end(session, f"no heartbeat for {self.core.settings.idle_seconds:g} seconds")


def numbered(id: str) -> int | None:
    """The number that the id of a model or sampling session ends in; None where it is not written as ids are."""
    number = id.rpartition(":")[2]
    return int(number) if NUMBER.fullmatch(number) else None


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, msgspec.json.encode(content))
