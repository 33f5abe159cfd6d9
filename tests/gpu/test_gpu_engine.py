"""Needles on CUDA: what the engine samples has the bits of the same request alone, and of the trainer at every update.

The traffic is that of the CPU's tests.
"""

import numpy as np
import pytest
import torch

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import ScoreRow, redraw, token_logprobs
from rlloop.numerics.profile import NumericsProfile
from rlloop.rollout.engine.engine import Engine
from rlloop.trainer import Trainer
from rlloop.types import SamplingParams
from tests.support.gpu_models import dense_model as model_of
from tests.support.samples import as_sample, different
from tests.support.traffic import NEEDLES, bits, traffic

TYPES = ["bfloat16", "float32", "float16"]


@pytest.fixture(scope="module", params=TYPES)
def model(request):
    return model_of(request.param)


@pytest.fixture(scope="module")
def hidden_among_many(model):
    return Engine(model).generate(*traffic(96))


def test_a_request_alone_has_the_bits_it_has_among_many(model, hidden_among_many):
    prompts, sampling = traffic(96)
    for needle in NEEDLES:
        (alone,) = Engine(model).generate([prompts[needle]], [sampling[needle]])
        assert bits(alone) == bits(hidden_among_many[needle])


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (96, {"page_size": 64}),
        (48, {"page_size": 1}),
        (96, {"max_batch_tokens": 64, "prefix_caching": False}),
        (24, {"max_batch_tokens": 7, "page_size": 64}),
        (96, {"max_running": 5}),
        (48, {"max_cache_tokens": 144, "max_batch_tokens": 64}),
    ],
)
def test_settings_leave_no_trace(model, hidden_among_many, count, settings):
    completions = Engine(model, **settings).generate(*traffic(count))
    assert [bits(c) for c in completions] == [bits(c) for c in hidden_among_many[:count]]


def test_prompts_beside_decoding_are_replayed(model, hidden_among_many):
    engine = Engine(model, max_running=5)
    for _ in range(2):
        assert [bits(c) for c in engine.generate(*traffic(96))] == [bits(c) for c in hidden_among_many]
    assert engine._graphs is not None
    assert sum(form.tokens > 0 for form in engine._graphs._recorded) >= 3


def test_the_trainer_recomputes_the_engines_bits(model, hidden_among_many):
    sequences = [(c.prompt_ids, c.token_ids) for c in hidden_among_many]
    samplings = [c.sampling for c in hidden_among_many]
    for max_tokens in (None, 500):
        sampled = token_logprobs(model, sequences, sampling=samplings, max_tokens=max_tokens)
        raw = token_logprobs(model, sequences, max_tokens=max_tokens)
        for completion, s, r in zip(hidden_among_many, sampled, raw, strict=True):
            assert completion.logprobs.tobytes() == s.detach().cpu().numpy().tobytes(), completion.sampling
            assert completion.raw_logprobs.tobytes() == r.detach().cpu().numpy().tobytes(), completion.sampling


def test_the_trainer_draws_the_engines_tokens_again(model, hidden_among_many):
    rows = [
        ScoreRow(c.prompt_ids + c.token_ids, [len(c.prompt_ids) + at for at in c.written], c.sampling)
        for c in hidden_among_many
    ]
    found = redraw(model, rows, max_tokens=3000)
    assert [(f.token_ids.tolist(), f.logprobs.view(np.int32).tolist(), f.raw_logprobs.view(np.int32).tolist())
            for f in found] == [bits(c) for c in hidden_among_many]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
def test_trainer_equals_engine_before_and_after_every_update(dtype):
    model = model_of(dtype)
    engine, trainer = Engine(model), Trainer(model, TrainerConfig(lr=3e-3, max_batch_tokens=1500))
    rng = np.random.default_rng(0)
    for step in range(3):
        prompts, sampling = traffic(48)
        made = engine.generate(prompts, sampling)
        samples = [as_sample(i, c, float(rng.normal())) for i, c in enumerate(made)]
        result = trainer.forward_backward(samples, get_loss("grpo"))
        assert sum(map(len, result.logprobs)) > 500
        assert different(samples, result.logprobs) == 0
        assert [ids.tolist() for ids in result.recomputed.redrawn] == [each.token_ids for each in made]
        raw = [array.tobytes() for array in result.recomputed.raw_logprobs]
        assert raw == [each.raw_logprobs.tobytes() for each in made]
        assert trainer.optim_step()["loss/grad_norm"] > 0
        assert different(samples, trainer.logprobs(samples)) > 50  # the weights, and so the engine's, have moved
        engine.set_version(step + 1)


def test_as_many_requests_as_a_vendor_s_product_takes():
    """Steps of 256 and 128 rows are graphs in which cuBLAS does what it does with our bits."""
    from rlloop.numerics.kernels.triton.multi_linear import as_one

    model = model_of("bfloat16", hidden_size=1024, intermediate_size=3072, num_hidden_layers=2, head_dim=128)
    for name, layer in model.named_modules():
        if name.endswith("self_attn"):
            assert as_one([each.weight for each in (layer.q_proj, layer.k_proj, layer.v_proj)]) is not None
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 5000, int(rng.integers(4, 40))).tolist() for _ in range(256)]
    sampling = [SamplingParams(12 if i % 2 else 24, seed=i, ignore_eos=True) for i in range(256)]
    made = Engine(model).generate(prompts, sampling)
    scored = token_logprobs(model, [(c.prompt_ids, c.token_ids) for c in made])
    for completion, logprobs in zip(made, scored, strict=True):
        assert completion.logprobs.tobytes() == logprobs.detach().cpu().numpy().tobytes()
    for i in (0, 1, 255):
        (alone,) = Engine(model).generate([prompts[i]], [sampling[i]])
        assert bits(alone) == bits(made[i])


def test_long_contexts_are_decoded_as_they_are_trained():
    model = model_of("bfloat16")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 5000, n).tolist() for n in (1000, 1020, 1500, 20)]
    made = Engine(model).generate(prompts, [SamplingParams(60, seed=i, ignore_eos=True) for i in range(4)])
    scored = token_logprobs(model, [(c.prompt_ids, c.token_ids) for c in made])
    for completion, logprobs in zip(made, scored, strict=True):
        assert completion.logprobs.tobytes() == logprobs.detach().cpu().numpy().tobytes()


def test_steps_of_many_tokens_are_replayed_where_layers_are_small():
    model = model_of("bfloat16", hidden_size=1024, intermediate_size=3072, head_dim=128, max_position_embeddings=8192)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 5000, 5000).tolist() for _ in range(8)]
    sampling = [SamplingParams(8, seed=i, ignore_eos=True) for i in range(8)]
    engine = Engine(model, max_batch_tokens=4096, prefix_caching=False)
    once, made = (engine.generate(prompts, sampling) for _ in range(2))
    assert engine._graphs is not None
    assert any(form.tokens >= 4096 for form in engine._graphs._recorded)
    assert [bits(c) for c in made] == [bits(c) for c in once]
    scored = token_logprobs(model, [(c.prompt_ids, c.token_ids) for c in made])
    for completion, logprobs in zip(made, scored, strict=True):
        assert completion.logprobs.tobytes() == logprobs.detach().cpu().numpy().tobytes()


# (Stock products happen to have our bits at this model's shapes: test_gpu_operations has one where they do not.)
@pytest.mark.parametrize("op", ["attention", "rms_norm", "token_logprob"])
def test_one_stock_operation_in_the_trainer_is_seen(op):
    model = model_of("bfloat16", hidden_size=1024, num_hidden_layers=2)
    prompts, sampling = traffic(24)
    made = Engine(model).generate(prompts, sampling)
    stock = model.with_profile(NumericsProfile(**{op: "stock"}))
    scored = token_logprobs(stock, [(c.prompt_ids, c.token_ids) for c in made], sampling=sampling)
    assert any(c.logprobs.tobytes() != s.detach().cpu().numpy().tobytes() for c, s in zip(made, scored, strict=True))


def test_weights_that_are_not_finite_are_refused():
    model = model_of("bfloat16")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="no distribution"):
        Engine(model).generate([[5, 6, 7]], SamplingParams(4, seed=0))
