"""Partial rollouts over fakes: groups that a slow tool keeps go on into later steps, and each token is compared under
the version that made it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlloop.audit import verify
from rlloop.config.fleet import FleetConfig, FleetKind
from rlloop.config.rollout import PartialConfig
from rlloop.config.run import AlgorithmConfig, Anchor, CheckpointConfig, EvalConfig, RolloutConfig, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError, ParityError
from rlloop.loop.environments import Reply
from rlloop.loop.partial import Partial, _Group
from rlloop.metrics import Mean
from rlloop.parity.certificate import find_breaks
from rlloop.rewards.episode import episode_reward
from rlloop.runs.folder import RunFolder, read_records
from rlloop.testing import FakeEngine, FakePolicy, FakeScorer, FakeTrainer
from rlloop.types import Example
from tests.support import loop_run
from tests.support.fake_history import History
from tests.support.talks import Countdown, TalkTask

STEPS, PROMPTS, GROUP = 6, 4, 3
LATE = ("train-1-1", "train-2-1")
REFILLS = {"dynamic_sampling": True, "max_refills": 1}


def config(prompts: int = 4, lag: int = 2, overdue: str = "wait", **more) -> RunConfig:
    settings = {
        "seed": 5,
        "algorithm": AlgorithmConfig(loss="grpo", advantage="group_norm", anchor=Anchor.rollout),
        "trainer": TrainerConfig(num_steps=STEPS),
        "rollout": RolloutConfig(
            num_prompts=PROMPTS, group_size=GROUP, max_tokens=6, partial=PartialConfig(prompts, lag, overdue)
        ),
        "eval": EvalConfig(every=0, num_draws=2),
        "checkpoint": CheckpointConfig(every=1),
    }
    return RunConfig(**{**settings, **more})


class Late(Countdown):
    """The first tool call of some conversations ends only when so many more versions have been published."""

    published = 0

    def __init__(self, example: Example) -> None:
        super().__init__(example)
        self.due = Late.published + example.data["late"]

    async def step(self, message: str) -> Reply:
        while Late.published < self.due:
            await asyncio.sleep(0.001)
        return super().step(message)


class Task(TalkTask):
    """Prompt 1 of the first two batches comes `late` versions late; all take two turns."""

    environment = Late

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late

    def _example(self, name: str, index: int) -> Example:
        made = super()._example(name, index)
        late = self.late if name in LATE else 0
        return dataclasses.replace(made, data={**made.data, "turns": 2, "late": late})


class Sync:
    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine

    def publish(self, version):
        self.engine.set_version(version)
        Late.published = version
        return {}


class Run(loop_run.Run):
    def __init__(self, path: Path, settings: RunConfig, late: int) -> None:
        policy = FakePolicy()
        engine = FakeEngine(policy)
        schedule = Partial(settings, History(policy))
        super().__init__(
            path, settings, policy=policy, engine=engine, trainer=FakeTrainer(policy), sync=Sync(engine),
            task=Task(late), scorer=FakeScorer(episode_reward), schedule=schedule, measured=schedule.take_metrics,
        )  # fmt: skip
        rollout = {"num_prompts": PROMPTS, "partial": dataclasses.asdict(settings.rollout.partial)}
        (path / "config.yaml").write_text(json.dumps({"rollout": rollout}))

    def rows(self) -> list[dict]:
        return [{**row, "step": step} for step, rows in enumerate(self.rollouts(), start=1) for row in rows]


def problems(path: Path) -> list[str]:
    told = ("metrics", "ledger", "rollouts", "outcomes", "aggregates")
    return [problem for check in verify(path) if check.name in told for problem in check.problems]


@pytest.fixture
def carried(tmp_path) -> Run:
    run = Run(tmp_path, config(), late=1)
    assert run() == STEPS
    run.loop.close()
    return run


def test_groups_that_are_not_whole_go_on_into_later_steps(carried):
    rows = carried.rows()
    assert {row["outcome"] for row in rows} == {"trained"}
    assert len({row["uid"] for row in rows}) == len(rows) == STEPS * PROMPTS * GROUP
    late = [row for row in rows if row["example"] in LATE]
    assert late
    for row in late:  # one version for each turn, and the step after it
        first = row["policy_version"]
        assert row["versions"] == [first, first + 1]
        assert [turn["version"] for turn in row["conversation"]] == row["versions"]
        assert row["step"] - 1 >= first + 1
    assert not [row for row in rows if row not in late and "versions" in row]
    for record in carried.metrics()[1:]:
        assert record["ledger/trained"] == PROMPTS * GROUP
        assert record["parity/tokens_different"] == record["parity/redrawn_different"] == 0
        assert record["rollout/version_lag_max"] <= 2
        assert record["rollout/groups_dropped"] == 0
    assert carried.metrics()[1]["rollout/groups_carried"] == 4
    assert carried.metrics()[-1]["rollout/groups_carried"] == 0
    for rows in carried.rollouts():  # a group's samples stand together, under a number of their own
        assert [row["group"] for row in rows] == [index // GROUP for index in range(PROMPTS * GROUP)]


def test_the_certificate_counts_tokens_by_version(carried):
    lines = list(read_records(carried.folder.parity.path))
    assert not find_breaks(lines)
    assert [line["version"] for line in lines] == list(range(STEPS))
    mixed = [line for line in lines if "versions" in line]
    assert mixed
    assert all(sum(line["versions"].values()) == line["tokens"] for line in mixed)
    assert not problems(carried.folder.path)
    step = mixed[0]["step"]
    changed = [{**row, "versions": None, "policy_version": step - 1} for row in carried.rollouts()[step - 1]]
    with RunFolder(carried.folder.path) as folder:
        folder.write_rollouts(step, changed)
    assert any("are certified" in problem for problem in problems(carried.folder.path))


def test_ratios_under_the_present_weights_are_not_expected_of_completions_of_older_ones(tmp_path):
    """As a correction measures them, with algorithm.anchor=trainer."""
    run = Run(tmp_path, config(), late=1)
    update, lags = run.parts.trainer.forward_backward, []

    def measured(batch, loss, **options):
        result = update(batch, loss, **options)
        versions = {int(version) for sample in batch for version in sample.completion.token_versions}
        lags.append(len(lags) not in versions or len(versions) > 1)
        return dataclasses.replace(result, metrics={**result.metrics, "is/ratio_mean": Mean(1.0 - 0.1 * lags[-1], 1)})

    run.parts.trainer.forward_backward = measured
    run()
    run.loop.close()
    assert set(lags) == {True, False}
    assert not problems(tmp_path)


def test_a_wrong_version_of_a_token_is_a_difference(tmp_path):
    run = Run(tmp_path, config(), late=1)
    history = run.parts.schedule._history
    remember = history.remember

    def forget(version: int) -> None:
        remember(version)
        history.logits[0] = [1.0] * 7 + [0.0]  # not what sampled the first turns

    history.remember = forget
    with pytest.raises(ParityError, match="have other bits in the trainer"):
        run()
    run.loop.close()


def test_a_group_at_the_bound_is_waited_for(tmp_path):
    run = Run(tmp_path, config(lag=1), late=1)
    run()
    run.loop.close()
    assert {record["rollout/groups_dropped"] for record in run.metrics()[1:]} == {0}
    assert max(record["rollout/version_lag_max"] for record in run.metrics()[1:]) == 1


def test_a_group_beyond_the_bound_is_dropped_with_its_reason(tmp_path):
    run = Run(tmp_path, config(lag=1, overdue="drop"), late=3)
    run()
    run.loop.close()
    late = [row for row in run.rows() if row["example"] in LATE]
    why = "rejected: its weights are 2 steps old, and rollout.partial.max_version_lag is 1"
    assert late
    assert {row["outcome"] for row in late} == {why}
    assert sum(record["rollout/groups_dropped"] for record in run.metrics()[1:]) * GROUP == len(late)
    assert all(record["ledger/trained"] == PROMPTS * GROUP for record in run.metrics()[1:])
    assert not problems(tmp_path)


def test_a_stopped_run_loses_no_prompt(tmp_path):
    steps = iter(range(1, 9))
    first = Run(tmp_path, config(), late=1)
    assert first(lambda: next(steps) == 3) == 3
    before = first.rollouts()
    first.loop.close()
    second = Run(tmp_path, config(), late=1)
    assert second() == STEPS
    second.loop.close()
    assert second.rollouts()[:3] == before
    names = {row["uid"].rpartition("/")[0] for row in second.rows()}
    assert names == {f"{index // PROMPTS + 1}/{index % PROMPTS}" for index in range(STEPS * PROMPTS)}
    assert len(second.rows()) == STEPS * PROMPTS * GROUP
    assert not problems(tmp_path)


def test_a_conversation_that_ended_after_the_cut_is_not_lost_by_a_stop(tmp_path):
    """An episode of another library may end while the trainer learns; it has no sample before the next step."""
    partial = Partial(config(), History(FakePolicy()))
    partial._groups = [_Group(1, 2, [SimpleNamespace(ended=True)])]  # pyright: ignore[reportArgumentType]
    partial.save(tmp_path)
    again = Partial(config(), History(FakePolicy()))
    again.restore(tmp_path)
    assert (again._groups, again._again) == ([], [(1, 2)])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"algorithm": AlgorithmConfig(loss="grpo", advantage="group_norm")}, "anchor=rollout, or a correction"),
        ({"fleet": FleetConfig(FleetKind.regions, max_version_lag=1)}, "samples whole batches ahead"),
        (
            {"algorithm": AlgorithmConfig(loss="grpo", advantage="group_norm", anchor=Anchor.rollout, **REFILLS)},
            "max_refills asks for prompts in turn",
        ),
    ],
)
def test_what_cannot_carry_conversations_is_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        config(**more)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"rollout.partial.max_version_lag is 0"):
        PartialConfig(max_version_lag=0)
    with pytest.raises(ConfigError, match=r"rollout.partial.overdue is 'never'"):
        PartialConfig(overdue="never")
