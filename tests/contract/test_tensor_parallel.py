"""Tensor parallelism: tokens, logprobs and gradients have one rank's bits in every family, at 2, 3 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import EVERY, make_checkpoint
from tests.support.rank_cases import over_ranks, results
from tests.support.ranks import run_ranks

KINDS = {"float32": EVERY, "bfloat16": ("qwen3", "deepseek_v32")}
Folders = dict[tuple[str, str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made = {}
    for dtype, families in KINDS.items():
        for family in families:
            folder = made[family, dtype] = tmp_path_factory.mktemp(family)
            make_checkpoint(
                folder, family, dtype=getattr(torch, dtype), tie_word_embeddings=family in ("llama", "qwen3")
            )
    return made


@pytest.fixture(scope="module")
def alone(folders: Folders) -> dict[str, bytes]:
    return results(folders, None)


@pytest.mark.parametrize(("processes", "sizes"), [(3, (3,)), (4, (2, 4))])
def test_every_family_has_one_ranks_bits(
    folders: Folders, alone: dict[str, bytes], processes: int, sizes: tuple[int, ...]
) -> None:
    for by_rank in zip(*run_ranks(processes, over_ranks, folders, *sizes), strict=True):
        assert {name for found in by_rank for name in found} == alone.keys()
        for found in by_rank:
            assert found
            assert [name for name, value in found.items() if value != alone[name]] == []
