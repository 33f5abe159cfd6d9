"""rlloop from Python: `train`, `GRPO`, and a run's folder that a loop of one's own records."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import rlloop
from rlloop.audit import Extent, verify
from rlloop.cli.main import main
from rlloop.dashboard.runs import Run as Shown
from rlloop.launch.grpo import BatchRewards
from rlloop.recipes.custom.tiny import write_tiny
from tests.support import tampering

SMALL = {
    "rollout": {"max_tokens": 4, "num_prompts": 2, "group_size": 4},
    "eval": {"num_draws": 4},
    "trainer": {"num_steps": 3, "lr": 1e-3},
}
ROWS = [{"prompt": f"{n}: say {'abc'[n % 3]}", "letter": "abc"[n % 3]} for n in range(30)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("python")
    write_tiny(place / "model")
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return place


def length(prompt: str, completion: str, example: rlloop.Example) -> float:
    return len(completion) / 10


class StopAt:
    def __init__(self, step: int) -> None:
        self.step, self.seen = step, list[object]()

    def on_start(self, run: rlloop.Run) -> None:
        self.seen.append(run.path.name)

    def on_step(self, step: int, metrics: dict) -> bool:
        self.seen.append(step)
        return step == self.step

    def on_end(self, run: rlloop.Run) -> None:
        self.seen.append(run.status)


def test_a_callback_stops_a_run_and_the_same_call_resumes_it(place: Path) -> None:
    def train(*callbacks: object) -> rlloop.Run:
        return rlloop.train(
            "custom", callbacks=callbacks, quiet=True, model={"path": place / "model"}, reward=length,
            data={"path": str(place / "rows.jsonl")}, run={"dir": str(place / "stopped")}, algorithm="dapo", **SMALL,
        )  # fmt: skip

    stop, steps = StopAt(1), []
    run = train(stop, lambda step, metrics: steps.append(step))
    assert stop.seen == ["stopped", 0, 1, "interrupted"]
    assert list(run.checkpoints) == [1]
    assert "Stopped by StopAt after step 1" in (run.path / "run.log").read_text()
    run = train(lambda step, metrics: steps.append(step))
    assert steps == [0, 1, 2, 3]
    assert (run.status, run.summary["step"], run.config["algorithm"]["loss"]) == ("finished", 3, "dapo")
    assert run.config["reward"] == {"_target_": f"{__name__}.length"}
    columns = run.columns("reward/mean", "eval/reward")
    assert columns["step"] == [0, 1, 2, 3]
    assert columns["reward/mean"][0] is None
    assert columns["reward/mean"][1] > 0
    assert columns["eval/reward"][1:3] == [None, None]
    assert run.best_checkpoint() == run.checkpoints[3]
    assert [row["reward"] for row in run.samples(2)] == [len(row["text"]) / 10 for row in run.samples(2)]
    with pytest.raises(rlloop.ConfigError, match="reward/mean"):
        run.columns("reward/men")
    with pytest.raises(rlloop.RunError, match="run of `rlloop train`"):
        run.log(9, {})


def test_dictionaries_and_files_are_recipes_too_and_a_refused_one_leaves_no_folder(place: Path) -> None:
    stopped = rlloop.Run(place / "stopped").config
    with pytest.raises(rlloop.ConfigError, match=r"requir\b.*require, fallback, observe"):
        rlloop.train({**stopped, "parity": {"mode": "requir"}}, run={"dir": str(place / "refused")})
    with pytest.raises(rlloop.ConfigError, match="on_start, on_step, on_end"):
        rlloop.train(stopped, callbacks=[3])
    with pytest.raises(rlloop.ConfigError, match="no such file"):
        rlloop.train("nothing.yaml")
    assert not (place / "refused").exists()
    exact = {"_target_": "rlloop.recipes.custom.reward.exact_match", "answer_key": "letter"}
    run = rlloop.train(stopped, quiet=True, reward=exact, run={"dir": str(place / "again")}, **{"trainer.num_steps": 1})
    assert run.config["reward"] == exact
    assert (run.config["algorithm"], run.summary["step"]) == (stopped["algorithm"], 1)


def test_grpo_takes_rewards_of_trl_and_rows_in_memory(place: Path) -> None:
    batches = []

    def share(prompts, completions, letter, **columns):
        batches.append(len(completions))
        assert all(prompt.endswith(each) for prompt, each in zip(prompts, letter, strict=True))
        return [float(completion.count(each)) for completion, each in zip(completions, letter, strict=True)]

    def short(completions):
        return [None if index else -len(text) / 100 for index, text in enumerate(completions)]

    run = rlloop.GRPO(
        place / "model", [share, short], ROWS, reward_weights=[2.0, 1.0], quiet=True, run={"dir": str(place / "grpo")},
        **SMALL,
    ).train()  # fmt: skip
    assert batches == [4, 8, 8, 8, 4]  # a batch at a time, as TRL calls them
    first, second = run.samples()[:2]
    assert first["components"].keys() == {"share", "short"}
    assert first["reward"] == pytest.approx(2 * first["components"]["share"] + first["components"]["short"])
    assert second["components"].keys() == {"share"}
    assert run.columns("parity/tokens_different")["parity/tokens_different"][1:] == [0, 0, 0]
    text = "reward_funcs is 'mine.reward'; it must be a function"
    for wrong, message in (([], "function"), ([share, 3], "function"), (None, "function"), ("mine.reward", text)):
        with pytest.raises(rlloop.ConfigError, match=message):
            rlloop.GRPO(place / "model", wrong, ROWS)
    nameless = [{"prompt": "a"}, {"question": "b"}], "train_dataset: row 2 has no field 'prompt'; it has question"
    for rows, message in (([], "has no rows"), (None, "has no rows"), (["a"], "the row 'a'; give dict"), nameless):
        with pytest.raises(rlloop.ConfigError, match=message):
            rlloop.GRPO(place / "model", share, rows)
    with pytest.raises(rlloop.ConfigError, match="config is None; it must be a recipe's name"):
        rlloop.train(None)


def test_a_batch_reward_is_not_for_train(place: Path) -> None:
    def right(prompts, completions, answer, **_):
        return [1.0 for _ in completions]

    where = {"model": {"path": place / "model"}, "data": {"path": str(place / "rows.jsonl")}}
    with pytest.raises(
        rlloop.ConfigError, match=r"right\(.*a batch reward of rlloop.GRPO; rlloop.train calls \(prompt,"
    ):
        rlloop.train("custom", reward=right, run={"dir": str(place / "refused")}, **where)
    assert not (place / "refused").exists()


def test_of_a_reward_of_trl_nan_rejects_a_completion_and_none_leaves_it_out() -> None:
    examples = [rlloop.Example(name, [1], "a", {}) for name in ("0", "1")]
    reward = BatchRewards([lambda completions: [math.nan, None], lambda completions: [1.0, 1.0]])
    first, second = reward(["a", "a"], ["b", "c"], examples)
    assert math.isnan(first.reward)
    assert second.reward == 1.0


def test_parity_of_a_run_and_a_checkpoint_is_of_the_same_weights_or_says_so(place: Path, tmp_path, capsys) -> None:
    run = place / "stopped"
    for step, code, says in ((1, 0, "Both sides are version 1"), (3, 3, "Not the same weights")):
        assert main(["parity", str(run), str(run / f"checkpoints/step_{step}"), "--require"]) == code
        assert says in capsys.readouterr().out
    assert main(["generate", str(run / "checkpoints/step_2"), "a"]) == 2
    assert f"is not kept; {run} has the checkpoints: step_1, step_3" in capsys.readouterr().err.replace("\n", " ")
    assert main(["parity", str(place / "model"), str(run), "--require"]) == 0
    assert "Both sides are version 0" in capsys.readouterr().out

    short = shutil.copytree(place / "model", tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    assert main(["parity", str(short), f"engine:{short}", "--require"]) == 0  # 64 tokens by default
    assert " 128 " in capsys.readouterr().out.replace("\n", " ")  # 8 sequences, 16 tokens each from the engine
    assert main(["parity", str(short), f"engine:{short}", "--length", "33"]) == 2
    assert "the model has 32 positions" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ a loop of one's own


def own_loop(place: Path, folder: Path, steps: range, *, other: float = 0.0) -> rlloop.Run:
    """REINFORCE in ten lines. `other`: added to one of the trainer's logprobs in the last step."""
    model = rlloop.load_model(place / "model")
    engine = rlloop.Engine(model)
    with rlloop.Run(folder, {"lr": 1e-2}, parity="require", engine=model.fingerprint()) as run:
        for step in steps:
            engine.set_version(step)
            prompts = [[id] for id in (7, 8) for _ in range(3)]
            sampling = [rlloop.SamplingParams(4, seed=10 * step + i, ignore_eos=True) for i in range(6)]
            completions = engine.generate(prompts, sampling)
            logprobs = rlloop.token_logprobs(model, [(each.prompt_ids, each.token_ids) for each in completions])
            scored = [each.detach().numpy().copy() for each in logprobs]
            scored[4][1] += other * (step == steps[-1])
            run.samples(step, [
                {"completion": each, "text": "?", "reward": np.float64(index), "trainer_logprobs": mine}
                for index, (each, mine) in enumerate(zip(completions, scored, strict=True))
            ])  # fmt: skip
            run.log(step, {"loss/value": logprobs[0].sum(), "eval/reward": 0.1 * step})
    return run


def problems_of(folder: Path) -> dict[str, list[str]]:
    return {check.name: check.problems for check in verify(folder, Extent()) if check.problems}


def test_a_loop_of_ones_own_is_recorded_verified_compared_and_shown(place: Path, capsys) -> None:
    run = own_loop(place, place / "own", range(3))
    assert (run.status, [line["step"] for line in run.certificate]) == ("finished", [0, 1, 2])
    assert [line["tokens_different"] for line in run.certificate] == [0, 0, 0]
    assert run.columns("reward/mean")["reward/mean"] == [2.5, 2.5, 2.5]
    assert {row["group"] for row in run.samples(1)} == {0, 1}
    assert problems_of(run.path) == {}
    checks = {check.name: check.summary for check in verify(run.path)}
    assert "not checked: the loop is not rlloop's" in checks["requests, rewards, advantages"]

    run = own_loop(place, run.path, range(3, 5))  # goes on
    assert (len(run.certificate), problems_of(run.path)) == (5, {})
    assert main(["compare", str(run.path), str(place / "stopped")]) == 0
    assert "5" in capsys.readouterr().out
    shown = Shown(run.path, "own")
    assert (shown.breaks(), shown.problems) == ([], [])
    assert shown.overview()["step"] == 4


def test_what_a_loop_of_ones_own_gets_wrong_is_named(place: Path, tmp_path: Path) -> None:
    with pytest.raises(rlloop.ParityError, match=r"step 2.*2/1/1, token 1"):
        own_loop(place, tmp_path / "broken", range(1, 3), other=1e-3)
    assert rlloop.Run(tmp_path / "broken").status == "parity broken"
    assert problems_of(tmp_path / "broken") == {}
    run = rlloop.Run(tmp_path / "text")
    foreign = {"prompt": "2 + 2", "text": "4", "reward": 1}
    for rows, message in (
        ([], "no rows"), ([{**foreign, "rewrd": 1}], "did you mean reward"), ([{"text": "4"}], "no reward"),
        ([{"reward": 1}], "neither"), ([{**foreign, "token_ids": [1]}], "0 logprobs for 1"),
        ([{**foreign, "reward": float("nan")}], "finite"), ([{**foreign, "trainer_logprobs": [0.0]}], "1 trainer_log"),
    ):  # fmt: skip
        with pytest.raises(rlloop.ConfigError, match=message):
            run.samples(1, rows)
    assert run.samples(1, [foreign, {**foreign, "text": "5", "reward": 0}])["reward/solved"] == 0.5
    with pytest.raises(rlloop.ConfigError, match=r"reward/mean is 0\.9, and the step's samples give 0\.5"):
        run.log(1, {"reward/mean": 0.9})
    run.log(1, {"mine": np.float32(2)})
    with pytest.raises(rlloop.ConfigError, match="after step 1"):
        run.log(1)
    run.finish()
    assert run.records[0]["mine"] == 2
    assert [row["outcome"].partition(":")[0] for row in run.samples()] == ["dropped", "dropped"]
    assert problems_of(run.path) == {}


def test_tampering_with_a_loop_of_ones_own_is_seen(place: Path) -> None:
    run = rlloop.Run(place / "own")
    metrics = run.path / "metrics.jsonl"
    before = metrics.read_bytes()
    metrics.write_bytes(before.replace(b'"reward/mean":2.5', b'"reward/mean":0.5', 1))
    assert set(problems_of(run.path)) >= {"metrics", "aggregates"}
    metrics.write_bytes(before)
    tampering.put(run.path, 4, [row | {"reward": 9.0} for row in run.samples(4)])
    assert set(problems_of(run.path)) >= {"rollouts", "aggregates"}
