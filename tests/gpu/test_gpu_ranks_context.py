"""Context parallelism on GPUs: forwards have one GPU's bits; gradients are close to one GPU's, and updates repeat."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu_mixtures import FAMILIES, RECURRENT, SIZES
from tests.support.gpu_models import CONFIG, need_gpus
from tests.support.rank_context import compared, rows_of
from tests.support.rank_updates import Case, digests_of, go, live, ranked, save
from tests.support.ranks import in_shares, run_ranks

LENGTHS = (300, 17, 1025)  # more than a window, a part of a scan, a tile
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": CONFIG,  # 2 key-value heads
    **{
        family: {**SIZES, "model_type": family.partition(" ")[0], **{**FAMILIES, **RECURRENT}[family]}
        for family in (
            "deepseek_v3 of real widths", "deepseek_v32", "glm_moe_dsa", "qwen3_5_moe_text", "nemotron_h", "gpt_oss",
        )
    },
}  # fmt: skip
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}  # relative: of a weight's gradient, by its norm
UNCUT = (8, "qwen3_5_moe_text")  # ranks split a recurrent layer's heads, of which it has four
FEW = 4  # the seed of three tokens whose terms do not cancel in decay gradients, as those of others do
UPDATES: dict[int, dict[str, dict[str, int]]] = {  # by number of GPUs: shapes, and a layout of each
    2: {"qwen3": {"cp": 2}, "qwen3_5_moe_text": {"cp": 2}, "nemotron_h": {"cp": 2, "ep": 2}, "glm_moe_dsa": {"cp": 2},
        "gpt_oss": {"cp": 2}},
    4: {"qwen3_5_moe_text": {"cp": 2, "dp_shard": 2}, "nemotron_h": {"cp": 4},
        "deepseek_v3 of real widths": {"cp": 2, "pp": 2}},
    8: {"qwen3": {"cp": 8}, "nemotron_h": {"cp": 4, "ep": 4, "dp_shard": 2}},
}  # fmt: skip


def types_of(degree: int) -> list[str]:
    """float32's kernels take longest to compile, and cuts of the context are the same in both types."""
    return list(TOLERANCE) if degree == 2 else ["bfloat16"]


def compared_here(name: str, dtype: str, degree: int) -> list[str]:
    batches = [rows_of(0, LENGTHS), rows_of(FEW, (3,))]
    return compared({name: SHAPES[name]}, degree, dtype, (), TOLERANCE[dtype], batches, device="cuda")


def compiled(degree: int) -> None:
    """The kernels of one GPU, which the comparisons find on the disk."""
    in_shares({f"{n} {t}": partial(compared_here, n, t, 1) for n in SHAPES for t in types_of(degree)})


@pytest.fixture(scope="module")
def prepared() -> set[int]:
    """Numbers of GPUs for which kernels are compiled."""
    return set()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("degree", "name"), [(n, name) for n in (2, 3, 4, 8) for name in SHAPES if (n, name) != UNCUT])
def test_contexts_over_gpus_have_the_bits_of_one(degree: int, name: str, prepared: set[int]) -> None:
    need_gpus(degree)
    if degree not in prepared:
        run_ranks(degree, compiled, degree, kind="cuda")
        prepared.add(degree)
    for dtype in types_of(degree):
        for rank, different in enumerate(run_ranks(degree, compared_here, name, dtype, degree, kind="cuda")):
            assert not different, f"rank {rank}, {dtype}"


def updated(folder: Path, size: int, device: str = "cuda") -> list[str]:
    """Shapes and layouts of which two runs differ."""
    different = []
    for name, layout in UPDATES[size].items():
        case, runs = Case(SHAPES[name], "bfloat16", {"checkpoint_layers": "all"}), []
        for run in range(2):
            trainer = ranked(case, layout, device if device == "cpu" else f"cuda:{torch.cuda.current_device()}")
            reported = digests_of(go(trainer, case, range(case.steps)))
            runs.append((reported, save(trainer, folder / f"{name} {layout} {run}"), live(trainer)))
        if runs[0] != runs[1]:
            different.append(f"{name} {layout}")
    return different


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", UPDATES)
def test_updates_over_gpus_repeat(tmp_path: Path, size: int) -> None:
    need_gpus(size)
    for rank, different in enumerate(run_ranks(size, updated, tmp_path, size, kind="cuda")):
        assert not different, f"rank {rank}"
