"""Weights of past versions where ranks have pieces of them (`trainer.shard=parameters`): one rank's bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlloop.trainer import Trainer
from rlloop.trainer.history import Sharded, WeightHistory
from rlloop.types import Completion, Example, RewardResult, Sample, SamplingParams
from tests.support.rank_updates import CASES, digests, digests_of, go, live, ranked
from tests.support.ranks import run_ranks
from tests.support.train_sequences import VOCAB

NAMES = ("dense", "dense bfloat16", "experts")  # masters that are the rows themselves, and others
LAYOUTS: dict[int, list[dict[str, int]]] = {
    2: [{"dp_shard": 2, "layers": 1}, {"tp": 2}],
    3: [{"dp_shard": 3, "layers": 1}],
}


def samples() -> list[Sample]:
    """Of three versions, one of them in the middle of a completion; fewer micro-batches than ranks of one version."""
    found, random = [], np.random.default_rng(0)
    for index, versions in enumerate([[0] * 6, [0, 0, 1], [1] * 9, [1, 1, 1, 2], [2] * 5, [0] * 11]):
        prompt, count = random.integers(3, VOCAB, 2 + index).tolist(), len(versions)
        zeros, ids = np.zeros(count, np.float32), random.integers(3, VOCAB, count).tolist()
        made = Completion(
            prompt, ids, zeros, zeros, versions[0], "stop", SamplingParams(max_tokens=16, seed=index),
            versions=tuple(versions), version_spans=tuple((at, at + 1) for at in range(count)),
        )  # fmt: skip
        found.append(Sample(f"{index}", Example(f"{index}", prompt, "", {}), made, "", RewardResult(0.0), 0, 0.0))
    return found


def history_of(trainer: Trainer) -> WeightHistory:
    past = None if trainer.sharded is None else Sharded(trainer.model, trainer.sharded)
    return WeightHistory(trainer.model, 2, 40, trainer.moe, past=past)


def compared(trainer: Trainer, history: WeightHistory) -> str:
    found = history.recompute(samples())
    arrays = [found.logprobs, found.raw_logprobs, found.redrawn]
    assert None not in (found.raw_logprobs, found.redrawn)
    return digests_of([tuple(x.tobytes() for x in each) for each in arrays if each is not None])


def kept(folder: Path, name: str, layout: dict[str, int]) -> tuple[Any, ...]:
    """Digests of tokens under three versions, of the weights and of the history's file; then of tokens under restored
    versions, and of what training reports afterwards."""
    trainer, place = ranked(CASES[name], layout), folder / f"{name} {layout}"
    place.mkdir(parents=True, exist_ok=True)
    history = history_of(trainer)
    for version in range(3):
        history.remember(version)
        list(go(trainer, CASES[name], [0]))
    first, weights = compared(trainer, history), live(trainer)
    history.save(place)
    world = trainer.model.context.ranks("world")
    saved = world.broadcast_object(digests(place) if world.rank == 0 else None)
    resumed = history_of(trainer)
    resumed.restore(place)
    return first, weights, saved, compared(trainer, resumed), digests_of(go(trainer, CASES[name], [2]))


def everything(folder: Path, size: int) -> list[Any]:
    return [(name, layout, kept(folder, name, layout)) for layout in LAYOUTS[size] for name in NAMES]


@pytest.mark.parametrize("size", LAYOUTS)
def test_tokens_under_past_weights_are_one_ranks(tmp_path: Path, size: int) -> None:
    alone = {name: kept(tmp_path / "alone", name, {}) for name in NAMES}
    assert all(first == again for first, _, _, again, _ in alone.values())
    for found in run_ranks(size, everything, tmp_path, size):
        for name, layout, result in found:
            assert result == alone[name], (name, layout)
