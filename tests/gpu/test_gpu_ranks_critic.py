"""PPO's critic over several GPUs has one GPU's bytes: values, metrics, and what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu_models import need_gpus
from tests.support.rank_critics import trained
from tests.support.ranks import run_ranks

LAYOUTS: dict[int, list[tuple[str, dict[str, int]]]] = {
    1: [("dense", {}), ("experts", {})],
    2: [
        ("dense", {"dp_replicate": 2}), ("dense", {"tp": 2}), ("experts", {"dp_shard": 2}),
        ("experts", {"dp_shard": 2, "ep": 2}),
    ],
    4: [("dense", {"dp_shard": 4}), ("experts", {"dp_shard": 4, "ep": 4})],
}  # fmt: skip


def everything(folder: Path, size: int) -> list[Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    return [trained(folder, *each, device) for each in LAYOUTS[size]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 4])
def test_a_critic_over_gpus_is_one_gpus(tmp_path: Path, size: int) -> None:
    need_gpus(size)
    [found] = run_ranks(1, everything, tmp_path / "alone", 1, kind="cuda")
    alone = {name: result for (name, _), result in zip(LAYOUTS[1], found, strict=True)}
    for found in run_ranks(size, everything, tmp_path / "ranks", size, kind="cuda"):
        different = [each for each, result in zip(LAYOUTS[size], found, strict=True) if result != alone[each[0]]]
        assert not different
