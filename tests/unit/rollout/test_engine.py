"""The engine's public behaviour, on a model that caches latents. Bits against other settings: tests/contract."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from rlloop.errors import ConfigError
from rlloop.models import load_model
from rlloop.numerics.layout import AttentionLayout
from rlloop.rollout.engine.engine import Engine
from rlloop.types import Alternatives, Completion, Part, SamplingParams
from tests.support.checkpoints import make_checkpoint
from tests.support.latent_model import PROMPTS, VOCABULARY, LatentModel, longest, same
from tests.support.tiny_models import tiny_qwen3

EOS = LatentModel.eos_token_ids[0]


@pytest.fixture(scope="module")
def model() -> LatentModel:
    return LatentModel()


class Pair:
    """Two ranks that share experts, of which the other has no requests."""

    size = 2

    def gather(self, tensor, *_):
        return tensor

    def gather_objects(self, value):
        return [value, False]


def test_a_step_of_several_ranks_that_failed_leaves_no_prefix(monkeypatch):
    model, prompt, params = tiny_qwen3(), list(range(3, 40)), SamplingParams(max_tokens=4, seed=1, ignore_eos=True)
    [expected] = Engine(model).generate([prompt], params)
    engine = Engine(model, page_size=8)
    engine._together = Pair()

    def broken(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "hidden", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate([prompt], params)
    [again] = engine.generate([prompt], params)
    assert again.token_ids == expected.token_ids
    assert (again.raw_logprobs == expected.raw_logprobs).all()


def test_completions_come_in_the_order_of_the_prompts_with_all_their_fields(model):
    completions = Engine(model).generate(PROMPTS, [longest(max_tokens=n) for n in (9, 3, 5, 1)])
    assert [c.prompt_ids for c in completions] == PROMPTS
    assert [len(c.token_ids) for c in completions] == [9, 3, 5, 1]
    for completion in completions:
        assert completion.finish_reason == "length"
        assert completion.policy_version == 0
        assert completion.logprobs.dtype == completion.raw_logprobs.dtype == np.float32
        assert len(completion.logprobs) == len(completion.raw_logprobs) == len(completion.token_ids)
        assert (completion.logprobs <= 0).all()


def test_greedy_takes_the_argmax_of_a_full_forward(model):
    (completion,) = Engine(model, page_size=4).generate([PROMPTS[0]], longest(temperature=0.0))
    tokens = PROMPTS[0] + completion.token_ids
    with torch.no_grad():
        hidden = model.hidden(
            torch.tensor(tokens), torch.arange(len(tokens)), AttentionLayout.of_sequences([len(tokens)])
        )
        logprobs = model.ops.logits(hidden, model.head).log_softmax(-1)[len(PROMPTS[0]) - 1 : -1]
    assert completion.token_ids == logprobs.argmax(-1).tolist()
    np.testing.assert_allclose(completion.logprobs, logprobs.amax(-1).numpy(), atol=1e-5)
    assert completion.logprobs.tobytes() == completion.raw_logprobs.tobytes()


def test_a_prompts_last_mlp_is_made_for_its_last_token_alone(tmp_path):
    make_checkpoint(tmp_path)
    model, rows = load_model(tmp_path), list[int]()
    expected = Engine(load_model(tmp_path)).generate(PROMPTS, longest(max_tokens=3))
    last = list(model.model.layers.values())[-1]
    last.mlp.register_forward_hook(lambda _, given, __: rows.append(len(given[0])))
    engine = Engine(model, max_batch_tokens=16, prefix_caching=False)
    made = engine.generate(PROMPTS, longest(max_tokens=3))
    assert all(map(same, made, expected))
    assert rows
    assert max(rows) <= len(PROMPTS)


def test_a_seed_repeats_a_completion_and_another_changes_it(model):
    engine = Engine(model, prefix_caching=False)
    first, again, other = (engine.generate([PROMPTS[0]], longest(seed=seed))[0] for seed in (1, 1, 2))
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


def test_a_seed_left_out_is_drawn_from_the_engines_stream_and_recorded(model):
    def seeds(engine_seed: int) -> list[int | None]:
        completions = Engine(model, seed=engine_seed).generate(PROMPTS, longest(seed=None, max_tokens=2))
        return [c.sampling.seed for c in completions]

    assert seeds(3) == seeds(3)
    assert len({*seeds(3), *seeds(4)}) == 2 * len(PROMPTS)
    engine = Engine(model, prefix_caching=False)
    (drawn,) = engine.generate([PROMPTS[0]], longest(seed=None))
    (replayed,) = engine.generate([PROMPTS[0]], drawn.sampling)
    assert drawn.token_ids == replayed.token_ids


def test_a_stop_token_ends_a_completion_and_is_its_last(model):
    engine = Engine(model)
    (free,) = engine.generate([PROMPTS[0]], longest())
    stop = free.token_ids[7]
    first = free.token_ids.index(stop)
    (stopped,) = engine.generate([PROMPTS[0]], longest(stop_token_ids=(stop,)))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: first + 1]
    (late,) = engine.generate([PROMPTS[0]], longest(stop_token_ids=(stop,), min_tokens=first + 2))
    assert len(late.token_ids) >= first + 2
    assert stop not in late.token_ids[: first + 1]


def test_end_of_sequence_stops_unless_ignored(model):
    prompts = [[token] for token in range(3, VOCABULARY)]
    ignoring = Engine(model).generate(prompts, longest())
    stopping = Engine(model).generate(prompts, longest(ignore_eos=False))
    assert all(len(c.token_ids) == 24 for c in ignoring)
    ends = 0
    for ignored, stopped in zip(ignoring, stopping, strict=True):
        if EOS in ignored.token_ids:
            ends += 1
            assert stopped.token_ids == ignored.token_ids[: ignored.token_ids.index(EOS) + 1]
            assert stopped.finish_reason == "stop"
        else:
            assert stopped.token_ids == ignored.token_ids
            assert stopped.finish_reason == "length"
    assert ends > 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_puts_off_the_end(model, temperature):
    prompts = [[token] for token in range(3, VOCABULARY)]
    completions = Engine(model).generate(prompts, SamplingParams(24, min_tokens=6, temperature=temperature, seed=5))
    assert all(len(c.token_ids) >= 6 for c in completions)
    assert all(EOS not in c.token_ids[:5] for c in completions)
    assert any(c.finish_reason == "stop" for c in completions)


def test_requests_can_be_added_while_others_run_and_aborted(model):
    engine = Engine(model)
    first = engine.add_request(PROMPTS[0], longest())
    assert engine.step() == []
    second = engine.add_request(PROMPTS[1], longest(max_tokens=2))
    third = engine.add_request(PROMPTS[2], longest())
    done = dict(itertools.chain.from_iterable(engine.step() for _ in range(3)))
    assert set(done) == {second}
    aborted = engine.abort(third)
    assert aborted is not None
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) == 3
    assert engine.abort(third) is None
    while engine.has_work:
        done.update(engine.step())
    assert set(done) == {first, second}
    assert same(done[first], Engine(model).generate([PROMPTS[0]], longest())[0])


@pytest.mark.parametrize("later", [0, 1, 2])
def test_a_group_that_shares_a_part_of_a_page_has_the_bits_of_each_alone(model, later):
    """`later`: so many steps lie between the first request and the others."""
    engine, sampling, prompt = Engine(model, page_size=16), [longest(seed=seed) for seed in range(4)], PROMPTS[0]
    assert (len(prompt) - 1) % 16 > 0
    done: dict[int, Completion] = {}
    ids = [engine.add_request(prompt, sampling[0])]
    for _ in range(later):
        done.update(engine.step())
    ids += [engine.add_request(prompt, each) for each in sampling[1:]]
    while engine.has_work:
        done.update(engine.step())
    alone = [Engine(model, prefix_caching=False).generate([prompt], each)[0] for each in sampling]
    assert all(same(done[id], each) for id, each in zip(ids, alone, strict=True))
    assert engine.stats().cached_tokens == 3 * (len(prompt) - 1)


def test_set_version_waits_for_requests_in_flight_and_drops_what_was_cached(model):
    engine = Engine(model, page_size=4)
    engine.generate([PROMPTS[2]], longest())
    engine.add_request(PROMPTS[2], longest())
    with pytest.raises(ConfigError, match="1 requests are in flight"):
        engine.set_version(1)
    engine.step()
    assert engine.stats().cached_tokens == 36
    assert [c.finish_reason for _, c in engine.abort_all()] == ["abort"]
    engine.set_version(1)
    (completion,) = engine.generate([PROMPTS[2]], longest())
    assert completion.policy_version == 1
    assert engine.stats().cached_tokens == 36


def test_weights_changed_in_place_are_used_after_set_version():
    model = LatentModel(seed=3)
    engine = Engine(model, page_size=4)
    (before,) = engine.generate([PROMPTS[2]], longest())
    with torch.no_grad():
        model.embed.add_(0.5 * torch.roll(model.embed, 1, 0))
    engine.set_version(1)
    (after,) = engine.generate([PROMPTS[2]], longest())
    assert same(after, Engine(model, prefix_caching=False).generate([PROMPTS[2]], longest())[0])
    assert not same(after, before)


def test_an_engine_survives_a_step_that_raises(model):
    engine = Engine(model, page_size=4)
    expected = engine.generate(PROMPTS, longest())
    engine.set_version(0)

    def interrupt(done: int, tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, longest(), on_progress=interrupt)
    write = engine._cache.write
    engine._cache.write = lambda layer, **tensors: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        engine.generate(PROMPTS, longest())
    engine._cache.write = write  # type: ignore[method-assign]
    assert not engine.has_work
    assert all(same(a, b) for a, b in zip(engine.generate(PROMPTS, longest()), expected, strict=True))


def test_progress_and_stats_count_what_happened(model):
    engine, seen = Engine(model, page_size=4, prefix_caching=False), []
    engine.generate(PROMPTS, longest(max_tokens=3), on_progress=lambda done, tokens: seen.append((done, tokens)))
    assert seen == [(0, 4), (0, 8), (4, 12)]
    stats = engine.stats()
    assert (stats.steps, stats.requests, stats.made_tokens) == (3, 4, 12)
    assert stats.prompt_tokens == sum(len(p) for p in PROMPTS)
    assert stats.computed_tokens == stats.prompt_tokens + 8
    assert (stats.cached_tokens, stats.preemptions) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], longest(), "empty"),
        (3, longest(), "a prompt is 3; it must be a list of token ids, and prompts a list of such"),
        ("ab", longest(), "a prompt is 'ab'; it must be a list of token ids"),
        ([3, 4.5], longest(), r"a prompt is \[3, 4.5\]; it must be a list of token ids"),
        ([3, VOCABULARY], longest(), f"token id {VOCABULARY} in prompt"),
        ([3, -1], longest(), "token id -1 in prompt"),
        ([3], longest(stop_token_ids=(99,)), "token id 99 in stop_token_ids"),
        ([3] * 100, longest(max_tokens=61), "takes 161 positions; the model has 160"),
        ([3] * 100, longest(max_tokens=60), "needs 159 cached tokens; the cache holds 128"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(model, prompt, sampling, message):
    engine = Engine(model, max_cache_tokens=128)
    with pytest.raises(ConfigError, match=message):
        engine.generate([[3, 4], prompt], [longest(), sampling])
    assert not engine.has_work
    with pytest.raises(ConfigError, match=message):
        engine.add_request(prompt, sampling)


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"max_tokens": 2.5}, "max_tokens is 2.5; it must be a whole number"),
        ({"max_tokens": "3"}, "max_tokens is '3'; it must be a whole number"),
        ({"max_tokens": True}, "max_tokens is True; it must be a whole number"),
        ({"min_tokens": None}, "min_tokens is None; it must be a whole number"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
        ({"seed": 0.5}, "seed is 0.5; it must be a whole number"),
        ({"temperature": None}, "temperature is None; it must be a number"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be ids of tokens"),
        ({"stop_token_ids": "ab"}, "stop_token_ids is 'ab'; it must be ids of tokens"),
        ({"stop_token_ids": [5.5]}, "it must be ids of tokens"),
    ],
)
def test_sampling_parameters_of_other_types_are_refused(given, allowed):
    with pytest.raises(ConfigError, match=f"SamplingParams.*{allowed}"):
        SamplingParams(**{"max_tokens": 8, **given})
    numpys: dict[str, Any] = {
        "max_tokens": np.int64(8),
        "top_p": np.float32(0.5),
        "stop_token_ids": iter([3, np.int32(4)]),
    }
    assert SamplingParams(**numpys) == SamplingParams(max_tokens=8, top_p=0.5, stop_token_ids=(3, 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 0}, "page_size is 0"),
        ({"max_batch_tokens": 0}, "max_batch_tokens is 0"),
        ({"max_running": 0}, "max_running is 0"),
        ({"page_size": 1.5}, "page_size is 1.5; it must be a whole number"),
        ({"page_size": "16"}, "page_size is '16'; it must be a whole number"),
        ({"max_cache_tokens": 64.0}, "max_cache_tokens is 64.0; it must be a whole number"),
        ({"seed": None}, "seed is None; it must be a whole number"),
        ({"max_cache_tokens": 8}, "max_cache_tokens is 8; it must be at least one page"),
        ({"max_cache_tokens": 2**50}, "does not fit in memory: .*; lower max_cache_tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused(model, settings, message):
    with pytest.raises(ConfigError, match=message):
        Engine(model, **settings)


def test_a_folder_is_no_model():
    with pytest.raises(ConfigError, match="model is 'folder'; it must be a Model, as load_model returns"):
        Engine("folder")  # pyright: ignore[reportArgumentType]


def test_a_number_of_alternatives_below_0_is_refused(model):
    engine = Engine(model)
    with pytest.raises(ConfigError, match="top_logprobs is -2; it must be 0"):
        engine.add_request([3], longest(), top_logprobs=-2)
    assert not engine.has_work


def test_prompts_may_come_from_a_generator(model):
    engine = Engine(model)
    made = engine.generate((prompt for prompt in ([3], [4])), longest(max_tokens=2, seed=0))  # pyright: ignore
    assert [each.token_ids for each in made] == [
        each.token_ids for each in engine.generate([[3], [4]], longest(max_tokens=2, seed=0))
    ]


def test_generate_refuses_to_mix_with_requests_in_flight_and_lists_of_other_lengths(model):
    engine = Engine(model)
    with pytest.raises(ConfigError, match="2 prompts came with 1 sampling"):
        engine.generate([[3], [4]], [longest()])
    engine.add_request([3], longest())
    with pytest.raises(ConfigError, match="in flight"):
        engine.generate([[3]], longest())


def test_prompts_of_numpy_and_torch_are_lists_of_numbers(model):
    for prompt in (np.array([3, 4]), torch.tensor([3, 4]), list(np.array([3, 4]))):
        (completion,) = Engine(model).generate([prompt], longest(max_tokens=2, seed=0))  # pyright: ignore
        assert [type(id) for id in completion.prompt_ids] == [int, int]
    for sampling in (None, {"max_tokens": 3}, [None]):
        with pytest.raises(ConfigError, match=r"sampling is .*; it must be SamplingParams, or a list"):
            Engine(model).generate([[3]], sampling)  # pyright: ignore


def test_nothing_to_do_is_no_work(model):
    engine = Engine(model)
    assert engine.generate([], longest()) == []
    assert engine.step() == []


def test_what_is_made_so_far_and_the_likeliest_beside_it_survive_chunks_and_preemption(model):
    sampling = [longest(seed=seed, temperature=0.7, top_k=9) for seed in range(len(PROMPTS))]
    alone = Engine(model).generate(PROMPTS, sampling)
    engine = Engine(model, page_size=4, max_batch_tokens=8, max_cache_tokens=64)
    ids = [engine.add_request(prompt, params, top_logprobs=5) for prompt, params in zip(PROMPTS, sampling, strict=True)]
    told: dict[int, list[Part]] = {id: [] for id in ids}
    done: dict[int, Completion] = {}
    while engine.has_work:
        done.update(engine.step())
        for id in ids:
            told[id].append(engine.so_far(id, sum(len(part.token_ids) for part in told[id])))
    assert engine.stats().preemptions > 0
    for id, expected in zip(ids, alone, strict=True):
        made, parts = done[id], [*told[id], done[id].part(sum(len(part.token_ids) for part in told[id]))]
        assert same(made, expected)
        assert [token for part in parts for token in part.token_ids] == made.token_ids
        assert max(len(part.token_ids) for part in parts) == 1
        for name in ("logprobs", "raw_logprobs"):
            assert np.concatenate([getattr(part, name) for part in parts]).tobytes() == getattr(made, name).tobytes()
        beside = made.alternatives
        assert beside is not None
        assert beside.token_ids.shape == beside.logprobs.shape == (24, 5)
        assert (np.diff(beside.raw_logprobs, axis=1) <= 0).all()
        told_beside = Alternatives.joined([part.alternatives for part in parts if part.alternatives is not None])
        assert told_beside is not None
        assert told_beside.logprobs.tobytes() == beside.logprobs.tobytes()
        place, column = np.nonzero(beside.token_ids == np.array(made.token_ids)[:, None])
        assert len(place) > 5
        for name in ("logprobs", "raw_logprobs"):
            drawn = getattr(made, name)[place]
            assert getattr(beside, name)[place, column].tobytes() == drawn.tobytes()
    assert engine.so_far(ids[0]).token_ids == []
