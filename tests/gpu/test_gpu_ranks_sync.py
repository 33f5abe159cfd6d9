"""Versions encoded by several GPUs, each its share, have the bytes of one CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlloop.models import new_model, save_model
from rlloop.models.parameters import ParameterStore
from tests.support.gpu_models import need_gpus
from tests.support.gpu_runs import KINDS, SHARED
from tests.support.rank_versions import published, stored
from tests.support.ranks import run_ranks

# Wide enough that tensors are encoded on the device: above 2^19 elements.
WIDE = {**SHARED, "vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 1536}
PIECE = 1 << 18  # bytes
MODELS = {
    "dense": {**WIDE, **KINDS["dense"], "tie_word_embeddings": True},
    "mixture": {**WIDE, **KINDS["mixture"], "moe_intermediate_size": 256},
}
LAYOUTS: dict[int, dict[str, list[dict[str, int]]]] = {
    1: {"dense": [{}]},
    2: {
        "dense": [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}],
        "mixture": [{"dp_shard": 2, "ep": 2}, {"tp": 2}],
    },
    4: {
        "dense": [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}],
        "mixture": [{"dp_shard": 4, "ep": 4}, {"pp": 2, "dp_shard": 2, "ep": 2}],
    },
    8: {
        "dense": [{"dp_shard": 8}, {"dp_shard": 2, "tp": 4}],
        "mixture": [{"dp_shard": 8, "ep": 8}, {"pp": 2, "dp_shard": 4, "ep": 4}],
    },
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    for name, config in MODELS.items():
        model = new_model(config, seed=1, dtype="bfloat16")
        save_model(ParameterStore(model).snapshot(), folder / name, config=model.config)
    run_ranks(1, every, folder, {name: [{}] for name in MODELS}, "cpu")
    return folder


def every(folder: Path, cases: dict[str, list[dict[str, int]]], kind: str) -> list[Any]:
    """Publishes a few versions of each case in each layout; the names of tensors whose bits a rank keeps."""
    return [
        published(folder, case, layout, folder / f"{case} {layout} {kind}", range(5), kind=kind, piece=PIECE)
        for case, layouts in cases.items()
        for layout in layouts
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", LAYOUTS)
def test_gpus_store_the_bytes_of_one_cpu(alone: Path, size: int) -> None:
    need_gpus(size)
    run_ranks(size, every, alone, LAYOUTS[size], "cuda", kind="cuda")
    for case, layouts in LAYOUTS[size].items():
        for layout in layouts:
            assert stored(alone / f"{case} {layout} cuda") == stored(alone / f"{case} {{}} cpu"), (case, layout)
