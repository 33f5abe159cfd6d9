"""Records the experts and past tokens that a model inside vLLM chose for each token, by vLLM's slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rlloop.rollout.engine.choice_store import Choices, ChoiceStore
from rlloop.rollout.vllm.loading import routes_of
from rlloop.rollout.vllm.model import RlloopForCausalLM
from rlloop.rollout.vllm.requests import CHOICES

MOST_ENDED = 4096  # requests of a server whose choices wait to be fetched; older ones are dropped


class Recorder:
    """Stores choices by cache slot, as long as the slot's keys, so cached prefixes keep theirs.

    Nothing is copied to the host in a step. A request's choices are read when it has ended, before the next step that
    vLLM begins could write into its slots; those of a preempted one, whose slots others get, before that step.
    """

    def __init__(self, runner: Any, store: ChoiceStore, group: int) -> None:
        self._runner, self.store, self._group = runner, store, group
        described = runner.kv_cache_config.kv_cache_groups[group]
        self._block_size, self._layer = described.kv_cache_spec.block_size, described.layer_names[0]
        self._preempted: dict[str, Callable[[], Choices]] = {}
        self._ended: dict[str, Callable[[], Choices]] = {}  # of a server's requests that gave a name, oldest first
        # Reads do not wait for the step that vLLM may have begun meanwhile.
        self._stream = torch.cuda.Stream() if runner.device.type == "cuda" else None

    @classmethod
    def of(cls, runner: Any, model: nn.Module) -> Recorder | None:
        """None for a model that chooses nothing. `runner` knows its caches by now."""
        cache = runner.kv_cache_config
        routers, indexed = routes_of(model)
        if routers is None and not indexed:
            return None
        groups = cache.kv_cache_groups
        full = [at for at, each in enumerate(groups) if isinstance(each.kv_cache_spec, FullAttentionSpec)]
        group = full[0] if full else 0  # where layers differ in width, one group has a specification of its own
        slots = cache.num_blocks * groups[group].kv_cache_spec.block_size
        recorder = cls(runner, ChoiceStore(routers, indexed, slots, runner.device), group)
        if isinstance(model, RlloopForCausalLM):
            model.choices = recorder.store
        else:
            recorder._hook_routers(model)
        return recorder

    def before(self, step: Any) -> None:
        """`step` (vLLM's SchedulerOutput) is about to be computed."""
        for id in step.preempted_req_ids or ():
            self._preempted[id] = self.store.begin_read(self._slots(id))
        for id in step.finished_req_ids:
            if (name := self._name(id)) is not None:
                self._ended[name] = self._preempted.get(id) or self.store.begin_read(self._slots(id))
        while len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]
        for id in (*step.finished_req_ids, *step.scheduled_cached_reqs.resumed_req_ids):
            self._preempted.pop(id, None)

    def read(self, asked: Sequence[tuple[str, int]]) -> list[Choices]:
        """Choices for the first `count` tokens of each request (id, count), which are computed; None where it is 0."""
        kept = [self._preempted.get(id) for id, _ in asked]
        slots = [
            self._slots(id)[:count] if preempted is None else np.zeros(0, np.int64)
            for (id, count), preempted in zip(asked, kept, strict=True)
        ]
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            arrays = self.store.read(np.concatenate(slots))
        ends = np.cumsum([len(each) for each in slots])[:-1]
        experts, selected = ([None] * len(asked) if array is None else np.split(array, ends) for array in arrays)
        choices: list[Choices] = []
        for (_, count), preempted, *own in zip(asked, kept, experts, selected, strict=True):
            of_it = own if preempted is None else preempted()
            one, other = (None if array is None or count == 0 else array[:count] for array in of_it)
            choices.append((one, other))
        return choices

    def take(self, names: Sequence[str]) -> list[Choices]:
        """Choices of a server's requests that have ended, in whole blocks of tokens; None for an unknown one."""
        known = {name: id for id in self._runner.requests if (name := self._name(id)) is not None}
        choices: list[Choices] = []
        for name in names:
            if name in self._ended:
                choices.append(self._ended.pop(name)())
            elif name in known:  # no step has begun since
                choices.append(self._preempted.get(known[name], self.store.begin_read(self._slots(known[name])))())
            else:
                choices.append((None, None))
        return choices

    def _name(self, id: str) -> str | None:
        state = self._runner.requests.get(id)
        params = None if state is None else state.sampling_params
        return None if params is None else (params.extra_args or {}).get(CHOICES)

    def _slots(self, id: str) -> np.ndarray:
        """Slots of all the blocks that a request has; none before it has begun."""
        state = self._runner.requests.get(id)
        blocks = np.array([] if state is None else state.block_ids[self._group], np.int64)
        return (blocks[:, None] * self._block_size + np.arange(self._block_size)).reshape(-1)

    def _hook_routers(self, model: nn.Module) -> None:
        """Record vLLM's own routers, through the hook of its `enable_return_routed_experts`.

        That option itself copies each step's choices to the host, and in 0.32 needs the newer model runner.
        """
        runners: list[Any] = [module for module in model.modules() if isinstance(module, MoERunner)]
        routers = {runner.layer_id: runner.router for runner in runners}
        for layer, id in enumerate(sorted(routers)):
            routers[id].set_capture_fn(partial(self._captured, layer))

    def _captured(self, layer: int, chosen: Tensor) -> None:
        """chosen [T, top_k]: the experts that one layer takes."""
        steps: Any = get_forward_context().attn_metadata
        if steps is None:  # a trial run
            return
        slots = steps[self._layer].slot_mapping
        assert self.store.experts is not None
        self.store.experts[slots.long(), layer] = chosen[: len(slots)].to(self.store.experts.dtype)
