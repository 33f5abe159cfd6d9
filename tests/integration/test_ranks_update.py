"""The update does not know the number of ranks: 1, 2, 3 and 4 have the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_updates import LAYOUTS, PLAIN, everything, relay
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = everything(tmp_path_factory.mktemp("alone"), LAYOUTS[1])
    return {name.removesuffix(" {}"): result for name, result in found.items()}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_report_save_and_publish_the_bytes_of_one(alone: dict[str, Any], tmp_path: Path, size: int) -> None:
    for found in run_ranks(size, everything, tmp_path, LAYOUTS[size]):
        assert found
        for name, result in found.items():
            assert result == alone[name[: name.index(" {")]], f"{name}, of {size} ranks, is not what one rank has"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "four", "three"),
    [
        (PLAIN, {"dp_shard": 2, "dp_replicate": 2, "layers": 1, "small": 0}, {"dp_shard": 3, "small": 512}),
        (["dense bfloat16"], {"pp": 2, "dp_shard": 2}, {"dp_replicate": 3}),
        (["experts bfloat16"], {"dp_shard": 4, "ep": 4}, {"dp_shard": 3, "ep": 3}),
    ],
    ids=["data", "stages", "experts"],
)
def test_a_run_goes_on_with_the_same_bytes_on_other_ranks(
    tmp_path: Path, cases: Sequence[str], four: dict[str, int], three: dict[str, int]
) -> None:
    """Twenty steps: stopped on four ranks, then on three; and from four ranks to one."""
    whole = relay(tmp_path / "whole", cases, {}, 0, 20)
    run_ranks(4, relay, tmp_path / "cut", cases, four, 0, 7)
    run_ranks(3, relay, tmp_path / "cut", cases, three, 7, 14)
    assert relay(tmp_path / "cut", cases, {}, 14, 20) == whole
    assert relay(tmp_path / "cut", cases, {}, 7, 20) == whole
