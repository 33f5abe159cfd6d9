"""Needles: a request's bits, alone and hidden among many, whatever the engine does around it.

"The same" means token ids equal and logprobs equal through their integer views.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlloop.models import Model, token_logprobs
from rlloop.numerics.profile import NumericsProfile
from rlloop.rollout.engine.engine import Engine
from rlloop.types import Completion
from tests.support.tiny_models import tiny_qwen3
from tests.support.traffic import NEEDLES, VOCABULARY, bits, traffic


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_qwen3(vocab_size=VOCABULARY)


@pytest.fixture(scope="module")
def hidden_among_many(model) -> list[Completion]:
    return Engine(model).generate(*traffic(96))


def test_the_traffic_is_worth_its_name(hidden_among_many):
    assert {c.finish_reason for c in hidden_among_many} == {"stop", "length"}
    assert sum(len(c.token_ids) for c in hidden_among_many) > 1200
    assert any((c.logprobs != c.raw_logprobs).any() for c in hidden_among_many)


@pytest.mark.parametrize("needle", NEEDLES)
def test_a_request_alone_has_the_bits_it_has_among_many(model, hidden_among_many, needle):
    prompts, sampling = traffic(96)
    (alone,) = Engine(model).generate([prompts[needle]], [sampling[needle]])
    assert bits(alone) == bits(hidden_among_many[needle])


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (96, {"page_size": 64}),
        (48, {"page_size": 1}),
        (96, {"page_size": 16, "prefix_caching": False}),
        (96, {"max_batch_tokens": 64}),
        (24, {"max_batch_tokens": 7, "page_size": 64}),
        (96, {"max_running": 5}),
        (24, {"max_batch_tokens": 64, "prefix_caching": False, "page_size": 1}),
    ],
    ids=lambda value: ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value),
)
def test_settings_leave_no_trace(model, hidden_among_many, count, settings):
    completions = Engine(model, **settings).generate(*traffic(count))
    assert [bits(c) for c in completions] == [bits(c) for c in hidden_among_many[:count]]


@pytest.mark.parametrize(("page_size", "max_cache_tokens"), [(1, 320), (4, 320), (16, 144)])
def test_preemption_and_resume_leave_no_trace(model, hidden_among_many, page_size, max_cache_tokens):
    engine = Engine(model, max_cache_tokens=max_cache_tokens, page_size=page_size, max_batch_tokens=64)
    completions = engine.generate(*traffic(48))
    assert engine.stats().preemptions > 1
    assert [bits(c) for c in completions] == [bits(c) for c in hidden_among_many[:48]]


def test_a_warm_prefix_cache_leaves_no_trace(model, hidden_among_many):
    engine = Engine(model)
    engine.generate(*traffic(48))
    before = engine.stats().cached_tokens
    completions = engine.generate(*traffic(48))
    assert engine.stats().cached_tokens > before
    assert [bits(c) for c in completions] == [bits(c) for c in hidden_among_many[:48]]


def test_order_and_time_of_arrival_leave_no_trace(model, hidden_among_many):
    prompts, sampling = traffic(48)
    engine, order, done = Engine(model, max_batch_tokens=128), np.random.default_rng(5).permutation(48).tolist(), {}
    ids = {}
    while order or engine.has_work:
        for index in order[:2]:
            ids[engine.add_request(prompts[index], sampling[index])] = index
        order = order[2:]
        done.update({ids[id]: completion for id, completion in engine.step()})
    assert [bits(done[index]) for index in range(48)] == [bits(c) for c in hidden_among_many[:48]]


def test_the_trainer_recomputes_the_engines_bits(model, hidden_among_many):
    sequences = [(c.prompt_ids, c.token_ids) for c in hidden_among_many]
    sampled = token_logprobs(model, sequences, sampling=[c.sampling for c in hidden_among_many])
    raw = token_logprobs(model, sequences)
    for completion, s, r in zip(hidden_among_many, sampled, raw, strict=True):
        assert completion.logprobs.tobytes() == s.detach().numpy().tobytes(), completion.sampling
        assert completion.raw_logprobs.tobytes() == r.detach().numpy().tobytes(), completion.sampling


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_leave_no_trace(model, hidden_among_many, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        completions = Engine(model).generate(*traffic(24))
    finally:
        torch.set_num_threads(before)
    assert [bits(c) for c in completions] == [bits(c) for c in hidden_among_many[:24]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_the_same_promises(dtype):
    model = tiny_qwen3(vocab_size=VOCABULARY, dtype=dtype)
    prompts, sampling = traffic(24)
    together = Engine(model).generate(prompts, sampling)
    again = Engine(model, max_batch_tokens=16, page_size=4, max_cache_tokens=320).generate(prompts, sampling)
    assert [bits(c) for c in together] == [bits(c) for c in again]
    scored = token_logprobs(model, [(c.prompt_ids, c.token_ids) for c in together], sampling=sampling)
    for completion, logprobs in zip(together, scored, strict=True):
        assert completion.logprobs.tobytes() == logprobs.detach().numpy().tobytes()


@pytest.mark.parametrize("op", ["linear", "attention"])
def test_a_stock_operation_breaks_the_needles(model, op):
    """The checks above can fail: PyTorch's own matrix product or attention is enough."""
    stock = model.with_profile(NumericsProfile(**{op: "stock"}))
    prompts, sampling = traffic(24)
    together = Engine(stock).generate(prompts, sampling)
    alone = [Engine(stock).generate([prompts[i]], [sampling[i]])[0] for i in NEEDLES[:3]]
    chunked = Engine(stock, max_batch_tokens=64, prefix_caching=False).generate(prompts, sampling)
    assert [bits(c) for c in together] != [bits(c) for c in chunked] or [bits(c) for c in alone] != [
        bits(together[i]) for i in NEEDLES[:3]
    ]
