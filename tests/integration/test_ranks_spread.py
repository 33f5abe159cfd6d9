"""Updates and engines with experts or layers spread over ranks have the bytes of one rank's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlloop import Engine, SamplingParams, load_model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from tests.support.checkpoints import make_checkpoint
from tests.support.rank_updates import CASES, digests_of, go, ranked, save
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
TRAINED = {  # by number of ranks: a case, and layouts
    2: {"dense bfloat16": [{"pp": 2}], "experts bfloat16": [{"pp": 2}], "delta": [{"pp": 2}],
        "mamba": [{"pp": 2}, {"dp_shard": 2, "ep": 2, "layers": 1}]},
    3: {"experts bfloat16": [{"dp_shard": 3, "ep": 3}], "delta": [{"dp_shard": 3, "ep": 3}]},
    4: {
        "dense bfloat16": [{"pp": 2, "dp_shard": 2}],
        "experts bfloat16": [{"dp_shard": 4, "ep": 2}, {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
                             {"pp": 2, "dp_shard": 2, "ep": 2}],
        "mamba": [{"pp": 2, "dp_shard": 2, "ep": 2}],
    },
}  # fmt: skip
LONG = {
    2: {"dense bfloat16": [{"dp_shard": 2}, {"pp": 2}],
        "experts bfloat16": [{"dp_shard": 2}, {"dp_shard": 2, "ep": 2}, {"pp": 2}]},
    3: {"dense bfloat16": [{"dp_shard": 3}], "experts bfloat16": [{"dp_shard": 3}]},
    4: {"dense bfloat16": [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"pp": 2, "dp_shard": 2}],
        "experts bfloat16": [{"dp_replicate": 2, "dp_shard": 2, "layers": 1}, {"dp_shard": 4, "ep": 4},
                             {"pp": 2, "dp_shard": 2, "ep": 2}]},
}  # fmt: skip
SAMPLED = {2: [{"pp": 2}], 4: [{"pp": 2, "tp": 2}, {"tp": 4, "ep": 4}]}
FAMILIES = ("qwen3_moe", "nemotron_h")
PROMPTS = [[5, 7, 9, 11], [4, 6], [8] * 9]
SAMPLING = [SamplingParams(max_tokens=6, seed=seed, temperature=0.7 + 0.3 * seed) for seed in range(3)]


def trained(folder: Path, case: str, layout: dict[str, int], steps: int = 3) -> tuple[str, dict[str, str]]:
    """Digests of what a few updates report, and of what is saved then."""
    trainer = ranked(CASES[case], layout)
    reported = digests_of(go(trainer, CASES[case], range(steps)))
    return reported, save(trainer, folder / f"{case} {layout}")


def all_trained(folder: Path, cases: dict[str, list[dict[str, int]]], steps: int = 3) -> list[Any]:
    return [trained(folder, case, layout, steps) for case, layouts in cases.items() for layout in layouts]


@pytest.mark.parametrize("size", TRAINED)
def test_updates_over_ranks_have_the_bytes_of_one(tmp_path: Path, size: int) -> None:
    alone = {case: trained(tmp_path, case, {}) for case in TRAINED[size]}
    wanted = [alone[case] for case, layouts in TRAINED[size].items() for _ in layouts]
    for found in run_ranks(size, all_trained, tmp_path, TRAINED[size]):
        assert found == wanted


@pytest.mark.slow
def test_twenty_updates_over_ranks_have_the_bytes_of_one(tmp_path: Path) -> None:
    alone = {case: trained(tmp_path, case, {}, steps=20) for case in LONG[2]}
    for case in alone:
        weights = load_file(tmp_path / f"{case} {{}}" / "model.safetensors").values()
        assert all(weight.isfinite().all() for weight in weights)
    for size, cases in LONG.items():
        wanted = [alone[case] for case, layouts in cases.items() for _ in layouts]
        for found in run_ranks(size, all_trained, tmp_path, cases, 20):
            assert found == wanted, f"{size} ranks"


def sampled(folders: list[Path], layouts: list[dict[str, int]]) -> list[list[Any]]:
    """Tokens, logprobs and choices of an engine, for each model and layout."""
    found = []
    for folder in folders:
        for layout in layouts:
            model = load_model(folder, context=join(CPU, Layout(**layout)))
            made = Engine(model, max_cache_tokens=512).generate(PROMPTS, SAMPLING)
            arrays = [(each.logprobs, each.raw_logprobs, each.routed_experts) for each in made]
            kept = [[None if x is None else np.ascontiguousarray(x).tobytes() for x in each] for each in arrays]
            found.append([[each.token_ids for each in made], kept])
    return found


@pytest.mark.parametrize("size", SAMPLED)
def test_engines_over_ranks_draw_the_tokens_of_one(tmp_path: Path, size: int) -> None:
    folders = [tmp_path / family for family in FAMILIES]
    for folder in folders:
        make_checkpoint(folder, folder.name)
    wanted = [alone for alone in sampled(folders, [{}]) for _ in SAMPLED[size]]
    for found in run_ranks(size, sampled, folders, SAMPLED[size]):
        assert found == wanted
