"""Requests that begin alike start from a saved state of the recurrent layers, with the bits of those that do not."""

from __future__ import annotations

import numpy as np
import pytest

from rlloop.models import Model, new_model
from rlloop.rollout.engine.engine import Engine
from rlloop.rollout.engine.kv_cache import PagedCache
from rlloop.rollout.engine.saved_states import SavedStates
from rlloop.types import SamplingParams
from tests.support.planted_faults import DELTA, MAMBA
from tests.support.traffic import bits

PROMPT = np.random.default_rng(0).integers(3, 900, 30).tolist()
OTHER = [*PROMPT[:17], 5, 6]
PROMPTS = [*[PROMPT] * 3, OTHER, PROMPT[:9], [7], PROMPT[:16], OTHER]
SAMPLING = [SamplingParams(max_tokens=6, seed=i, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=["delta", "mamba"])
def model(request) -> Model:
    return new_model({"delta": DELTA, "mamba": MAMBA}[request.param], seed=0)


def made(engine: Engine) -> list:
    return [bits(completion) for completion in engine.generate(PROMPTS, SAMPLING)]


def test_a_group_computes_its_prompt_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = made(Engine(model, prefix_caching=False))
    engine = Engine(model, page_size=8)
    assert made(engine) == alone
    first = 24 + 24 + 16 + 8  # of two of the three, of the repeated one, and of the one with 16 tokens
    assert engine.stats().cached_tokens == first
    before = engine.stats().cached_tokens
    assert made(engine) == alone
    assert engine.stats().cached_tokens - before == 3 * 24 + 2 * 16 + 8 + 8
    engine.set_version(1)
    before = engine.stats().cached_tokens
    assert made(engine) == alone
    assert engine.stats().cached_tokens - before == first
    chunks = Engine(model, page_size=8, max_batch_tokens=7)
    assert made(chunks) == alone
    assert chunks.stats().cached_tokens == first
    monkeypatch.setattr(PagedCache, "copy_states", lambda *_: None)
    assert made(Engine(model, page_size=8)) != alone


def test_few_rows_blocks_and_states_leave_no_trace(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = made(Engine(model, prefix_caching=False))
    tight = Engine(model, page_size=8, max_cache_tokens=72, max_batch_tokens=40)
    assert made(tight) == alone
    assert tight.stats().cached_tokens > 0
    monkeypatch.setattr("rlloop.rollout.engine.engine.SAVED_STATES", 1)
    assert made(Engine(model, page_size=8)) == alone
    assert made(Engine(model, page_size=8, max_running=1)) == alone


def test_the_longest_unused_state_gives_way_and_who_leaves_is_not_waited_for() -> None:
    states = SavedStates(4, 2)
    for row, name in enumerate((b"a", b"b", b"c")):
        states.expect(row, 8, name)
    assert states.longest([b"x", b"a"]) is None
    assert [states.save(0), states.save(1)] == [4, 5]
    assert states.longest([b"x", b"a", b"y"]) == 2
    assert states.row(b"a") == 4
    assert states.save(2) == 5  # of b, since a was read
    assert states.longest([b"b"]) == 0
    states.expect(3, 8, b"d")
    assert states.longest([b"a", b"d"]) is None
    states.leave(3)
    assert states.longest([b"a", b"d"]) == 1
    states.forget()
    assert states.longest([b"a"]) == 0


def test_a_step_with_more_prompts_than_places_saves_one_state_in_each(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[3 + i, *PROMPT[1:20]] for i in range(8)]
    sampling = [SamplingParams(max_tokens=4, seed=i, ignore_eos=True) for i in range(8)]
    alone = [bits(each) for each in Engine(model, prefix_caching=False).generate(prompts, sampling)]
    monkeypatch.setattr("rlloop.rollout.engine.engine.SAVED_STATES", 3)
    copy = PagedCache.copy_states

    def to_different_places(cache: PagedCache, pairs: tuple[tuple[int, int], ...]) -> None:
        assert len({to for _, to in pairs}) == len(pairs)
        copy(cache, pairs)

    monkeypatch.setattr(PagedCache, "copy_states", to_different_places)
    engine = Engine(model, page_size=8)
    for _ in range(2):
        assert [bits(each) for each in engine.generate(prompts, sampling)] == alone
    assert engine.stats().cached_tokens > 0
