"""The samplers of a service by id, their frozen weights, and the two engines that serve them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlloop.errors import ConfigError
from rlloop.models import Model
from rlloop.models.adapter_files import read_adapter
from rlloop.models.adapter_weights import Adapter
from rlloop.models.parameters import ParameterStore
from rlloop.models.vision import check_images
from rlloop.rollout import Engine
from rlloop.rollout.engine.validation import Limits, check_request
from rlloop.rollout.fleet.text import Tokenizer, Writer
from rlloop.training.lanes import Action, SamplingLane
from rlloop.training.provenance import FrozenWeights, SampledSequences
from rlloop.training.sampling import (
    BASE,
    MOST_TOP,
    PromptAsk,
    SampleCall,
    Sampler,
    Sampling,
    engine_params,
    first_seed,
)
from rlloop.training.types import Checkpoint, SamplingParams, array_of
from rlloop.types import ModelInput, as_model_input
from rlloop.types import SamplingParams as EngineParams


class Samplers:
    """Registry of samplers. Ids may be looked up and dropped from any thread; weights change in the worker's thread."""

    def __init__(
        self, base: Model, tokenizer: Tokenizer | None, sequences: SampledSequences,
        load_whole: Callable[[Path], Model], *, engine: Mapping[str, Any], max_running: int, keep: int,
    ) -> None:  # fmt: skip
        """`engine`: settings of `rlloop.Engine`; `keep`: unnamed samplers of a model."""
        self._base, self._tokenizer, self._sequences, self._load_whole = base, tokenizer, sequences, load_whole
        self._settings: dict[str, Any] = {"max_running": max_running, **engine}
        self._running, self._keep = max_running, keep
        room = self._settings.get("max_cache_tokens") or base.max_positions
        self._limits = Limits(base.vocab_size, base.max_positions, room, base.eos_token_ids)
        self._lock, self._by_id = threading.Lock(), dict[str, Sampler]()
        self._of_base = Sampler("base", BASE, keeps=True)
        self._versions, self._views = 0, dict[FrozenWeights, Model]()
        self.over_base, self.whole = SamplingLane(self._base_engine), SamplingLane(self._whole_engine)

    def __len__(self) -> int:
        return len(self._by_id)

    def of(self, model_id: str) -> int:
        """The number of a model's samplers."""
        with self._lock:
            return sum(each.owner == model_id for each in self._by_id.values())

    def lane(self, weights: FrozenWeights) -> SamplingLane:
        return self.over_base if weights.state is None else self.whole

    def call(
        self, prompt: ModelInput | Sequence[int], count: int, params: SamplingParams, sampler: str | None,
        request: str | None, sequence_ids: Sequence[str] | None, top: int, ask: PromptAsk,
    ) -> SampleCall:  # fmt: skip
        """A checked request. Raises `ConfigError`."""
        model_input = as_model_input(prompt)
        check_images(model_input, self._base.config)
        if not 0 <= top <= MOST_TOP:
            raise ConfigError(f"topk_sample_logprobs is {top}; it may be 0 to {MOST_TOP}")
        if ask.targets is not None:
            ask = replace(ask, targets=array_of("target_prompt_logprobs", ask.targets))
        ask.check(len(model_input), self._base.vocab_size)
        with self._lock:
            by = self._of_base if sampler is None else self._get(sampler)
            by.requests += 1
            name = request or f"{by.id}#{by.requests}"
        each, stops = engine_params(params, count, name, self._base.max_positions - len(model_input), self._tokenizer)
        check_request(model_input, each[0] if each else EngineParams(max_tokens=1), self._limits)
        ids = [f"{name}/{index}" for index in range(count)] if sequence_ids is None else list(sequence_ids)
        if len(ids) != count:
            raise ConfigError(f"sequence_ids has {len(ids)} ids for num_samples={count}; give one each")
        decode = None if self._tokenizer is None else self._tokenizer.decode
        writers = [Writer(decode, stops) if stops and decode is not None else None for _ in each]
        return SampleCall(by, model_input, each, ids, ask, top, first_seed(params, name), writers)

    # ------------------------------------------------------------------------------------------------ ids

    def load(self, id: str, checkpoint: Checkpoint, folder: Path) -> str:
        """Register a checkpoint's weights under an id. In the worker's thread."""
        if checkpoint.is_lora:
            weights = FrozenWeights(adapter=read_adapter(self._base, folder))
        else:
            weights = FrozenWeights(state=ParameterStore(self._load_whole(folder)).snapshot())
        return self.add(Sampler(id, weights, keeps=True))

    def add(self, sampler: Sampler) -> str:
        """Register a sampler, replacing one with its id; the oldest unnamed one of its model may be dropped. In
        the worker's thread, unless it is of the base."""
        weights = sampler.weights
        if weights.adapter is not None and weights.name is None:
            self._versions += 1
            weights.name = f"{sampler.id}@{self._versions}"
            self._base.adapters.add(weights.name, weights.adapter, self._base.adapter_targets())
        with self._lock:
            gone = [self._by_id.pop(sampler.id, None)]
            if gone[0] is not None:
                sampler.requests = gone[0].requests  # no two requests have one name, nor two sequences one id
            self._by_id[sampler.id] = sampler
            weights.gone = False  # a dropped sampler may have had the same ones
            if sampler.owner is not None:
                unnamed = [each for each in self._by_id.values() if each.owner == sampler.owner and not each.keeps]
                gone += [self._by_id.pop(old.id) for old in unnamed[: -self._keep]]
        for each in gone:
            if each is not None:
                self._release(each.weights)
        return sampler.id

    def drop(self, id: str) -> tuple[SamplingLane, Action]:
        """Drop a sampler; returns the rest of the work, for the worker. Raises `ConfigError` for an unknown id."""
        with self._lock:
            weights = self._get(id).weights
            del self._by_id[id]
        return self.lane(weights), Action(lambda: self._release(weights))

    def weights_of(self, id: str | None) -> FrozenWeights:
        """Raises `ConfigError` for an unknown id."""
        with self._lock:
            return BASE if id is None else self._get(id).weights

    def _get(self, id: str) -> Sampler:
        if id not in self._by_id:
            raise ConfigError(
                f"there is no sampler {id!r:.140}; of those without a name a model's newest {self._keep} are kept. "
                "Save the weights for a sampler again, or under a name"
            )
        return self._by_id[id]

    def _release(self, weights: FrozenWeights) -> None:
        """Drop weights that no sampler holds any more, and their sequences."""
        with self._lock:
            used = weights is BASE or any(each.weights is weights for each in self._by_id.values())
        if not used:
            self._sequences.forget(weights)
            self._views.pop(weights, None)
            if weights.name is not None:
                self._base.adapters.drop(weights.name)
                weights.name = None

    # ------------------------------------------------------------------------------------------------ weights

    def view(self, weights: FrozenWeights) -> Model:
        """A model that computes with these weights, until the next call. In the worker's thread."""
        if weights is BASE:
            return self._base
        if weights.state is not None:
            return self.whole.ready().lend(weights)
        assert weights.adapter is not None
        if weights not in self._views:
            self._views = {weights: self._base.with_adapter(Adapter(weights.adapter, self._base.adapter_targets()))}
        return self._views[weights]

    def _base_engine(self) -> Sampling:
        registry = self._base.adapters
        slots: dict[str, Any] = {"adapter_slots": registry.slots, "adapter_rank": registry.max_rank}
        return Sampling(Engine(self._base, **self._settings, **slots), self._sequences, max_running=self._running)

    def _whole_engine(self) -> Sampling:
        engine = Engine(deepcopy(self._base).requires_grad_(False), **self._settings)
        return Sampling(engine, self._sequences, max_running=self._running, whole=True)
