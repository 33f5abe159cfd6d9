"""Degrees, the world's size and a rank's coordinates."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlloop.errors import ConfigError
from rlloop.parallel.layout import Layout


def test_the_world_is_the_product_of_all_axes_but_the_experts() -> None:
    assert Layout().world_size == 1
    assert Layout(dp_replicate=2, dp_shard=3, cp=5, tp=7, pp=11, ep=21).world_size == 2 * 3 * 5 * 7 * 11


def test_ranks_meet_in_layers_where_they_split_tokens_products_or_experts() -> None:
    assert Layout(dp_replicate=2, dp_shard=2, pp=2).layers_alone
    assert not any(layout.layers_alone for layout in (Layout(cp=2), Layout(tp=2), Layout(dp_shard=2, ep=2)))


@pytest.mark.parametrize("name", ["dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"])
@pytest.mark.parametrize("degree", [0, -1, 1.0, True])
def test_degrees_are_whole_numbers_from_one_on(name: str, degree: int) -> None:
    with pytest.raises(ConfigError, match=rf"layout\.{name} is {degree!r}; it must be a whole number, at least 1"):
        Layout(**{name: degree})


@pytest.mark.parametrize(
    "degrees", [{"ep": 2}, {"ep": 2, "dp_replicate": 2, "pp": 2}, {"ep": 4, "dp_shard": 3, "tp": 2}]
)
def test_experts_are_laid_over_shards_context_and_tensor_ranks(degrees: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"layout\.ep is \d, and experts are laid over dp_shard x cp x tp = \d ranks"):
        Layout(**degrees)


def test_each_rank_has_coordinates_of_its_own_with_tp_innermost() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2, cp=3, tp=2, pp=2)
    places = [tuple(layout.coordinates(rank).items()) for rank in range(layout.world_size)]
    assert len(set(places)) == layout.world_size
    assert [dict(place)["tp"] for place in places[:3]] == [0, 1, 0]
    assert [dict(place)["pp"] for place in (places[0], places[23], places[24])] == [0, 0, 1]
    with pytest.raises(AssertionError):
        layout.coordinates(layout.world_size)


def test_a_layout_needs_no_torch() -> None:
    code = "import sys, rlloop.parallel.layout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
