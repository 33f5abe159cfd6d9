"""Clients of a training service in this process, with the methods of Tinker's clients over HTTP.

    service = rlloop.ServiceClient("path/to/a/hugging-face-folder")     # tinker.ServiceClient(base_url=...) elsewhere
    training = service.create_lora_training_client(rank=16)
    sampling = training.save_weights_and_get_sampling_client()
    result = training.forward_backward(data, "importance_sampling").result()

Data may be `rlloop.training.types` or Tinker's own. Every method that computes returns a future, which can be awaited;
its name with `_async` is a coroutine that returns the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch

from rlloop.errors import ConfigError
from rlloop.rollout.fleet.text import Tokenizer
from rlloop.training.service import TrainingService
from rlloop.training.types import (
    LOSS,
    AdamParams,
    Checkpoint,
    Datum,
    ForwardBackwardOutput,
    GetInfoResponse,
    GetServerCapabilitiesResponse,
    LoadWeightsResponse,
    LoraConfig,
    OptimStepResponse,
    Parity,
    PromptProvenanceSpan,
    Provenance,
    SampledProvenanceSpan,
    SampleResponse,
    SamplingParams,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from rlloop.types import ModelInput

T = TypeVar("T")
CustomLossFn = Callable[[list[Datum], list[torch.Tensor]], tuple[torch.Tensor, Mapping[str, float]]]


class APIFuture(Generic[T]):
    """A pending result: `.result()`, or `await`."""

    def __init__(self, future: Future[Any], convert: Callable[[Any], T] = lambda value: value) -> None:
        self._future, self._convert = future, convert

    def result(self, timeout: float | None = None) -> T:
        """Wait for it. Raises what the call failed with; `TimeoutError` after so many seconds."""
        return self._convert(self._future.result(timeout))

    async def result_async(self, timeout: float | None = None) -> T:
        return self._convert(await asyncio.wait_for(asyncio.wrap_future(self._future), timeout))

    def done(self) -> bool:
        return self._future.done()

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


class _Ready:
    """A finished client, in places where Tinker's API returns the future of one."""

    def result(self, timeout: float | None = None) -> Self:
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        yield  # which makes this a generator


class ServiceClient:
    """A training service over a model's folder, in this process."""

    def __init__(self, folder: str | Path | TrainingService, *, parity: Parity = "require", **settings: Any) -> None:
        """`settings`: of `TrainingService`, unless one is given. `parity`: of models that are created here."""
        self.service = folder if isinstance(folder, TrainingService) else TrainingService(folder, **settings)
        self._parity: Parity = parity

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        return self.service.capabilities()

    def create_lora_training_client(
        self,
        base_model: str | None = None,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> TrainingClient:
        """A model that trains an adapter; of rank 0, all weights. `base_model`: checked, if given."""
        self._check_base(base_model)
        lora = LoraConfig(rank, seed, train_unembed=train_unembed, train_mlp=train_mlp, train_attn=train_attn)
        future = self.service.create_model(lora=lora, parity=self._parity, user_metadata=user_metadata)
        return TrainingClient(self.service, future.result().model_id)

    def create_training_client(self, lora_config: LoraConfig | None = None, **options: Any) -> TrainingClient:
        """A model that trains: `lora_config`, or all weights. `options`: of `TrainingService.create_model`."""
        future = self.service.create_model(lora=lora_config, **{"parity": self._parity, **options})
        return TrainingClient(self.service, future.result().model_id)

    def create_training_client_from_state(
        self, path: str, user_metadata: Mapping[str, str] | None = None
    ) -> TrainingClient:
        """A model with the weights of a checkpoint and a new optimizer."""
        return self._from(path, False, user_metadata)

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: Mapping[str, str] | None = None
    ) -> TrainingClient:
        """A model with the weights and the optimizer of a checkpoint."""
        return self._from(path, True, user_metadata)

    def create_sampling_client(self, model_path: str | None = None, base_model: str | None = None) -> SamplingClient:
        """Samples a checkpoint; without a path, the base."""
        self._check_base(base_model)
        return SamplingClient(self.service, self.service.create_sampler(model_path).result())

    def list_checkpoints(self, model_id: str | None = None) -> list[Checkpoint]:
        return self.service.checkpoints(model_id)

    def delete_checkpoint(self, path: str) -> None:
        self.service.delete_checkpoint(path)

    def close(self) -> None:
        self.service.close()

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _from(self, path: str, optimizer: bool, user_metadata: Mapping[str, str] | None) -> TrainingClient:
        options = {"parity": self._parity, "user_metadata": user_metadata}
        future = self.service.create_model_from(path, optimizer=optimizer, **options)
        return TrainingClient(self.service, future.result().model_id)

    def _check_base(self, name: str | None) -> None:
        if name is not None and name != self.service.base_model:
            raise ConfigError(f"base_model is {name!r}; the service has only {self.service.base_model!r}")


class TrainingClient(_Ready):
    """One model that trains. Calls may be submitted before earlier ones are done; they run in order."""

    def __init__(self, service: TrainingService, model_id: str) -> None:
        self.service, self.model_id = service, model_id

    def get_info(self) -> GetInfoResponse:
        return self.service.info(self.model_id)

    def get_tokenizer(self) -> Tokenizer:
        """Raises `ConfigError` where the base's folder has none."""
        return _tokenizer(self.service)

    def forward(
        self,
        data: Sequence[Any],
        loss_fn: str = "cross_entropy",
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        return APIFuture(self.service.forward(self.model_id, _data(data), loss_fn, loss_fn_config))

    def forward_backward(
        self, data: Sequence[Any], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return APIFuture(self.service.forward_backward(self.model_id, _data(data), loss_fn, loss_fn_config))

    def forward_backward_custom(self, data: Sequence[Any], loss_fn: CustomLossFn) -> APIFuture[ForwardBackwardOutput]:
        """Add the gradient of any function of all data's logprobs, `loss_fn(data, logprobs) -> (loss, metrics)`, at the
        cost of a second forward. Blocks until the first one is done."""
        datums = _data(data)
        zeros = [
            Datum(each.model_input, {**_targets(each), "weights": torch.zeros(_targets(each)["target_tokens"].shape)})
            for each in datums
        ]
        outputs = self.service.forward(self.model_id, zeros).result().loss_fn_outputs
        logprobs = [torch.from_numpy(each["logprobs"]).clone().requires_grad_() for each in outputs]
        loss, metrics = loss_fn(datums, logprobs)
        gradients = torch.autograd.grad(loss, logprobs, allow_unused=True, materialize_grads=True)
        linear = [
            Datum(each.model_input, {**_targets(each), "weights": -gradient}, each.provenance)
            for each, gradient in zip(datums, gradients, strict=True)
        ]

        def convert(output: ForwardBackwardOutput) -> ForwardBackwardOutput:
            output_metrics = {**output.metrics, "surrogate_loss:sum": output.metrics[LOSS], LOSS: float(loss.detach())}
            return ForwardBackwardOutput(output.loss_fn_outputs, {**output_metrics, **metrics})

        return APIFuture(self.service.forward_backward(self.model_id, linear, "cross_entropy"), convert)

    def optim_step(self, adam_params: Any = None) -> APIFuture[OptimStepResponse]:
        """`adam_params`: `AdamParams`, the defaults without them."""
        return APIFuture(self.service.optim_step(self.model_id, _as(AdamParams, adam_params or AdamParams())))

    def save_state(
        self,
        name: str,
        ttl_seconds: float | None = None,
        overwrite: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Weights and optimizer as a checkpoint."""
        options = {"ttl_seconds": ttl_seconds, "overwrite": overwrite, "user_metadata": user_metadata}
        return APIFuture(self.service.save_weights(self.model_id, name, **options))

    def load_state(self, path: str) -> APIFuture[LoadWeightsResponse]:
        return APIFuture(self.service.load_weights(self.model_id, path, optimizer=False))

    def load_state_with_optimizer(self, path: str) -> APIFuture[LoadWeightsResponse]:
        return APIFuture(self.service.load_weights(self.model_id, path, optimizer=True))

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: float | None = None, user_metadata: Mapping[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        options = {"ttl_seconds": ttl_seconds, "user_metadata": user_metadata}
        return APIFuture(self.service.save_weights_for_sampler(self.model_id, name, **options))

    def create_sampling_client(self, model_path: str) -> SamplingClient:
        return SamplingClient(self.service, self.service.create_sampler(model_path).result())

    def save_weights_and_get_sampling_client(self, name: str | None = None) -> SamplingClient:
        """A sampler of the current weights, which later training does not change. Of these, a model's newest are kept
        (`keep_samplers` of the service)."""
        return SamplingClient(self.service, self.service.save_weights_for_sampler(self.model_id).result().sampler)

    async def save_weights_and_get_sampling_client_async(self, name: str | None = None) -> SamplingClient:
        saved = await asyncio.wrap_future(self.service.save_weights_for_sampler(self.model_id))
        return SamplingClient(self.service, saved.sampler)

    async def forward_async(self, *args: Any, **options: Any) -> APIFuture[ForwardBackwardOutput]:
        return self.forward(*args, **options)

    async def forward_backward_async(self, *args: Any, **options: Any) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward(*args, **options)

    async def forward_backward_custom_async(self, *args: Any, **options: Any) -> APIFuture[ForwardBackwardOutput]:
        return await asyncio.to_thread(self.forward_backward_custom, *args, **options)

    async def optim_step_async(self, *args: Any, **options: Any) -> APIFuture[OptimStepResponse]:
        return self.optim_step(*args, **options)

    async def save_state_async(self, *args: Any, **options: Any) -> APIFuture[SaveWeightsResponse]:
        return self.save_state(*args, **options)

    async def load_state_async(self, path: str) -> APIFuture[LoadWeightsResponse]:
        return self.load_state(path)


class SamplingClient(_Ready):
    """Samples with the weights of one point in time."""

    def __init__(self, service: TrainingService, sampler: str) -> None:
        self.service, self.sampler = service, sampler

    def get_tokenizer(self) -> Tokenizer:
        return _tokenizer(self.service)

    def sample(
        self,
        prompt: Any,
        num_samples: int,
        sampling_params: Any,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        **asked: Any,
    ) -> APIFuture[SampleResponse]:
        """`asked`: what else `TrainingService.sample` takes."""
        future = self.service.sample(
            _input(prompt), num_samples, _as(SamplingParams, sampling_params), sampler=self.sampler,
            include_prompt_logprobs=include_prompt_logprobs, topk_prompt_logprobs=topk_prompt_logprobs, **asked,
        )  # fmt: skip
        return APIFuture(future)

    def compute_logprobs(self, prompt: Any) -> APIFuture[list[float | None]]:
        """The logprob of each token of a prompt given those before it; None for the first."""
        return APIFuture(self.service.compute_logprobs(_input(prompt), sampler=self.sampler))

    async def sample_async(self, *args: Any, **options: Any) -> SampleResponse:
        return await self.sample(*args, **options)

    async def compute_logprobs_async(self, prompt: Any) -> list[float | None]:
        return await self.compute_logprobs(prompt)


# ---------------------------------------------------------------------------------------------------- others' types


def _input(model_input: Any) -> ModelInput | Sequence[int]:
    if isinstance(model_input, ModelInput) or not hasattr(model_input, "to_ints"):
        return model_input
    return ModelInput.from_ids(model_input.to_ints())


def _data(data: Sequence[Any]) -> list[Datum]:
    return [each if isinstance(each, Datum) else _datum(each) for each in data]


def _datum(datum: Any) -> Datum:
    model_input = _input(datum.model_input)
    if not isinstance(model_input, ModelInput):
        model_input = ModelInput.from_ids(model_input)
    spans = getattr(datum, "model_input_spans", None), getattr(datum, "loss_fn_input_spans", None)
    provenance = None if spans[0] is None or spans[1] is None else Provenance(_spans(spans[0]), _spans(spans[1]))
    return Datum(model_input, datum.loss_fn_inputs, provenance)


def _spans(spans: Sequence[Any]) -> tuple[PromptProvenanceSpan | SampledProvenanceSpan, ...]:
    kinds = {kind.__name__: kind for kind in (PromptProvenanceSpan, SampledProvenanceSpan)}
    return tuple(kinds[type(each).__name__](**asdict(each)) for each in spans)


def _as(kind: type[T], settings: Any) -> T:
    """Settings of another library's class of the same fields."""
    if isinstance(settings, kind) or not is_dataclass(kind):
        return settings
    return kind(**{each.name: getattr(settings, each.name) for each in fields(kind) if hasattr(settings, each.name)})


def _targets(datum: Datum) -> dict[str, Any]:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise ConfigError("a datum lacks loss_fn_inputs['target_tokens']")
    return {"target_tokens": datum.loss_fn_inputs["target_tokens"]}


def _tokenizer(service: TrainingService) -> Tokenizer:
    if service.tokenizer is None:
        raise ConfigError("the base model's folder has no tokenizer; give token ids, or save the tokenizer there")
    return service.tokenizer
