"""What the loop asks of its parts. `loop.py` depends on these, never on ray, vllm or a concrete engine."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rlloop.types import Completion, Example, RewardResult, Sample, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path


class Engine(Protocol):
    """Continues prompts and says with which probabilities."""

    policy_version: int

    def generate(
        self, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams]
    ) -> list[Completion]: ...

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the bits: library versions, instruction set, profile, dtype."""
        ...


class Trainer(Protocol):
    """Owns the masters. The loop's update is `forward_backward`, then `optim_step`."""

    def forward_backward(self, batch: Sequence[Sample], loss: Any) -> Any: ...

    def optim_step(self) -> dict[str, float]: ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...

    def fingerprint(self) -> dict[str, Any]: ...


class WeightSync(Protocol):
    """Brings the trainer's weights to the engines and leaves them serving exactly `version`."""

    def publish(self, version: int) -> dict[str, float]:
        """Returns `sync/*` metrics; empty where nothing has to move."""
        ...


class Reward(Protocol):
    """Judges one completion. Sync or async; a function or an object with `__call__`."""

    def __call__(
        self, prompt: str, completion: str, example: Example
    ) -> float | RewardResult | Awaitable[float | RewardResult]: ...


class Task(Protocol):
    """Where prompts come from. Everything is a function of the seed and the step, so a resumed run repeats it."""

    def train_examples(self, step: int, count: int) -> list[Example]: ...

    def eval_examples(self, count: int) -> list[Example]: ...

    def decode(self, token_ids: list[int]) -> str: ...
