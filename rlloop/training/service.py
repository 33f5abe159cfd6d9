"""`TrainingService`: one base model in memory, many models that train over it, and their samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from blake3 import blake3

from rlloop.errors import ConfigError, RlloopError
from rlloop.training.calls import LossCall, Objective
from rlloop.training.checkpoints import Overwrite, check_holds, check_same
from rlloop.training.custom_loss import CustomLoss
from rlloop.training.lanes import Action, ModelLane
from rlloop.training.sampling import Sampler
from rlloop.training.sampling_service import SamplingService
from rlloop.training.trained_model import TrainedModel, adam_checked, check_lora, lora_targets
from rlloop.training.types import (
    AdamParams,
    CustomLossGraph,
    CustomLossInput,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsResponse,
    LoraConfig,
    OptimStepResponse,
    Parity,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    SupportedModel,
)


class TrainingService(SamplingService):
    """One base model in memory, and any number of models that train over it: adapters, or whole copies.

    Every method can be called from any thread; those that return a future compute in one worker thread. A model's calls
    run in the order of `seq_id`, from 1 on: a call that arrives early waits for those before it. Without `seq_id`,
    calls are numbered by arrival (each model: always with, or always without). Each number is used once, also by a call
    that fails. Owners of models take turns by the time they use, one micro-batch at a time.

    A future fails with `ConfigError` (an invalid call, found before anything is computed, so gradient and weights do
    not change), `ParityError` (below) or `ModelError`. Checks that need no turn fail it at once.

    **Determinism.** Weights, gradients and results are functions of the base, these settings, and each model's own
    calls in order: not of timing, of the division of data into calls, or of other models. Missing seeds are derived
    from names (`create_model`, `sample`). Calls repeated after a restart, under the same names, give the same bytes.

    **Streaming.** A micro-batch consists of consecutive datums, across calls, of at most `leaf_tokens` tokens (a longer
    datum goes alone); a datum that no longer fits, or `optim_step`, ends it. Results of `forward_backward` are
    available as soon as its forward is done.

    **Parity.** Tokens whose provenance names a sampled sequence are compared bitwise with the sampled logprobs, on the
    weights that sampled them. A difference fails the call, unless the model is created with `parity="observe"`; each
    result's metrics have the counts.
    """

    # ------------------------------------------------------------------------------------------------ models

    def create_model(
        self,
        *,
        lora: LoraConfig | None,
        model_id: str | None = None,
        parity: Parity = "require",
        user_metadata: Mapping[str, str] | None = None,
        owner: str | None = None,
    ) -> Future[GetInfoResponse]:
        """Create a model that trains: an adapter over the base, or (`lora=None`, or rank 0) a copy of all its weights.

        `model_id`: letters, digits, `.`, `_`, `:` and `-`; None: `model-1`, `model-2`, ... An adapter without a seed
        has one derived from the id. `owner`: models of one owner share turns; None: this model is its own owner. Calls
        may follow at once.
        """
        if lora is not None and lora.rank == 0:
            lora = None
        if lora is not None:
            base = self._models.base
            check_lora(lora, base.adapters.max_rank)
            base.check_adapts()
            lora_targets(base.adapter_targets(), lora)
        return self._models.create(lora, model_id, parity, user_metadata, owner, lambda model: None)

    def create_model_from(
        self,
        path: str,
        *,
        optimizer: bool,
        model_id: str | None = None,
        parity: Parity = "require",
        user_metadata: Mapping[str, str] | None = None,
        owner: str | None = None,
    ) -> Future[GetInfoResponse]:
        """A new model with the weights of a checkpoint, and (`optimizer`) the state of its optimizer."""
        checkpoint, folder = self._store.get(path)
        check_holds(checkpoint, optimizer)

        def load(model: TrainedModel) -> None:
            model.trainer.restore(folder, optimizer=optimizer)

        return self._models.create(checkpoint.lora, model_id, parity, user_metadata, owner, load)

    def weights_digest(self, model_id: str, *, adapters_only: bool = False) -> Future[bytes]:
        """blake3 of the master weights' bytes, by name, after all earlier calls: equal for equal weights.

        `adapters_only`: b"" for a whole model, whose digest would take as long as an update.
        """
        lane = self._models.get(model_id)

        def digest() -> bytes:
            if adapters_only and _made(lane).info.lora is None:
                return b""
            hasher = blake3()
            for name, tensor in sorted(_made(lane).trainer.masters.items()):
                hasher.update(name.encode() + b"\0")
                hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            return hasher.digest()

        return self._models.place(lane, Action(digest))

    def drop_model(self, model_id: str) -> Future[None]:
        """Drop a model after its pending calls; samplers and checkpoints stay."""
        return self._models.drop(model_id)

    def info(self, model_id: str) -> GetInfoResponse:
        """Raises `ConfigError` for an unknown model."""
        lane = self._models.get(model_id)
        if lane.model is None:
            raise ConfigError(f"model {model_id} is not made yet; wait for the future of create_model")
        return lane.model.info

    def capabilities(self) -> GetServerCapabilitiesResponse:
        return GetServerCapabilitiesResponse([SupportedModel(self.base_model, self._models.base.max_positions)])

    # ------------------------------------------------------------------------------------------------ training

    def forward(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        seq_id: int | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """The results of `forward_backward`, bit for bit, without a gradient."""
        return self._loss_call(model_id, data, loss_fn, loss_fn_config, seq_id, trains=False)

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        seq_id: int | None = None,
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of a loss, summed over tokens and datums, to the model's.

        `loss_fn`: of `rlloop.training.losses.LOSSES`, or `custom` with `loss_fn_config={"loss_id": ...}`.
        """
        return self._loss_call(model_id, data, loss_fn, loss_fn_config, seq_id, trains=True)

    def optim_step(self, model_id: str, params: AdamParams, *, seq_id: int | None = None) -> Future[OptimStepResponse]:
        """Apply the gradient. If it is not finite, the call fails, the gradient is dropped, and weights do not
        change."""
        lane = self._models.get(model_id)

        def make() -> Action:
            checked = adam_checked(params)
            return Action(lambda: _made(lane).optim_step(checked), closes=True)

        return self._checked(lane, make, seq_id)

    def create_custom_loss(self, name: str, inputs: Sequence[CustomLossInput], graph: CustomLossGraph) -> str:
        """Check a traced loss; returns its id, a function of its content, for `forward_backward`.

        Raises `ConfigError` that names the first operation that is not allowed.
        """
        loss = CustomLoss.checked(name, inputs, graph)
        self._models.losses[loss.id] = loss
        return loss.id

    # ------------------------------------------------------------------------------------------------ weights

    def save_weights(
        self,
        model_id: str,
        name: str,
        *,
        overwrite: Overwrite = False,
        ttl_seconds: float | None = None,
        user_metadata: Mapping[str, str] | None = None,
        seq_id: int | None = None,
    ) -> Future[SaveWeightsResponse]:
        """Save weights and the optimizer's state as a checkpoint: a PEFT folder, or of full training a Hugging Face
        folder, with optimizer.safetensors beside. A gradient that was not applied is not part of it."""
        lane = self._models.get(model_id)

        def make() -> Action:
            path = self._new_path(model_id, "training", name)

            def save() -> SaveWeightsResponse:
                model = _made(lane)
                self._write(path, model.info.lora, model.trainer.save, overwrite, ttl_seconds, user_metadata)
                return SaveWeightsResponse(path)

            return Action(save)

        return self._checked(lane, make, seq_id)

    def load_weights(
        self, model_id: str, path: str, *, optimizer: bool, seq_id: int | None = None
    ) -> Future[LoadWeightsResponse]:
        """Replace a model's weights, and its optimizer's state by the checkpoint's (`optimizer`) or by a new one; a
        gradient that was not applied is dropped. `path`: of a checkpoint of this service, of an equal shape."""
        lane = self._models.get(model_id)

        def make() -> Action:
            def load() -> LoadWeightsResponse:
                checkpoint, folder = self._store.get(path)
                model = _made(lane)
                check_holds(checkpoint, optimizer)
                check_same(checkpoint, model.info)
                model.forget()
                model.loads += 1
                model.trainer.restore(folder, optimizer=optimizer)
                model.changed()
                return LoadWeightsResponse(path, model_id)

            return Action(load)

        return self._checked(lane, make, seq_id)

    def save_weights_for_sampler(
        self,
        model_id: str,
        name: str | None = None,
        *,
        sampler: str | None = None,
        freeze: bool = True,
        overwrite: Overwrite = False,
        ttl_seconds: float | None = None,
        user_metadata: Mapping[str, str] | None = None,
        seq_id: int | None = None,
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Freeze the current weights for sampling; with a `name`, also as a checkpoint on disk.

        `sampler`: the id to sample by; None: the checkpoint's path, or made from model and version. That of a path is
        in memory until `drop_sampler`, or until the checkpoint is deleted or expires. `freeze=False`: only on disk,
        from where `create_sampler` loads it.
        """
        lane = self._models.get(model_id)

        def make() -> Action:
            if name is None and not freeze:
                raise ConfigError("save_weights_for_sampler with freeze=False needs a name; it saves a checkpoint only")
            path = None if name is None else self._new_path(model_id, "sampler", name)

            def save() -> SaveWeightsForSamplerResponse:
                model = _made(lane)
                if path is not None:
                    write = model.trainer.save_weights
                    self._write(path, model.info.lora, write, overwrite, ttl_seconds, user_metadata)
                version = f"{model.counts.updates}.{model.loads}" if model.loads else f"{model.counts.updates}"
                id = sampler or path or f"{model_id}/version-{version}"
                if freeze:
                    self._samplers.add(Sampler(id, model.freeze(), model_id, keeps=path is not None))
                return SaveWeightsForSamplerResponse(id, path)

            return Action(save)

        return self._checked(lane, make, seq_id)

    # ------------------------------------------------------------------------------------------------ the service

    def status(self) -> dict[str, Any]:
        """Counts for dashboards, as JSON values: by model its verbs waiting, datums, updates, parity counts and
        samplers; of the engine its requests; see `docs/training.md`."""
        lanes = (self._samplers.over_base, self._samplers.whole)
        engines = [lane.sampling.engine for lane in lanes if lane.sampling is not None]
        return {
            "base_model": self.base_model,
            "models": self._models.status(self._samplers.of),
            "samplers": len(self._samplers),
            "sampling": {
                "waiting": sum(lane.waiting for lane in lanes),
                "running": sum(engine.in_flight for engine in engines),
                "tokens": sum(engine.stats().made_tokens for engine in engines),
            },
            "sequences": len(self.sequences),
        }

    # ------------------------------------------------------------------------------------------------ calls

    def _checked(self, lane: ModelLane, make: Callable[[], Action | LossCall], seq_id: int | None) -> Future[Any]:
        """Queue a call; one that failed its checks is queued as failed, to use up its number."""
        try:
            call = make()
        except RlloopError as error:
            call = Action.failed(error)
        return self._models.place(lane, call, seq_id)

    def _loss_call(
        self, model_id: str, data: Sequence[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None,
        seq_id: int | None, *, trains: bool,
    ) -> Future[ForwardBackwardOutput]:  # fmt: skip
        def make() -> LossCall:
            objective, base = Objective.of(loss_fn, loss_fn_config, self._models.losses), self._models.base
            return LossCall(data, objective, trains=trains, vocabulary=base.vocab_size, config=base.config)

        return self._checked(self._models.get(model_id), make, seq_id)


def _made(lane: ModelLane) -> TrainedModel:
    assert lane.model is not None, "a lane without a model fails its calls"
    return lane.model
