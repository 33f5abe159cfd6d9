"""What the loop asks of its parts. `loop.py` depends on these, never on torch, ray, vllm or a concrete engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlloop.metrics import Reduction
from rlloop.types import Completion, Example, Part, PromptScores, Recomputed, RewardResult, Sample, SamplingParams


class Engine(Protocol):
    """Continues prompts and says with which probabilities."""

    @property
    def policy_version(self) -> int: ...

    def generate(
        self, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams]
    ) -> list[Completion]: ...

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the bits: library versions, instruction set, profile, dtype."""
        ...


class InProcessEngine(Engine, Protocol):
    """An engine in the trainer's process, over the trainer's own parameters: what `rollout.engine._target_` makes.

    `close()`, where it has one, is called at the end of the run. Under `parity.mode=require` its `fingerprint` must be
    the trainer's (`model.fingerprint()`, of an engine that runs the model it was given).
    """

    def set_version(self, version: int) -> None:
        """The parameters, changed in place, are those of `version` now: forget what was computed with earlier ones."""
        ...


@runtime_checkable
class SubmittingEngine(Protocol):
    """An engine that takes prompts one by one, while others are on their way, and computes by itself.

    Optional: conversations use it where an engine has it, so that a turn need not wait for a whole batch.
    """

    def submit(self, prompt_ids: list[int], sampling: SamplingParams) -> Future[Completion]:
        """The completion by the weights that are served now. The future raises what `generate` would."""
        ...


class UpdateResult(Protocol):
    """What one `forward_backward` saw."""

    @property
    def recomputed(self) -> Recomputed:
        """Of the batch, in its order, by the update's own forward."""
        ...

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """`loss/*` and `is/*` of the loss, and what else the trainer measured."""
        ...


class Trainer(Protocol):
    """Owns the masters. The loop's update is `forward_backward`, then `optim_step`."""

    def forward_backward(
        self, batch: Sequence[Sample], loss: Callable[..., Any], *, old_logprobs: Sequence[np.ndarray] | None = None
    ) -> UpdateResult:
        """`old_logprobs`, [T] a sample, anchor the policy ratio; None: this very forward's, so that it starts at 1."""
        ...

    def optim_step(self) -> Mapping[str, float]:
        """Applies the gradient. Returns `loss/grad_norm` and the like."""
        ...

    def recompute(self, batch: Sequence[Sample]) -> Recomputed:
        """What `forward_backward(batch, ...)` would report, without a gradient."""
        ...

    def reference_kl(self, batch: Sequence[Sample], kind: str) -> Sequence[float]:
        """KL(policy ‖ reference) of each completion, summed over its tokens: k1, k2 or k3 of what was sampled."""
        ...

    def routing(self) -> Mapping[str, float]:
        """`parity/router_different` and the like, of what was scored last; empty for a model without routers."""
        ...

    def replay_experts(self, on: bool) -> None:
        """Whether forwards take the experts that `Completion.routed_experts` names."""
        ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...

    def fingerprint(self) -> dict[str, Any]: ...


class WeightSync(Protocol):
    """Brings the trainer's weights to the engines and leaves them serving exactly `version`."""

    def publish(self, version: int) -> Mapping[str, float]:
        """Returns `sync/*` metrics; empty where nothing has to move."""
        ...


class Reward(Protocol):
    """Judges one completion. Sync or async; a function or an object with `__call__`."""

    def __call__(
        self, prompt: str, completion: str, example: Example
    ) -> float | RewardResult | Awaitable[float | RewardResult]: ...


class Checkpoint(Protocol):
    """One whole checkpoint on disk."""

    @property
    def step(self) -> int: ...

    @property
    def path(self) -> Path: ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """What is wrong with each newer one, where newer ones are damaged."""
        ...


class Checkpoints(Protocol):
    """Complete or absent, whatever kills the process; the last few are kept."""

    def save(self, step: int, writers: Iterable[Callable[[Path], None]]) -> Path: ...

    def latest(self) -> Checkpoint | None: ...

    def digests(self, step: int) -> Mapping[str, str]:
        """Of each that is kept, up to `step`, by its step."""
        ...


class Task(Protocol):
    """Where prompts come from. Everything is a function of the seed and the step, so a resumed run repeats it.

    `task._target_` is called with the section's other keys, the run's `seed`, and `model_path` (`model.path` or None).
    """

    def model_folder(self) -> Path:
        """The Hugging Face folder to start from: `model_path`, or the task's own model, made once and cached."""
        ...

    def train_examples(self, step: int, count: int) -> list[Example]:
        """The `step`-th batch of prompts, from 1: one a step, or more where dynamic sampling asks for further ones."""
        ...

    def eval_examples(self, count: int) -> list[Example]:
        """Exactly `count` held-out problems, the same at every call; they repeat where there are fewer."""
        ...

    def decode(self, token_ids: list[int]) -> str: ...


class Scorer(Protocol):
    """Judges a batch: one outcome a request, a `RewardResult` or a failure with `kind` and `message`."""

    def score(self, requests: Sequence[tuple[str, str, Example]]) -> Sequence[Any]: ...


class Observer(Protocol):
    """Whoever watches: the console, sinks."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...


class Stateful(Protocol):
    """A part that cannot be made anew from the trainer's weights alone."""

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


class SteppedEngine(Protocol):
    """What `EngineService` drives: `rlloop.Engine`, or a stand-in for it. Not for many threads."""

    @property
    def policy_version(self) -> int: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def longest(self) -> int: ...

    def add_request(self, prompt: list[int], sampling: SamplingParams, *, top_logprobs: int = 0) -> int: ...

    def so_far(self, request_id: int, begin: int = 0) -> Part: ...

    def score(self, prompt: list[int], top_logprobs: int = 0) -> PromptScores: ...

    def step(self) -> list[tuple[int, Completion]]: ...

    def abort(self, request_id: int) -> Completion | None: ...

    def stats(self) -> Any: ...

    def fingerprint(self) -> dict[str, Any]: ...


class Listener(Protocol):
    """Hears of one call in the engine's thread, between steps, so it must be quick. An error of its own ends the call.

    `index` says which of the call's prompts.
    """

    def scored(self, index: int, scores: PromptScores) -> None: ...

    def made(self, index: int, part: Part) -> int | None:
        """The tokens that it has got since, all but the one that ends it. Returns None to go on; or how many of the
        completion's tokens to keep: with these it ends, as if a stop token had come."""
        ...

    def finished(self, index: int, completion: Completion) -> None: ...
