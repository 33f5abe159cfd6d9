"""Checks of an engine's completions against its request, one violation at a time."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from rlloop.parity.asked import Vocabulary, fault_of
from rlloop.types import Completion, SamplingParams

EOS, KNOWN = 2, Vocabulary(size=10, eos_token_ids=(2,))
ASKED = SamplingParams(max_tokens=4, min_tokens=1, seed=7, stop_token_ids=(9,))


def made(token_ids: list[int], reason: str, sampling: SamplingParams = ASKED, **changed: Any) -> Completion:
    zeros = np.zeros(len(token_ids), np.float32)
    whole = Completion([5, 6], token_ids, zeros, zeros, 0, reason, sampling)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(whole, **changed)


@pytest.mark.parametrize(
    ("token_ids", "reason", "asked"),
    [
        ([3, 4, EOS], "stop", ASKED),
        ([3, 9], "stop", ASKED),
        ([3, 4, 3, EOS], "stop", ASKED),
        ([3, 4, 3, 4], "length", ASKED),
        ([3, 4, 3, EOS], "length", ASKED),
        ([3, EOS, 3, 4], "length", dataclasses.replace(ASKED, ignore_eos=True)),
        ([3, EOS, 9], "stop", dataclasses.replace(ASKED, ignore_eos=True)),
        ([3], "abort", ASKED),
    ],
)
def test_what_was_asked_for_has_no_fault(token_ids: list[int], reason: str, asked: SamplingParams) -> None:
    assert fault_of(made(token_ids, reason, asked), [5, 6], asked, KNOWN) is None


def test_an_engine_draws_the_seed_that_it_was_not_given() -> None:
    assert fault_of(made([3, EOS], "stop"), [5, 6], dataclasses.replace(ASKED, seed=None), KNOWN) is None


@pytest.mark.parametrize(
    ("completion", "named"),
    [
        (made([3, EOS], "stop", prompt_ids=[5, 7]), r"its prompt is \[5, 7\], and was asked for as \[5, 6\]"),
        (made([3, EOS], "stop", dataclasses.replace(ASKED, seed=8)), "seed=8, and asked for with seed=7"),
        (made([3, EOS], "stop", dataclasses.replace(ASKED, temperature=0.5)), "temperature=0.5"),
        (made([3, EOS], "stop", dataclasses.replace(ASKED, max_tokens=3)), "max_tokens=3"),
        (made([3, 10, EOS], "stop"), "token id 10 is not in the vocabulary"),
        (made([3, -1, EOS], "stop"), "token id -1"),
        (made([3, 4, 3, 4, EOS], "stop"), "5 tokens, and max_tokens is 4"),
        (made([EOS], "stop"), r"token 0 \(id 2\) ends a completion, and min_tokens is 1"),
        (made([3, EOS, 4, EOS], "stop"), r"token 1 \(id 2\) ends a completion, and 2 more follow"),
        (made([3, 4], "stop"), "finish_reason is stop, and its last token is 4"),
        (made([], "stop"), "finish_reason is stop, and it has no token"),
        (made([3, 4, 3], "length"), "length after 3 tokens, and max_tokens is 4"),
    ],
    ids=lambda value: "" if isinstance(value, Completion) else value[:30],
)
def test_each_departure_is_named(completion: Completion, named: str) -> None:
    assert re.search(named, fault_of(completion, [5, 6], ASKED, KNOWN) or "nothing")


def test_the_models_end_of_sequence_stops_nothing_that_ignores_it() -> None:
    asked = dataclasses.replace(ASKED, ignore_eos=True)
    assert "what ends it is 9" in (fault_of(made([3, EOS], "stop", asked), [5, 6], asked, KNOWN) or "")
