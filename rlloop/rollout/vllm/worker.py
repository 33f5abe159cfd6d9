"""vLLM's CPU worker with our sampler in it where the model is ours, and a stock model's weights by name."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from rlloop.rollout.vllm.attention import PagedStore
from rlloop.rollout.vllm.model import RlloopForCausalLM
from rlloop.rollout.vllm.sampler import ExactSampler
from rlloop.rollout.vllm.worker_mixin import WorkerMixin


class CpuWorker(WorkerMixin, CPUWorker):
    def init_device(self) -> None:
        set_num_threads = torch.set_num_threads
        super().init_device()
        torch.set_num_threads = set_num_threads  # vLLM disables it, and this process may not be its own

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        if isinstance(model, RlloopForCausalLM):
            self.model_runner.sampler = sampler = ExactSampler(self.model_runner, model.policy)
            model.rows = sampler.rows

    def release_caches(self) -> None:
        """Free the caches on a CPU, where vLLM's sleep mode does nothing: drop them from layers, views and the
        runner."""
        super().release_caches()
        runner = self.model_runner
        for layer in runner.compilation_config.static_forward_context.values():
            if isinstance(layer, PagedStore):
                layer.rows = torch.empty(0)
            layer.kv_cache = torch.empty(0)
        runner.kv_caches.clear()

    def restore_caches(self) -> None:
        """Fill with zeros, as at the start: unwritten slots may be read with weight 0, so they must be finite."""
        runner = self.model_runner
        runner.initialize_kv_cache_tensors(runner.kv_cache_config, runner._kernel_block_sizes)
