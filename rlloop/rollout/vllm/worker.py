"""vLLM's CPU worker with our sampler in it where the model is ours, and a stock model's weights by name."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from rlloop.models import Model
from rlloop.rollout.choices import Choices
from rlloop.rollout.vllm.attention import PagedStore
from rlloop.rollout.vllm.loading import LENT_AS, policy_of
from rlloop.rollout.vllm.model import RlloopForCausalLM
from rlloop.rollout.vllm.recording import Recorder
from rlloop.rollout.vllm.sampler import ExactSampler
from rlloop.rollout.vllm.weights import Part, live_parts, renew


class CpuWorker(CPUWorker):
    def init_device(self) -> None:
        set_num_threads = torch.set_num_threads
        super().init_device()
        torch.set_num_threads = set_num_threads  # vLLM disables it, and this process may not be its own

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        model = self.model_runner.get_model()
        self.recorder = Recorder.of(self.model_runner, policy_of(self.vllm_config)) if self._asked() else None
        if self.recorder is not None and isinstance(model, RlloopForCausalLM):
            model.choices = self.recorder.store
        elif self.recorder is not None:
            self.recorder.listen(model)

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

    def choices(self, asked: list[tuple[str, int]]) -> list[Choices]:
        """What was chosen for the first tokens of requests (id, how many)."""
        assert self.recorder is not None
        return self.recorder.read(asked)

    def release_caches(self) -> None:
        """vLLM's own sleep mode does nothing on a CPU. All that holds a cache lets go: layers, views, the runner."""
        runner = self.model_runner
        for layer in runner.compilation_config.static_forward_context.values():
            if isinstance(layer, PagedStore):
                layer.rows = torch.empty(0)
            layer.kv_cache = torch.empty(0)
        runner.kv_caches.clear()

    def restore_caches(self) -> None:
        """Zeros, as at the start: what nobody wrote may be read and weighed with zero, so it must be a number."""
        runner = self.model_runner
        runner.initialize_kv_cache_tensors(runner.kv_cache_config, runner._kernel_block_sizes)

    def live_parts(self) -> dict[str, Part]:
        """A stock model's live weights by Hugging Face name; for callers in this process."""
        return live_parts(self.model_runner.get_model())

    def renew(self) -> None:
        """What a stock model makes of its weights, once they have changed."""
        renew(self.model_runner.get_model(), self.vllm_config.model_config.dtype)

    def _asked(self) -> bool:
        """Whether an engine of this process asks: of a server's answers, choices are no part."""
        given = self.vllm_config.additional_config
        return isinstance(given, dict) and LENT_AS in given
