"""Inputs of a step that vLLM does not carry: adapters, positions and images of its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rlloop.models.vision import PlacedFeatures
from rlloop.numerics.layout import LogitsProcessing
from rlloop.numerics.transfer import on_device
from rlloop.rollout.engine.adapters import EngineAdapters
from rlloop.rollout.engine.feature_cache import FeatureCache
from rlloop.rollout.engine.request import rope_positions
from rlloop.rollout.vllm.requests import Request

if TYPE_CHECKING:
    from rlloop.models import Model


class StepInputs:
    """An engine's requests, as the model inside vLLM in the same process asks about them: by vLLM's ids of the S
    requests of a step. Requests that have ended meanwhile count as texts without an adapter."""

    def __init__(self, model: Model, requests: Mapping[str, Request], adapters: EngineAdapters) -> None:
        self._requests, self._adapters = requests, adapters
        self.model = model

    @property
    def model(self) -> Model:
        return self._model

    @model.setter
    def model(self, view: Model) -> None:
        self._model, self._features = view, FeatureCache()

    def forget(self) -> None:
        """Drop the images' features; the weights have changed."""
        self._features.forget()

    def plain(self, ids: Sequence[str]) -> bool:
        """True if vLLM carries all that there is; on a GPU such steps may be replayed from CUDA graphs."""
        requests = (self._requests.get(id) for id in ids)
        return all(request is None or request.plain for request in requests)

    def slots(self, ids: Sequence[str]) -> np.ndarray | None:
        """[S] int64 the adapters' slots; None where no request names one."""
        named = [None if (request := self._requests.get(id)) is None else request.adapter for id in ids]
        return self._adapters.slots_of(named) if any(each is not None for each in named) else None

    def placed(
        self, ids: Sequence[str], begin: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, PlacedFeatures | None] | None:
        """Positions [T] or [axes, T] and images of a step that computes `counts` [S] tokens from each request's
        `begin` [S] on; None where all have the positions of texts."""
        inputs = [None if (request := self._requests.get(id)) is None else request.model_input for id in ids]
        own = [each for each in inputs if each is not None and each.positions is not None]
        if not own:
            return None
        start = np.cumsum(counts) - counts
        index = np.arange(counts.sum()) + np.repeat(begin - start, counts)
        shift = np.array([0 if each is None else each.shift for each in inputs])
        inside = {
            at: each
            for at, each in enumerate(inputs)
            if each is not None and each.positions is not None and begin[at] < len(each)
        }
        images = self._features.place(
            self._model,
            ((each, int(begin[at]), int(begin[at] + counts[at]), int(start[at])) for at, each in inside.items()),
        )
        return rope_positions(index, begin, counts, shift, inside), images

    def score(self, ids: Sequence[str], begin: np.ndarray, counts: np.ndarray, hidden: Tensor) -> None:
        """Keep the logprobs that the step's hidden states [T, D] give to prompts that are to be scored."""
        end = np.cumsum(counts)
        for at, id in enumerate(ids):
            request = self._requests.get(id)
            if request is None or request.scored is None:
                continue
            first, start = int(begin[at]), int(end[at] - counts[at])
            last = min(first + int(counts[at]), len(request.scored))
            if first < last:
                targets = on_device(np.array(request.prompt_ids[first + 1 : last + 1]), hidden.device)
                rows = hidden[start : start + last - first]
                logprobs, _ = self._model.output.token_logprob(rows, targets, LogitsProcessing())
                request.scored[first:last] = logprobs.cpu().numpy()
