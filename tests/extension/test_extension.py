"""A package outside of rlloop adds a loss, an advantage, an engine, a reward, an environment and a kernel.

It is installed beside rlloop and named by a recipe of the working folder; `rlloop train` runs as it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlloop.cli.main import main
from rlloop.recipes.custom.tiny import write_tiny
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from tests.support.command import Command

HERE = Path(__file__).parent
KERNEL = "model.profile.activation=rlloop_plugin.kernels"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Folder that the package is installed in."""
    source, target = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("installed")
    shutil.copytree(HERE / "package", source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, env={**os.environ, "PYTHONWARNINGS": ""})
    return target


@pytest.fixture(scope="module")
def working_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    shutil.copytree(HERE / "recipes", folder / "recipes")
    write_tiny(folder / "model", hidden_size=32, num_layers=1)
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "say {n}"}}\n' for n in range(6)))
    return folder


@dataclasses.dataclass
class Ran:
    code: int
    output: str
    folder: Path

    @property
    def metrics(self) -> list[dict]:
        """Of each step."""
        return [record for record in read_records(self.folder / "metrics.jsonl") if record["step"]]

    @property
    def rows(self) -> list[dict]:
        return [row for file in rollout_files(self.folder) for row in read_rollouts(file)]


@pytest.fixture(scope="module")
def train(installed, working_folder):
    """`rlloop train` in a process of its own."""

    def run(name: str, *overrides: str) -> Ran:
        paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        arguments = ["train", "--config-name", "outside", f"run.dir={name}", *overrides]
        process = Command(*arguments, cwd=working_folder, env=environment)
        output, _ = process.communicate()
        return Ran(process.wait(), output, working_folder / name)

    return run


@pytest.fixture(scope="module")
def everything(train) -> Ran:
    ran = train("everything")
    assert ran.code == 0, ran.output
    return ran


def test_the_contract_holds_for_what_comes_from_outside(everything):
    assert len(everything.metrics) == 2
    for record in everything.metrics:
        assert record["parity/tokens"] > 0
        assert record["parity/tokens_different"] == 0


def test_the_reward_and_the_environment_were_played(everything):
    rows = everything.rows
    assert len(rows) == 2 * 2 * 4
    for row in rows:
        assert len(row["turns"]) == 2
        assert "<|tool|>again<|end|><|assistant|>" in row["text"]
        share = row["text"].count("e") / len(row["text"])
        assert row["components"] == {"letters": share}
        assert row["reward"] > share  # the environment's comes to it
    assert len({row["reward"] for row in rows}) > 1


def test_the_advantages_are_the_estimators_with_its_argument(everything):
    for row in everything.rows:
        group = [
            other["reward"] for other in everything.rows if other["uid"].split("/")[:2] == row["uid"].split("/")[:2]
        ]
        assert row["advantage"] == 0.25 * sum(np.sign(row["reward"] - other) for other in group)
    assert {abs(row["advantage"]) for row in everything.rows} - {0.0}


def test_the_loss_is_its_own_with_its_argument(everything, train):
    """Its value by hand; and another argument makes another update of the same completions."""
    first = [row for row in everything.rows if row["uid"].startswith("1/")]
    terms = np.concatenate([
        -np.sign(row["advantage"]) * abs(row["advantage"]) ** 0.5 * np.asarray(row["logprobs"], dtype=np.float64)
        for row in first
    ])  # fmt: skip
    assert everything.metrics[0]["loss/policy"] == pytest.approx(terms.mean(), abs=1e-9)
    other = train("other_power", "algorithm.loss.power=2.0")
    assert other.code == 0, other.output
    assert [row["token_ids"] for row in other.rows][:8] == [row["token_ids"] for row in everything.rows][:8]
    assert other.metrics[0]["loss/policy"] != everything.metrics[0]["loss/policy"]
    assert other.metrics[0]["loss/grad_norm"] != everything.metrics[0]["loss/grad_norm"]


def test_the_engine_made_every_completion_under_each_version(everything):
    report = json.loads((everything.folder / "engine.json").read_text())
    assert report["versions"] == [0, 1, 2]
    turns = sum(len(row["turns"]) for row in everything.rows)
    assert report["completions"] == turns + 2 * 2 * 2  # two evaluations of two conversations of two turns


def test_an_engine_whose_logprobs_are_not_the_trainers_is_stopped_in_its_first_step(train):
    ran = train("offset", "rollout.engine.offset=1e-3")
    assert ran.code == 3
    assert "have other bits in the trainer than in the engine" in ran.output
    assert ran.metrics == []
    measured = train("measured", "rollout.engine.offset=1e-3", "parity.mode=observe", "trainer.num_steps=1")
    assert measured.code == 0, measured.output
    assert measured.metrics[0]["parity/logprob_diff_mean"] == pytest.approx(1e-3, rel=1e-2)


def test_what_a_factory_makes_must_be_an_engine(train):
    ran = train("unfinished", "rollout.engine={_target_: rlloop_plugin.engine.unfinished}", "~rollout.engine.report")
    assert ran.code == 2
    assert "made a object, which is no engine: it lacks" in ran.output
    for name in ("set_version", "policy_version", "generate", "fingerprint"):
        assert name in ran.output


def test_rays_actors_use_the_package_and_give_the_same_bits(everything, train):
    pytest.importorskip("ray")
    ran = train("ray", "launch=ray", "ray.replicas=1", "ray.cpus_per_worker=0.5")
    assert ran.code == 0, ran.output
    for key in ("token_ids", "logprobs", "reward", "advantage"):
        assert [row[key] for row in ran.rows] == [row[key] for row in everything.rows], key
    assert [step["loss/grad_norm"] for step in ran.metrics] == [step["loss/grad_norm"] for step in everything.metrics]


def test_a_kernel_for_one_operation_runs_in_engine_and_trainer(everything, train):
    ran = train("kernel", KERNEL)
    assert ran.code == 0, ran.output
    assert all(record["parity/tokens_different"] == 0 for record in ran.metrics)
    assert all(record["parity/tokens"] > 0 for record in ran.metrics)
    assert "rlloop_plugin.kernels" in (ran.folder / "fingerprints.json").read_text()
    first, again = ({row["uid"]: row for row in run.rows}["1/0/0"] for run in (everything, ran))
    assert first["prompt_ids"] == again["prompt_ids"]
    assert first["logprobs"][0] != again["logprobs"][0]
    assert first["logprobs"][0] == pytest.approx(again["logprobs"][0], abs=0.5)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "algorithm.loss.pwoer=2.0",
            "algorithm.loss.pwoer is no argument of rlloop_plugin.loss.tempered; allowed are power",
        ),
        ("algorithm.loss.power=much", "algorithm.loss.power is 'much'; rlloop_plugin.loss.tempered takes float"),
        ("algorithm.loss._target_=rlloop_plugin.loss.tepmered", "did you mean tempered?"),
        ("algorithm.advantage.weight=2", "algorithm.advantage.weight is no argument of rlloop_plugin.advantage.ranks"),
        (
            "rollout.engine.reprot=x",
            "rollout.engine.reprot is no argument of rlloop_plugin.engine.OneByOne; allowed are",
        ),
        ("rollout.engine.offset=none", "rollout.engine.offset is 'none'; rlloop_plugin.engine.OneByOne takes float"),
        ("+reward.leter=a", "reward.leter is no argument of rlloop_plugin.reward.letters; allowed are letter"),
        ("+task.environment.trns=3", "task.environment.trns is no argument of rlloop_plugin.environment.Insisting"),
        ("model.profile.activation=rlloop_plugin.kernel", "model.profile.activation"),
        ("model.profile.rope=rlloop_plugin.kernels", "rlloop_plugin.kernels has no function rope"),
    ],
)
def test_a_wrong_argument_is_refused_by_name_before_any_work(
    installed, working_folder, monkeypatch, capsys, override, says
):
    monkeypatch.syspath_prepend(installed)
    monkeypatch.chdir(working_folder)
    assert main(["train", "--config-name", "outside", "run.dir=refused", override]) == 2
    assert says in capsys.readouterr().err
    assert not (working_folder / "refused").exists()
