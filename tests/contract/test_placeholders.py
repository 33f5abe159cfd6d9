"""Placeholders without an image: refused in prompts, by engine, scoring and servers; a policy may sample them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from rlloop import Engine, ModelInput, SamplingParams, load_model, token_logprobs
from rlloop.errors import ConfigError
from rlloop.launch.make import vocabulary_of
from rlloop.loop.conversations import SingleTurn
from rlloop.models import Model, ScoreRow, score
from rlloop.models.config import read_config
from rlloop.models.prompt_scores import score_prompt
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.client import RemoteEngine
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.fleet.wire import Ask
from rlloop.trainer.batching import TrainSequence
from rlloop.types import Completion, Example, RewardResult, Sample
from rlloop.web.server import BackgroundServer, Listen
from tests.support.image_models import PAD, image, make_image_checkpoint, prompt_with

VIDEO = 93
TEXT = [20, 21, 22]
SHORT = SamplingParams(max_tokens=1, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_image_checkpoint(path, dtype=torch.bfloat16)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder)


def seen(*, before: list[int] = TEXT, after: list[int] = TEXT) -> ModelInput:
    return prompt_with(before, image(4, 4), after)


REFUSED = {
    "text": ([5, PAD, 6], "token 91 at index 1 of a prompt is Qwen3VL.* placeholder image_token_id, .* give its image"),
    "before": (seen(before=[PAD]), "token 91 at index 0 "),
    "between": (prompt_with(image(2, 2), [PAD, 9], image(2, 2)), "token 91 at index 3 "),
    "after": (seen(after=[7, PAD]), "token 91 at index 10 "),
    "video": (seen(after=[VIDEO]), "token 93 at index 9 .* video_token_id, and no image stands there; leave it out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_placeholder_without_its_image_is_refused_in_prompts(model: Model, name: str) -> None:
    prompt, message = REFUSED[name]
    engine = Engine(model)
    for ask in (
        lambda: engine.generate([[5], prompt], SHORT),
        lambda: engine.add_request(prompt, SHORT),
        lambda: engine.score(prompt),
        lambda: engine.prefill_logprobs([prompt]),
        lambda: token_logprobs(model, [(prompt, [5])]),
        lambda: token_logprobs(model, [(prompt, [])]),
    ):
        with pytest.raises(ConfigError, match=message):
            ask()
    assert not engine.has_work
    assert engine.stats().made_tokens == 0
    if isinstance(prompt, list):  # as the trainer gets it
        with pytest.raises(ConfigError, match=message):
            score(model, [ScoreRow([*prompt, 5], [len(prompt)])])


def test_numpys_integers_are_read_as_well(model: Model) -> None:
    with pytest.raises(ConfigError, match="token 91 at index 1"):
        Engine(model).generate([np.array([5, PAD])], SHORT)  # type: ignore[list-item]


def test_a_config_without_video_token_has_one_placeholder(folder: Path) -> None:
    vision = read_config(folder).vision
    assert vision is not None
    assert vision.placeholders == {"image_token_id": PAD, "video_token_id": VIDEO}
    assert replace(vision, video_token_id=None).placeholders == {"image_token_id": PAD}


# ---------------------------------------------------------------------------------------------- sampled ones


def with_placeholder(engine: Engine, prompt: ModelInput | list[int]) -> Completion:
    """A completion in which the policy sampled a placeholder, and more after it."""
    sampling = [SamplingParams(max_tokens=30, seed=seed, ignore_eos=True) for seed in range(20)]
    return next(
        made for made in engine.generate([prompt] * 20, sampling) if not {PAD, VIDEO}.isdisjoint(made.token_ids[:-5])
    )


@pytest.mark.parametrize("prompt", [TEXT, seen()], ids=["text", "image"])
def test_a_sampled_placeholder_is_scored_and_trained_with_the_engines_bits(
    model: Model, prompt: ModelInput | list[int]
) -> None:
    made = with_placeholder(Engine(model), prompt)
    (logprobs,) = token_logprobs(model, [(prompt, made.token_ids)])
    assert logprobs.detach().numpy().tobytes() == made.raw_logprobs.tobytes()
    item = TrainSequence.of_sample(Sample("", Example("", [], "", {}), made, "", RewardResult(0.0), 0, 1.0))
    row = ScoreRow(item.token_ids, item.predict, item.sampling, model_input=item.model_input)
    assert score(model, [row])[0].detach().numpy().tobytes() == made.logprobs.tobytes()
    whole = prompt if isinstance(prompt, ModelInput) else ModelInput(prompt)
    scored = score_prompt(model, whole.followed_by(made.token_ids))  # of a sequence, as an API's client may ask
    assert scored.logprobs[-30:].tobytes() == made.raw_logprobs.tobytes()


@pytest.mark.parametrize("asked", [None, seen()], ids=["text", "image"])
def test_a_completion_goes_on_after_a_sampled_placeholder(model: Model, asked: ModelInput | None) -> None:
    """In pieces, each asked for with the ones before, it is what it is at once."""
    ids = TEXT if asked is None else asked.token_ids
    example, vocabulary = Example("one", ids, "", {}, asked), vocabulary_of(model.config)
    engine = Engine(model)
    made = with_placeholder(engine, example.asked)
    task: Any = None
    under_way = SingleTurn(task, vocabulary).under_way(4)
    talk = under_way.begin(example, made.sampling)
    under_way.advance(engine)
    again = talk.played(str).completion
    assert again.token_ids == made.token_ids
    assert again.raw_logprobs.tobytes() == made.raw_logprobs.tobytes()
    if asked is None:  # other engines get text as ids, as ever
        assert example.asked_with([*ids, 5], vocabulary.placeholders) == [*ids, 5]


# ---------------------------------------------------------------------------------------------- servers


@pytest.fixture(scope="module")
def url(model: Model) -> Iterator[str]:
    service = EngineService(Engine(model))
    background = BackgroundServer(EngineServer(service, name="one").app, Listen())
    yield background.url
    background.close()
    service.close()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("ids", [[5, PAD, 6], [5, 6, VIDEO]], ids=["image", "video"])
def test_servers_refuse_ids_of_placeholders(url: str, ids: list[int], stream: bool) -> None:
    params = {"max_tokens": 2, "stream": stream}
    bodies = [
        ("/v1/completions", {"model": "rlloop", "prompt": ids, **params}),
        ("/v1/completions", {"model": "rlloop", "prompt": [[5, 6], ids], **params}),
        ("/v1/completions", {"model": "rlloop", "prompt": ids, **params, "max_tokens": 0, "prompt_logprobs": 0}),
        ("/inference/v1/generate", {"token_ids": ids, "sampling_params": params}),
    ]
    for path, body in bodies:
        answer = httpx.post(url + path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert "of a prompt is Qwen3VLForConditionalGeneration's placeholder" in answer.json()["error"]["message"]
    assert httpx.post(url + "/v1/completions", json={**bodies[0][1], "prompt": [5, 6]}).status_code == 200


def test_engines_in_other_processes_learn_what_was_given(url: str, model: Model) -> None:
    prompt, sampling = ModelInput(TEXT).followed_by([PAD, 6]), SamplingParams(max_tokens=4, seed=1)
    with RemoteEngine(url) as remote:
        theirs, _ = remote.generate([prompt, TEXT], sampling)
        assert theirs.token_ids == Engine(model).generate([prompt], sampling)[0].token_ids
        with pytest.raises(ConfigError, match="token 91 at index 3"):
            remote.generate([prompt.token_ids], sampling)
    with pytest.raises(ConfigError, match="2 prompts came with 1 numbers"):
        _ = Ask([[5], [6]], [sampling] * 2, given=[None]).asked
