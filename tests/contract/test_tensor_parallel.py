"""Tensor parallelism: tokens, logprobs and gradients have one rank's bits. Every family at 3 ranks, whose shares are
uneven; at 2 and 4 a family of each kind of layer, of which the others are made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import EVERY, make_checkpoint
from tests.support.rank_cases import over_ranks, results
from tests.support.ranks import run_ranks

KINDS = {"float32": EVERY, "bfloat16": ("qwen3", "deepseek_v32")}
# Grouped queries; latents with an indexer; shared experts and linear attention; latent experts and a state; sinks
OF_LAYERS = [("qwen3", "bfloat16"), ("deepseek_v32", "bfloat16")]
OF_LAYERS += [(family, "float32") for family in ("qwen3", "qwen3_5_moe", "nemotron_h", "gpt_oss")]
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
    chosen = folders if sizes == (3,) else {name: folders[name] for name in OF_LAYERS}
    wanted = {name: value for name, value in alone.items() if tuple(name.split()[:2]) in chosen}
    for by_rank in zip(*run_ranks(processes, over_ranks, chosen, *sizes), strict=True):
        assert {name for found in by_rank for name in found} == wanted.keys()
        for found in by_rank:
            assert found
            assert [name for name, value in found.items() if value != wanted[name]] == []
