"""`rlloop serve api`: the training API."""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from rlloop.errors import ConfigError
from rlloop.web.server import TOKEN_VARIABLE, Listen, is_loopback, serve


def api(given: argparse.Namespace, stack: ExitStack) -> None:
    """Serve until a signal."""
    from rlloop.api.core import Base, Settings, keep_base
    from rlloop.api.keys import PREFIX, Client, Keys, Quota, read_keys

    if not (given.model / "config.json").is_file():
        raise ConfigError(f"--model {given.model} has no config.json; it must be a Hugging Face checkpoint folder")
    token = os.environ.get(TOKEN_VARIABLE)
    if given.token_file is None and token:
        keys = Keys({token if token.startswith(PREFIX) else PREFIX + token: Client("fleet", operator=True)})
    else:
        keys = read_keys(given.token_file)
    closed = given.token_file is not None or bool(token)
    settings = Settings(
        folder=given.folder,
        model_name=given.model_name or given.model.resolve().name,
        model_folder=given.model,
        max_body=given.max_body,
        quota=Quota(given.models_per_key, given.futures_per_key, given.bytes_per_key),
        parity=given.parity,
        idle_seconds=given.idle,
        state_every=given.state_every,
    )
    listen = Listen(
        given.host, given.port, None, given.certificate, given.key, given.max_body,
        admits=(lambda request: server.admits(request)) if closed else None,
    )  # fmt: skip
    stack.enter_context(_locked(given.folder))

    import torch  # slow to import, so after the checks

    from rlloop.api.server import ApiServer
    from rlloop.training.service import TrainingService

    if given.threads is not None:
        torch.set_num_threads(given.threads)
    sys.setswitchinterval(5e-4)  # requests are answered while the service computes: 5 ms at each hand-over are too long
    bits = {
        "dtype": given.dtype, "device": given.device, "leaf_tokens": given.leaf_tokens,
        "max_lora_rank": given.max_lora_rank,
    }  # fmt: skip
    keep_base(given.folder, Base(str(given.model.resolve()), settings.model_name, bits))
    service = TrainingService(
        given.model,
        checkpoints=given.folder / "checkpoints",
        model_name=settings.model_name,
        **bits,
        adapter_slots=given.adapter_slots,
        max_running=given.max_running,
        checkpoint_layers=given.checkpoint_layers,
    )
    stack.callback(service.close)
    server = ApiServer(service, settings, keys, local=is_loopback(given.host))
    serve(server.app, listen, lambda url: print(f"rlloop api: {url}", flush=True))


def _locked(folder: Path) -> IO[str]:
    """The folder's lock, held while the file is open: two servers must not write the same logs. Raises
    `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"--folder {folder} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(f"another server writes --folder {folder}; give each server a folder of its own") from None
    return file
