"""Updates under tensor parallelism have one rank's bytes: all that is reported, what is saved, and the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rank_updates import everything
from tests.support.ranks import run_ranks

CASES = (
    "dense",
    "untied",
    "reference",
    "custom",
    "experts bfloat16",
    "indexer",
    "shared prompts",
)  # of 2 query heads, 1 key-value head
EXPERTS = ("experts bfloat16", "indexer")
LAYOUTS = [  # each with cases that it can do otherwise than the ones before it
    ({"tp": 2}, CASES),
    ({"tp": 2, "dp_shard": 2}, ("untied", "indexer")),
    ({"dp_shard": 2, "tp": 2, "ep": 4}, EXPERTS),
]


@pytest.mark.slow
def test_tensor_parallel_ranks_train_alike(tmp_path: Path) -> None:
    found = everything(tmp_path / "alone", [({}, CASES)])
    alone = {name.removesuffix(" {}"): result for name, result in found.items()}
    for layout, names in LAYOUTS:
        size = 4 if "dp_shard" in layout else 2
        for found in run_ranks(size, everything, tmp_path, [(layout, names)]):
            assert len(found) == len(names)
            for name, result in found.items():
                assert result == alone[name[: name.index(" {")]], f"{name}, of {size} ranks, is not what one rank has"
