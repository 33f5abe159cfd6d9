"""Every family learns: a few sequences by heart, router and experts included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.checkpoints import EVERY, make_checkpoint
from tests.support.family_checks import memorise


@pytest.mark.parametrize("family", EVERY)
def test_a_few_sequences_are_learned_by_heart(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family)
    losses, moved = memorise(tmp_path)
    assert losses[0] > 3
    assert losses[-1] < 0.01
    choices = {name for name in moved if "indexer" in name or "e_score" in name}
    assert all(moved[name] == 0 for name in choices)
    assert all(distance > 1e-3 for name, distance in moved.items() if name not in choices)
