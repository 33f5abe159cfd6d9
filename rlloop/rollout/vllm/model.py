"""rlloop's model under vLLM's model interface: the trainer's `Model`, with its caches in vLLM's pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

from rlloop.models import RoutingRecord
from rlloop.models.parameters import ParameterStore
from rlloop.numerics.layout import AdapterSlots
from rlloop.numerics.transfer import on_device
from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.vllm.attention import GpuStore, PagedStore, PagedStores, StepMetadata
from rlloop.rollout.vllm.gpu_graphs import StepGraphs
from rlloop.rollout.vllm.loading import policy_of
from rlloop.rollout.vllm.sampler import Replayed, Rows
from rlloop.rollout.vllm.states import RequestStates
from rlloop.rollout.vllm.step_inputs import StepInputs


class RlloopForCausalLM(nn.Module):
    """All arithmetic is `policy`'s; vLLM decides the order of tokens and the slots of their keys."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        parallel = vllm_config.parallel_config
        if parallel.world_size > parallel.tensor_parallel_size:
            raise ValueError(
                f"rlloop's model takes tensor_parallel_size ({parallel.tensor_parallel_size}) inside vLLM, and "
                f"{parallel.world_size} ranks were asked for; leave pipeline and context parallelism at 1"
            )
        self.policy = policy_of(vllm_config)
        self._most = vllm_config.scheduler_config.max_num_seqs
        self.states: RequestStates | None = None
        if self.policy.recurrent:
            if vllm_config.cache_config.enable_prefix_caching:
                raise ValueError(
                    f"{self.policy.config.architecture} has recurrent layers, whose states are not in vLLM's prefix "
                    "cache; start vLLM with --no-enable-prefix-caching"
                )
            self.states = RequestStates(self.policy.state_spec(), self._most, self.policy.device)
        known = vllm_config.compilation_config.static_forward_context
        self.stores: list[dict[str, PagedStore]] = []
        self.graphs: StepGraphs | None = None
        make = GpuStore if self.policy.device.type == "cuda" else PagedStore
        for layer, spec in enumerate(self.policy.cache_spec()):
            stores = {}
            for name, shape in spec.items():
                store = make(prod(shape[:-1]), shape[-1], self.policy.dtype)
                known[f"layers.{layer}.{name}"] = store
                stores[name] = store
            self.stores.append(stores)
        self._any_store = next(iter(known))
        self.choices: ChoiceStore | None = None  # recorder of each token's choices; set by the worker
        self.rows: Callable[[], Rows]  # sampling parameters of this step's requests; set by the worker
        self.batch: Callable[[], Any]  # vLLM's InputBatch of this step; set by the worker
        self.inputs: StepInputs | None = None  # what vLLM does not carry; set by an engine in this process
        self.step: StepMetadata | None = None  # the last
        self._of_requests: AdapterSlots | None = None  # in it
        self.replayed: Replayed | None = None  # what a graph made of it, if one did

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedding = self.policy.model.embed_tokens
        assert embedding is not None, "vLLM's ranks have every layer"
        return nn.functional.embedding(input_ids.long(), embedding.weight)

    def forward(self, input_ids: Tensor, positions: Tensor, *unused: Any, **also_unused: Any) -> Tensor | Replayed:
        """Last hidden states. [T] -> [T, D]"""
        steps = get_forward_context().attn_metadata
        self.step = self.replayed = self._of_requests = None
        if steps is None:  # a trial run, to see how much memory is left
            return self.embed_input_ids(input_ids)
        assert isinstance(steps, dict)
        step = steps[self._any_store]
        assert isinstance(step, StepMetadata)
        self.step, count = step, step.count
        ids, inputs = self.batch().req_ids, self.inputs
        if inputs is not None and inputs.plain(ids):
            inputs = None
        if input_ids.is_cuda and step.decodes and inputs is None and self.states is None:
            replayed = self.replayed = self._graphs().replay(input_ids[:count], positions[:count], step, self.rows())
            return replayed
        states = None if self.states is None else partial(self.states.carried, rows=self.states.rows(ids))
        cache = PagedStores(self.stores, step.slots, states)
        routes = None if self.choices is None else RoutingRecord()
        tokens, positions = input_ids[:count].long().clamp(min=0), positions[:count].long()  # -1: none was drawn
        of_tokens = images = None
        begin = self.batch().num_computed_tokens_cpu[: len(ids)].astype(np.int64)
        if inputs is not None and (slots := inputs.slots(ids)) is not None:
            on = on_device(slots, self.policy.device)
            counts = step.layout.query_start.diff()
            self._of_requests = self.policy.adapters.rows(on)
            of_tokens = self.policy.adapters.rows(on.repeat_interleave(counts, output_size=count))
        if inputs is not None and (placed := inputs.placed(ids, begin, step.counts)) is not None:
            positions, images = on_device(placed[0], self.policy.device), placed[1]
        kept = {"routes": routes, "adapters": of_tokens, "images": images}
        hidden = self.policy.hidden(tokens, positions, step.layout, cache, **kept)
        if inputs is not None:
            inputs.score(ids, begin, step.counts, hidden)
        if self.choices is not None and routes is not None:
            self.choices.write(step.slots, routes)
        return hidden if count == len(input_ids) else nn.functional.pad(hidden, (0, 0, 0, len(input_ids) - count))

    def _graphs(self) -> StepGraphs:
        self.graphs = self.graphs or StepGraphs(self.policy, self.stores, self.choices, self._most)
        return self.graphs

    def compute_logits(self, hidden_states: Tensor | Replayed) -> Tensor:
        """[N, D] -> [N, V] float32"""
        if isinstance(hidden_states, Replayed):
            return hidden_states.logits
        return self.policy.output.whole(self.policy.logits(hidden_states, self._of_requests))

    def load_weights(self, weights: Any) -> set[str]:
        """Copies weights in place, by Hugging Face name; every name must be a live parameter's."""
        live = ParameterStore(self.policy).tensors()
        loaded = set()
        with torch.no_grad():
            for name, tensor in weights:
                live[name].copy_(tensor)
                loaded.add(f"policy.{name}")
        return loaded
