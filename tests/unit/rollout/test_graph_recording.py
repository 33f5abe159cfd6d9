"""Recording of decode steps, with CUDA's part replaced: pools, other threads, and the end of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlloop.models import load_model
from rlloop.parallel.layout import Layout
from rlloop.rollout.engine.engine import Engine
from rlloop.rollout.engine.graph_forms import Form
from rlloop.rollout.engine.graphs import EngineGraphs
from rlloop.rollout.engine.leader import LeadingEngine
from tests.support.checkpoints import make_checkpoint

Recorded = list[dict[str, Any]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The settings of each graph that is recorded."""
    settings: Recorded = []

    @contextmanager
    def graph(made: object, **given: Any) -> Iterator[None]:
        settings.append(given)
        yield

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return settings


@pytest.fixture(params=[Engine, LeadingEngine])
def engine(request: pytest.FixtureRequest, tmp_path: Path, recorded: Recorded) -> Engine:
    make_checkpoint(tmp_path)
    made: Engine = request.param(load_model(tmp_path), max_cache_tokens=256)
    made._cache.spare -= 1  # on a GPU there is a slot more
    made._graphs = EngineGraphs(made.model, made._cache, made.page_size, None)
    return made


@torch.inference_mode()
def record(engine: Engine, rows: int) -> None:
    assert engine._graphs is not None
    engine._graphs._record(Form(rows, 2, "none", draws=True))


def test_graphs_share_a_pool_which_ends_with_the_last_of_them(engine: Engine, recorded: Recorded) -> None:
    for rows in (1, 2):
        record(engine, rows)
    engine.close()
    record(engine, 1)
    pools = [each["pool"] for each in recorded]
    assert pools[0] is pools[1]
    assert pools[2] is not pools[0]


def test_other_threads_may_use_the_gpu_while_a_graph_is_recorded(engine: Engine, recorded: Recorded) -> None:
    record(engine, 3)
    assert [each["capture_error_mode"] for each in recorded] == ["thread_local"]


def test_a_closed_engine_has_no_graphs(engine: Engine) -> None:
    record(engine, 1)
    assert engine._graphs is not None
    assert engine._graphs._recorded
    engine.close()
    assert not engine._graphs._recorded


@pytest.mark.parametrize(
    ("degrees", "records"), [({"dp_shard": 2}, True), ({"tp": 2}, True), ({"pp": 2}, False), ({"cp": 2}, False)]
)
def test_ranks_without_stages_record_steps_with_prompts(engine: Engine, degrees: dict[str, int], records: bool) -> None:
    engine.model.context = replace(engine.model.context, layout=Layout(**degrees))
    graphs = EngineGraphs(engine.model, engine._cache, engine.page_size, None)
    assert graphs._records_prompts is records
