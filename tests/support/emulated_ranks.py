"""Context-parallel ranks of which one has no token, over gloo, by kernels for GPUs (`test_interpreted_kernels`)."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.support.interpreted_kernels  # noqa: F401  in the ranks' processes, too
from tests.support.checkpoints import make_checkpoint
from tests.support.rank_context import FEW, compared, rows_of
from tests.support.ranks import run_ranks

RANKS = 3  # for two tokens: the last one is not read


def few(folder: Path) -> list[str]:
    return compared([folder], RANKS, batches=[rows_of(2, FEW)])


@pytest.mark.timeout(300)  # ranks that leave an exchange out wait for ever
@pytest.mark.parametrize("family", ["deepseek_v32", "qwen3_5_moe", "gpt_oss"])
def test_a_rank_without_tokens_takes_part_in_every_exchange(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path / family, family)
    for different in run_ranks(RANKS, few, tmp_path / family):
        assert not different
