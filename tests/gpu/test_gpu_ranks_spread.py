"""Experts and layers over 2 and 4 GPUs: the bits of one, with CUDA graphs and NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlloop import Engine
from rlloop.models import new_model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from tests.support.gpu_models import CONFIG, TEN_EXPERTS, need_gpus
from tests.support.rank_updates import CASES, digests_of, go, ranked, save
from tests.support.ranks import run_ranks
from tests.support.traffic import bits, traffic

SAMPLED: dict[int, list[dict[str, int]]] = {
    2: [{"pp": 2}, {"tp": 2, "ep": 2}],
    4: [{"tp": 4, "ep": 4}, {"pp": 2, "tp": 2}, {"tp": 4, "ep": 2}],
}
TRAINED: dict[int, dict[str, list[dict[str, int]]]] = {
    2: {"dense bfloat16": [{"pp": 2}], "experts bfloat16": [{"dp_shard": 2, "ep": 2}, {"pp": 2}]},
    4: {
        "dense bfloat16": [{"pp": 2, "dp_shard": 2}],
        "experts bfloat16": [{"dp_shard": 4, "ep": 4}, {"dp_shard": 4, "ep": 2}, {"pp": 2, "dp_shard": 2, "ep": 2}],
    },
}


def sampled(layouts: list[dict[str, int]]) -> list[Any]:
    found, device = [], torch.device("cuda", torch.cuda.current_device())
    for layout in layouts:
        context = join(device, Layout(**layout))
        engine = Engine(new_model({**CONFIG, **TEN_EXPERTS}, seed=0, dtype="bfloat16", context=context))
        found.append([bits(each) for each in engine.generate(*traffic(48))])
    return found


def trained(folder: Path, cases: dict[str, list[dict[str, int]]]) -> list[Any]:
    found = []
    for case, layouts in cases.items():
        for layout in layouts:
            trainer = ranked(CASES[case], layout, f"cuda:{torch.cuda.current_device()}")
            reported = digests_of(go(trainer, CASES[case], range(3)))
            found.append((reported, save(trainer, folder / f"{case} {layout}")))
    return found


@pytest.mark.parametrize("size", SAMPLED)
def test_engines_over_gpus_draw_the_tokens_of_one(size: int) -> None:
    need_gpus(size)
    (wanted,) = sampled([{}])
    for found in run_ranks(size, sampled, SAMPLED[size], kind="cuda"):
        assert found == [wanted] * len(SAMPLED[size])


@pytest.mark.parametrize("size", TRAINED)
def test_updates_over_gpus_have_the_bytes_of_one(tmp_path: Path, size: int) -> None:
    need_gpus(size)
    alone = trained(tmp_path, {case: [{}] for case in TRAINED[size]})
    wanted = [one for one, layouts in zip(alone, TRAINED[size].values(), strict=True) for _ in layouts]
    for found in run_ranks(size, trained, tmp_path, TRAINED[size], kind="cuda"):
        assert found == wanted
