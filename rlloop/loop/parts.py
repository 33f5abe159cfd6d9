"""The parts that the loop drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlloop.loop.schedule import InStep, Schedule
from rlloop.parity.asked import Vocabulary
from rlloop.parity.monitor import Finding, TokenDifference
from rlloop.protocols import Checkpoints, Critic, Engine, Scorer, Stateful, Task, Trainer, WeightSync
from rlloop.types import Sample

# (rewards, groups, lengths of the longest turns, KL to the reference or None) -> (advantages, keep), [n] each
Advantages = Callable[..., tuple[Sequence[float], Sequence[bool]]]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything that the loop drives. `rlloop.launch` builds it; tests use the fakes of `rlloop.testing`."""

    # Prompts and rewards
    task: Task
    scorer: Scorer
    # Sampling
    engine: Engine
    vocabulary: Vocabulary  # of the engine's model
    engine_lag: int = 0  # versions by which the engine's weights may be older than the published ones, on purpose
    eval_engine: Engine | None = None  # reports the policy; None: `engine`. Another only where that one differs from it
    sync: WeightSync
    schedule: Schedule = field(default_factory=InStep)  # when prompts are sampled, and with which weights
    # Learning
    trainer: Trainer
    advantages: Advantages
    loss: Callable[..., Any]
    critic: Critic | None = None  # makes advantages by token
    # Checkpoints
    checkpoints: Checkpoints
    stateful: tuple[Stateful, ...] = ()  # what a checkpoint must hold beside the trainer and the schedule
    # Observation
    doctor: Callable[[Sample, TokenDifference], Finding | None] | None = None  # names the first operation that differs
    measured: Callable[[], Mapping[str, float]] = dict  # metrics that the parts gathered since the last step
    ranks: Callable[..., Callable[[], Any]] | None = None  # calls a method of all ranks; None: rank 0 is this process
