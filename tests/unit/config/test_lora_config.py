"""model.lora: what it may be combined with, and targets by name."""

import pytest

from rlloop.config.model import LoraSection, ModelSection
from rlloop.config.numerics import DriftConfig
from rlloop.config.rollout import EngineKind, RolloutConfig
from rlloop.config.run import AlgorithmConfig, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.launch.compose import build, compose_recipe
from rlloop.launch.make import with_lora
from rlloop.models import save_model
from rlloop.models.adapter_files import save_adapter
from tests.support.adapters import random_adapter
from tests.support.tiny_models import tiny_qwen3


def config(lora: LoraSection, **sections) -> RunConfig:
    algorithm = AlgorithmConfig(loss="grpo", advantage="group_norm")
    return RunConfig(model=ModelSection(lora=lora), algorithm=algorithm, **sections)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"rollout": RolloutConfig(engine=EngineKind.vllm_stock)},
            "rollout.engine is .*vllm_stock.* embedded or vllm with model",
        ),
        ({"rollout": RolloutConfig(drift=DriftConfig(weights="int8"))}, "rollout.drift rounds all weights"),
        ({"trainer": TrainerConfig(expert_bias_rate=0.1)}, "expert_bias_rate is 0.1; .* 0 with model.lora.rank=4"),
    ],
)
def test_what_an_adapter_cannot_be_trained_with(sections, message):
    with pytest.raises(ConfigError, match=message):
        config(LoraSection(rank=4), **sections)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": -1}, "model.lora.rank is -1"),
        ({"rank": 4, "alpha": 0.0}, "model.lora.alpha is 0.0; it must be a positive number"),
        ({"rank": 4, "targets": []}, r"model.lora.targets is \[\]"),
    ],
)
def test_values_out_of_bounds(lora, message):
    with pytest.raises(ConfigError, match=message):
        LoraSection(**lora)


def test_recipes_take_it():
    made = build(compose_recipe("countdown/lora", []))
    assert (made.model.lora.rank, made.model.lora.targets) == (16, ["all-linear"])
    assert made.trainer.lr == pytest.approx(10 * build(compose_recipe("countdown", [])).trainer.lr)
    custom = ["model.path=m", "data.path=rows.jsonl", "model.lora.rank=8", "model.lora.targets=[q_proj,lm_head]"]
    assert build(compose_recipe("custom", custom)).model.lora.targets == ["q_proj", "lm_head"]


def test_targets_and_the_adapter_to_start_from(tmp_path):
    model = tiny_qwen3()
    view = with_lora(model, LoraSection(rank=4, targets=["q_proj", "lm_head", "model.layers.1.mlp.up_proj"]), 0)
    assert view.adapter is not None
    assert sorted(view.adapter.targets) == [
        "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj",
    ]  # fmt: skip
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ConfigError, match=r"model.lora.targets names 'wq', .* it has all-linear, .*q_proj"):
        with_lora(model, LoraSection(rank=4, targets=["wq"]), 0)
    with pytest.raises(ConfigError, match="names 'experts'"):
        with_lora(model, LoraSection(rank=4, targets=["experts"]), 0)
    save_model(model, tmp_path / "base")
    save_adapter(model, random_adapter(model, 0, rank=4), tmp_path / "adapter")
    started = with_lora(model, LoraSection(rank=4, alpha=8.0, path=str(tmp_path / "adapter")), 0)
    assert started.adapter is not None
    assert all(parameter.any() for parameter in started.adapter.named_parameters().values())
    with pytest.raises(ConfigError, match=r"model.lora.path has rank 4, alpha 8 .* model.lora says rank 8"):
        with_lora(model, LoraSection(rank=8, alpha=8.0, path=str(tmp_path / "adapter")), 0)


def test_a_rank_beyond_every_projection():
    with pytest.raises(ConfigError, match=r"the adapter's rank is 1000000; it must be at most \d+, the model's widest"):
        with_lora(tiny_qwen3(), LoraSection(rank=1_000_000), 0)
