"""`TrainingService`: one base model in memory, many models that train over it, and their samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

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
        raise NotImplementedError

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
        raise NotImplementedError

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
        raise NotImplementedError

    def drop_model(self, model_id: str) -> Future[None]:
        """Forget a model after the verbs that it has; samplers and checkpoints stay."""
        raise NotImplementedError

    def info(self, model_id: str) -> GetInfoResponse:
        """Raises `ConfigError` for an unknown model."""
        raise NotImplementedError

    def capabilities(self) -> GetServerCapabilitiesResponse: ...

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
        raise NotImplementedError

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
        raise NotImplementedError

    def optim_step(self, model_id: str, params: AdamParams, *, seq_id: int | None = None) -> Future[OptimStepResponse]:
        """Apply the gradient. One that is not finite fails, is dropped, and leaves weights and optimizer as they are."""
        raise NotImplementedError

    def create_custom_loss(self, name: str, inputs: Sequence[CustomLossInput], graph: CustomLossGraph) -> str:
        """Check a traced loss; returns its id, a function of its content, for `forward_backward`.

        Raises `ConfigError` that names the first operation that is not allowed.
        """
        raise NotImplementedError

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
        raise NotImplementedError

    def load_weights(
        self, model_id: str, path: str, *, optimizer: bool, seq_id: int | None = None
    ) -> Future[LoadWeightsResponse]:
        """Replace a model's weights, and its optimizer's state by the checkpoint's (`optimizer`) or by a new one; a
        gradient that was not applied is dropped. `path`: of a checkpoint of this service, of an equal shape."""
        raise NotImplementedError

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
        raise NotImplementedError

    def create_sampler(self, path: str | None = None, *, sampler: str | None = None) -> Future[str]:
        """An id to sample a checkpoint by, of either type; without a path, the base itself."""
        raise NotImplementedError

    def drop_sampler(self, sampler: str) -> None: ...

    def checkpoints(self, model_id: str | None = None) -> list[Checkpoint]:
        """In the order of their time."""
        raise NotImplementedError

    def checkpoint_folder(self, path: str) -> Path:
        """The files of a checkpoint. Raises `ConfigError` for a path of none."""
        raise NotImplementedError

    def delete_checkpoint(self, path: str) -> None: ...

    def set_checkpoint_ttl(self, path: str, ttl_seconds: float | None) -> None:
        """None: it stays."""

    def delete_expired(self) -> list[str]:
        """Delete checkpoints whose time has come; returns their paths."""
        raise NotImplementedError

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
        raise NotImplementedError

    def compute_logprobs(
        self, prompt: ModelInput | Sequence[int], *, sampler: str | None = None
    ) -> Future[list[float | None]]:
        """The logprob of each token of a prompt given those before it; None for the first."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ the service

    def status(self) -> dict[str, Any]:
        """Counts for dashboards, as JSON values: by model its verbs waiting, datums, updates, parity counts and
        samplers; of the engine its requests; see `docs/training.md`."""
        raise NotImplementedError

    def close(self) -> None:
        """End the worker; futures that wait fail."""
