"""The bounded-lag loop over fakes: how old samples are, bits compared under the right weights, resuming."""

from __future__ import annotations

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlloop.audit import verify
from rlloop.config.fleet import FleetConfig, FleetKind
from rlloop.config.run import AlgorithmConfig, Anchor, CheckpointConfig, EvalConfig, RolloutConfig, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.loop.loop import Loop
from rlloop.loop.schedule import InStep, Pipelined
from rlloop.metrics import is_timing
from rlloop.parity.certificate import Certificate, comparison_of
from rlloop.parity.monitor import ParityMonitor
from rlloop.runs.folder import RunFolder, read_records, read_rollouts, rollout_files
from rlloop.testing import FakeEngine, FakePolicy, FakeTrainer, fake_parts
from tests.support import loop_run
from tests.support.fake_history import History


def config(lag: int, **algorithm) -> RunConfig:
    return RunConfig(
        seed=5,
        fleet=FleetConfig(FleetKind.regions, max_version_lag=lag),
        algorithm=AlgorithmConfig(**{"loss": "grpo", "advantage": "group_norm", "anchor": Anchor.rollout, **algorithm}),
        trainer=TrainerConfig(num_steps=8, num_minibatches=2),
        rollout=RolloutConfig(num_prompts=4, group_size=3, max_tokens=6),
        eval=EvalConfig(every=4, num_draws=8),
        checkpoint=CheckpointConfig(every=3),
    )


class Sync:
    """Copies the policy to an engine of its own."""

    def __init__(self, policy: FakePolicy, engine: FakeEngine) -> None:
        self.policy, self.engine = policy, engine

    def publish(self, version):
        self.engine.policy.logits = self.policy.logits.copy()
        self.engine.set_version(version)
        return {}


class Run:
    def __init__(self, path, lag: int | None) -> None:
        """`lag` None: the on-policy schedule."""
        self.config, self.folder = config(lag or 0), RunFolder(path)
        self.policy, engine = FakePolicy(), FakeEngine(FakePolicy())
        history = History(self.policy)
        parts = fake_parts(
            self.folder.checkpoints,
            policy=self.policy,
            engine=engine,
            trainer=FakeTrainer(self.policy),
            sync=Sync(self.policy, engine),
            schedule=InStep() if lag is None else Pipelined(lag, history, self.config.trainer.num_steps),
        )
        monitor = ParityMonitor(self.config.parity, Certificate(self.folder.parity), {}, {})
        self.loop = Loop(self.config, parts, self.folder, monitor)

    def __call__(self, stop_after: int = 99) -> list:
        steps = iter(range(1, stop_after + 1))
        with self.folder:
            self.loop.run(self.loop.restore(), lambda: next(steps) == stop_after)
        metrics = [
            {name: value for name, value in record.items() if not is_timing(name)}
            for record in read_records(self.folder.metrics.path)
        ]
        rollouts = [read_rollouts(file) for file in rollout_files(self.folder.path)]
        certificate = [comparison_of(line) for line in read_records(self.folder.parity.path)]
        return [metrics, rollouts, certificate, self.policy.logits.tolist()]


@pytest.mark.parametrize("lag", [1, 2])
def test_samples_are_as_old_as_asked_for_and_compared_under_the_weights_that_made_them(tmp_path, lag):
    run = Run(tmp_path, lag)
    metrics, rollouts, certificate, _ = run()
    versions = [{row["policy_version"] for row in rows} for rows in rollouts]
    assert versions == [{max(0, step - 1 - lag)} for step in range(1, 9)]
    assert [line["version"] for line in certificate] == [max(0, step - 1 - lag) for step in range(1, 9)]
    for step, record in enumerate(metrics[1:], start=1):
        assert record["rollout/version_lag"] == min(step - 1, lag)
        assert record["parity/tokens_different"] == record["parity/k3"] == 0
        assert record["ledger/sampled"] == record["ledger/trained"] == 12
    assert metrics[-1]["eval/reward"] > metrics[0]["eval/reward"]
    assert len({row["uid"] for rows in rollouts for row in rows}) == 8 * 12
    (tmp_path / "config.yaml").write_text(json.dumps({"fleet": {"max_version_lag": lag}}))
    told = ("metrics", "ledger", "rollouts", "outcomes", "aggregates")
    assert not [problem for check in verify(tmp_path) if check.name in told for problem in check.problems]
    (tmp_path / "config.yaml").write_text(json.dumps({"fleet": {"max_version_lag": lag - 1}}))
    [outcomes] = [check for check in verify(tmp_path) if check.name == "outcomes"]
    assert f"was trained with weights {lag} steps old; the run allows {lag - 1}" in outcomes.problems[0]


def test_without_lag_it_is_the_strict_loop(tmp_path):
    assert Run(tmp_path / "a", 0)() == Run(tmp_path / "b", None)()


@pytest.mark.parametrize("stop", [1, 3, 4])
def test_what_was_under_way_is_in_the_checkpoint(tmp_path, stop):
    whole = Run(tmp_path / "whole", 2)()
    Run(tmp_path / "parts", 2)(stop_after=stop)
    assert Run(tmp_path / "parts", 2)() == whole


def test_a_sample_that_is_too_old_is_rejected_with_the_reason(tmp_path):
    run = Run(tmp_path, 1)
    batch = run.loop.sampler.batch

    def older(step, version, first=0):
        oldest, *rest = batch(step, version, first)
        if step == 1:
            return [oldest, *rest]
        stale = dataclasses.replace(oldest.completion, policy_version=oldest.completion.policy_version - 1)
        return [dataclasses.replace(oldest, completion=stale), *rest]

    run.loop.sampler.batch = older
    _, rollouts, _, _ = run()
    outcomes = {row["uid"]: row["outcome"] for rows in rollouts for row in rows}
    assert outcomes["6/0/0"] == "rejected: its weights are 2 steps old, and fleet.max_version_lag is 1"
    assert sorted(outcomes.values()).count("trained") == 8 * 11 + 1


def test_a_lag_that_nothing_corrects_is_refused():
    with pytest.raises(ConfigError, match=r"anchor=rollout, or a correction"):
        config(1, anchor=Anchor.trainer)
    config(1, anchor=Anchor.trainer, correction={"tis": {}})
    with pytest.raises(ConfigError, match="set fleet=regions"):
        FleetConfig(max_version_lag=1)
    with pytest.raises(ConfigError, match=r"fleet.engines.eu is \['host:1'\]; it must be a list of http"):
        FleetConfig(FleetKind.regions, engines={"eu": ["host:1"]})


class Slow:
    """Publishes in the background, as slowly as the test wants."""

    def __init__(self, sync: Sync, notes: list[str]) -> None:
        self.sync, self.notes, self.gate = sync, notes, threading.Event()
        self.thread = ThreadPoolExecutor(1)

    def publish(self, version):
        return self.thread.submit(self._publish, version)

    def _publish(self, version):
        assert self.gate.wait(60)
        self.notes.append(f"published {version}")
        return {"sync/version": version, **self.sync.publish(version)}


def noted(run: Run, notes: list[str], sync: Slow) -> Run:
    """Notes what the trainer does, and opens the gate after its gradients."""
    trainer, batch = run.loop.parts.trainer, run.loop.sampler.batch
    forward_backward, optim_step = trainer.forward_backward, trainer.optim_step

    def gradients(*args, **options):
        notes.append("gradients")
        result = forward_backward(*args, **options)
        sync.gate.set()
        return result

    def step():
        notes.append("step")
        return optim_step()

    def sampled(step, version, first=0):
        notes.append(f"sampled {step}")
        return batch(step, version, first)

    trainer.forward_backward, trainer.optim_step, run.loop.sampler.batch = gradients, step, sampled
    return run


@pytest.fixture
def slow(tmp_path):
    """A run of lag 1 whose version 1 is published slowly, what it notes, and its sync."""
    run, notes = Run(tmp_path, 1), list[str]()
    run.config = run.loop.config = dataclasses.replace(
        run.config, trainer=TrainerConfig(num_steps=8), eval=EvalConfig(every=0)
    )
    sync = Slow(run.loop.parts.sync, notes)
    sync.gate.set()
    run.loop.parts = dataclasses.replace(run.loop.parts, sync=sync)
    yield noted(run, notes, sync), notes, sync
    sync.thread.shutdown()


def test_the_trainer_goes_on_while_a_version_is_published_up_to_its_next_step(slow):
    run, notes, sync = slow
    run.loop.step(1)
    del notes[:]
    sync.gate.clear()
    metrics = run.loop.step(2)
    run.loop.parts.schedule.settle()
    assert [note for note in notes if "sampled" not in note] == ["gradients", "published 1", "step"]
    assert notes.index("published 1") < notes.index("sampled 3")
    assert metrics["sync/version"] == 1


def test_a_publication_that_fails_leaves_the_weights_and_samples_nothing(slow):
    run, notes, sync = slow
    run.loop.step(1)
    del notes[:]

    def fails(version):
        raise OSError("the disk is full")

    before = run.policy.logits.copy()
    sync.sync.publish = fails
    with pytest.raises(OSError, match="the disk is full"):
        run.loop.step(2)
    with pytest.raises(OSError, match="the disk is full"):
        run.loop.parts.schedule.settle()
    assert sorted(note for note in notes if note != "sampled 2") == ["gradients", "published 1"]
    assert (run.policy.logits == before).all()


class Noted(InStep):
    """A schedule of one's own."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def publish(self, sync, version):
        self.calls.append(f"publish {version}")
        return super().publish(sync, version)

    def samples(self, sampler, step, version, first=0):
        self.calls.append(f"samples {step} of {version}")
        return super().samples(sampler, step, version, first)

    def recompute(self, samples):
        self.calls.append(f"recompute {len(samples)}")

    def settle(self):
        self.calls.append("settle")

    def save(self, folder):
        self.calls.append("save")
        (folder / "mine").write_text("kept")

    def restore(self, folder):
        self.calls.append(f"restore {(folder / 'mine').read_text()}")

    def close(self):
        self.calls.append("close")


def test_the_loop_drives_any_schedule(tmp_path):
    settings = loop_run.config(trainer=TrainerConfig(num_steps=2), checkpoint=CheckpointConfig(every=0))
    schedule = Noted()
    run = loop_run.Run(tmp_path, settings, schedule=schedule)
    assert run() == 2
    run.loop.close()
    steps = ["publish 0", "samples 1 of 0", "recompute 12", "publish 1", "samples 2 of 1", "recompute 12", "publish 2"]
    assert schedule.calls == [*steps, "settle", "save", "close"]
    again = Noted()
    assert loop_run.Run(tmp_path, settings, schedule=again)() == 2
    assert again.calls == ["restore kept"]
