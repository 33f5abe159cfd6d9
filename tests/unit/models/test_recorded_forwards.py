"""Steps of every family, as CUDA graphs record them, read nothing on the host, alone or on a rank of any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlloop.models import Model
from rlloop.parallel.layout import Layout
from rlloop.rollout.engine.graph_forms import Form
from tests.support import catalogue
from tests.support.adapters import random_adapter
from tests.support.catalogue import RELEASED, refusal
from tests.support.recorded_forwards import META, graphs_of, model_of, recording

FAMILIES: dict[str, dict[str, Any]] = {}
for each in RELEASED.values():
    if refusal(each["config"]) is None:
        FAMILIES.setdefault(each["config"]["model_type"], each["config"])
LAYERS = 4  # enough for every kind of layer; twice as many where layers are halves, or pictures enter the first three
DENSE = [Layout(), Layout(tp=3), Layout(pp=2)]
SPREAD = [Layout(dp_shard=2, ep=2), Layout(tp=2, ep=2), Layout(dp_shard=2, tp=2, ep=4), Layout(tp=4, ep=2)]
DECODES = [Form(8, 4, "none", True), Form(3, 4, "none")]  # 3 rows: no rank has as many as another
PROMPTS = [Form(16, 8, "none", tokens=96, decoding=4)]


def config_of(family: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        twice = family == "nemotron_h" or family.startswith("qwen3_vl")
        patch.setattr(catalogue, "MOST_LAYERS", LAYERS * (2 if twice else 1))
        return catalogue.cut(FAMILIES[family])


def record(monkeypatch: pytest.MonkeyPatch, model: Model, adapted: tuple[str, ...] = ("none",)) -> tuple[int, int]:
    """Numbers of steps recorded: that decode, and with prompts."""
    with recording(monkeypatch) as made:
        graphs = graphs_of(model)
        for kind in adapted:
            for form in DECODES:
                graphs._record(form._replace(adapted=kind))
            for form in PROMPTS if graphs._records_prompts else []:
                assert graphs._record_prompts(form._replace(adapted=kind))
    assert all(output.device == META for outputs in made for output in outputs)
    prompts = sum(form.tokens > 0 for form in graphs._recorded)
    return len(graphs._recorded) - prompts, prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_read_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    config = config_of(family)
    mixed = model_of(config, Layout()).config.mixture is not None
    for layout in [*DENSE, *(SPREAD if mixed else [])]:
        for rank in {0 if layout.pp > 1 else layout.world_size - 1, layout.world_size - 1}:
            model = model_of(config, layout, rank)
            together = layout.pp > 1 or (mixed and layout.world_size > 1)
            records = not together and model.indexed_layers() == 0
            assert record(monkeypatch, model) == (len(DECODES), records * len(PROMPTS)), (layout, rank)


def test_a_rank_without_experts_records_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**config_of("qwen3_moe"), "num_experts": 2, "num_experts_per_tok": 1}
    for rank in range(4):
        assert record(monkeypatch, model_of(config, Layout(tp=4), rank)) == (len(DECODES), 0)


@pytest.mark.parametrize("family", ["qwen3", "kimi_k2", "gpt_oss", "nemotron_h"])
def test_recorded_steps_with_adapters_read_nothing_on_the_host(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    config = config_of(family)
    model = model_of(config, Layout())
    model.adapters.configure(2, 8)
    for name in ("one", "two"):
        model.adapters.add(name, random_adapter(model, seed=0, rank=4), model.adapter_targets())
    with torch.inference_mode():
        model.adapters.place([model.adapters.get(name) for name in ("one", "two")])
    made = record(monkeypatch, model, ("one", "many"))
    assert made == (2 * len(DECODES), 2 * len(PROMPTS))
