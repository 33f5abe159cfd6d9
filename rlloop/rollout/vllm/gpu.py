"""vLLM 0.26 on a GPU: its worker with our sampler, its pages as our stores, and decode steps as CUDA graphs of ours.

vLLM's own compilation and graphs are off (`enforce_eager`): the model is not its. A step in which every request decodes
one token is one replay, as in `rlloop.rollout.engine.graphs`; what it reads are tensors on the device, so no
host waits.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from vllm.device_allocator import get_mem_allocator_instance
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from rlloop.models import Model, RoutingRecord
from rlloop.numerics.layout import AttentionLayout, LogitsWarp
from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.engine.graphs import LEAST_TOKENS, at_least, rounded
from rlloop.rollout.vllm.attention import PagedStore, PagedStores, StepMetadata
from rlloop.rollout.vllm.model import RlloopForCausalLM
from rlloop.rollout.vllm.sampler import ExactSampler, Replayed, Rows
from rlloop.rollout.vllm.worker_mixin import Inside

SPARE = 0  # a slot of vLLM's null block, which nobody reads


class GpuWorker(Inside, Worker):
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
        _allocator().sleep(())  # the worker's own method looks at memory that other processes take

    def restore_caches(self) -> None:
        """Zeros, as at the start: what nobody wrote may be read and weighed with zero, so it must be a number."""
        torch.cuda.empty_cache()  # what the trainer has freed, torch keeps
        _allocator().wake_up()
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """Of all that may sleep, caches only: weights are the trainer's, or written while the caches sleep."""
        if tag != "kv_cache" or not self.vllm_config.model_config.enable_sleep_mode:
            return nullcontext()
        gc.collect()
        _allocator().release_pools()  # what an engine before this one left
        return super()._maybe_get_memory_pool_context(tag)


def _allocator() -> Any:
    """Of what may sleep: CUDA's, which knows more than vLLM's protocol of it says."""
    return get_mem_allocator_instance()


class _Checked(AsyncModelRunnerOutput):
    """A step's tokens, for which the host does not wait before it begins the next step."""

    def __init__(self, output: AsyncModelRunnerOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        return _checked(self._output.get_output())


def _checked(output: ModelRunnerOutput) -> ModelRunnerOutput:
    if [-1] in output.sampled_token_ids:
        raise ValueError("a row holds no distribution to sample from; look for weights that are not finite")
    return output


class GpuStore(PagedStore):
    """vLLM 0.26 assigns the cache, in the shape that the backend names: [blocks, block_size, heads, width]."""

    @property
    def kv_cache(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.rows

    @kv_cache.setter
    def kv_cache(self, cache: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if cache.numel():
            self.rows = cache.view(-1, self.heads, self.width)


class StepGraphs:
    """Steps in which every request has one token to compute, for one view of the weights: one replay, drawn tokens too.

    Rows that nobody uses decode token 0 at position 0 of a slot that nobody reads.
    """

    def __init__(
        self, policy: Model, stores: list[dict[str, PagedStore]], choices: ChoiceStore | None, most: int
    ) -> None:
        """`most`: requests in a step."""
        self._policy, self._stores, self._choices = policy, stores, choices
        self._recorded: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Replayed]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # What graphs read, and so must outlive them. Each begins where vectors can be loaded from.
        self._most, device = rounded(most + most % 2), policy.device
        self._start = torch.arange(self._most + 1, device=device)
        self._numbers = torch.zeros(5, self._most, dtype=torch.int64, device=device)
        self._fractions = torch.zeros(3, self._most, device=device)
        self._pages: dict[int, Tensor] = {}  # by columns
        self._rows: Rows | None = None  # whose parameters these are

    def replay(self, tokens: Tensor, positions: Tensor, step: StepMetadata, rows: Rows) -> Replayed:
        """tokens, positions [N]. What it returns is valid until the next call."""
        count, blocks = len(tokens), step.blocks
        columns = at_least(blocks.shape[1], LEAST_TOKENS // step.block_size)
        if columns not in self._pages:
            self._pages[columns] = self._numbers.new_zeros(self._most, columns)
        if rows is not self._rows:
            self._take(rows, count)
        for place, given in zip(self._numbers, (tokens, positions, step.slots), strict=False):
            place[:count].copy_(given)
        self._pages[columns][:count, : blocks.shape[1]].copy_(blocks)
        key = rounded(count), columns
        graph, made = self._recorded.get(key) or self._record(*key, step.block_size)
        graph.replay()
        if made.drawn is None or rows.bans:
            return Replayed(made.logits[:count], None)
        ids, logprobs, raw = made.drawn
        return Replayed(made.logits[:count], (ids[:count], logprobs[:count], raw[:count]))

    def _take(self, rows: Rows, count: int) -> None:
        warp, self._rows = rows.warp, rows
        self._numbers[:, count:] = SPARE
        for place, given, otherwise in (
            (self._numbers[3], rows.seeds, 0),
            (self._numbers[4], warp.top_k, 0),
            (self._fractions[0], warp.temperature, 1),
            (self._fractions[1], warp.top_p, 1),
            (self._fractions[2], warp.min_p, 0),
        ):
            place.fill_(otherwise)
            if given is not None:
                place[:count].copy_(given)

    def _record(self, rows: int, columns: int, size: int) -> tuple[torch.cuda.CUDAGraph, Replayed]:
        tokens, positions, slots, seeds, top_k = self._numbers[:, :rows]
        temperature, top_p, min_p = self._fractions[:, :rows]
        start, pages, ops = self._start[: rows + 1], self._pages[columns][:rows], self._policy.ops
        warp = LogitsWarp(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

        def work() -> Replayed:
            layout = AttentionLayout(start, positions, pages * size, size, contiguous=False)
            routes, stores = None if self._choices is None else RoutingRecord(), PagedStores(self._stores, slots)
            hidden = self._policy.hidden(tokens.clamp(min=0), positions, layout, stores, routes=routes)
            if self._choices is not None and routes is not None:
                self._choices.write(slots, routes)
            logits = ops.logits(hidden, self._policy.head)
            if ops.profile.token_logprob != "rlloop":  # it reads numbers on the host
                return Replayed(logits, None)
            return Replayed(logits, ops.sample(logits, warp, seeds, positions + 1))

        work()  # compiles what has to be
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            made = work()
        self._recorded[rows, columns] = graph, made
        return graph, made
