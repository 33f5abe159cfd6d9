"""model.quantize: what it may be combined with."""

import pytest

from rlloop.config.model import LoraSection, ModelSection
from rlloop.config.numerics import DriftConfig, ProfileConfig
from rlloop.config.rollout import EngineKind, RolloutConfig
from rlloop.config.run import AlgorithmConfig, ParityConfig, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.launch.compose import build, compose_recipe

OBSERVED = {"parity": ParityConfig(mode="observe")}


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ({"lora": LoraSection(rank=4)}, {}, "model.lora.rank is 4; .* 0 with model.quantize=fp8"),
        ({"dtype": "float16"}, {}, "model.dtype is .*float16.*; .* bfloat16 or float32 with model.quantize=fp8"),
        ({"profile": ProfileConfig(experts="stock")}, OBSERVED, "model.profile.experts is .*stock.*; .* rlloop with"),
        ({}, {"rollout": RolloutConfig(engine=EngineKind.vllm)}, "rollout.engine is .*vllm.*; .* embedded with model"),
        ({}, {"trainer": TrainerConfig(shard="parameters")}, "trainer.shard is .*parameters.*; .* optimizer with"),
        ({}, {"rollout": RolloutConfig(drift=DriftConfig(weights="fp8"))}, "rollout.drift changes weights or products"),
        ({"quantize": "int8"}, {}, "model.quantize is 'int8'; it must be one of none, fp8"),
    ],
)
def test_what_8_bit_weights_cannot_train_with(model, sections, message):
    algorithm = AlgorithmConfig(loss="grpo", advantage="group_norm")
    with pytest.raises(ConfigError, match=message):
        RunConfig(model=ModelSection(**{"quantize": "fp8", **model}), algorithm=algorithm, **sections)


@pytest.mark.parametrize("axis", ["tp", "pp", "ep"])
def test_layouts_that_cut_weights_are_refused(axis):
    given = ["model.quantize=fp8", "trainer.layout.dp_shard=2", f"trainer.layout.{axis}=2"]
    with pytest.raises(ConfigError, match=f"trainer.layout.{axis} is 2; it must be 1 with model.quantize=fp8"):
        build(compose_recipe("countdown", given))
