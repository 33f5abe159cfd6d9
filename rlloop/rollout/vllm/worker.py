"""vLLM's CPU worker with our sampler in it where the model is ours, and a stock model's weights by name."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from rlloop.models import Model
from rlloop.rollout.vllm.model import RlloopForCausalLM
from rlloop.rollout.vllm.sampler import ExactSampler
from rlloop.rollout.vllm.weights import live_parts


class CpuWorker(CPUWorker):
    def init_device(self) -> None:
        set_num_threads = torch.set_num_threads
        super().init_device()
        torch.set_num_threads = set_num_threads  # vLLM disables it, and this process may not be its own

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        if isinstance(model, RlloopForCausalLM):
            self.model_runner.sampler = ExactSampler(self.model_runner, model.policy)

    def run(self, policy: Model) -> None:
        """Another view of the weights, of a caller in this process."""
        model = self.model_runner.get_model()
        assert isinstance(model, RlloopForCausalLM), "vLLM's own model has no views"
        model.policy = self.model_runner.sampler.policy = policy

    def live_parts(self) -> dict[str, torch.Tensor]:
        """A stock model's live weights by Hugging Face name; views, for callers in this process."""
        return live_parts(self.model_runner.get_model())
