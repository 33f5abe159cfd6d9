"""The update does not know the number of ranks: 1, 2, 3 and 4 have the same bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_updates import LAYOUTS, everything, relay
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


def test_a_run_goes_on_with_the_same_bytes_on_other_ranks(tmp_path: Path) -> None:
    whole = relay(tmp_path / "whole", 1, 0, 6)
    run_ranks(4, relay, tmp_path / "cut", 4, 0, 2)
    run_ranks(3, relay, tmp_path / "cut", 3, 2, 4)
    assert relay(tmp_path / "cut", 1, 4, 6) == whole
