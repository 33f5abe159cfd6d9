"""Layouts that a model cannot have are refused with one that it can."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import Qwen3_5MoeTextConfig, Qwen3Config, Qwen3MoeConfig

from rlloop.errors import ConfigError
from rlloop.models.config import parse_config
from rlloop.models.placement import check_placement
from rlloop.parallel.layout import Layout
from tests.support.checkpoints import MIXTURE, MIXTURES, SIZES

DENSE = parse_config({**Qwen3Config(**{**SIZES, "head_dim": 16}).to_dict(), "architectures": ["Qwen3ForCausalLM"]})
EXPERTS = parse_config(
    {
        **Qwen3MoeConfig(**{**SIZES, **MIXTURE, "head_dim": 16, "num_experts": 6}).to_dict(),
        "architectures": ["Qwen3MoeForCausalLM"],
    }
)
FEW = replace(EXPERTS, mixture=replace(EXPERTS.mixture, num_experts=3))


DELTA = parse_config(  # 4 heads of attention, 3 heads of recurrent layers
    {
        **Qwen3_5MoeTextConfig(**{**SIZES, **MIXTURES["qwen3_5_moe"][1], "linear_num_value_heads": 3,
                                  "linear_num_key_heads": 3}).to_dict(),
        "architectures": ["Qwen3_5MoeForCausalLM"],
    }
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layout", "fault", "instead"),
    [
        (DENSE, {"pp": 3}, "pp is 3, and there are 2 layers", {"pp": 1, "dp_shard": 3}),
        (DENSE, {"pp": 4}, "pp is 4, and there are 2 layers", {"pp": 2, "dp_shard": 2}),
        (DENSE, {"dp_shard": 2, "ep": 2}, "ep is 2, and there are no experts", {"ep": 1}),
        (DENSE, {"cp": 5}, "cp is 5, and ranks split layers of 4 heads", {"cp": 1, "dp_shard": 5}),
        (DENSE, {"tp": 6}, "tp is 6, and ranks split layers of 4 heads", {"tp": 3, "dp_shard": 2}),
        (EXPERTS, {"dp_shard": 8, "ep": 8}, "ep is 8, and there are 6 experts", {"ep": 4}),
        (FEW, {"tp": 8}, "tp is 8, and ranks split layers of 4 heads", {"tp": 4, "dp_shard": 2}),
        (FEW, {"dp_shard": 4, "ep": 4}, "ep is 4, and there are 3 experts", {"ep": 2}),
        (EXPERTS, {"dp_shard": 3, "cp": 2, "ep": 3}, "ep is 3, which neither divides tp", {"ep": 2}),
        (EXPERTS, {"cp": 8, "ep": 8, "pp": 4}, "pp is 4", {"pp": 2, "cp": 4, "ep": 4, "dp_shard": 4}),
        (EXPERTS, {"cp": 2, "tp": 2}, "both split heads", {"cp": 1, "dp_shard": 2}),
        (EXPERTS, {"tp": 8, "ep": 8}, "tp is 8", {"tp": 4, "ep": 4, "dp_shard": 2}),
        (DELTA, {"cp": 4}, "cp is 4, and ranks split layers of 3 heads", {"cp": 2, "dp_shard": 2}),
    ],
)
def test_a_layout_that_does_not_fit_names_one_that_does(config, layout, fault, instead) -> None:
    with pytest.raises(ConfigError, match=fault) as error:
        check_placement(config, {"trainer.layout": Layout(**layout)})
    advised = dict(change.split("=") for change in str(error.value).rpartition("; set ")[2].split(", "))
    assert advised == {f"trainer.layout.{name}": f"{degree}" for name, degree in instead.items()}
    fitting = Layout(**{**layout, **instead})
    assert fitting.world_size == Layout(**layout).world_size
    check_placement(config, {"trainer.layout": fitting})


def test_tensor_parallel_ranks_may_outnumber_the_experts() -> None:
    check_placement(FEW, {"trainer.layout": Layout(tp=4), "rollout.layout": Layout(tp=4)})


def test_engines_do_not_split_sequences() -> None:
    with pytest.raises(ConfigError, match=r"cp is 2, .*set rollout.layout.cp=1"):
        check_placement(DENSE, {"rollout.layout": Layout(cp=2)})
    for layout in (Layout(tp=4, pp=2), Layout(dp_shard=3), Layout(dp_replicate=5)):
        check_placement(DENSE, {"rollout.layout": layout})
    check_placement(EXPERTS, {"rollout.layout": Layout(tp=4, ep=2, dp_shard=2)})


def test_faults_of_both_layouts_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        check_placement(DENSE, {"trainer.layout": Layout(pp=4), "rollout.layout": Layout(tp=2, pp=4)})
    assert str(error.value).endswith(
        "; set trainer.layout.pp=2, trainer.layout.dp_shard=2, rollout.layout.pp=2, rollout.layout.dp_shard=2"
    )
