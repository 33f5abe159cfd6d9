"""A training service in another process, with the methods of a local one."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rlloop.rollout.fleet.text import Tokenizer
from rlloop.training.sampling_service import SamplingService
from rlloop.training.service import TrainingService


class RemoteTrainingService(TrainingService):
    """Forwards every method by `_call`. Errors that a local method raises at once are raised by the future instead."""

    _base_model: str
    _tokenizer: Tokenizer | None

    def __init__(self) -> None:  # pyright: ignore[reportMissingSuperCall]
        """Takes no settings: nothing is computed in this process."""

    @property
    def base_model(self) -> str:
        return self._base_model

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    @abstractmethod
    def close(self) -> None:
        """End the service; futures that wait fail."""

    @abstractmethod
    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Start a call, in the order of calls; a method's own error is the future's."""


def _forwarded(method: Callable[..., Any]) -> Callable[..., Any]:
    waits = not method.__annotations__["return"].startswith("Future[")

    @functools.wraps(method)
    def forwarded(self: RemoteTrainingService, *args: Any, **kwargs: Any) -> Any:
        future = self._call(method.__name__, args, kwargs)
        return future.result() if waits else future

    return forwarded


for _name, _method in {**vars(SamplingService), **vars(TrainingService)}.items():
    if callable(_method) and not _name.startswith("_") and _name not in vars(RemoteTrainingService):
        setattr(RemoteTrainingService, _name, _forwarded(_method))
