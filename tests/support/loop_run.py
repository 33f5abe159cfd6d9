"""A loop over fakes in a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from rlloop.config.run import AlgorithmConfig, CheckpointConfig, EvalConfig, RolloutConfig, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.loop.loop import Loop
from rlloop.loop.parts import Parts
from rlloop.metrics import is_timing
from rlloop.parity.certificate import Certificate
from rlloop.parity.monitor import ParityMonitor
from rlloop.runs.folder import RunFolder, read_records, read_rollouts, rollout_files
from rlloop.testing import FakePolicy, fake_parts


def config(**sections) -> RunConfig:
    small = RunConfig(
        seed=5,
        algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm"),
        trainer=TrainerConfig(num_steps=4),
        rollout=RolloutConfig(num_prompts=4, group_size=3, max_tokens=6),
        eval=EvalConfig(every=0, num_draws=8),
        checkpoint=CheckpointConfig(every=2),
    )
    return dataclasses.replace(small, **sections)


class Run:
    """A loop over fakes in a folder, and what it left there."""

    def __init__(self, path: Path, settings: RunConfig | None = None, **replaced) -> None:
        self.config = settings or config()
        self.folder = RunFolder(path)
        policy = replaced.pop("policy", None) or FakePolicy()
        self.parts: Parts = fake_parts(self.folder.checkpoints, policy=policy, **replaced)
        fingerprints = self.parts.engine.fingerprint(), self.parts.trainer.fingerprint()
        self.monitor = ParityMonitor(self.config.parity, Certificate(self.folder.parity), *fingerprints)
        self.loop = Loop(self.config, self.parts, self.folder, self.monitor)

    def __call__(self, should_stop: Callable[[], bool] = lambda: False) -> int:
        with self.folder:
            return self.loop.run(self.loop.restore(), should_stop)

    def metrics(self) -> list[dict]:
        records = read_records(self.folder.metrics.path)
        return [{name: value for name, value in record.items() if not is_timing(name)} for record in records]

    def rollouts(self) -> list[list[dict]]:
        return [read_rollouts(file) for file in rollout_files(self.folder.path)]
