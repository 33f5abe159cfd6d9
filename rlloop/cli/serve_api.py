"""`rlloop serve api`: the training API."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from rlloop.errors import ConfigError
from rlloop.web.server import TOKEN_VARIABLE, Listen, is_loopback, serve


def api(args: argparse.Namespace, stack: ExitStack) -> None:
    """Serve until a signal."""
    from rlloop.api.core import Base, Settings, keep_base
    from rlloop.api.inputs import InputReader
    from rlloop.api.keys import PREFIX, Client, Keys, Quota, read_keys

    if not (args.model / "config.json").is_file():
        raise ConfigError(f"--model {args.model} has no config.json; it must be a Hugging Face checkpoint folder")
    if args.shape is not None:
        take_shape(args)
    token = os.environ.get(TOKEN_VARIABLE)
    if args.token_file is None and token:
        keys = Keys({token if token.startswith(PREFIX) else PREFIX + token: Client("fleet", operator=True)})
    else:
        keys = read_keys(args.token_file)
    closed = args.token_file is not None or bool(token)
    settings = Settings(
        folder=args.folder,
        model_name=args.model_name or args.model.resolve().name,
        model_folder=args.model,
        inputs=InputReader.of_folder(args.model),
        max_body=args.max_body,
        quota=Quota(args.models_per_key, args.futures_per_key, args.bytes_per_key),
        parity=args.parity,
        idle_seconds=args.idle,
        state_every=args.state_every,
    )
    listen = Listen(
        args.host, args.port, None, args.certificate, args.key, args.max_body,
        admits=(lambda request: server.admits(request)) if closed else None,
    )  # fmt: skip
    stack.enter_context(_locked(args.folder))

    import torch  # slow to import, so after the checks

    from rlloop.api.server import ApiServer
    from rlloop.training.service_process import ProcessTrainingService

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    bits = {
        "dtype": args.dtype, "device": args.device, "leaf_tokens": args.leaf_tokens,
        "max_lora_rank": args.max_lora_rank,
    }  # fmt: skip
    keep_base(args.folder, Base(str(args.model.resolve()), settings.model_name, bits))
    chosen = {
        "checkpoints": (args.folder / "checkpoints").absolute(), "model_name": settings.model_name, **bits,
        "adapter_slots": args.adapter_slots, "keep_samplers": args.keep_samplers, "max_running": args.max_running,
        "checkpoint_layers": args.checkpoint_layers,
    }  # fmt: skip
    if args.ray is None:
        service = ProcessTrainingService(args.model, died=_end, **chosen)
    else:
        from rlloop.launch.ray_service import RayTrainingService

        address = None if args.ray == "local" else args.ray
        service = RayTrainingService(args.model, address=address, cpus=args.ray_cpus, gpus=args.ray_gpus,
                                     died=_end, **chosen)  # fmt: skip
    stack.callback(service.close)
    server = ApiServer(service, settings, keys, local=is_loopback(args.host))
    serve(server.app, listen, lambda url: print(f"rlloop api: {url}", flush=True))


def _end(reason: str) -> None:
    """End at once, as if killed: unfinished commands are executed when the server is started again."""
    print(f"rlloop api: {reason}; start it again, with the same --folder, to go on", file=sys.stderr, flush=True)
    os._exit(1)


def take_shape(args: argparse.Namespace) -> None:
    """Set options from the shape. Raises `ConfigError` for a shape of another model, or of several accelerators."""
    from rlloop.training.shapes import resolve_training_profile

    shape = resolve_training_profile(args.shape, files=args.shape_file)
    config = json.loads((args.model / "config.json").read_text())
    for name, value in shape.model.items():
        if name in config and config[name] != value:
            raise ConfigError(
                f"--shape {args.shape} is of a model whose {name} is {value!r:.80}, and --model {args.model} has "
                f"{config[name]!r:.80}; give the shape of this model (rlloop shapes)"
            )
    if shape.accelerator_count != 1:
        raise ConfigError(
            f"--shape {args.shape} takes {shape.accelerator_count} accelerators, and this server computes on one; "
            "take a shape of one, or train a model of this size with `rlloop train`"
        )
    args.dtype, args.leaf_tokens = shape.base_model_weight_precision, shape.max_batch_tokens
    if shape.trainer_mode == "lora":
        args.max_lora_rank = shape.lora_rank
    if shape.accelerator_type != "CPU":
        args.device, args.ray_gpus = "cuda", args.ray_gpus or 1.0


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
