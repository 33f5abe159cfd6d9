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
    "delta",
    "mamba",
)  # of 2 query heads, 1 key-value head
EXPERTS = ("experts bfloat16", "indexer", "delta", "mamba")
LAYOUTS = [  # each with cases that it can do otherwise than the ones before it
    ({"tp": 2}, CASES),
    ({"tp": 2, "dp_shard": 2}, ("untied", "indexer")),
    ({"dp_shard": 2, "tp": 2, "ep": 4}, EXPERTS),
]


BLOCKS = ("reference", "untied", "adapter bfloat16")  # whose layers are made again


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


@pytest.mark.slow
def test_mlps_in_blocks_of_rows_have_one_rank_s_bytes(tmp_path: Path) -> None:
    found = everything(tmp_path / "alone", [({"rows": 7}, BLOCKS)])
    alone = {name[: name.index(" {")]: result for name, result in found.items()}
    whole = everything(tmp_path / "whole", [({"rows": 30}, BLOCKS)])
    assert whole["reference {'rows': 30}"][2] != alone["reference"][2], "other sums"
    layouts = [({"tp": 2, "rows": 7}, BLOCKS), ({"dp_shard": 2, "layers": 1, "rows": 7}, BLOCKS)]
    for found in run_ranks(2, everything, tmp_path, layouts):
        assert {name: alone[name[: name.index(" {")]] for name in found} == found
