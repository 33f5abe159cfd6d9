"""Updates under tensor parallelism have one rank's bytes: all that is reported, what is saved, and the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_updates import everything
from tests.support.ranks import run_ranks

CASES = ("dense", "untied", "reference", "custom", "experts bfloat16", "indexer")  # of 2 query heads, 1 key-value head
LAYOUTS = {2: [{"tp": 2}], 4: [{"tp": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2, "ep": 4}]}


@pytest.mark.slow
@pytest.mark.parametrize("size", LAYOUTS)
def test_tensor_parallel_ranks_train_alike(tmp_path: Path, size: int) -> None:
    (found,) = run_ranks(1, everything, tmp_path / "alone", 1, CASES)
    alone = {name.removesuffix(" {}"): result for name, result in found.items()}
    for layout in LAYOUTS[size]:
        names = [name for name in CASES if "ep" not in layout or name in ("experts bfloat16", "indexer")]
        for found in run_ranks(size, everything, tmp_path, size, names, [layout]):
            assert len(found) == len(names)
            for name, result in found.items():
                assert result == alone[name[: name.index(" {")]], f"{name}, of {size} ranks, is not what one rank has"
