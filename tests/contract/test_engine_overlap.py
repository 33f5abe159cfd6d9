"""Steps that begin before the last one's tokens are known, as on a GPU, leave no trace in a completion.

In place of CUDA graphs stands something with their two methods that compute the step at once.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rlloop.models import Model, load_model
from rlloop.models.routing_record import RoutingRecord
from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from rlloop.rollout.engine.engine import Engine
from rlloop.rollout.engine.graphs import packed
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.engine.step_tokens import StepTokens
from rlloop.types import Completion, Part, PromptScores, SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.image_models import image, make_image_checkpoint, prompt_with
from tests.support.tiny_models import tiny_qwen3
from tests.support.traffic import VOCABULARY, bits, traffic


class AtOnce:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.steps = engine, 0

    def logits(self, tokens: Tensor, adapters: None, inputs: StepTokens, rows: np.ndarray) -> Tensor:
        assert adapters is None
        assert inputs.positions.shape == inputs.slots.shape  # graphs have room for one position a token
        engine, self.steps = self.engine, self.steps + 1
        at, engine._cache.slots = torch.from_numpy(inputs.positions), torch.from_numpy(inputs.slots)
        layout = AttentionLayout(
            query_start=torch.arange(len(tokens) + 1), context=torch.from_numpy(inputs.index),
            block_start=torch.from_numpy(inputs.block_start), block_size=engine.page_size, contiguous=False,
        )  # fmt: skip
        routes = None if engine._choices is None else RoutingRecord()
        hidden = engine.model.hidden(tokens, at, layout, engine._cache, routes=routes)
        if engine._choices is not None and routes is not None:
            engine._choices.write(engine._cache.slots, routes)
        return engine.model.ops.logits(hidden, engine.model.head)

    def draw(
        self, tokens: Tensor, adapters: None, inputs: StepTokens, rows: np.ndarray, seeds: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        logits, after = self.logits(tokens, adapters, inputs, rows), torch.from_numpy(inputs.index) + 1
        made = self.engine.model.ops.sample(logits, LogitsProcessing(), torch.from_numpy(seeds), after)
        return made[0], packed(*made)

    def hidden(self, *_: object) -> None:
        """Records no step with prompts."""

    def check_weights(self) -> None:
        """Keeps nothing of the weights."""


def overlapping(model: Model, **settings) -> Engine:
    engine = Engine(model, **settings)
    engine._graphs = AtOnce(engine)  # pyright: ignore[reportAttributeAccessIssue]
    return engine


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_qwen3(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def plain(model) -> list[Completion]:
    return Engine(model).generate(*traffic(48))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_running": 5},
        {"max_batch_tokens": 7, "page_size": 64},
        {"max_cache_tokens": 144, "max_batch_tokens": 64},
        {"prefix_caching": False, "page_size": 1},
    ],
    ids=str,
)
def test_completions_are_those_of_one_step_at_a_time(model, plain, settings):
    engine = overlapping(model, **settings)
    for _ in range(2):  # the second time with a warm prefix cache
        assert [bits(c) for c in engine.generate(*traffic(48))] == [bits(c) for c in plain]
    assert not engine.has_work


def test_the_next_step_begins_before_the_last_one_is_known(model):
    engine = overlapping(model)
    for prompt, sampling in zip(*traffic(6), strict=True):
        engine.add_request(prompt, sampling)
    engine.step()
    assert engine.stats().steps == 1
    assert engine._flight is not None


def test_requests_end_with_what_they_have_while_a_step_is_in_flight(model, plain):
    engine = overlapping(model)
    ids = [engine.add_request(prompt, sampling) for prompt, sampling in zip(*traffic(48), strict=True)]
    made: dict[int, Completion] = {}
    while len(made) < 20:
        made.update(engine.step())
    first = next(id for id in ids if id not in made)
    aborted = engine.abort(first)
    assert aborted is not None
    made[first] = aborted
    made.update(engine.abort_all())
    assert not engine.has_work
    assert sorted(made) == ids
    for id, whole in zip(ids, plain, strict=True):
        tokens = made[id].token_ids
        assert tokens == whole.token_ids[: len(tokens)]
        assert made[id].logprobs.tobytes() == whole.logprobs[: len(tokens)].tobytes()
        assert (made[id].finish_reason == "abort") or len(tokens) == len(whole.token_ids)
    engine.set_version(1)
    assert [bits(c) for c in engine.generate(*traffic(48))] == [bits(c) for c in plain]


def test_choices_of_experts_come_with_a_request_that_ended_meanwhile(tmp_path):
    make_checkpoint(tmp_path, "qwen3_moe")
    model, sampling = load_model(tmp_path), SamplingParams(max_tokens=24, seed=3, stop_token_ids=tuple(range(3, 12)))
    prompts = [[5 + i, 7, 9 + i] for i in range(12)]
    expected, made = Engine(model).generate(prompts, sampling), overlapping(model).generate(prompts, sampling)
    assert len({len(c.token_ids) for c in expected}) > 2
    for a, b in zip(expected, made, strict=True):
        assert bits(a) == bits(b)
        assert a.routed_experts is not None
        assert b.routed_experts is not None
        assert a.routed_experts.tobytes() == b.routed_experts.tobytes()


@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 7}, {"max_running": 2, "page_size": 4}], ids=str)
def test_prompts_with_images_are_decoded_by_graphs_beside_texts(tmp_path, settings):
    make_image_checkpoint(tmp_path, "qwen3_vl_moe")
    model, sampling = load_model(tmp_path), SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    text = list(range(5, 12))
    prompts = [
        prompt_with(text, image(4, 8, 0), text),
        text,
        prompt_with(image(12, 10, 1)),
        prompt_with(text[:2], image(2, 2, 2)),
    ]
    engine = overlapping(model, **settings)
    for made in (engine.generate(prompts, sampling), engine.generate(prompts, sampling)):
        assert [bits(c) for c in made] == [bits(c) for c in Engine(model).generate(prompts, sampling)]
    assert engine._graphs.steps >= 20  # of some 24 or more


@pytest.mark.parametrize("top", [0, 4])
def test_what_is_made_so_far_has_nothing_of_the_step_in_flight(model, plain, top):
    engine, ahead = overlapping(model), 0
    prompts, sampling = traffic(48)
    ids = [engine.add_request(*each, top_logprobs=top) for each in zip(prompts, sampling, strict=True)]
    told: dict[int, list[Part]] = {id: [] for id in ids}
    made: dict[int, Completion] = {}
    while engine.has_work:
        made.update(engine.step())
        ahead += engine._flight is not None
        for id in ids:
            told[id].append(engine.so_far(id, sum(len(part.token_ids) for part in told[id])))
            assert len(told[id][-1].token_ids) <= 1
    assert ahead > 10
    for id, whole in zip(ids, plain, strict=True):
        rest = made[id].part(sum(len(part.token_ids) for part in told[id]))
        parts = [part for part in [*told[id], rest] if part.token_ids]
        assert len(rest.token_ids) <= 1
        assert bits(made[id]) == bits(whole)
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert np.concatenate([part.logprobs for part in parts]).tobytes() == whole.logprobs.tobytes()
        beside = made[id].alternatives
        if not top:
            assert beside is None
            continue
        assert beside is not None
        assert beside.token_ids.shape == (len(whole.token_ids), top)
        place, column = np.nonzero(beside.token_ids == np.array(whole.token_ids)[:, None])
        assert beside.logprobs[place, column].tobytes() == whole.logprobs[place].tobytes()
        told_beside = [part.alternatives.token_ids for part in parts if part.alternatives is not None]
        assert np.concatenate(told_beside).tobytes() == beside.token_ids.tobytes()


def test_a_listener_ends_requests_while_a_step_is_in_flight(model, plain):
    class Ear:
        def scored(self, index: int, scores: PromptScores) -> None: ...

        def made(self, index: int, part: Part) -> int | None:
            counts[index] = counts.get(index, 0) + len(part.token_ids)
            return 1 + index % 7 if counts[index] > index % 7 else None  # when one ends, others get two at once

        def finished(self, index: int, completion: Completion) -> None: ...

    counts: dict[int, int] = {}
    service = EngineService(overlapping(model))
    made = service.submit(*traffic(48), listener=Ear()).result(120)
    service.close()
    for index, (part, whole) in enumerate(zip(made, plain, strict=True)):
        count = len(part.token_ids)
        assert count <= 1 + index % 7
        assert part.token_ids == whole.token_ids[:count]
        assert part.logprobs.tobytes() == whole.logprobs[:count].tobytes()
        assert part.finish_reason == ("stop" if count < len(whole.token_ids) else part.finish_reason)
    assert sum(len(part.token_ids) < len(whole.token_ids) for part, whole in zip(made, plain, strict=True)) > 20
