"""The run of `tiny_run` on several ranks, started as torchrun starts them, whose micro-batches are small: there are
several for each rank."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.command import Command, free_port
from tests.support.tiny_run import history, train

SMALL = "trainer.max_batch_tokens=96"
SPELLED = "def reward(prompt, completion, example):\n    return sum(map(ord, completion)) % 5\n"
FILES = ("model.safetensors", "optimizer.safetensors", "trainer.json")


def start(folder: Path, size: int, *overrides: str, run: Callable[..., Command] = train) -> list[Command]:
    """`size` processes with torchrun's environment; one without it. `run` starts each, as `tiny_run.train` does."""
    if size == 1:
        return [run(folder, SMALL, *overrides)]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    return [
        run(folder, SMALL, *overrides, env={**os.environ, **meeting, "RANK": str(rank), "OMP_NUM_THREADS": "1"})
        for rank in range(size)
    ]


def on_pictures(folder: Path, *overrides: str, env: Mapping[str, str] | None = None) -> Command:
    """Two steps of the recipe `images`, whose reward has signal from the first one."""
    (folder.parent / "learnable.py").write_text(SPELLED)
    few = ["rollout.num_prompts=3", "rollout.group_size=3", "trainer.num_steps=2", "checkpoint.every=2"]
    few += ["eval.num_draws=2", "task.demonstrations=4", "task.warm_steps=2", "reward._target_=learnable.reward"]
    command = ["train", "--config-name", "images", f"run.dir={folder}", *few, *overrides]
    return Command(*command, cwd=folder.parent, env=env)


def finish(ranks: list[Command]) -> str:
    """Rank 0's output, of a run whose ranks all end well; no other rank says anything."""
    output, *others = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), (output, others)
    assert all("step" not in other for other in others), others
    return output


def same(folder: Path, other: Path, step: int = 6) -> None:
    """Both runs have the same records, and after `step`, their last, weights and optimizer of the same bytes."""
    assert history(folder) == history(other)
    for name in FILES:
        files = [run / "checkpoints" / f"step_{step}" / name for run in (folder, other)]
        assert files[0].read_bytes() == files[1].read_bytes(), name
