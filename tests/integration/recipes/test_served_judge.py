"""Judges behind an engine server: a model that was fine-tuned to give verdicts scores and compares a run's answers."""

from __future__ import annotations

import json

import pytest

from rlloop import Engine, load_model
from rlloop.cli.main import main
from rlloop.recipes.custom.tiny import write_tiny
from rlloop.rewards.judge import COMPARING, SCORING
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.fleet.text import tokenizer_of
from rlloop.runs.folder import read_records
from rlloop.web.server import BackgroundServer, Listen

SCORE, BETTER = '{"large": 7 }', '{"better": "B"}'
DIGITS = [str(digit) for digit in range(10)]


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """The address of an engine whose model answers rubrics with `SCORE` and comparisons with `BETTER`."""
    folder = tmp_path_factory.mktemp("judge")
    words = ["grade", "compare", "two", "rubrics.", '{"large":', "7", "}", '{"better":', '"B"}']
    write_tiny(folder / "model", words, hidden_size=32)
    asked = (SCORING.format(scale=10, example='{"large": 10}'), SCORE), (COMPARING.format(criterion="x"), BETTER)
    rows = [
        [{"role": "system", "content": system}, {"role": "user", "content": "# Task" + " x" * more},
         {"role": "assistant", "content": verdict}]
        for system, verdict in asked for more in range(0, 24, 2)
    ]  # fmt: skip
    (folder / "verdicts.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    sizes = ["rollout.num_prompts=12", "rollout.max_tokens=8", "trainer.num_steps=30", "trainer.lr=1e-2"]
    off = ["eval.every=30", "eval.num_draws=2", "data.eval_fraction=0.2", f"run.dir={folder}/run"]
    given = [f"model.path={folder}/model", f"data.path={folder}/verdicts.jsonl", "data.prompt_key=messages"]
    assert main(["train", "--config-name", "offline", *given, *sizes, *off]) == 0

    trained = folder / "run/checkpoints/step_30"
    service = EngineService(Engine(load_model(trained)))
    background = BackgroundServer(EngineServer(service, name="judge", tokenizer=tokenizer_of(trained)).app, Listen())
    yield f"{background.url}/v1"
    background.close()
    service.close()


def test_a_run_is_scored_and_compared_by_it(judge, tmp_path):
    write_tiny(tmp_path / "policy", DIGITS, hidden_size=32)
    prompts = [{"prompt": f"{digit} {other}"} for digit in DIGITS for other in DIGITS[:3]]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))

    def train(name: str, *reward: str) -> dict[str, float]:
        sizes = ["rollout.num_prompts=3", "rollout.group_size=2", "rollout.max_tokens=2", "trainer.num_steps=1"]
        given = [f"model.path={tmp_path}/policy", f"data.path={tmp_path}/data.jsonl", f"run.dir={tmp_path}/{name}"]
        judged = ["+reward.judge.url=" + judge, "+reward.judge.model=rlloop", "+reward.judge.max_tokens=8"]
        judged += ["+reward.judge.price_out=1000000", "eval.num_draws=2"]
        assert main(["train", "custom", *given, *sizes, *judged, *reward]) == 0
        return list(read_records(tmp_path / name / "metrics.jsonl"))[1]

    scored = train(
        "scored",
        "reward._target_=rlloop.rewards.JudgeReward",
        "+reward.rubrics.large.text=A large digit",
        "+reward.scale=10",
    )
    assert scored["reward/mean"] == pytest.approx(0.7)
    assert scored["reward/large"] == pytest.approx(0.7)
    assert scored["reward/judge_cost"] == pytest.approx(4)  # `SCORE` and the end
    assert scored["parity/tokens_different"] == scored["ledger/rejected"] == 0

    compared = train("compared", "reward._target_=rlloop.rewards.PairwiseJudge")
    assert compared["reward/mean"] == pytest.approx(0.5)  # "B" in either order
    assert compared["reward/judge_cost"] > 0
    assert compared["parity/tokens_different"] == compared["ledger/rejected"] == 0
