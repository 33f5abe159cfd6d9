"""One engine over several ranks, called on the first rank only, as by a server.

The first rank's engine sends each state-changing call to the others, which repeat it, so a step admits, ends and
computes the same requests on every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from rlloop.models import Model
from rlloop.models.adapter_weights import AdapterWeights
from rlloop.models.parameters import ParameterStore
from rlloop.parallel.interrupts import held_back
from rlloop.parallel.progress import doing, rest
from rlloop.rollout.engine.engine import Engine
from rlloop.types import Completion, ModelInput, PromptScores, SamplingParams

log = logging.getLogger(__name__)
Call = tuple[str, tuple[Any, ...]]  # a method, and its arguments
P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=Engine)


def _computes(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Report that this rank computes during the call. Between calls it is idle for as long as its caller likes."""

    @wraps(method)
    def call(engine: E, *args: P.args, **kwargs: P.kwargs) -> R:
        with doing("computes"):
            return method(engine, *args, **kwargs)

    return call


class LeadingEngine(Engine):
    """The first rank's engine, used like any engine; the other ranks run `follow` until `close`. All ranks have the
    same requests, so its layout has one rank along dp_shard.

    `weights`: a model on this rank that has the parameters whole; `set_version` hands its values to all ranks. None:
    the weights stay as they are.
    """

    def __init__(self, model: Model, *, weights: Model | None = None, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._weights = weights
        self._calls: list[Call] = []  # not sent yet
        self.has_stepped = False  # before, kernels may still have to be compiled

    def _send(self, method: str, *args: Any) -> None:
        """Send the queued calls, then one with collectives, which all ranks must make at the same time."""
        self.model.context.ranks("world").broadcast_object([*self._calls, (method, args)])
        self._calls = []

    def _accept(
        self, id: int, prompt: ModelInput, sampling: SamplingParams, top_logprobs: int, adapter: str | None
    ) -> None:
        self._calls.append(("_accept", (id, prompt, sampling, top_logprobs, adapter)))
        super()._accept(id, prompt, sampling, top_logprobs, adapter)

    def add_adapter(self, name: str, weights: AdapterWeights) -> int:
        self._calls.append(("add_adapter", (name, weights)))
        return super().add_adapter(name, weights)

    def drop_adapter(self, name: str) -> None:
        self._calls.append(("drop_adapter", (name,)))
        super().drop_adapter(name)

    @_computes
    def abort(self, request_id: int) -> Completion | None:
        self._send("abort", request_id)  # stages gather what a request's tokens chose
        return super().abort(request_id)

    @_computes
    def abort_all(self) -> list[tuple[int, Completion]]:
        self._send("abort_all")
        return super().abort_all()

    @_computes
    def step(self) -> list[tuple[int, Completion]]:
        self._send("step")
        ended = super().step()
        self.has_stepped = True
        return ended

    @_computes
    def prepare(self, requests: int = 256, tokens: int = 1024) -> int:
        with held_back():  # an interrupt in between would leave the others waiting
            self._send("prepare", requests, tokens)
            return super().prepare(requests, tokens)

    @_computes
    def score(self, prompt: ModelInput | list[int], top_logprobs: int = 0, adapter: str | None = None) -> PromptScores:
        self._send("score", prompt, top_logprobs, adapter)
        return super().score(prompt, top_logprobs, adapter)

    @_computes
    def set_version(self, version: int) -> None:
        if not self.has_work:  # else it is refused
            self._send("set_version", version, self._weights is not None)
            if self._weights is not None:
                hand_out(self.model, self._weights)
        super().set_version(version)

    @_computes
    def close(self) -> None:
        """End `follow` on the other ranks."""
        self._send("close")
        super().close()


def follow(engine: Engine) -> None:
    """Repeat the calls of the first rank's `LeadingEngine`, of the same settings, until it is closed."""
    world = engine.model.context.ranks("world")
    rest()
    while True:
        calls: list[Call] = world.broadcast_object(None)
        for method, args in calls:
            if method == "close":
                engine.close()
                return
            try:
                with doing("computes"):
                    if method == "set_version":
                        version, handed = args
                        if handed:
                            hand_out(engine.model, None)
                        engine.set_version(version)
                    else:
                        getattr(engine, method)(*args)
            except Exception as error:  # the leader's call raised it as well, to its caller
                log.info("a call of %s raised %r", method, error)


def hand_out(model: Model, whole: Model | None) -> None:
    """Copy whole parameters, which the first rank has, into each rank's `model`. Collective."""
    ranks, tensors = model.context.ranks("world"), {} if whole is None else ParameterStore(whole).tensors()
    store, device = ParameterStore(model), model.context.device
    kinds = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    for name, shape, dtype in ranks.broadcast_object(kinds):  # of all stages
        value = tensors[name].to(device).contiguous() if tensors else torch.empty(shape, dtype=dtype, device=device)
        store.copy_wholes([(name, ranks.broadcast(value, 0))])
