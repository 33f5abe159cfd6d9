"""A run over fakes whose steps take about a millisecond, so that many kills fit into a second."""

import sys
import time
from pathlib import Path

from rlloop.config.run import AlgorithmConfig, CheckpointConfig, EvalConfig, RolloutConfig, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.loop.loop import Loop
from rlloop.parity.certificate import Certificate
from rlloop.parity.monitor import ParityMonitor
from rlloop.runs.folder import RunFolder
from rlloop.testing import FakeTrainer, fake_parts
from tests.support.tiny_run import steps

STEPS = 240
CONFIG = RunConfig(
    algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm"),
    trainer=TrainerConfig(num_steps=STEPS),
    rollout=RolloutConfig(num_prompts=4, group_size=4, max_tokens=6),
    eval=EvalConfig(every=10, num_draws=8),
    checkpoint=CheckpointConfig(every=3),
)


def main() -> None:
    """In the folder that the command line names. Prints the step it begins after, at the end weights and optimizer.
    With a number behind the folder it stops at so many records of steps, until it is killed."""
    with RunFolder(Path(sys.argv[1])) as folder:
        parts = fake_parts(folder.checkpoints)
        loop = Loop(CONFIG, parts, folder, ParityMonitor(CONFIG.parity, Certificate(folder.parity), {}, {}))
        start = loop.restore()
        print(start, flush=True)
        assert isinstance(parts.trainer, FakeTrainer)
        if len(sys.argv) > 2:
            wait_at(int(sys.argv[2]), folder.path, parts.trainer)
        loop.run(start)
        print(parts.trainer.policy.logits.tolist(), parts.trainer.momentum.tolist(), flush=True)


def wait_at(records: int, folder: Path, trainer: FakeTrainer) -> None:
    learn = trainer.forward_backward

    def learn_or_wait(*given, **named):
        while steps(folder) >= records:
            time.sleep(0.01)
        return learn(*given, **named)

    trainer.forward_backward = learn_or_wait
