"""Which experts and past tokens a model inside vLLM chose for each token, kept by vLLM's slots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from rlloop.models import Model
from rlloop.rollout.choices import Choices, ChoiceStore


class Recorder:
    """A slot holds its token's choices as long as its keys, so a cached prefix brings them along."""

    def __init__(self, runner: Any, store: ChoiceStore) -> None:
        self._runner, self.store = runner, store

    @classmethod
    def of(cls, runner: Any, policy: Model) -> Recorder | None:
        """None for a model that chooses nothing. `runner` knows its caches by now."""
        cache = runner.kv_cache_config
        [group] = cache.kv_cache_groups
        store = ChoiceStore.of(policy, cache.num_blocks * group.kv_cache_spec.block_size)
        return None if store is None else cls(runner, store)

    def read(self, asked: Sequence[tuple[str, int]]) -> list[Choices]:
        """Of the first `count` tokens of each request (id, count); nothing of one that was preempted."""
        batch = self._runner.input_batch
        table = batch.block_table[0]
        made: list[Choices] = []
        for id, count in asked:
            row, at = batch.req_id_to_index.get(id), np.arange(count)
            if row is None:
                made.append((None, None))
            else:
                blocks = table.block_table.np[row][at // table.block_size].astype(np.int64)
                made.append(self.store.read(blocks * table.block_size + at % table.block_size))
        return made

    def listen(self, model: nn.Module) -> None:
        """To vLLM's own routers, through the hook of its `enable_return_routed_experts`.

        That option itself needs the newer model runner, and that one Triton, which the CPU build has not.
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
        slots = next(iter(steps.values())).slot_mapping
        assert self.store.experts is not None
        self.store.experts[slots.long(), layer] = chosen[: len(slots)].to(self.store.experts.dtype)
