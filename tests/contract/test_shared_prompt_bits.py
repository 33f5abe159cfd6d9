"""Prompts computed once: every logprob's bits are those of whole sequences, for all families."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlloop import SamplingParams, load_model
from rlloop.models import Model, RedrawRecord, RoutingRecord, ScoreRow, score
from rlloop.models.shared_prompts import why_not_shared
from tests.support.checkpoints import EVERY, RECURRENT, make_checkpoint

SAMPLING = [
    None,
    SamplingParams(max_tokens=60, seed=3, temperature=0.7, top_p=0.9),
    SamplingParams(max_tokens=60, temperature=0.0),
]


def rows_of(seed: int = 0) -> list[ScoreRow]:
    """Groups of 3, 1, 2 and 2: prompts of several tiles, of one, of one token too few, and too short to share."""
    rng, rows = np.random.default_rng(seed), []
    for count, length in ((3, 140), (1, 70), (2, 65), (2, 64), (2, 9)):
        prompt = rng.integers(3, 97, length).tolist()
        for _ in range(count):
            made = rng.integers(3, 97, int(rng.integers(1, 40))).tolist()
            at = range(length, length + len(made))
            rows.append(ScoreRow(prompt + made, at if len(made) < 9 else [*at[:3], *at[5:]], SAMPLING[len(rows) % 3]))
    return rows


def computed(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of tokens of each forward."""
    counts, hidden = list[int](), model.hidden
    monkeypatch.setattr(
        model, "hidden", lambda tokens, *args, **more: (counts.append(len(tokens)), hidden(tokens, *args, **more))[1]
    )
    return counts


def scored(model: Model, **options: bool) -> tuple[list[bytes], list[bytes]]:
    """Bits of logprobs, entropies, raw logprobs and redraws; and the recorded choices."""
    record, choices = RedrawRecord(), list[bytes]()

    def watch(routes: RoutingRecord, _: list[ScoreRow]) -> None:
        choices.extend(x.numpy().tobytes() for x in (routes.chosen(), routes.selected()) if x is not None)

    made = (*score(model, rows_of(), watch=watch, record=record, **options), record.raw_logprobs, record.token_ids)
    return [x.detach().numpy().tobytes() for x in made], choices


@pytest.mark.parametrize("family", EVERY)
def test_no_bit_differs(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    model = load_model(tmp_path, dtype="bfloat16")
    reads, trains = (why_not_shared(model, trains=trains) is None for trains in (False, True))
    assert (reads, trains) == (family not in RECURRENT, family not in RECURRENT and not model.indexed_layers())
    counts, kept = computed(model, monkeypatch), 2 * 128 + 64
    whole = scored(model)
    with torch.no_grad():
        assert scored(model) == whole
    assert scored(model, share=True) == whole
    assert [counts[0] - count for count in counts] == [0, kept * reads, kept * trains]
