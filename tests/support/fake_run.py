"""A run over fakes whose steps take about a millisecond, so that many kills fit into a second."""

import sys
from pathlib import Path

from rlloop.config.run import AlgorithmConfig, CheckpointConfig, EvalConfig, RolloutConfig, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.loop.loop import Loop
from rlloop.parity.certificate import Certificate
from rlloop.parity.monitor import ParityMonitor
from rlloop.runs.folder import RunFolder
from rlloop.testing import FakeTrainer, fake_parts

STEPS = 240  # a busy machine lets a test look late: the run is to be under way still
CONFIG = RunConfig(
    algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm"),
    trainer=TrainerConfig(num_steps=STEPS),
    rollout=RolloutConfig(num_prompts=4, group_size=4, max_tokens=6),
    eval=EvalConfig(every=10, num_draws=8),
    checkpoint=CheckpointConfig(every=3),
)


def main() -> None:
    """In the folder that the command line names. Prints the step it begins after, at the end weights and optimizer."""
    with RunFolder(Path(sys.argv[1])) as folder:
        parts = fake_parts(folder.checkpoints)
        loop = Loop(CONFIG, parts, folder, ParityMonitor(CONFIG.parity, Certificate(folder.parity), {}, {}))
        start = loop.restore()
        print(start, flush=True)
        loop.run(start)
        assert isinstance(parts.trainer, FakeTrainer)
        print(parts.trainer.policy.logits.tolist(), parts.trainer.momentum.tolist(), flush=True)
