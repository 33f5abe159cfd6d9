"""Routes of checkpoints, training runs and sessions: lists, downloads, expiry, deletion."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from rlloop.api import requests
from rlloop.api.calls import EXTERNAL, HIDDEN, public_path, service_path, texts
from rlloop.api.core import Core, Refused
from rlloop.api.keys import Client
from rlloop.api.models import Trained
from rlloop.api.requests import decoded
from rlloop.api.sessions import Session, Sessions
from rlloop.errors import ConfigError
from rlloop.training.types import Checkpoint

Handler = Callable[[Request, Client, bytes], Awaitable[Response]]
SIGNED_SECONDS = 3600.0  # a download's address is good for
RUN = "training_runs/{run}"
CHECKPOINT = RUN + "/checkpoints/{checkpoint:path}"


class Checkpoints:
    def __init__(self, core: Core, sessions: Sessions) -> None:
        self.core, self.sessions = core, sessions
        self._secret = secrets.token_bytes(32)  # signs addresses of downloads
        self.handlers: list[tuple[str, str, Handler]] = [  # in the order in which paths are compared
            ("GET", RUN + "/checkpoints", self._list_of_run),
            ("GET", CHECKPOINT + "/external_weights_urls", self._urls),
            ("PUT", CHECKPOINT + "/ttl", self._set_ttl),
            ("POST", CHECKPOINT + "/publish", self._publish),
            ("DELETE", CHECKPOINT + "/publish", self._publish),
            ("DELETE", CHECKPOINT, self._delete),
            ("GET", RUN, self._run),
            ("GET", "training_runs", self._runs),
            ("GET", "checkpoints", self._list),
            ("POST", "weights_info", self._weights_info),
            ("POST", "copy_weights", self._copy),
            ("GET", "sessions", self._sessions),
            ("GET", "sessions/{session}", self._session),
        ]

    # ------------------------------------------------------------------------------------------------ checkpoints

    def _of(self, client: Client, model_id: str | None = None) -> list[Checkpoint]:
        """A client's checkpoints in the order of their time, without those that belong to logs."""
        return [
            each
            for each in self.core.service.checkpoints(model_id)
            if self.sessions.owner_of(_run_of(each.tinker_path)) == client.name
            and not each.checkpoint_id.partition("/")[2].startswith(HIDDEN)
        ]

    def _path(self, request: Request, client: Client) -> str:
        """The path, in the service, of the checkpoint that a route names. Raises `Refused`."""
        path = f"tinker://{request.path_params['run']}/{request.path_params['checkpoint']}"
        try:
            return self.sessions.path_for(client.name, path, None)
        except ConfigError as error:
            raise Refused(404, str(error)) from None

    async def _list_of_run(self, request: Request, client: Client, body: bytes) -> Response:
        run = request.path_params["run"]
        if self.sessions.owner_of(run) != client.name:
            raise Refused(404, f"there is no training run {run!r} of this key")
        return JSONResponse({"checkpoints": [described(each) for each in self._of(client, run)]})

    async def _list(self, request: Request, client: Client, body: bytes) -> Response:
        page, cursor = _page(request, self._of(client)[::-1])
        return JSONResponse({"checkpoints": [described(each) for each in page], "cursor": cursor})

    async def _delete(self, request: Request, client: Client, body: bytes) -> Response:
        path = self._path(request, client)
        self.core.service.delete_checkpoint(path)
        self.sessions.checkpoint_gone(path)
        return Response(status_code=204)

    async def _set_ttl(self, request: Request, client: Client, body: bytes) -> Response:
        seconds = requests.checked_ttl(decoded(body, requests.Ttl).ttl_seconds)
        self.core.service.set_checkpoint_ttl(self._path(request, client), seconds)
        return Response(status_code=204)

    async def _publish(self, request: Request, client: Client, body: bytes) -> Response:
        raise Refused(403, "this server has no public checkpoints; give the other client a copy, or a key")

    async def _urls(self, request: Request, client: Client, body: bytes) -> Response:
        """Signed addresses of a checkpoint's files."""
        path = self._path(request, client)
        folder, expires = self.core.service.checkpoint_folder(path), time.time() + SIGNED_SECONDS
        urls = {}
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            name = str(file.relative_to(folder))
            target = f"{path.removeprefix('tinker://')}/{name}"
            query = f"expires={int(expires)}&signature={self._signature(target, int(expires))}"
            urls[name] = f"{request.base_url}api/v1/files/{target}?{query}"
        return JSONResponse({"urls": urls, "expires": _time(expires)})

    async def file(self, request: Request) -> Response:
        """A file by its signed address."""
        if not self.is_signed(request):
            raise Refused(403, "this address is not signed by this server, or its time is over: ask for it again")
        run, kind, name, *rest = request.path_params["path"].split("/")
        folder = self.core.service.checkpoint_folder(f"tinker://{run}/{kind}/{name}")
        return FileResponse(folder / Path(*rest))

    def is_signed(self, request: Request) -> bool:
        """True for a download's address that this server gave out, whose time is not over."""
        prefix = "/api/v1/files/"
        target, expires = request.url.path, request.query_params.get("expires", "0")
        if not target.startswith(prefix) or not expires.isdecimal() or int(expires[:12]) < time.time():
            return False
        signature = self._signature(target.removeprefix(prefix), int(expires[:12]))
        return hmac.compare_digest(signature.encode(), request.query_params.get("signature", "").encode())

    def _signature(self, target: str, expires: int) -> str:
        return hmac.new(self._secret, f"{expires} {target}".encode(), hashlib.sha256).hexdigest()

    async def _weights_info(self, request: Request, client: Client, body: bytes) -> Response:
        path = self.sessions.path_for(client.name, decoded(body, requests.Path).tinker_path, None)
        checkpoint = next(each for each in self.core.service.checkpoints(_run_of(path)) if each.tinker_path == path)
        lora = checkpoint.lora
        return JSONResponse(
            {
                "base_model": self.core.settings.model_name,
                "is_lora": checkpoint.is_lora,
                "lora_rank": None if lora is None else lora.rank,
                "train_unembed": None if lora is None else lora.train_unembed,
                "train_mlp": None if lora is None else lora.train_mlp,
                "train_attn": None if lora is None else lora.train_attn,
            }
        )

    async def _copy(self, request: Request, client: Client, body: bytes) -> Response:
        asked = decoded(body, requests.CopyWeights)
        if asked.session_id is None or asked.model_seq_id is None:
            raise Refused(422, "copy_weights needs session_id and model_seq_id; this server has no projects")
        session = self.sessions.find(asked.session_id, client)
        source = self.sessions.path_for(client.name, asked.source_path, asked.weights_access_token)
        copied = self.core.service.copy_checkpoint(
            source,
            f"{session.id}:train:{asked.model_seq_id}",
            ttl_seconds=requests.checked_ttl(asked.ttl_seconds),
        )
        return JSONResponse({"tinker_path": public_path(copied)})

    # ------------------------------------------------------------------------------------------------ runs, sessions

    async def _run(self, request: Request, client: Client, body: bytes) -> Response:
        session, model = self.sessions.model(request.path_params["run"], client)
        return JSONResponse(self._described(session, model, client))

    async def _runs(self, request: Request, client: Client, body: bytes) -> Response:
        models = [(session, model) for session in self.sessions.of(client.name) for model in session.models.values()]
        models.sort(key=lambda pair: -pair[1].created)
        page, cursor = _page(request, [pair for pair in models if self._is_made(pair[1])])
        runs = [self._described(session, model, client) for session, model in page]
        return JSONResponse({"training_runs": runs, "cursor": cursor})

    def _is_made(self, model: Trained) -> bool:
        """False also while it is being made."""
        try:
            self.core.service.info(model.model_id)
        except ConfigError:
            return False
        return True

    def _described(self, session: Session, model: Trained, client: Client) -> dict[str, Any]:
        info = self.core.service.info(model.model_id)
        saved = self._of(client, model.model_id)
        last = {kind: described(each) for each in saved for kind in [each.checkpoint_type]}
        return {
            "training_run_id": model.model_id,
            "base_model": self.core.settings.model_name,
            "model_owner": client.name,
            "is_lora": info.is_lora,
            "lora_rank": info.lora_rank,
            "last_request_time": _time(model.last_request),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": texts(session.card.user_metadata),
        }

    async def _sessions(self, request: Request, client: Client, body: bytes) -> Response:
        page, _ = _page(request, [session.id for session in self.sessions.of(client.name)][::-1])
        return JSONResponse({"sessions": page})

    async def _session(self, request: Request, client: Client, body: bytes) -> Response:
        session = self.sessions.find(request.path_params["session"], client)
        return JSONResponse(
            {
                "training_run_ids": [model.model_id for model in session.models.values()],
                "sampler_ids": [sampling.id for sampling in session.sampling.values()],
                "user_metadata": texts(session.card.user_metadata),
                "display_name": session.card.display_name,
            }
        )


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    path = public_path(checkpoint.tinker_path)
    kind = "external" if f"/{EXTERNAL}" in checkpoint.tinker_path else checkpoint.checkpoint_type
    return {
        "checkpoint_id": path.removeprefix("tinker://").partition("/")[2],
        "checkpoint_type": kind,
        "time": _time(checkpoint.time),
        "tinker_path": path,
        "size_bytes": checkpoint.size_bytes,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires_at is None else _time(checkpoint.expires_at),
    }


def _run_of(path: str) -> str:
    return service_path(path).removeprefix("tinker://").partition("/")[0]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(request: Request, items: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """The items of a page, by the query's offset and limit, and its cursor."""
    values = {"offset": 0, "limit": 100}
    for name in values:
        text = request.query_params.get(name, str(values[name]))
        if not text.isdecimal() or len(text) > 9:
            raise Refused(422, f"{name} is {text!r:.40}; it must be a whole number")
        values[name] = int(text)
    page = items[values["offset"] : values["offset"] + values["limit"]]
    return page, {**values, "total_count": len(items)}
