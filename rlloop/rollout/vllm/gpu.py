"""vLLM 0.26's GPU worker with rlloop's sampler.

vLLM's own compilation and graphs are off (`enforce_eager`): the model is not its own. A step in which every request
decodes one token is one replay of a graph (`gpu_graphs`), whose inputs lie on the device, so the host never waits.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm.device_allocator import get_mem_allocator_instance
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from rlloop.rollout.vllm.model import RlloopForCausalLM
from rlloop.rollout.vllm.sampler import ExactSampler
from rlloop.rollout.vllm.worker_mixin import WorkerMixin


class GpuWorker(WorkerMixin, Worker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        if isinstance(model, RlloopForCausalLM):
            self.model_runner.sampler = sampler = ExactSampler(self.model_runner, model.policy)
            model.rows = sampler.rows
            # No logits processor reads tokens, so no step has to wait for those of the last one.
            self.model_runner.input_batch.logitsprocs_need_output_token_ids = False

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        return _Checked(output) if isinstance(output, AsyncModelRunnerOutput) else _checked(output)

    def release_caches(self) -> None:
        """vLLM's sleep mode: addresses stay, so that graphs which read there do, and the memory goes."""
        torch.cuda.synchronize()
        super().release_caches()
        _allocator().sleep(())  # the worker's own method looks at memory that other processes take

    def restore_caches(self) -> None:
        """Fill with zeros, as at the start: unwritten slots may be read with weight 0, so they must be finite."""
        torch.cuda.empty_cache()  # torch keeps memory freed by the trainer
        _allocator().wake_up()
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """Put only caches to sleep: weights are the trainer's, or written while the caches sleep."""
        if tag != "kv_cache" or not self.vllm_config.model_config.enable_sleep_mode:
            return nullcontext()
        gc.collect()
        _allocator().release_pools()  # memory left by an earlier engine
        return super()._maybe_get_memory_pool_context(tag)


def _allocator() -> Any:
    """CUDA's allocator of memory that may sleep; it has more methods than vLLM's protocol declares."""
    return get_mem_allocator_instance()


class _Checked(AsyncModelRunnerOutput):
    """A step's tokens, checked when they arrive on the host, after the next step has begun."""

    def __init__(self, output: AsyncModelRunnerOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        return _checked(self._output.get_output())


def _checked(output: ModelRunnerOutput) -> ModelRunnerOutput:
    if [-1] in output.sampled_token_ids:
        raise ValueError("a row holds no distribution to sample from; look for weights that are not finite")
    return output
