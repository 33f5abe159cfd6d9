"""Prompts with positions and contents of their own: the engine's bits are the trainer's, and caches keep them apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlloop.errors import ConfigError
from rlloop.models.scoring import token_logprobs
from rlloop.rollout import Engine
from rlloop.types import ContentSpan, ModelInput, SamplingParams
from tests.support.tiny_models import tiny_qwen3
from tests.support.traffic import VOCABULARY, bits

IDS = [3 + index % 40 for index in range(45)]
SAMPLING = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
STEPPED = ModelInput(IDS, positions=np.repeat(np.arange(15), 3))  # three tokens at each position
AHEAD = ModelInput(IDS, positions=np.arange(45) + 20)


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3(vocab_size=VOCABULARY)


@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 7}, {"page_size": 4, "max_cache_tokens": 64}], ids=str)
def test_positions_are_data_and_give_the_bits_of_the_trainers_scoring(model, settings):
    prompts = [STEPPED, IDS, AHEAD, ModelInput.from_ids(IDS)]
    engine = Engine(model, **settings)
    completions = engine.generate(prompts, SAMPLING)
    scored = token_logprobs(
        model, [(prompt, made.token_ids) for prompt, made in zip(prompts, completions, strict=True)]
    )
    for made, logprobs in zip(completions, scored, strict=True):
        assert made.raw_logprobs.tobytes() == logprobs.detach().numpy().tobytes()
    assert [made.model_input for made in completions] == [STEPPED, None, AHEAD, None]
    assert bits(completions[1]) == bits(completions[3])
    assert completions[0].raw_logprobs.tobytes() != completions[1].raw_logprobs.tobytes()  # positions do matter
    again = engine.generate(prompts, SAMPLING)  # with a warm cache
    assert [bits(made) for made in again] == [bits(made) for made in completions]
    assert engine.score(AHEAD).logprobs.tobytes() == Engine(model).score(AHEAD).logprobs.tobytes()


def cached(engine: Engine, prompt: ModelInput | list[int]) -> int:
    before = engine.stats().cached_tokens
    engine.generate([prompt], SAMPLING)
    return engine.stats().cached_tokens - before


def test_equal_placeholders_of_other_contents_share_no_page(model):
    engine = Engine(model, page_size=8)
    image = ModelInput(IDS, contents=(ContentSpan(10, 20, "first"),))
    other = replace(image, contents=(ContentSpan(10, 20, "second"),))
    assert cached(engine, image) == 0
    assert cached(engine, image) == len(IDS) - 1
    assert cached(engine, other) == 8  # the page before the image
    assert cached(engine, IDS) == 8


def test_positions_of_their_own_share_no_page_with_the_text(model):
    engine = Engine(model, page_size=8)
    assert [cached(engine, prompt) for prompt in (IDS, AHEAD, IDS, AHEAD)] == [0, 0, 44, 44]


def test_a_prompt_whose_positions_the_model_has_not_is_refused(model):
    far = ModelInput(IDS, positions=np.arange(45) + model.max_positions - 50)
    with pytest.raises(ConfigError, match=f"reaches position {model.max_positions + 6}; the model has"):
        Engine(model).generate([far], SAMPLING)


@pytest.mark.parametrize("settings", [{}, {"max_batch_tokens": 7}])
def test_a_prompt_of_all_the_models_positions_is_read(model, settings):
    prompt, engine = [3 + index % 40 for index in range(model.max_positions)], Engine(model, **settings)
    assert engine.prefill_logprobs([prompt])[0].tobytes() == engine.score(prompt).logprobs.tobytes()
    with pytest.raises(ConfigError, match=f"of {len(prompt) + 1} tokens"):
        engine.prefill_logprobs([[*prompt, 3]])
