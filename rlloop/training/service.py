"""`TrainingService`: one base model in memory, many models that train over it, and their samplers."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from rlloop.errors import ConfigError, RlloopError
from rlloop.rollout.fleet.text import Tokenizer
from rlloop.training.calls import LossCall, Objective
from rlloop.training.checkpoints import CheckpointFolder, check_holds, check_same, checked_name
from rlloop.training.custom_loss import CustomLoss
from rlloop.training.lanes import Action, ModelLane
from rlloop.training.models import Models
from rlloop.training.provenance import SampledRecord, SampledSequences
from rlloop.training.samplers import Samplers
from rlloop.training.sampling import BASE, PromptAsk, Sampler
from rlloop.training.trained_model import TrainedModel, adam_checked, check_lora, lora_targets
from rlloop.training.types import (
    AdamParams,
    Checkpoint,
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
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    SupportedModel,
)
from rlloop.types import ModelInput


class TrainingService:
    """One base model in memory, and any number of models that train over it: adapters, or whole copies.

    Every method can be called from any thread; those that return a future compute in one worker thread. A model's verbs
    run in the order of `seq_id`, from 1 on: a call that comes early waits for those before it; without one, calls are
    numbered as they come (one model: always with, or always without). Each number counts once, also that of a call that
    fails. Models take turns, one micro-batch each.

    A future fails with `ConfigError` (a mistake in the call, found before anything is computed: gradient and weights
    are as if it had not been made), `ParityError` (below) or `ModelError`. Checks that need no turn fail it at once.

    **Determinism.** Weights, gradients and results are functions of the base, the settings here, and each model's own
    verbs in order: not of when they come, how data are cut into calls, or what other models do. Seeds that a caller
    leaves out come from names (`create_model`, `sample`). Calls repeated after a restart, under the same names, give
    the same bytes.

    **Streaming.** A micro-batch is a run of consecutive datums, whatever calls they came in, of at most `leaf_tokens`
    tokens (a longer datum goes alone); a datum that no longer fits, or `optim_step`, ends it. Results of
    `forward_backward` are there as soon as its forward is.

    **Parity.** Tokens whose provenance names a sampled sequence are compared, bit for bit, with the logprobs that were
    sampled, on the weights that sampled them. A difference fails the call, unless the model is created with
    `parity="observe"`; counts stand in each result's metrics.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        checkpoints: str | Path | None = None,
        model_name: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        leaf_tokens: int = 16384,
        max_lora_rank: int = 64,
        adapter_slots: int = 8,
        max_running: int = 256,
        keep_samplers: int = 8,
        keep_sequences: int = 100_000,
        checkpoint_layers: int = 0,
        engine: Mapping[str, Any] | None = None,
    ) -> None:
        """`folder`: the base model, a Hugging Face folder. `checkpoints`: where weights are saved; None: a temporary
        folder. `model_name`: the base's name in answers; None: the folder's name.

        `leaf_tokens`: of a micro-batch; the only setting here besides `dtype` and `device` that decides bits.
        `max_lora_rank`, `adapter_slots`: as for `rlloop.Engine`. `max_running`: completions of one step of the engine.
        `keep_samplers`: unnamed samplers of one model that stay, the newest; `keep_sequences`: sampled sequences that
        provenance may name. `checkpoint_layers`: every n-th layer is computed again in the backward pass.
        `engine`: further settings of `rlloop.Engine`, such as `max_cache_tokens`.
        """
        if leaf_tokens < 1 or keep_samplers < 1 or max_running < 1:
            raise ConfigError(
                f"leaf_tokens is {leaf_tokens}, keep_samplers {keep_samplers}, max_running {max_running}; each must be "
                "at least 1"
            )
        self.sequences = SampledSequences(keep_sequences)
        self._models = models = Models(
            Path(folder), model_name, dtype, device, leaf_tokens=leaf_tokens, checkpoint_layers=checkpoint_layers,
            sequences=self.sequences,
        )  # fmt: skip
        models.base.adapters.configure(adapter_slots, max_lora_rank)
        self._samplers = Samplers(
            models.base, models.tokenizer, self.sequences, models.load_whole, engine=engine or {},
            max_running=max_running, keep=keep_samplers,
        )  # fmt: skip
        models.view = self._samplers.view
        models.worker.lanes += [self._samplers.over_base, self._samplers.whole]
        self._temporary = None if checkpoints is not None else tempfile.TemporaryDirectory(prefix="rlloop-")
        self._store = CheckpointFolder(Path(self._temporary.name if self._temporary else str(checkpoints)))
        self._custom: dict[str, CustomLoss] = {}

    @property
    def base_model(self) -> str:
        """The base's name in answers."""
        return self._models.name

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Of the base's folder; None where it has none."""
        return self._models.tokenizer

    # ------------------------------------------------------------------------------------------------ models

    def create_model(
        self,
        *,
        lora: LoraConfig | None,
        model_id: str | None = None,
        parity: Parity = "require",
        user_metadata: Mapping[str, str] | None = None,
    ) -> Future[GetInfoResponse]:
        """A model that trains: an adapter over the base, or (`lora=None`, or of rank 0) a copy of all its weights.

        `model_id`: letters, digits, `.`, `_`, `:` and `-`; None: `model-1`, `model-2`, ... An adapter without a seed
        has one derived from the id. Verbs may follow at once.
        """
        if lora is not None and lora.rank == 0:
            lora = None
        if lora is not None:
            base = self._models.base
            check_lora(lora, base.adapters.max_rank)
            base.check_adapts()
            lora_targets(base.adapter_targets(), lora)
        return self._models.create(lora, model_id, parity, user_metadata, lambda model: None)

    def create_model_from(
        self,
        path: str,
        *,
        optimizer: bool,
        model_id: str | None = None,
        parity: Parity = "require",
        user_metadata: Mapping[str, str] | None = None,
    ) -> Future[GetInfoResponse]:
        """A new model with the weights of a checkpoint, and (`optimizer`) the state of its optimizer."""
        checkpoint, folder = self._store.get(path)
        check_holds(checkpoint, optimizer)

        def load(model: TrainedModel) -> None:
            model.trainer.restore(folder, optimizer=optimizer)

        return self._models.create(checkpoint.lora, model_id, parity, user_metadata, load)

    def weights_digest(self, model_id: str) -> Future[bytes]:
        """blake3 of the master weights' bytes after the verbs that came before, by name: equal for equal weights."""
        lane = self._models.get(model_id)

        def digest() -> bytes:
            hasher = blake3()
            for name, tensor in sorted(_made(lane).trainer.masters.items()):
                hasher.update(name.encode() + b"\0")
                hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            return hasher.digest()

        return self._models.place(lane, Action(digest))

    def drop_model(self, model_id: str) -> Future[None]:
        """Forget a model after the verbs that it has; samplers and checkpoints stay."""
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
        """Apply the gradient. One that is not finite fails, is dropped, and leaves the weights as they are."""
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
        self._custom[loss.id] = loss
        return loss.id

    # ------------------------------------------------------------------------------------------------ weights

    def save_weights(
        self,
        model_id: str,
        name: str,
        *,
        overwrite: bool = False,
        ttl_seconds: float | None = None,
        user_metadata: Mapping[str, str] | None = None,
        seq_id: int | None = None,
    ) -> Future[SaveWeightsResponse]:
        """Save weights and the optimizer's state as a checkpoint: a PEFT folder, or of full training a Hugging Face
        folder, with optimizer.safetensors beside. A gradient that was not applied is not part of it."""
        lane = self._models.get(model_id)

        def make() -> Action:
            path = self._store.path(model_id, "training", checked_name("name", name))

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
        overwrite: bool = False,
        ttl_seconds: float | None = None,
        user_metadata: Mapping[str, str] | None = None,
        seq_id: int | None = None,
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Freeze the weights of this moment for sampling; with a `name`, also as a checkpoint on disk.

        `sampler`: the id to sample by; None: made from model and version.
        """
        lane = self._models.get(model_id)

        def make() -> Action:
            path = None if name is None else self._store.path(model_id, "sampler", checked_name("name", name))

            def save() -> SaveWeightsForSamplerResponse:
                model = _made(lane)
                if path is not None:
                    write = model.trainer.save_weights
                    self._write(path, model.info.lora, write, overwrite, ttl_seconds, user_metadata)
                weights = model.freeze()
                id = sampler or path or f"{model_id}/version-{model.counts.updates}"
                self._samplers.add(Sampler(id, weights, model_id, keeps=path is not None))
                return SaveWeightsForSamplerResponse(id, path)

            return Action(save)

        return self._checked(lane, make, seq_id)

    def create_sampler(self, path: str | None = None, *, sampler: str | None = None) -> Future[str]:
        """An id to sample a checkpoint by, of either type; without a path, the base itself."""
        if path is None:
            done: Future[str] = Future()
            done.set_result(self._samplers.add(Sampler(sampler or "base", BASE, keeps=True)))
            return done
        checkpoint, folder = self._store.get(path)
        lane = self._samplers.over_base if checkpoint.is_lora else self._samplers.whole
        return self._models.place(lane, Action(lambda: self._samplers.load(sampler or path, checkpoint, folder)))

    def drop_sampler(self, sampler: str) -> None:
        """Forget a sampler; requests that have it are finished with it. Raises `ConfigError` for an unknown one."""
        self._models.place(*self._samplers.drop(sampler))

    def checkpoints(self, model_id: str | None = None) -> list[Checkpoint]:
        """In the order of their time."""
        return self._store.list(model_id)

    def checkpoint_folder(self, path: str) -> Path:
        """The files of a checkpoint. Raises `ConfigError` for a path of none."""
        return self._store.get(path)[1]

    def copy_checkpoint(
        self, path: str, model_id: str, *, ttl_seconds: float | None = None, overwrite: bool = False
    ) -> str:
        """Copy a checkpoint to a model's, under its own name; returns the copy's path. The model need not be there."""
        checkpoint, folder = self._store.get(path)
        name = checkpoint.checkpoint_id.partition("/")[2]
        copy = self._store.path(checked_name("model_id", model_id), checkpoint.checkpoint_type, name)
        self._write(copy, checkpoint.lora, partial(_copy, folder), overwrite, ttl_seconds, checkpoint.user_metadata)
        return copy

    def delete_checkpoint(self, path: str) -> None:
        """Raises `ConfigError` for a path of none."""
        self._store.delete(path)

    def set_checkpoint_ttl(self, path: str, ttl_seconds: float | None) -> None:
        """None: it stays."""
        self._store.set_ttl(path, ttl_seconds)

    def delete_expired(self) -> list[str]:
        """Delete checkpoints whose time has come; returns their paths."""
        now = time.time()
        expired = [each.tinker_path for each in self._store.list() if (each.expires_at or now) < now]
        for path in expired:
            self._store.delete(path)
        return expired

    # ------------------------------------------------------------------------------------------------ sampling

    def sample(
        self,
        prompt: ModelInput | Sequence[int],
        num_samples: int,
        params: SamplingParams,
        *,
        sampler: str | None = None,
        request: str | None = None,
        sequence_ids: Sequence[str] | None = None,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: np.ndarray | None = None,
        prompt_logprobs_last_n: int | None = None,
        prompt_alt_tokens_k: int = 0,
    ) -> Future[SampleResponse]:
        """Completions of a prompt by a sampler; None: the base. Samplers take turns; order decides no bits.

        `request`: a name, unique to the request, such as `SESSION/NUMBER`: seeds that `params` leaves out come from it,
        and so do sequence ids that `sequence_ids` does not give (`REQUEST/0`, `REQUEST/1`, ...). None: the sampler and
        its count of requests.
        """
        ask = PromptAsk(
            include_prompt_logprobs, topk_prompt_logprobs, prompt_logprobs_last_n, target_prompt_logprobs,
            prompt_alt_tokens_k,
        )  # fmt: skip
        return self._ask(prompt, num_samples, params, sampler, request, sequence_ids, topk_sample_logprobs, ask)

    def compute_logprobs(
        self, prompt: ModelInput | Sequence[int], *, sampler: str | None = None
    ) -> Future[list[float | None]]:
        """The logprob of each token of a prompt given those before it; None for the first."""
        answer: Future[list[float | None]] = Future()
        asked = self._ask(prompt, 0, SamplingParams(max_tokens=1), sampler, None, None, 0, PromptAsk(logprobs=True))

        def done(sampled: Future[SampleResponse]) -> None:
            if (error := sampled.exception()) is not None:
                answer.set_exception(error)
                return
            logprobs = sampled.result().prompt_logprobs
            assert logprobs is not None
            answer.set_result([None, *logprobs[1:].tolist()])

        asked.add_done_callback(done)
        return answer

    def restore_sequence(
        self,
        sequence_id: str,
        prompt: ModelInput | Sequence[int],
        tokens: Sequence[int],
        raw_logprobs: np.ndarray,
        *,
        sampler: str | None = None,
    ) -> None:
        """Know a sequence again that this sampler drew before a restart, so that provenance may name it. Raises
        `ConfigError` for an unknown sampler."""
        ids = prompt.token_ids if isinstance(prompt, ModelInput) else prompt
        arrays = np.asarray(ids, np.int32), np.asarray(tokens, np.int32)
        self.sequences.add(SampledRecord(sequence_id, self._samplers.weights_of(sampler), *arrays, raw_logprobs))

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

    def close(self) -> None:
        """End the worker; futures that wait fail."""
        self._models.worker.close(ConfigError("the training service was closed"))
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> TrainingService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ calls

    def _checked(self, lane: ModelLane, make: Callable[[], Action | LossCall], seq_id: int | None) -> Future[Any]:
        """Place a call; one that fails its checks has failed already, and takes its number."""
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
            objective, base = Objective.of(loss_fn, loss_fn_config, self._custom), self._models.base
            return LossCall(data, objective, trains=trains, vocabulary=base.vocab_size, positions=base.max_positions)

        return self._checked(self._models.get(model_id), make, seq_id)

    def _ask(self, *asked: Any) -> Future[SampleResponse]:
        try:
            call = self._samplers.call(*asked)
        except ConfigError as error:
            return Action.failed(error).future
        return self._models.place(self._samplers.lane(call.sampler.weights), call)

    def _write(
        self, path: str, lora: LoraConfig | None, write: Callable[[Path], None], overwrite: bool,
        ttl_seconds: float | None, user_metadata: Mapping[str, str] | None,
    ) -> None:  # fmt: skip
        if not overwrite:
            self._store.check_free(path)
        self._store.write(path, lora, write, ttl_seconds, user_metadata)


def _made(lane: ModelLane) -> TrainedModel:
    assert lane.model is not None, "a lane without a model fails its calls"
    return lane.model


def _copy(source: Path, to: Path) -> None:
    shutil.copytree(source, to, dirs_exist_ok=True)
