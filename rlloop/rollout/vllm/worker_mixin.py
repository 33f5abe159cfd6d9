"""Mixin of the CPU and GPU vLLM workers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import parallel_state

from rlloop.models import Model
from rlloop.rollout.engine.choice_store import Choices
from rlloop.rollout.vllm.loading import LENT_AS
from rlloop.rollout.vllm.model import RlloopForCausalLM
from rlloop.rollout.vllm.recording import Recorder
from rlloop.rollout.vllm.states import RequestStates
from rlloop.rollout.vllm.step_inputs import StepInputs
from rlloop.rollout.vllm.weights import Part, live_parts, renew
from rlloop.rollout.vllm.worker_replica import Following


class WorkerMixin:
    """Comes before vLLM's worker among the bases. Its methods but the first three are for `collective_rpc`."""

    model_runner: Any
    vllm_config: Any
    recorder: Recorder | None = None
    states: RequestStates | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # vLLM makes a process's groups once, and where that was for a dense model, none for experts.
        if self.vllm_config.model_config.is_moe and parallel_state._EP is None:
            group = parallel_state.get_tp_group()
            backend = torch.distributed.get_backend(group.device_group)
            every = torch.arange(torch.distributed.get_world_size()).view(-1, group.world_size).tolist()
            parallel_state._EP = parallel_state.init_model_parallel_group(
                every, group.local_rank, backend, group_name="ep"
            )
        super().load_model(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        model = self.model_runner.get_model()
        if isinstance(model, RlloopForCausalLM):
            model.batch = lambda: self.model_runner.input_batch
            self.states = model.states

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)  # pyright: ignore[reportAttributeAccessIssue]
        additional = self.vllm_config.additional_config
        # Only if somebody asks: an engine of this process, or rlloop's proxy. The newer runner has other tables.
        asked = (isinstance(additional, dict) and LENT_AS in additional) or isinstance(self, Following)
        if asked and not self.vllm_config.use_v2_model_runner:
            self.recorder = Recorder.of(self.model_runner, self.model_runner.get_model())

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.recorder is not None:
            self.recorder.before(scheduler_output)
        if self.states is not None:
            self.states.before(scheduler_output)
        return super().execute_model(scheduler_output)  # pyright: ignore[reportAttributeAccessIssue]

    def release_caches(self) -> None:
        """Free states; those of requests come with the next step. The worker's own frees what is in pages."""
        if self.states is not None:
            self.states.release()

    def run(self, policy: Model) -> None:
        """Another view of the weights, of a caller in this process."""
        model = self.model_runner.get_model()
        assert isinstance(model, RlloopForCausalLM), "vLLM's own model has no views"
        model.policy = self.model_runner.sampler.policy = policy
        model.graphs = None

    def drop_graphs(self) -> None:
        """Drop the CUDA graphs, which are recorded anew when steps need them. NCCL cannot be left before: it waits for
        every graph in which ranks exchange data."""
        if isinstance(model := self.model_runner.get_model(), RlloopForCausalLM):
            model.graphs = None

    def take_inputs(self, inputs: StepInputs) -> None:
        """`inputs`: of an engine in this process."""
        model = self.model_runner.get_model()
        assert isinstance(model, RlloopForCausalLM)
        model.inputs = inputs

    def choices(self, asked: list[tuple[str, int]]) -> list[Choices]:
        """Discrete choices for the first tokens of requests (id, count)."""
        assert self.recorder is not None
        return self.recorder.read(asked)

    def live_parts(self) -> dict[str, Part]:
        """A stock model's live weights by Hugging Face name; for callers in this process."""
        return live_parts(self.model_runner.get_model())

    def renew(self) -> None:
        """Recompute the tensors that a stock model derives from its weights, once they have changed."""
        renew(self.model_runner.get_model(), self.vllm_config.model_config.dtype)
