"""The update does not know the number of ranks: 1, 2, 3 and 4 have the same bytes."""

from __future__ import annotations

from pathlib import Path

from tests.support.rank_updates import everything, relay
from tests.support.ranks import run_ranks


def test_any_number_of_ranks_reports_saves_and_publishes_the_same_bytes(tmp_path: Path) -> None:
    alone = {name.rpartition(" ")[0]: found for name, found in everything(tmp_path, 1).items()}
    for size in (2, 3, 4):
        for found in run_ranks(size, everything, tmp_path, size):
            for name, result in found.items():
                case = name[: name.index(" {")]
                assert result == alone[case], f"{name} of {size} ranks is not what one rank has"


def test_a_run_goes_on_with_the_same_bytes_on_other_ranks(tmp_path: Path) -> None:
    whole = relay(tmp_path / "whole", 1, 0, 6)
    run_ranks(4, relay, tmp_path / "cut", 4, 0, 2)
    run_ranks(3, relay, tmp_path / "cut", 3, 2, 4)
    assert relay(tmp_path / "cut", 1, 4, 6) == whole
