"""A training service in a Ray actor: on another machine of a cluster, or in a separate process."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rlloop.errors import ConfigError, RlloopError, RunError
from rlloop.launch.ray_session import import_ray, ray_session
from rlloop.rollout.fleet.text import Tokenizer
from rlloop.training.futures import promised
from rlloop.training.remote_service import RemoteTrainingService
from rlloop.training.service import TrainingService


class ServiceActor:
    """The service in its actor. Calls are made in the order of their numbers; asyncio alone would not keep it.

    Of what a constructor raises Ray keeps the text alone, so `facts` raises it.
    """

    def __init__(self, folder: str, threads: int, settings: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        self._refused: Exception | None = None
        try:
            self._service = TrainingService(folder, **settings)
        except Exception as error:
            self._refused = error
        self._next, self._turn = 0, asyncio.Condition()

    async def call(self, number: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a method, which other calls do not wait for."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._next == number)
            try:
                result = getattr(self._service, name)(*args, **kwargs)
            finally:
                self._next += 1
                self._turn.notify_all()
        return await asyncio.wrap_future(result) if isinstance(result, Future) else result

    async def facts(self) -> tuple[str, Tokenizer | None, int]:
        """The base's name, its tokenizer, and the actor's process. Raises why the service could not start."""
        if self._refused is not None:
            raise self._refused
        return self._service.base_model, self._service.tokenizer, os.getpid()


class RayTrainingService(RemoteTrainingService):
    """A `TrainingService` whose model and engine live in an actor of Ray; it has the same methods and the same bits.

        service = rlloop.ServiceClient(rlloop.RayTrainingService("my-model", address="10.0.0.1:6379", gpus=1))

    Folders, of the model and of checkpoints, are paths on the actor's machine: of several machines, on a disk that they
    share. What a method would raise at once, its future raises here.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        address: str | None = None,
        cpus: float = 1.0,
        gpus: float = 0.0,
        threads: int | None = None,
        died: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> None:
        """`address`: a cluster's HOST:PORT, or `auto`; None starts Ray on this machine, until `close`. `cpus`, `gpus`:
        what the actor takes; with a GPU, `device` is `cuda` unless it is given. `threads`: of torch; None: as here.
        `died`: called with the reason when the actor has died, and futures stay pending; None: futures fail with
        `RunError`. `settings`: of `TrainingService`.

        Raises what `TrainingService` would raise, `ConfigError` where no cluster answers or has room, and
        `RlloopError` where the actor dies before it has started.
        """
        super().__init__()
        self._ray = ray = import_ray(address)
        self._died, self._numbers, self._lock = died, itertools.count(), threading.Lock()
        self._reason: str | None = None  # of the actor's death
        if gpus and "device" not in settings:
            settings["device"] = "cuda"
        with ExitStack() as stack:
            stack.enter_context(ray_session(ray, address, cpus))
            self._check_room({"CPU": cpus, "GPU": gpus})
            variables = {"OMP_WAIT_POLICY": "PASSIVE"}
            self._actor = (
                ray.remote(ServiceActor)
                .options(num_cpus=cpus, num_gpus=gpus, max_concurrency=100_000, runtime_env={"env_vars": variables})
                .remote(str(Path(folder).absolute()), threads or torch.get_num_threads(), settings)
            )
            stack.callback(ray.kill, self._actor)
            try:
                self._base_model, self._tokenizer, self.pid = ray.get(self._actor.facts.remote())
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayActorError as error:
                raise RlloopError(f"the training service could not start: {_last_line(error)}") from None
            self._stack = stack.pop_all()

    def close(self) -> None:
        """End the actor, and Ray where it was started here; futures that wait fail."""
        self._died = None
        self._stack.close()

    def _check_room(self, needs: dict[str, float]) -> None:
        total = self._ray.cluster_resources()
        for name, count in needs.items():
            if total.get(name, 0.0) < count:
                raise ConfigError(
                    f"the service needs {count:g} {name}, and the cluster has {total.get(name, 0.0):g}; ask for less, "
                    "or attach to a larger cluster by its address"
                )

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Start a call; a method's own error is the future's."""
        with self._lock:  # numbers are sent in their order
            remote_future = self._actor.call.remote(next(self._numbers), name, args, kwargs).future()
        result = promised()

        def done(completed: Future[Any]) -> None:
            error = completed.exception()
            if error is None:
                result.set_result(completed.result())
            elif isinstance(error, self._ray.exceptions.RayTaskError):
                result.set_exception(getattr(error, "cause", None) or error)
            elif (reason := self._end(error)) is not None:
                result.set_exception(RunError(reason))

        remote_future.add_done_callback(done)
        return result

    def _end(self, error: BaseException) -> str | None:
        """The failure of a call of an actor that died; None: the call stays pending."""
        with self._lock:
            first, self._reason = self._reason is None, f"the actor of the training service died: {_last_line(error)}"
        if (died := self._died) is None:
            return self._reason
        if first:
            died(self._reason)
        return None


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1].strip()
