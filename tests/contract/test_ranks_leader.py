"""An engine over ranks that is called on the first rank alone, as a server's: one rank's answers in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlloop import Engine, SamplingParams
from rlloop.models import Model
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.rollout.engine.leader import LeadingEngine, follow
from rlloop.types import Alternatives, Completion
from tests.support.rank_models import CPU, EXPERTS, model
from tests.support.ranks import run_ranks

TIED = {"tie_word_embeddings": True}
CASES = {
    "tp=2 ep=2": (Layout(tp=2, ep=2), EXPERTS),
    "pp=2": (Layout(pp=2), EXPERTS),
    "pp=2, tied": (Layout(pp=2), TIED),
    "tp=2 ep=2 pp=2": (Layout(tp=2, ep=2, pp=2), EXPERTS),
}
PROMPT = list(range(10, 30))


def alternatives(found: Alternatives | None) -> Any:
    return None if found is None else (found.token_ids.tolist(), found.logprobs.tobytes(), found.raw_logprobs.tobytes())


def seen(made: Completion) -> tuple[Any, ...]:
    experts = None if made.routed_experts is None else made.routed_experts.tolist()
    numbers = made.logprobs.tobytes(), made.raw_logprobs.tobytes()
    return made.token_ids, *numbers, experts, made.policy_version, made.finish_reason, alternatives(made.alternatives)


def answers(engine: Engine, weights: Model) -> list[Any]:
    """Of requests that come while others run, of some that are given up, of scores, and under further weights."""
    found: list[Any] = []
    for version in range(1, 3):
        first, second = (engine.add_request([5, 6, at], SamplingParams(max_tokens=9, seed=at)) for at in (7, 8))
        done = dict(engine.step())
        third = engine.add_request(PROMPT, SamplingParams(max_tokens=4, temperature=0.0), top_logprobs=3)
        done |= dict(engine.step())
        given_up = engine.abort(first)
        assert given_up is not None
        while engine.has_work:
            done |= dict(engine.step())
        found += [seen(given_up), seen(done[second]), seen(done[third])]
        scores = engine.score(PROMPT, 2)
        found.append((scores.logprobs.tobytes(), alternatives(scores.alternatives)))
        engine.add_request([9], SamplingParams(max_tokens=9, seed=1))
        engine.step()
        found += [seen(completion) for _, completion in engine.abort_all()]
        with torch.no_grad():
            for parameter in weights.parameters():
                parameter.mul_(1.25)
        engine.set_version(version)
    return found


def led(case: str) -> list[Any]:
    layout, config = CASES[case]
    context = join(CPU, layout)
    if context.rank:
        follow(Engine(model(context, config), page_size=8))
        return []
    whole = model(None, config)
    engine = LeadingEngine(model(context, config), weights=whole, page_size=8)
    found = answers(engine, whole)
    engine.close()
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_led_engine_answers_as_one_rank(case: str) -> None:
    layout, config = CASES[case]
    whole = model(None, config)
    expected = answers(Engine(whole, page_size=8), whole)
    assert expected[0] != expected[5]
    assert (expected[0][3] is not None) == (config is EXPERTS)
    assert run_ranks(layout.world_size, led, case)[0] == expected
