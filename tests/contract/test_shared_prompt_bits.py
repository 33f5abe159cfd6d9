"""Prompts computed once: every logprob's bits are those of whole sequences, for all families."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlloop import SamplingParams, load_model
from rlloop.models import Model, RedrawRecord, RoutingRecord, ScoreRow, score
from rlloop.models.shared_prompts import why_not_shared
from rlloop.numerics.probe import same_bits
from tests.support.checkpoints import EVERY, make_checkpoint
from tests.support.image_models import FAMILIES, image, make_image_checkpoint, prompt_with

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
    assert (reads, trains) == (True, not model.indexed_layers())
    counts, kept = computed(model, monkeypatch), 2 * 128 + 64
    whole = scored(model)
    with torch.no_grad():
        assert scored(model) == whole
    assert scored(model, share=True) == whole
    assert [counts[0] - count for count in counts] == [0, kept, kept * trains]


def picture_rows() -> list[ScoreRow]:
    """Groups of 3, 2 and 2: an image across the end of what is shared, two images before it, and the first prompt with
    another image. Of 3 prompts 64, 128 and 64 tokens are shared."""
    rng, rows = np.random.default_rng(0), []

    def text(count: int) -> list[int]:
        return rng.integers(3, 90, count).tolist()

    begin, end = text(20), text(4)
    prompts = [
        prompt_with(begin, image(16, 14), end),
        prompt_with(text(1), image(12, 10, 1), text(70), image(4, 4, 2), text(30)),
        prompt_with(begin, image(16, 14, 3), end),
    ]
    for count, prompt in zip((3, 2, 2), prompts, strict=True):
        for _ in range(count):
            made, length = text(int(rng.integers(1, 30))), len(prompt)
            at, params = range(length, length + len(made)), SAMPLING[len(rows) % 3]
            rows.append(ScoreRow(prompt.token_ids + made, at, params, model_input=prompt.first(length)))
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_no_bit_differs_with_images(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_image_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    model, rows, seen = load_model(tmp_path, dtype="bfloat16"), picture_rows(), list[int]()
    counts, tower = computed(model, monkeypatch), model.visual
    assert tower is not None
    tower.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    whole = [each.detach() for each in score(model, rows)]
    with torch.no_grad():
        read = score(model, rows)
    trained = [each.detach() for each in score(model, rows, share=True)]
    assert all(same_bits(a, b) for made in (read, trained) for a, b in zip(made, whole, strict=True))
    assert [counts[0] - count for count in counts] == [0, 2 * 64 + 128 + 64, 2 * 64 + 128 + 64]
    assert seen == [4, 4, 4]  # each image once a forward
