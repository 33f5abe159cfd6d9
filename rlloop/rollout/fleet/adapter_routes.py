"""An engine's adapters over HTTP: listed as models; loaded and dropped, while requests run, by vLLM's routes.

    POST /v1/load_lora_adapter      {"lora_name": "poet", "lora_path": "poet-2"}; "load_inplace": true replaces one
    POST /v1/unload_lora_adapter    {"lora_name": "poet"}

`lora_path` is a PEFT folder on the server, below the folder given by `--adapter-root`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from rlloop.errors import ConfigError, ModelError
from rlloop.rollout.engine.service import EngineService
from rlloop.web.requests import parsed, refusal


class Load(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class Unload(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's own number; not needed


class AdapterRoutes:
    """Loads and drops adapters of a service's engine."""

    def __init__(self, service: EngineService, base: str, root: Path | None) -> None:
        """`base`: the base model's name; `root`: the folder that adapters may be loaded from; None: none may be."""
        self._service, self._base, self._root = service, base, root
        self.routes: Sequence[BaseRoute] = [
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
        ]
        self._started = int(time.time())

    def cards(self, longest: int) -> list[dict[str, Any]]:
        """Entries of `/v1/models`."""
        return [
            {"id": name, "object": "model", "created": self._started, "owned_by": "rlloop", "parent": self._base,
             "max_model_len": longest, "version": version}
            for name, version in self._service.adapters.items()
        ]  # fmt: skip

    async def _load(self, request: Request) -> Response:
        asked = parsed(await request.body(), Load)
        if self._root is None:
            text = "this server loads no adapters for its clients; start it with --adapter-root FOLDER"
            return refusal(403, "adapters_not_loadable", text)
        if asked.lora_name == self._base:
            raise ConfigError(f"lora_name is {asked.lora_name!r}, the base model's own name; give the adapter another")
        if asked.lora_name in self._service.adapters and not asked.load_inplace:
            raise ConfigError(f"adapter {asked.lora_name!r} is loaded; load_inplace=true replaces it")
        root = self._root.resolve()
        folder = (root / asked.lora_path).resolve()
        if not folder.is_relative_to(root) or not folder.is_dir():
            text = f"lora_path is {asked.lora_path!r}; it must be a folder under the server's --adapter-root"
            return refusal(404, "adapter_not_found", text, param="lora_path")
        try:
            version = await run_in_threadpool(self._service.load_adapter, asked.lora_name, folder)
        except ModelError as error:
            return refusal(400, "adapter_unreadable", f"lora_path is {asked.lora_path!r}: {error}", param="lora_path")
        return PlainTextResponse(f"Success: adapter {asked.lora_name!r} is loaded, version {version}")

    async def _unload(self, request: Request) -> Response:
        asked = parsed(await request.body(), Unload)
        if asked.lora_name not in self._service.adapters:
            return refusal(404, "adapter_not_found", f"no adapter is named {asked.lora_name!r}", param="lora_name")
        await run_in_threadpool(self._service.drop_adapter, asked.lora_name)
        return PlainTextResponse(f"Success: adapter {asked.lora_name!r} is dropped")
