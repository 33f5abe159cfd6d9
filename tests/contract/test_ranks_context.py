"""Context parallelism: forwards have one rank's bits; updates repeat their bits, and are close to one rank's.
`tests/integration/test_ranks_adapters_context.py` has adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from rlloop.numerics.profile import NumericsProfile
from rlloop.trainer import gradients
from tests.support.checkpoints import make_checkpoint
from tests.support.rank_context import compared
from tests.support.rank_updates import CASES, go, ranked, save
from tests.support.ranks import run_ranks

# By number of ranks. Recurrent layers have 2 key heads, which several ranks read where they are more.
FAMILIES = {
    2: ("qwen3_5_moe", "nemotron_h", "deepseek_v32"),  # gated delta networks; Mamba-2; an indexer
    3: ("qwen3_5_moe", "nemotron_h", "glm_moe_dsa"),  # an indexer whose choice the next layer reads as well
    4: ("qwen3", "deepseek_v3", "gpt_oss", "nemotron_h"),  # shared key-value heads; latents; sinks, windows
}
UPDATES = (
    ("untied", {"cp": 2, "dp_shard": 2}),
    ("experts bfloat16", {"cp": 2, "dp_shard": 2, "ep": 4}),
    ("delta", {"cp": 2, "dp_shard": 2}),
    ("mamba", {"cp": 2, "dp_shard": 2, "ep": 4}),
    ("indexer", {"cp": 2, "pp": 2}),
)


@pytest.mark.parametrize("degree", FAMILIES)
def test_forwards_over_ranks_have_one_ranks_bits(tmp_path: Path, degree: int) -> None:
    folders = [tmp_path / family for family in FAMILIES[degree]]
    for folder in folders:
        make_checkpoint(folder, folder.name)
    for different in run_ranks(degree, compared, folders, degree):
        assert not different


def test_attention_over_expanded_latents_is_divided_too(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "deepseek_v3", "deepseek_v3")
    profile = NumericsProfile(latent="expanded")
    for different in run_ranks(2, compared, [tmp_path / "deepseek_v3"], 2, "float32", (), 1e-4, None, profile):
        assert not different


def reported_by(folder: Path, case: str, layout: dict[str, int]) -> list[Any]:
    trainer = ranked(CASES[case], layout)
    return [*go(trainer, CASES[case], range(2)), save(trainer, folder / f"{case} {layout}")]


def updated(folder: Path) -> list[Any]:
    """The second run gathers gradients in pieces of some hundreds of numbers."""
    found = []
    for case, layout in UPDATES:
        runs = [reported_by(folder, case, layout)]
        with patch.object(gradients, "IN_FLIGHT", 2001):
            runs.append(reported_by(folder, case, layout))
        assert list(map(repr, runs[0])) == list(map(repr, runs[1])), f"{case}: two runs of one layout differ"
        found.append((repr(runs[0][0][0]), runs[0][2]["loss/grad_norm"]))
    return found


def test_updates_repeat_and_are_close_to_one_ranks(tmp_path: Path) -> None:
    wanted = []
    for case, _ in UPDATES:
        reported = list(go(ranked(CASES[case], {}), CASES[case], range(2)))
        wanted.append((repr(reported[0][0]), reported[2]["loss/grad_norm"]))
    for found in run_ranks(4, updated, tmp_path):
        for (logprobs, norm), (one, its_norm) in zip(found, wanted, strict=True):
            assert logprobs == one
            assert abs(norm - its_norm) < 1e-2 * its_norm
