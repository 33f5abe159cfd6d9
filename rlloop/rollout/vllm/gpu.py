"""vLLM 0.26 on a GPU: its worker with our sampler, its pages as our stores, and decode steps as CUDA graphs of ours.

vLLM's own compilation and graphs are off (`enforce_eager`): the model is not its. A step in which every request decodes
one token is one replay, as in `rlloop.rollout.graphs`; what it reads are tensors on the device, so no host waits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.device_allocator import get_mem_allocator_instance
from vllm.v1.worker.gpu_worker import Worker

from rlloop.errors import ConfigError
from rlloop.models import Model, Routes
from rlloop.numerics.layout import AttentionLayout
from rlloop.rollout.choices import ChoiceStore
from rlloop.rollout.graphs import LEAST_TOKENS, at_least, rounded
from rlloop.rollout.vllm.attention import PagedStore, PagedStores, StepMetadata
from rlloop.rollout.vllm.inside import Inside
from rlloop.rollout.vllm.model import RlloopForCausalLM
from rlloop.rollout.vllm.sampler import ExactSampler

SPARE = 0  # a slot of vLLM's null block, which nobody reads


class GpuWorker(Inside, Worker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        if isinstance(model, RlloopForCausalLM):
            self.model_runner.sampler = ExactSampler(self.model_runner, model.policy)

    def release_caches(self) -> None:
        """vLLM's sleep mode: addresses stay, so that graphs which read there do, and the memory goes."""
        self.sleep(level=1)

    def restore_caches(self) -> None:
        """Zeros, as at the start: what nobody wrote may be read and weighed with zero, so it must be a number."""
        self.wake_up()
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """Of all that may sleep, caches only: weights are the trainer's, or written while the caches sleep."""
        if tag != "kv_cache":
            return nullcontext()
        if self.vllm_config.model_config.enable_sleep_mode and get_mem_allocator_instance().get_current_usage():
            raise ConfigError("another vLLM engine with sleep=True lives in this process; close it first")
        return super()._maybe_get_memory_pool_context(tag)


class GpuStore(PagedStore):
    """vLLM 0.26 assigns the cache, in the shape that the backend names: [blocks, block_size, heads, width]."""

    @property
    def kv_cache(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rows

    @kv_cache.setter
    def kv_cache(self, cache: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if cache.numel():
            self.rows = cache.view(-1, self.heads, self.width)


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # [R, 3 + B] int64: token, position, slot, first slots of pages
    start: Tensor  # [R + 1] int64: a graph does not keep what it reads
    hidden: Tensor  # [R, D]


class StepGraphs:
    """Steps in which every request has one token to compute, for one view of the weights."""

    def __init__(self, policy: Model, stores: list[dict[str, PagedStore]], choices: ChoiceStore | None) -> None:
        self._policy, self._stores, self._choices = policy, stores, choices
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def hidden(self, tokens: Tensor, positions: Tensor, step: StepMetadata) -> Tensor:
        """What it returns is valid until the next call."""
        pages, size = step.layout.block_start, step.layout.block_size
        rows, columns = rounded(len(tokens)), at_least(pages.shape[1], LEAST_TOKENS // size)
        found = self._recorded.get((rows, columns)) or self._record(rows, columns, size)
        count = len(tokens)
        found.inputs[:, 2:] = SPARE
        found.inputs[count:, :2] = 0
        found.inputs[:count, 0], found.inputs[:count, 1], found.inputs[:count, 2] = tokens, positions, step.slots
        found.inputs[:count, 3 : 3 + pages.shape[1]] = pages
        found.graph.replay()
        return found.hidden[:count]

    def _record(self, rows: int, columns: int, size: int) -> _Recorded:
        device = self._policy.device
        inputs = torch.zeros(rows, 3 + columns, dtype=torch.int64, device=device)
        start = torch.arange(rows + 1, device=device)

        def work() -> Tensor:
            tokens, positions, slots = (inputs[:, i].contiguous() for i in range(3))
            layout = AttentionLayout(start, positions, inputs[:, 3:].contiguous(), size, contiguous=False)
            routes = None if self._choices is None else Routes()
            hidden = self._policy.hidden(tokens, positions, layout, PagedStores(self._stores, slots), routes=routes)
            if self._choices is not None and routes is not None:
                self._choices.write(slots, routes)
            return hidden

        work()  # compiles what has to be
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = work()
        made = self._recorded[rows, columns] = _Recorded(graph, inputs, start, hidden)
        return made
