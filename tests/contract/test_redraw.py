"""Draws made again: every token that an engine made, from the trainer's path, the request's seed and nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlloop.errors import ConfigError
from rlloop.models import Model, ScoreRow, redraw
from rlloop.rollout.engine.engine import Engine
from rlloop.types import Completion, SamplingParams
from tests.support.tiny_models import tiny_qwen3
from tests.support.traffic import traffic


def row_of(completion: Completion) -> ScoreRow:
    start = len(completion.prompt_ids)
    written = [start + place for place in completion.written]
    return ScoreRow([*completion.prompt_ids, *completion.token_ids], written, completion.sampling)


def own(row: ScoreRow) -> list[int]:
    return [row.token_ids[at] for at in row.predict]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def made(request: pytest.FixtureRequest) -> tuple[Model, list[Completion]]:
    model = tiny_qwen3(dtype=request.param)
    return model, Engine(model, page_size=4, max_batch_tokens=100).generate(*traffic(60))


def test_every_token_is_drawn_again_and_logprobs_have_the_engines_bits(made: tuple[Model, list[Completion]]) -> None:
    model, completions = made
    rows = [row_of(each) for each in completions]
    found = redraw(model, rows, max_tokens=500)
    assert [each.token_ids.tolist() for each in found] == [each.token_ids for each in completions]
    for mine, theirs in zip(found, completions, strict=True):
        assert np.array_equal(mine.logprobs.view(np.int32), theirs.logprobs.view(np.int32))
        assert np.array_equal(mine.raw_logprobs.view(np.int32), theirs.raw_logprobs.view(np.int32))
    (alone,) = redraw(model, rows[7:8])
    assert np.array_equal(alone.token_ids, found[7].token_ids)


@pytest.mark.parametrize(
    "claimed",
    [{"seed": 5}, {"temperature": 0.9}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.3}],
    ids=str,
)
def test_a_draw_under_other_parameters_than_it_claims_is_seen(claimed: dict[str, float]) -> None:
    model = tiny_qwen3()
    honest = [SamplingParams(max_tokens=24, seed=seed) for seed in range(8)]
    completions = Engine(model).generate([[5, 6, 7]] * 8, honest)
    rows = [
        row_of(dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, **claimed)))
        for each in completions
    ]
    assert any(own(row) != each.token_ids.tolist() for row, each in zip(rows, redraw(model, rows), strict=True))


def test_each_turn_of_a_conversation_is_drawn_as_its_engine_drew_it() -> None:
    model, params = tiny_qwen3(), SamplingParams(max_tokens=6, min_tokens=4, temperature=0.8, top_p=0.9, seed=3)
    engine, ids, written = Engine(model), [5, 6, 7], list[int]()
    for said in ([40, 41], [50], [60, 61, 62]):
        (turn,) = engine.generate([ids], params)
        written += range(len(ids), len(ids) + len(turn.token_ids))
        ids = [*ids, *turn.token_ids, *said]
    row = ScoreRow(ids, written, params)
    assert redraw(model, [row])[0].token_ids.tolist() == own(row)


def test_rows_without_a_token_or_a_seed() -> None:
    model = tiny_qwen3()
    with pytest.raises(ConfigError, match="sequence 1 names no seed"):
        redraw(model, [ScoreRow([5, 6], [1], SamplingParams(max_tokens=1, seed=1)), ScoreRow([5, 6], [1])])
    nothing, one = redraw(model, [ScoreRow([5, 6], []), ScoreRow([5, 6], [1], SamplingParams(max_tokens=1, seed=1))])
    assert (len(nothing.token_ids), len(one.token_ids)) == (0, 1)
