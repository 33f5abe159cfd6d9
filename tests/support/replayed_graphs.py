"""An engine with graphs on a CPU: to replay one is to do its work again, on its inputs and into its outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlloop.models import Model
from rlloop.rollout.engine import graph_sizes, graphs, step_ranks, steps
from rlloop.rollout.engine.choice_store import ChoiceStore
from rlloop.rollout.engine.drawing import to_host
from rlloop.rollout.engine.engine import Engine
from rlloop.rollout.engine.graphs import EngineGraphs
from rlloop.rollout.engine.kv_cache import PagedCache

Work = Callable[[], tuple[Tensor, ...]]
Replays = Counter[str]


def count_replays(monkeypatch: pytest.MonkeyPatch, long: int = graph_sizes.LONG) -> Replays:
    """Counts steps of each kind that are replayed from now on; CUDA's part is replaced. `long`: `graph_sizes.LONG`."""
    counts: Replays = Counter()

    def captured(self: EngineGraphs, work: Work) -> tuple[object, tuple[Tensor, ...]]:
        outputs = work()

        def replay() -> None:
            counts["prompts" if outputs[0].shape[-1] == self._model.config.hidden_size else "decodes"] += 1
            for output, made in zip(outputs, work(), strict=True):
                output.copy_(made)

        return SimpleNamespace(replay=replay), outputs

    monkeypatch.setattr(EngineGraphs, "_captured", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (step_ranks.ROOM, 80 << 30))
    monkeypatch.setattr(graphs, "SEEN", 1)
    monkeypatch.setattr(graph_sizes, "LONG", long)
    # On a CPU what goes to the host is no copy yet, and the next replay writes over it.
    monkeypatch.setattr(steps, "to_host", lambda drawn: to_host(drawn.clone()))
    return counts


def replaying(model: Model, kind: type[Engine] = Engine, longest: int = 0, **settings: Any) -> Engine:
    """An engine with graphs, and what is spare on a GPU. `longest`: of `EngineGraphs`."""
    engine = kind(model, **settings)
    size, room = engine.page_size, engine._num_blocks * engine.page_size
    rows = engine._max_running + engine._saved_states
    engine._cache = PagedCache(
        model.cache_spec(), room, model.dtype, model.device, model.state_spec(), rows, size, engine.sleeps
    )  # fmt: skip
    engine._choices = ChoiceStore.of(model, room + size)
    engine._graphs = EngineGraphs(model, engine._cache, size, engine._choices, longest)
    engine._scheduler = engine._new_scheduler()
    return engine
