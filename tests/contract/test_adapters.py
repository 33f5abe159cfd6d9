"""Adapters: engine and trainer have the same bits, in any company, and without one those of the base."""

import numpy as np
import pytest
import torch

from rlloop import Engine, SamplingParams, load_adapter, load_model, token_logprobs
from rlloop.models import save_model
from rlloop.models.adapter_weights import Adapter
from tests.support.adapters import adapter_folder, random_adapter
from tests.support.checkpoints import EVERY, RECURRENT, make_checkpoint
from tests.support.tiny_models import tiny_qwen3
from tests.support.traffic import bits

ALL = ("all-linear", "lm_head")
PROMPTS = [[5], list(range(3, 20)), list(range(10, 60)), [9, 8, 7], list(range(3, 20))]
SAMPLING = [SamplingParams(max_tokens=8, seed=seed, ignore_eos=True) for seed in range(len(PROMPTS))]


@pytest.fixture
def model(tmp_path):
    save_model(tiny_qwen3(), tmp_path / "base")
    return load_model(tmp_path / "base")


def same_as_trainer(model, completions, adapters):
    for completion, adapter in zip(completions, adapters, strict=True):
        pair = (completion.prompt_ids, completion.token_ids)
        (scored,) = token_logprobs(model, [pair], adapter=adapter)
        assert scored.detach().numpy().tobytes() == completion.raw_logprobs.tobytes()


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_several_adapters_have_the_trainers_bits(tmp_path, family, dtype):
    if dtype == "bfloat16" and family not in ("qwen3", "qwen3_moe", "deepseek_v3"):
        pytest.skip("one dense family, one mixture and latent attention stand for all")
    make_checkpoint(tmp_path / "base", family, dtype=getattr(torch, dtype))
    model = load_model(tmp_path / "base", dtype=dtype)
    engine = Engine(model, max_batch_tokens=32, adapter_slots=2, prefix_caching=family not in RECURRENT)
    base = engine.generate(PROMPTS, SAMPLING)
    for seed, (name, rank) in enumerate({"a": 3, "b": 20}.items()):
        engine.load_adapter(name, adapter_folder(tmp_path / name, model, seed, rank=rank, targets=ALL))
    adapters = ["a", "b", None, "b", None]
    made = engine.generate(PROMPTS, SAMPLING, adapters=adapters)
    same_as_trainer(model, made, adapters)
    for index, (completion, adapter) in enumerate(zip(made, adapters, strict=True)):
        alone = Engine(model).generate([PROMPTS[index]], [SAMPLING[index]], adapters=adapter)
        assert bits(alone[0]) == bits(completion)
        assert (bits(completion) == bits(base[index])) == (adapter is None)


def test_b_of_zeros_gives_the_bases_bits(tmp_path, model):
    load_adapter(model, adapter_folder(tmp_path / "zero", model, 0, strength=0.0, targets=ALL), "zero")
    engine = Engine(model)
    base = engine.generate(PROMPTS, SAMPLING)
    assert list(map(bits, engine.generate(PROMPTS, SAMPLING, adapters="zero"))) == list(map(bits, base))


def test_more_adapters_than_slots_and_cached_prefixes_never_mix(tmp_path, model):
    engine = Engine(model, adapter_slots=3, max_batch_tokens=40, max_running=6, page_size=4)
    names = [f"a{index}" for index in range(7)]
    for seed, name in enumerate(names):
        engine.load_adapter(name, adapter_folder(tmp_path / name, model, seed, rank=1 + 3 * seed))
    rng = np.random.default_rng(0)
    order = [None, *names] * 4
    rng.shuffle(order)
    prompt = list(range(3, 40))  # of all: its blocks would be shared if they were not named by adapter
    sampling = [SamplingParams(max_tokens=int(rng.integers(2, 9)), seed=index) for index in range(len(order))]
    made = engine.generate([prompt] * len(order), sampling, adapters=order)
    same_as_trainer(model, made, order)
    stats = engine.stats()
    assert stats.adapter_swaps >= 7
    assert stats.adapter_swap_bytes > 0
    assert stats.adapter_waits > 0
    assert stats.cached_tokens > 0


def test_an_adapter_is_replaced_and_dropped_while_its_requests_run(tmp_path, model):
    engine = Engine(model, adapter_slots=2, page_size=4)
    folders = [adapter_folder(tmp_path / str(seed), model, seed, targets=ALL) for seed in range(2)]
    assert engine.load_adapter("a", folders[0]) == 1
    params = SamplingParams(max_tokens=12, seed=0, ignore_eos=True)
    (old,) = engine.generate([PROMPTS[1]], params, adapters="a")
    first = engine.add_request(PROMPTS[1], params, adapter="a")
    engine.step()
    assert engine.load_adapter("a", folders[1]) == 2
    second = engine.add_request(PROMPTS[1], params, adapter="a")
    engine.step()
    engine.drop_adapter("a")
    with pytest.raises(ValueError, match="no adapter is named 'a'"):
        engine.add_request(PROMPTS[1], params, adapter="a")
    done = {}
    while engine.has_work:
        done.update(engine.step())
    assert bits(done[first]) == bits(old)
    assert bits(done[second]) != bits(old)
    assert engine.load_adapter("a", folders[1]) == 3
    (again,) = engine.generate([PROMPTS[1]], params, adapters="a")
    assert bits(again) == bits(done[second])


def test_an_engine_of_a_model_with_an_adapter_serves_others_beside_it(tmp_path, model):
    for seed, name in enumerate("pq"):
        load_adapter(model, adapter_folder(tmp_path / name, model, seed, targets=ALL), name)
    engine = Engine(model.with_adapter("p"))
    adapters = [None, "q", None, "q", None]
    made = engine.generate(PROMPTS, SAMPLING, adapters=adapters)
    same_as_trainer(model, made, ["p" if each is None else each for each in adapters])
    assert list(map(bits, Engine(model).generate(PROMPTS, SAMPLING))) == list(
        map(bits, Engine(model.with_adapter("p").with_adapter(None)).generate(PROMPTS, SAMPLING))
    )


def test_an_adapter_in_training_keeps_its_targets_beside_others_that_lack_them(model):
    own = Adapter(random_adapter(model, 0, targets=("q_proj", "lm_head")), model.adapter_targets())
    engine = Engine(model.with_adapter(own))
    engine.add_adapter("q", random_adapter(model, 1, targets=("v_proj",)))
    adapters = [None, "q", None, "q", None]
    made = engine.generate(PROMPTS, SAMPLING, adapters=adapters)
    of_own, of_q = model.with_adapter(own), model.with_adapter("q")
    for completion, adapter in zip(made, adapters, strict=True):
        scored = token_logprobs(of_own if adapter is None else of_q, [(completion.prompt_ids, completion.token_ids)])
        assert scored[0].detach().numpy().tobytes() == completion.raw_logprobs.tobytes()


def test_requests_that_name_an_adapter_do_not_search_the_models_parameters(model, monkeypatch):
    engine = Engine(model)
    engine.add_adapter("q", random_adapter(model, 1))
    engine.generate(PROMPTS[:1], SAMPLING[0], adapters="q")
    monkeypatch.setattr(type(model), "parameters", lambda *_: pytest.fail("a request looked at every parameter"))
    engine.generate(PROMPTS, SAMPLING, adapters="q")


def test_an_engine_has_its_slots_whoever_loaded_the_adapters(model):
    names = [f"a{index}" for index in range(9)]
    for seed, name in enumerate(names):
        model.adapters.add(name, random_adapter(model, seed, rank=1), model.adapter_targets())
    narrow, wide = Engine(model, adapter_slots=2), Engine(model, adapter_slots=9)
    sampling = SamplingParams(max_tokens=2, seed=0)
    same_as_trainer(model, narrow.generate([[5]] * 3, sampling, adapters=names[:3]), names[:3])
    same_as_trainer(model, wide.generate([[5]] * 9, sampling, adapters=names), names)
    same_as_trainer(model, narrow.generate([[5]] * 3, sampling, adapters=names[:3]), names[:3])


@pytest.mark.parametrize(("adapters", "message"), [("x", "no adapter is named 'x'"), (["x"], "came with 1 adapters")])
def test_names_that_are_not_there(model, adapters, message):
    with pytest.raises(ValueError, match=message):
        Engine(model).generate(PROMPTS, SAMPLING, adapters=adapters)


def test_a_rank_above_the_slots_room(tmp_path, model):
    folder = adapter_folder(tmp_path / "wide", model, 0, rank=9)
    engine = Engine(model, adapter_rank=8)
    with pytest.raises(ValueError, match=r"rank 9 .* room for 8; raise Engine's adapter_rank"):
        engine.load_adapter("wide", folder)
    assert "wide" not in model.adapters
