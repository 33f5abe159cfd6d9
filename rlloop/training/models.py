"""The models of a service by id: their creation, and the lanes of their calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlloop.errors import ConfigError
from rlloop.models import Model, load_model
from rlloop.models.adapter_weights import Adapter, fresh_weights
from rlloop.rollout.fleet.text import tokenizer_of
from rlloop.training.checkpoints import checked_name
from rlloop.training.custom_loss import CustomLoss
from rlloop.training.lanes import Action, Lane, ModelLane, Worker
from rlloop.training.provenance import FrozenWeights, SampledSequences
from rlloop.training.sampling import derived_seed
from rlloop.training.trained_model import TrainedModel, lora_targets
from rlloop.training.types import GetInfoResponse, LoraConfig, ModelData, Parity


class Models:
    """The base, the models that train over it, and the worker that serves them."""

    def __init__(
        self, folder: Path, name: str | None, dtype: str, device: str, *, leaf_tokens: int, checkpoint_layers: int,
        sequences: SampledSequences,
    ) -> None:  # fmt: skip
        self.folder, self.name = folder, name or folder.resolve().name
        self._dtype, self._device, self._sequences = dtype, device, sequences
        self._leaf_tokens, self._checkpoint_layers = leaf_tokens, checkpoint_layers
        self.base = self.load_whole(folder).requires_grad_(False)
        self.tokenizer = tokenizer_of(folder)
        self.view: Callable[[FrozenWeights], Model] = lambda weights: self.base  # of a sampler's weights
        self.losses: dict[str, CustomLoss] = {}  # by id
        self._lanes: dict[str, ModelLane] = {}
        self._made = 0
        # Processor time: waits of the thread on a busy machine are not charged.
        clock = time.thread_time if self.base.context.device.type == "cpu" else time.perf_counter
        self.worker = Worker(f"rlloop-training-{self.name}", self._after, clock)

    def load_whole(self, folder: Path) -> Model:
        """A model loaded from a folder, with its own weights."""
        return load_model(folder, dtype=self._dtype, device=self._device)

    def get(self, model_id: str) -> ModelLane:
        """Raises `ConfigError` for an unknown model."""
        lane = self._lanes.get(model_id)
        if lane is None:
            known = ", ".join(list(self._lanes)[:5]) or "none"
            raise ConfigError(f"there is no model {model_id!r:.140}; there are: {known}")
        return lane

    def place(self, lane: Lane, call: Any, seq_id: int | None = None) -> Future[Any]:
        """Queue a call for the worker. Raises `ConfigError` once it is closed."""
        with self.worker.changed:
            self.worker.check()
            placed = lane.place(call, seq_id)
            self._wake(lane)
        return placed

    def create(
        self, lora: LoraConfig | None, model_id: str | None, parity: Parity, user_metadata: Mapping[str, str] | None,
        owner: str | None, load: Callable[[TrainedModel], None],
    ) -> Future[GetInfoResponse]:  # fmt: skip
        """Queue the creation of a model; `load` replaces its initial weights."""
        if parity not in ("require", "observe"):
            raise ConfigError(f"parity is {parity!r}; it must be require or observe")
        tokenizer = None if self.tokenizer is None else str(self.folder)
        data = ModelData(self.base.config.architecture, self.name, tokenizer)
        with self.worker.changed:
            self.worker.check()
            self._made += 1
            name = checked_name("model_id", model_id or f"model-{self._made}")
            if name in self._lanes:
                raise ConfigError(f"there is a model {name!r} already; give another model_id")
            if lora is not None and lora.seed is None:
                lora = replace(lora, seed=derived_seed(name))
            rank, noted = None if lora is None else lora.rank, dict(user_metadata or {})
            info = GetInfoResponse(name, data, lora is not None, rank, lora, parity, noted)
            lane = self._lanes[name] = ModelLane(name, owner)
            self.worker.lanes.append(lane)
            future = lane.first(Action(lambda: self._create(lane, info, load)))
            self.worker.changed.notify_all()
        return future

    def drop(self, model_id: str) -> Future[None]:
        """Queue the removal of a model, after its pending calls."""
        lane = self.get(model_id)

        def drop() -> None:
            if lane.model is not None:
                lane.model.forget()
            lane.model, lane.gone = None, ConfigError(f"model {model_id} was dropped")
            self._forget(lane)

        with self.worker.changed:
            self.worker.check()
            dropped = lane.first(Action(drop))
            self._wake(lane)
        return dropped

    def status(self, samplers: Callable[[str], int]) -> dict[str, Any]:
        """Counts of each model, as JSON values."""
        with self.worker.changed:
            lanes = list(self._lanes.values())
        statuses: dict[str, Any] = {}
        for lane in lanes:
            statuses[lane.model_id] = {"waiting": lane.waiting, "samplers": samplers(lane.model_id)}
            if (model := lane.model) is not None:
                info = {"is_lora": model.info.is_lora, "lora_rank": model.info.lora_rank, "parity": model.info.parity}
                statuses[lane.model_id] |= {**asdict(model.counts), **info}
        return statuses

    def _create(self, lane: ModelLane, info: GetInfoResponse, load: Callable[[TrainedModel], None]) -> GetInfoResponse:
        try:
            lane.model = self._trained(info)
            load(lane.model)
        except BaseException as error:
            lane.model, lane.gone = None, error
            self._forget(lane)
            raise
        return info

    def _trained(self, info: GetInfoResponse) -> TrainedModel:
        lora = info.lora
        if lora is None:
            model = self.load_whole(self.folder)
        else:
            targets = lora_targets(self.base.adapter_targets(), lora)
            assert lora.seed is not None
            fresh = fresh_weights(targets, lora.rank, lora.alpha, lora.seed)
            model = self.base.with_adapter(Adapter(fresh, targets, info.model_id))
        return TrainedModel(
            info, model, leaf_tokens=self._leaf_tokens, sequences=self._sequences, view=self.view,
            checkpoint_layers=self._checkpoint_layers,
        )  # fmt: skip

    def _forget(self, lane: ModelLane) -> None:
        with self.worker.changed:
            if self._lanes.get(lane.model_id) is lane:
                del self._lanes[lane.model_id]
            lane.end()

    def _wake(self, lane: Lane) -> None:
        """Have the worker serve a lane, also one that has ended since the caller found it: it fails the call."""
        if lane.ended and lane not in self.worker.lanes:
            self.worker.lanes.append(lane)
        self.worker.changed.notify_all()

    def _after(self, lane: Lane) -> None:
        """Free graphs of open micro-batches beyond the tokens of one micro-batch; the newest are kept."""
        with self.worker.changed:
            self.worker.lanes = [each for each in self.worker.lanes if each.busy or not each.ended]
            others = [each for each in self._lanes.values() if each is not lane]
        held = 0
        for each in [lane, *others[::-1]]:
            model = each.model if isinstance(each, ModelLane) else None
            if model is not None and model.held:
                held += model.held
                if held > self._leaf_tokens:
                    model.drop_graph()
