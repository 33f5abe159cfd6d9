"""Experts and layers over 2, 4 and 8 GPUs: the bits of one, with CUDA graphs and NCCL."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlloop import Engine
from rlloop.models import new_model
from rlloop.parallel.context import ParallelContext, join
from rlloop.parallel.layout import Layout
from tests.support.gpu_models import CONFIG, TEN_EXPERTS, need_gpus
from tests.support.rank_updates import CASES, MIXTURE, Case, digests_of, go, live, ranked, save
from tests.support.ranks import in_shares, run_ranks
from tests.support.traffic import bits, traffic

SAMPLED: dict[int, list[dict[str, int]]] = {
    2: [{"pp": 2}, {"tp": 2, "ep": 2}],
    4: [{"tp": 4, "ep": 4}, {"pp": 2, "tp": 2}, {"tp": 4, "ep": 2}],
    8: [{"tp": 8}, {"tp": 8, "ep": 8}, {"pp": 2, "tp": 4}],  # ten experts over eight
}
TRAINED: dict[int, dict[str, list[dict[str, int]]]] = {
    2: {"dense bfloat16": [{"pp": 2}], "experts bfloat16": [{"dp_shard": 2, "ep": 2}, {"pp": 2}]},
    4: {
        "dense bfloat16": [{"pp": 2, "dp_shard": 2}],
        "experts bfloat16": [{"dp_shard": 4, "ep": 4}, {"dp_shard": 4, "ep": 2}, {"pp": 2, "dp_shard": 2, "ep": 2}],
    },
    8: {
        "dense bfloat16": [{"pp": 2, "dp_shard": 4}],
        "ten experts": [{"dp_shard": 8, "ep": 8}, {"pp": 2, "dp_shard": 4, "ep": 4}],
    },
}
EVERY = {**CASES, "ten experts": Case({**MIXTURE, "n_routed_experts": 10}, "bfloat16", {"balance_coef": 0.1})}
FEW: dict[int, list[dict[str, int]]] = {2: [{"tp": 2}], 4: [{"tp": 4}]}  # GPUs have no expert, or one
SPARSE = {"num_experts": 1, "num_experts_per_tok": 1}


def sampled(layout: dict[str, int] | None = None, **sizes: int) -> list[Any]:
    """In a layout, or on this GPU alone."""
    device = torch.device("cuda", torch.cuda.current_device())
    context = ParallelContext(device) if layout is None else join(device, Layout(**layout))
    engine = Engine(new_model({**CONFIG, **TEN_EXPERTS, **sizes}, seed=0, dtype="bfloat16", context=context))
    return [bits(each) for each in engine.generate(*traffic(48))]


def compared(layouts: list[dict[str, int]], **sizes: int) -> list[str]:
    """Layouts in which an engine draws other tokens than on one GPU."""
    wanted = in_shares({"alone": partial(sampled, **sizes)})["alone"]
    return [str(layout) for layout in layouts if sampled(layout, **sizes) != wanted]


def few_trained(layouts: list[dict[str, int]]) -> list[str]:
    """Digests of three updates and of the weights after them, of a model with fewer experts than ranks."""
    sizes = {"n_routed_experts": 1, "num_experts_per_tok": 1, "num_attention_heads": 4}
    case = Case({**MIXTURE, **sizes}, "bfloat16", {"balance_coef": 0.1})
    found = []
    for layout in layouts:
        trainer = ranked(case, layout, f"cuda:{torch.cuda.current_device()}")
        found.append(digests_of([*go(trainer, case, range(3)), live(trainer)]))
    return found


def trained(folder: Path, cases: dict[str, list[dict[str, int]]]) -> list[Any]:
    found = []
    for case, layouts in cases.items():
        for layout in layouts:
            trainer = ranked(EVERY[case], layout, f"cuda:{torch.cuda.current_device()}")
            reported = digests_of(go(trainer, EVERY[case], range(3)))
            found.append((reported, save(trainer, folder / f"{case} {layout}")))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", SAMPLED)
def test_engines_over_gpus_draw_the_tokens_of_one(size: int) -> None:
    need_gpus(size)
    for rank, different in enumerate(run_ranks(size, compared, SAMPLED[size], kind="cuda")):
        assert not different, f"rank {rank}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", TRAINED)
def test_updates_over_gpus_have_the_bytes_of_one(tmp_path: Path, size: int) -> None:
    need_gpus(size)
    [alone] = run_ranks(1, trained, tmp_path, {case: [{}] for case in TRAINED[size]}, kind="cuda")
    wanted = [one for one, layouts in zip(alone, TRAINED[size].values(), strict=True) for _ in layouts]
    for found in run_ranks(size, trained, tmp_path, TRAINED[size], kind="cuda"):
        assert found == wanted


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", FEW)
def test_gpus_without_an_expert_draw_the_tokens_of_one(size: int) -> None:
    need_gpus(size)
    for rank, different in enumerate(run_ranks(size, partial(compared, **SPARSE), FEW[size], kind="cuda")):
        assert not different, f"rank {rank}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", FEW)
def test_updates_of_gpus_without_an_expert_repeat(size: int) -> None:
    """Under tp cuBLAS sums a part of a gradient's columns as it likes: over two GPUs these have one GPU's bytes, which
    more need not have."""
    need_gpus(size)
    first, *others = [each for _ in range(2) for each in run_ranks(size, few_trained, FEW[size], kind="cuda")]
    assert all(each == first for each in others)
    if size == 2:
        assert run_ranks(1, few_trained, [{}], kind="cuda") == [first]
