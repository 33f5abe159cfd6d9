"""Models that read images, inside vLLM: the tokens and bits of the embedded engine, hence of the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils import logging

from rlloop import ConfigError, Engine, Model, ModelInput, SamplingParams, load_model, token_logprobs
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.client import RemoteEngine
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.vllm.engine import VllmEngine
from rlloop.rollout.vllm.requests import Request, check_text
from rlloop.rollout.vllm.stock_engine import StockVllmEngine
from rlloop.types import Completion
from rlloop.web.server import BackgroundServer, Listen
from tests.support.image_models import image, inputs, make_image_checkpoint, prompt_with
from tests.support.vllm_families import READS_IMAGES
from tests.support.vllm_traffic import SAMPLINGS, bits

logging.disable_progress_bar()

TEXT = list(range(20, 31))


def requests() -> tuple[list[ModelInput], list[SamplingParams]]:
    """Prompts of several images, of none, and some that repeat; every kind of sampling."""
    prompts = [prompt for prompt, _ in inputs()]
    prompts += [prompt_with(TEXT, image(8, 8, seed), TEXT) for seed in (1, 2, 1)] + [prompts[1]]
    kinds = [kind for kind in SAMPLINGS if "stop_token_ids" not in kind]
    sampling = [
        SamplingParams(max_tokens=14 + at, seed=at, **{**kinds[at % len(kinds)], "ignore_eos": True})
        for at in range(len(prompts))
    ]
    return prompts, sampling


def check_trainer(model: Model, prompts: list[ModelInput], made: list[Completion]) -> None:
    pairs = [(prompt, each.token_ids) for prompt, each in zip(prompts, made, strict=True)]
    scored = token_logprobs(model, pairs, sampling=[each.sampling for each in made])
    assert [each.logprobs.tobytes() for each in made] == [each.detach().numpy().tobytes() for each in scored]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    make_image_checkpoint(folder)
    return load_model(folder)


@pytest.fixture(scope="module")
def engine(model: Model) -> Iterator[VllmEngine]:
    """Prompts are cut, and so small a cache preempts."""
    engine = VllmEngine(model, page_size=4, max_batch_tokens=16, max_running=8, max_cache_tokens=128)
    yield engine
    engine.close()


@pytest.mark.parametrize("family", READS_IMAGES)
def test_tokens_and_bits_are_the_embedded_engines_and_the_trainers(tmp_path: Path, family: str) -> None:
    make_image_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    model = load_model(tmp_path, dtype="bfloat16")
    prompts, sampling = requests()
    embedded, engine = Engine(model), VllmEngine(model, max_batch_tokens=16, max_running=8)
    for version in range(2):
        expected, made = (each.generate(prompts, sampling) for each in (embedded, engine))
        assert bits(made) == bits(expected)
        assert [each.model_input for each in made] == [each.model_input for each in expected]
        check_trainer(model, prompts, made)
        with torch.no_grad():  # in place, as an update is: of the tower, and of the text model
            model.visual.pos_embed.weight.mul_(1.5)  # type: ignore[union-attr]
            model.head.mul_(1.01)
        for each in (embedded, engine):
            each.set_version(version + 1)
    engine.close()


def test_requests_are_preempted_and_end_early(model: Model, engine: VllmEngine) -> None:
    prompts, sampling = requests()
    expected = Engine(model).generate(prompts, sampling)
    scheduler = engine._llm.engine_core.engine_core.scheduler
    ids = [engine.add_request(prompt, params) for prompt, params in zip(prompts, sampling, strict=True)]
    made: dict[int, Completion] = {}
    preempted = 0
    while len(made) < 3 or not preempted:
        made.update(engine.step())
        preempted += sum(each.num_preemptions for each in scheduler.requests.values())
    made.update(engine.abort_all())
    for id, whole in zip(ids, expected, strict=True):
        count = len(made[id].token_ids)
        assert made[id].token_ids == whole.token_ids[:count]
        assert made[id].logprobs.tobytes() == whole.logprobs[:count].tobytes()
    assert engine._requests == {}
    made_again = engine.generate(prompts, sampling)
    assert bits(made_again) == bits(expected)
    check_trainer(model, prompts, made_again)


def test_blocks_of_two_images_with_equal_tokens_are_never_mixed(model: Model, engine: VllmEngine) -> None:
    engine.set_version(engine.policy_version + 1)  # forgets blocks
    sampling = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    first, second = (prompt_with(TEXT, image(8, 8, seed), TEXT) for seed in (1, 2))
    longer = first.followed_by(TEXT)
    assert first.token_ids == second.token_ids
    cached, made = [], []
    for prompt in (first, second, first, longer):
        before = engine.stats().cached_tokens
        made += engine.generate([prompt], sampling)
        cached.append(engine.stats().cached_tokens - before)
    assert cached[:3] == [0, 0, 36]  # of 40 tokens: whole blocks, and one token is always computed
    assert cached[3] >= 40  # a conversation's next turn
    assert made[0].logprobs.tobytes() == made[2].logprobs.tobytes() != made[1].logprobs.tobytes()
    assert bits(made) == bits(Engine(model).generate([first, second, first, longer], sampling))


def test_names_of_blocks_hold_images_and_positions() -> None:
    def salt(prompt: ModelInput) -> str | None:
        return Request(0, prompt, SamplingParams(max_tokens=1)).salt

    one = prompt_with(TEXT, image(8, 8, 1), TEXT)
    assert one.positions is not None
    moved, later = one.positions.copy(), one.positions.copy()
    moved[1, len(TEXT) + 2] += 1
    later[:, -1] += 5
    prompts = [one, prompt_with(TEXT, image(8, 8, 2), TEXT), replace(one, positions=moved)]
    prompts += [replace(one, positions=later), ModelInput(TEXT, np.arange(len(TEXT)) + 2), ModelInput(TEXT)]
    salts = [salt(prompt) for prompt in prompts]
    assert len({*salts}) == len(prompts)
    assert salts[-1] is None
    assert salt(one.followed_by(TEXT)) == salts[0]


def test_texts_may_have_positions_of_their_own(model: Model, engine: VllmEngine) -> None:
    prompts = [ModelInput(TEXT, np.arange(len(TEXT)) + shift) for shift in (0, 7)] + [ModelInput(TEXT)]
    sampling = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    made = engine.generate(prompts, sampling)
    assert bits(made) == bits(Engine(model).generate(prompts, sampling))
    check_trainer(model, prompts, made)


def test_prefill_is_the_trainers(model: Model, engine: VllmEngine) -> None:
    """So `parity/k3_image` is measured as with the embedded engine."""
    prompts = [prompt for prompt in requests()[0] if len(prompt) > 1]
    engine.generate(prompts, SamplingParams(max_tokens=2, seed=0))  # cached blocks are of no use
    for mine, theirs in zip(engine.prefill_logprobs(prompts), Engine(model).prefill_logprobs(prompts), strict=True):
        assert mine.tobytes() == theirs.tobytes()


def test_images_come_over_http(model: Model) -> None:
    """As `rlloop serve engine --engine vllm` has it."""
    prompts, sampling = requests()
    expected, engine = Engine(model).generate(prompts, sampling), VllmEngine(model, max_batch_tokens=16, max_running=8)
    service = EngineService(engine)
    server = BackgroundServer(EngineServer(service, name="vllm").app, Listen())
    with RemoteEngine(server.url) as remote:
        made = remote.generate(prompts, sampling)
    assert bits(made) == bits(expected)
    assert [each.model_input for each in made] == [each.model_input for each in expected]
    server.close()
    service.close()
    engine.close()


def test_what_cannot_be_read_is_refused(model: Model, engine: VllmEngine) -> None:
    wide = prompt_with(TEXT, image(4, 4, numbers=192), TEXT)
    with pytest.raises(ConfigError, match="patches of 192 numbers; this model's have 96"):
        engine.generate([wide], SamplingParams(max_tokens=1))
    with pytest.raises(ConfigError, match=r"neither vLLM's own server .* `rlloop serve engine`, with --engine vllm"):
        check_text(wide)
    with pytest.raises(ConfigError, match=r"vllm_stock with .*: vLLM's own vision tower was not tried"):
        StockVllmEngine(model)
