"""A reward model behind an engine server: the trainer's own logprob of the verdict, and PPO against it."""

from __future__ import annotations

import numpy as np
import pytest

from rlloop import Engine, load_model, token_logprobs
from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.recipes.offline.toy import write_toy
from rlloop.rewards import RewardModel
from rlloop.rewards.runner import RewardFailure, RewardRunner
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.fleet.text import tokenizer_of
from rlloop.runs.folder import read_records
from rlloop.types import Example
from rlloop.web.server import BackgroundServer, Listen


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward_model")
    write_toy(folder)
    model = load_model(folder / "model")
    service = EngineService(Engine(model))
    server = EngineServer(service, name="one", tokenizer=tokenizer_of(folder / "model"))
    background = BackgroundServer(server.app, Listen())
    yield folder, model, background.url
    background.close()
    service.close()


def test_the_reward_is_the_verdicts_logprob_to_the_bit(served):
    folder, model, url = served
    reward = RewardModel(url, str(folder / "model"))
    prompt = reward.chat.prompt("3 7")[1]
    runner = RewardRunner(reward, timeout=240.0)
    examples = [Example("e", prompt, "3 7", {})] * 2
    results = runner.score([("3 7", text, example) for text, example in zip(("7", "3 3"), examples, strict=True)])
    end = verdict = model.eos_token_ids[0]
    given = [[*prompt, *reward.chat.ids(text), end] for text in ("7", "3 3")]
    ours = token_logprobs(model, [(ids, [verdict]) for ids in given])
    for result, logprob in zip(results, ours, strict=True):
        assert np.float32(result.reward) == logprob.detach().numpy()[0]
    [failed] = runner.score([("", "7 " * 600, examples[0])])
    runner.close()
    assert isinstance(failed, RewardFailure)
    assert "refuses a completion" in failed.message
    with pytest.raises(ConfigError, match=r"reward.url is 'here'"):
        RewardModel("here", str(folder / "model"))
    with pytest.raises(ConfigError, match=r"reward.url has a login"):
        RewardModel("http://me:password@here", str(folder / "model"))


def test_ppo_against_it(served, monkeypatch, tmp_path):
    folder, _, url = served
    monkeypatch.chdir(tmp_path)
    model, data = f"model.path={folder}/model", f"{folder}/demonstrations.jsonl"
    parts = [f"reward.parts.preferred.{key}" for key in (f"url={url}", f"model_path={folder}/model")]
    sizes = ["rollout.num_prompts=8", "rollout.max_tokens=2", "trainer.num_steps=1", "eval.num_draws=4"]
    more = [f"data.path={data}", "+reward.parts.right.answer_key=completion", "run.dir=run", *parts, *sizes]
    assert main(["train", "--config-name", "offline/ppo", model, *more]) == 0
    record = list(read_records(tmp_path / "run/metrics.jsonl"))[1]
    assert record["parity/tokens_different"] == 0
    assert record["reward/mean"] == pytest.approx(record["reward/preferred"])
    assert record["reward/mean"] < 0
    assert "critic/loss" in record
