"""Updates with experts, layers or sequences spread over ranks have the bytes of one rank's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_updates import everything
from tests.support.ranks import run_ranks

EXPERTS = {
    3: [{"dp_shard": 3, "ep": 3}],
    4: [{"dp_shard": 4, "ep": 2}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}],
}


@pytest.mark.parametrize("size", EXPERTS)
def test_experts_over_ranks_train_alike(tmp_path: Path, size: int) -> None:
    (alone,) = everything(tmp_path / "alone", 1, ["experts bfloat16"]).values()
    for found in run_ranks(size, everything, tmp_path, size, ["experts bfloat16"], EXPERTS[size]):
        for name, result in found.items():
            assert result == alone, name
