"""Model inputs: positions, what follows, and the keys that caches tell them apart by."""

from __future__ import annotations

import numpy as np
import pytest

import rlloop
from rlloop.errors import ConfigError
from rlloop.inputs import Image
from rlloop.types import ContentSpan, ModelInput, SamplingParams, as_model_input, changed


def test_a_list_is_a_text_at_the_usual_positions() -> None:
    text = as_model_input([4, 6, 8])
    assert text == rlloop.ModelInput.from_ids([4, 6, 8])
    assert as_model_input(text) is text
    assert (text.token_ids, len(text), text.positions, text.contents) == ([4, 6, 8], 3, None, ())
    assert text.positions_at(1, 5).tolist() == [1, 2, 3, 4]
    assert text.content_key(0, 9) == b""


def test_a_changed_record_is_a_copy_as_replace_makes_it() -> None:
    settings = SamplingParams(max_tokens=4, temperature=0.5)
    assert changed(settings, seed=3) == SamplingParams(max_tokens=4, temperature=0.5, seed=3)
    assert settings.seed is None


def test_tokens_that_follow_go_on_from_the_largest_position() -> None:
    one = ModelInput([4, 6, 8], np.array([0, 7, 3]))
    assert one.positions_at(0, 5).tolist() == [0, 7, 3, 8, 9]
    assert one.positions_at(1, 3).tolist() == [7, 3]
    assert one.positions_at(4, 6).tolist() == [9, 10]
    three = ModelInput([4, 6], np.array([[0, 1], [0, 5], [0, 2]]))
    assert three.positions_at(1, 4).tolist() == [[1, 6, 7], [5, 6, 7], [2, 6, 7]]


def test_a_key_says_what_ids_do_not() -> None:
    spans = (ContentSpan(1, 3, "a"), ContentSpan(5, 6, "b"))
    ids = [0, 9, 9, 0, 0, 9]
    keys = [
        ModelInput(ids, contents=spans).content_key(0, 4),
        ModelInput(ids, contents=(ContentSpan(1, 3, "c"), spans[1])).content_key(0, 4),
        ModelInput(ids, contents=(ContentSpan(1, 2, "a"), spans[1])).content_key(0, 4),
        ModelInput(ids, np.arange(6)[::-1], spans).content_key(0, 4),
        ModelInput(ids, np.stack([np.arange(6)] * 2), spans).content_key(0, 4),
    ]
    assert len(set(keys)) == len(keys)
    assert ModelInput(ids, contents=(spans[0], ContentSpan(5, 6, "z"))).content_key(0, 4) == keys[0]
    assert ModelInput(ids, contents=spans).content_key(2, 6) != ModelInput(ids, contents=spans[1:]).content_key(2, 6)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (np.arange(2), r"int64 \[2\]; it must be whole numbers, \[3\] or \[axes, 3\]"),
        (np.zeros((3, 2), np.int64), r"\[3, 2\]"),
        (np.zeros((1, 1, 3), np.int64), r"\[1, 1, 3\]"),
        (np.zeros(3), "float64"),
        (np.array([0, -1, 2]), "has -1; positions begin at 0"),
        (np.array([0, 1, 2**64 - 1], np.uint64), "has 18446744073709551615; positions begin at 0"),
    ],
)
def test_positions_that_fit_no_token_are_refused(positions: np.ndarray, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelInput([1, 2, 3], positions)


@pytest.mark.parametrize("spans", [[(0, 4)], [(2, 1)], [(1, 3), (2, 3)], [(-1, 2)]])
def test_spans_outside_the_tokens_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match="spans must ascend within the 3 tokens"):
        ModelInput([1, 2, 3], contents=tuple(ContentSpan(*each, "x") for each in spans))


def test_a_picture_at_many_places_costs_the_places_and_not_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    image, count, made = Image(np.zeros((16, 8), np.float32), 4, 4), 500, list[int]()
    arange = np.arange
    monkeypatch.setattr(np, "arange", lambda *ends: made.append(len(result := arange(*ends))) or result)
    placed = ModelInput.with_images(
        [1, 7, 7, 7, 7, 2] * count, [6 * n + 1 + k for n in range(count) for k in range(4)], [image] * count
    )
    assert sum(made) < 4 * len(placed)
    each = np.array([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])  # time, rows, columns
    assert placed.positions is not None
    assert (placed.positions.reshape(3, count, 6) == each[:, None] + 4 * arange(count)[:, None]).all()


def test_a_key_has_the_contents_that_its_tokens_meet() -> None:
    spans = [ContentSpan(start, end, f"{start}-{end}") for start, end in ((0, 2), (2, 2), (2, 3), (5, 8), (8, 9))]
    model_input = ModelInput([1] * 10, contents=tuple(spans))
    for begin in range(10):
        for end in range(begin + 1, 11):
            met = {each.digest for each in spans if each.start < end and begin < each.end}
            key = model_input.content_key(begin, end)
            assert {each.digest for each in spans if f"'{each.digest}'".encode() in key} == met
