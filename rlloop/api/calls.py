"""Executes a log's commands as calls of the training service, for the server and for `rlloop verify`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rlloop.api import requests, wire
from rlloop.api.futures import PROTOBUF, Outcome
from rlloop.api.inputs import TEXT_ONLY, InputReader
from rlloop.api.log import Command
from rlloop.errors import ConfigError, RlloopError
from rlloop.training.checkpoints import Overwrite
from rlloop.training.service import TrainingService
from rlloop.training.types import ForwardBackwardOutput, OptimStepResponse, Parity, PromptProvenanceSpan

HIDDEN = "rlloop-log-"  # begins the names of checkpoints that belong to a log
EXTERNAL = "rlloop-external-"  # begins those of checkpoints in another library's format
OBSERVE = "parity"  # key of user_metadata; "observe" as its value lets a model train on tokens that differ


@dataclass(frozen=True)
class Context:
    """Server-side facts that a command's execution needs besides its own bytes."""

    model_id: str
    base_models: tuple[str, ...]  # names under which the base may be asked for
    parity: Parity = "require"  # unless the model's metadata ask for another
    check_path: Callable[[str, str | None], str] = lambda path, token: path  # raises for a path of another client
    client: str | None = None  # whose models share turns
    inputs: InputReader = TEXT_ONLY  # of the base


@dataclass(frozen=True)
class Call:
    future: Future[Any]
    encode: Callable[[Any], Outcome]
    kept: bool = False  # its result is logged, so it is not executed again
    checked: bool = False  # its datums name sampled sequences


@dataclass(frozen=True)
class Replayed:
    """Recorded outcome of a call that is executed again from the log; empty for a new call."""

    compared: Mapping[str, float] | None = None  # metrics of the comparison of its tokens, which all were equal
    broken: bool = False  # it failed in the server, and took the gradient with it
    again: bool = False  # it may have been executed before, without a record of it


def start(service: TrainingService, context: Context, command: Command, replayed: Replayed = Replayed()) -> Call:
    """Start a command. Raises `ConfigError` if it cannot be read."""
    return _KINDS[command.kind](service, context, command, replayed)


def failure(error: BaseException) -> Outcome:
    """The final answer of a failed command, which names the side at fault."""
    if isinstance(error, RlloopError):
        return failed(str(error), "user")
    return failed(f"{type(error).__name__}: {error}", "server")


def failed(message: str, category: str) -> Outcome:
    return Outcome(msgspec.json.encode({"error": message, "category": category}), failed=True)


def result(**fields: Any) -> Outcome:
    return Outcome(msgspec.json.encode(fields))


def sampling_session(model_id: str, number: int) -> str:
    """The id of a sampling session, which is also its sampler's in the service."""
    return f"{session_of(model_id)}:sample:{number}"


def session_of(model_id: str) -> str:
    return model_id.rpartition(":train:")[0]


def public_path(path: str) -> str:
    """A checkpoint's path as clients see it."""
    return path.replace(f"/sampler_weights/{EXTERNAL}", "/external_weights/")


def service_path(path: str) -> str:
    """A checkpoint's path as the training service knows it."""
    return path.replace("/external_weights/", f"/sampler_weights/{EXTERNAL}")


# ------------------------------------------------------------------------------------------------ one for each kind


def _create_model(service: TrainingService, context: Context, command: Command, replayed: Replayed) -> Call:
    body = requests.decoded(command.body, requests.CreateModel)
    _check_base(body.base_model, context)
    _check_optimizer(body.optimizer_config)
    future = service.create_model(
        lora=None if body.lora_config is None else body.lora_config.config(),
        model_id=context.model_id,
        parity=_parity(body.user_metadata, context),
        user_metadata=texts(body.user_metadata),
        owner=context.client,
    )
    return Call(future, lambda _: result(type="create_model", model_id=context.model_id))


def _load_weights(service: TrainingService, context: Context, command: Command, replayed: Replayed) -> Call:
    body = requests.decoded(command.body, requests.LoadWeights)
    path = context.check_path(body.path, body.weights_access_token)
    _check_optimizer(body.optimizer_config)
    if command.seq_id:
        loaded: Future[Any] = service.load_weights(context.model_id, path, optimizer=body.optimizer)
    else:
        if body.base_model is not None:
            _check_base(body.base_model, context)
        loaded = service.create_model_from(
            path,
            optimizer=body.optimizer,
            model_id=context.model_id,
            parity=_parity(body.user_metadata, context),
            user_metadata=texts(body.user_metadata),
            owner=context.client,
        )
    return Call(loaded, lambda _: result(type="load_weights", path=body.path, model_id=context.model_id))


def _forward_backward(service: TrainingService, context: Context, command: Command, replayed: Replayed) -> Call:
    compared = replayed.compared
    body = wire.decode_forward_backward(command.body, context.inputs, provenance=compared is None)
    if not body.data:
        raise ConfigError("forward_backward has no datum; send one or more")
    if replayed.broken:  # a name that no sequence has fails the call, and drops the gradient, as the first time
        first = body.data[0]
        lengths = len(first.model_input), len(first.loss_fn_inputs.get("target_tokens", ()))
        spans = [(PromptProvenanceSpan(sequence_id="-", length=length),) for length in lengths]
        body.data[0] = first.with_provenance(*spans)
    call = service.forward if body.forward_only else service.forward_backward
    future = call(context.model_id, body.data, body.loss_fn, body.loss_fn_config)

    def encode(output: ForwardBackwardOutput) -> Outcome:
        if compared is not None:
            output = replace(output, metrics={**output.metrics, **compared})
        return Outcome(wire.encode_output(output), PROTOBUF, metrics=output.metrics)

    return Call(future, encode, checked=any(datum.provenance is not None for datum in body.data))


def _optim_step(service: TrainingService, context: Context, command: Command, replayed: Replayed) -> Call:
    body = requests.decoded(command.body, requests.OptimStep)
    if body.optimizer_params is not None or body.adam_params is None:
        raise ConfigError("optim_step has no adam_params; AdamW is the optimizer of this server")

    def encode(response: OptimStepResponse) -> Outcome:
        finite = {name: value for name, value in response.metrics.items() if value - value == 0}  # JSON has no infinity
        return result(type="optim_step", metrics=finite)

    return Call(service.optim_step(context.model_id, body.adam_params.params()), encode)


def _save_weights(service: TrainingService, context: Context, command: Command, replayed: Replayed) -> Call:
    body = requests.decoded(command.body, requests.SaveWeights)
    name = _name(body.path) if body.path is not None else f"{command.seq_id:06d}"
    saved = service.save_weights(
        context.model_id,
        name,
        overwrite=body.overwrite or _kept(replayed),
        ttl_seconds=requests.checked_ttl(body.ttl_seconds),
        user_metadata=body.user_metadata,
    )
    return Call(saved, lambda response: result(type="save_weights", path=response.path), kept=True)


def _save_for_sampler(service: TrainingService, context: Context, command: Command, replayed: Replayed) -> Call:
    body = requests.decoded(command.body, requests.SaveForSampler)
    name = None if body.path is None else _name(body.path)
    if name is None and body.sampling_session_seq_id is None:
        raise ConfigError("save_weights_for_sampler has neither a path nor a sampling_session_seq_id; give one")
    sampler = None if name is not None else sampling_session(context.model_id, body.sampling_session_seq_id or 0)
    saved = service.save_weights_for_sampler(
        context.model_id,
        name,
        sampler=sampler,
        freeze=name is None,  # sampling sessions load a path from disk
        overwrite=_kept(replayed),
        ttl_seconds=requests.checked_ttl(body.ttl_seconds) if name is not None else None,
        user_metadata=body.user_metadata if name is not None else None,
    )
    return Call(
        saved,
        lambda response: result(type="save_weights_for_sampler", path=response.path, sampling_session_id=sampler),
        kept=name is not None,
    )


def _save_external(service: TrainingService, context: Context, command: Command, replayed: Replayed) -> Call:
    body = requests.decoded(command.body, requests.SaveExternal)
    if body.age_encryption_recipients:
        raise ConfigError("this server does not encrypt checkpoints; leave age_encryption_recipients out")
    saved = service.save_weights_for_sampler(
        context.model_id,
        EXTERNAL + _name(body.path),
        freeze=False,
        overwrite=_kept(replayed),
        ttl_seconds=requests.checked_ttl(body.ttl_seconds),
    )
    return Call(
        saved, lambda response: result(type="save_weights_external", path=public_path(response.path or "")), kept=True
    )


_KINDS: dict[str, Callable[[TrainingService, Context, Command, Replayed], Call]] = {
    "create_model": _create_model,
    "load_weights": _load_weights,
    "forward_backward": _forward_backward,
    "optim_step": _optim_step,
    "save_weights": _save_weights,
    "save_weights_for_sampler": _save_for_sampler,
    "save_weights_external": _save_external,
}


def _kept(replayed: Replayed) -> Overwrite:
    """A save that was killed before its record was written has left the checkpoint, which is no error."""
    return "equal" if replayed.again else False


def _name(path: str) -> str:
    if path.startswith((HIDDEN, EXTERNAL)):
        raise ConfigError(f"the checkpoint's name {path!r} begins with {HIDDEN!r} or {EXTERNAL!r}, which are reserved")
    return path


def _check_base(name: str, context: Context) -> None:
    if name not in context.base_models:
        raise ConfigError(f"base_model is {name!r}; this server has {context.base_models[0]!r}")


def _check_optimizer(config: Mapping[str, Any] | None) -> None:
    kind = (config or {}).get("type", "adamw")
    if kind != "adamw":
        raise ConfigError(f"the optimizer is {kind!r}; this server has 'adamw'")


def _parity(metadata: Mapping[str, Any] | None, context: Context) -> Parity:
    asked = (metadata or {}).get(OBSERVE, context.parity)
    if asked not in ("require", "observe"):
        raise ConfigError(f"user_metadata[{OBSERVE!r}] is {asked!r}; it must be 'require' or 'observe'")
    return asked


def texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata as texts, the form in which they are listed."""
    return None if metadata is None else {name: str(value) for name, value in metadata.items()}
