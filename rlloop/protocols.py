"""Protocols of the parts that the loop drives. It depends on these, never on torch, ray, vllm or a concrete engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlloop.metrics import Reduction
from rlloop.types import Completion, Example, Part, PromptScores, Recomputed, RewardResult, Sample, SamplingParams


class Engine(Protocol):
    """Samples completions, with their logprobs."""

    @property
    def policy_version(self) -> int: ...

    def generate(
        self, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams]
    ) -> list[Completion]: ...

    def fingerprint(self) -> dict[str, Any]:
        """JSON values of everything that decides the bits: library versions, instruction set, profile, dtype."""
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
    """The result of one `forward_backward`."""

    @property
    def recomputed(self) -> Recomputed:
        """The batch's logprobs, in its order, from the update's own forward."""
        ...

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """`loss/*` and `is/*` of the loss, and the trainer's own."""
        ...


class Trainer(Protocol):
    """Owns the master weights. The loop's update is `forward_backward`, then `optim_step`."""

    def forward_backward(
        self, batch: Sequence[Sample], loss: Callable[..., Any], *, old_logprobs: Sequence[np.ndarray] | None = None
    ) -> UpdateResult:
        """Add the loss's gradient. `old_logprobs`, [T] for each sample, are the denominator of the policy ratio; None:
        this forward's own, so that the ratio is 1."""
        ...

    def optim_step(self) -> Mapping[str, float]:
        """Apply the gradient and clear it. Returns `loss/grad_norm` and other metrics."""
        ...

    def recompute(self, batch: Sequence[Sample]) -> Recomputed:
        """The logprobs that `forward_backward(batch, ...)` would recompute, without a gradient."""
        ...

    def reference_kl(self, batch: Sequence[Sample], kind: str) -> Sequence[float]:
        """KL(policy ‖ reference) of each completion, summed over its tokens. `kind`: the estimator k1, k2 or k3."""
        ...

    def routing(self) -> Mapping[str, float]:
        """`parity/router_different` and others for the batch scored last; empty for a model without routers."""
        ...

    def replay_experts(self, on: bool) -> None:
        """Let forwards route tokens to the experts in `Completion.routed_experts`, or not."""
        ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...

    def fingerprint(self) -> dict[str, Any]: ...


class WeightSync(Protocol):
    """Brings the trainer's weights to the engines."""

    def publish(self, version: int) -> Mapping[str, float]:
        """When it returns, engines serve exactly `version`. Returns `sync/*` metrics; empty if no bytes moved."""
        ...


class Reward(Protocol):
    """Scores one completion. Sync or async; a function or an object with `__call__`."""

    def __call__(
        self, prompt: str, completion: str, example: Example
    ) -> float | RewardResult | Awaitable[float | RewardResult]: ...


class Checkpoint(Protocol):
    """One complete checkpoint on disk."""

    @property
    def step(self) -> int: ...

    @property
    def path(self) -> Path: ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """Newer checkpoints that are damaged, with the damage of each."""
        ...


class Checkpoints(Protocol):
    """Stores checkpoints, each complete or absent even after a kill, and keeps the last few."""

    def save(self, step: int, writers: Iterable[Callable[[Path], None]]) -> Path: ...

    def latest(self) -> Checkpoint | None: ...

    def digests(self, step: int) -> Mapping[str, str]:
        """Digests of the kept checkpoints up to `step`, by step."""
        ...


class Task(Protocol):
    """Supplies prompts. Everything is a function of the seed and the step, so that a resumed run repeats it.

    `task._target_` is called with the section's other keys, the run's `seed`, and `model_path` (`model.path` or None).
    """

    def model_folder(self) -> Path:
        """The Hugging Face folder to start from: `model_path`, or the task's own model, created once and cached."""
        ...

    def train_examples(self, step: int, count: int) -> list[Example]:
        """The `step`-th batch of prompts, from 1. A step uses one, or more if dynamic sampling needs more prompts."""
        ...

    def eval_examples(self, count: int) -> list[Example]:
        """Exactly `count` held-out problems, the same at every call, repeated if there are fewer."""
        ...

    def decode(self, token_ids: list[int]) -> str: ...


class Scorer(Protocol):
    """Scores a batch. One outcome for each request: a `RewardResult`, or a failure with `kind` and `message`."""

    def score(self, requests: Sequence[tuple[str, str, Example]]) -> Sequence[Any]: ...


class Observer(Protocol):
    """Receives each step's metrics: the console, sinks."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...


class Stateful(Protocol):
    """A part with state that checkpoints must hold besides the trainer's."""

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


class SteppedEngine(Protocol):
    """The engine that `EngineService` drives: `rlloop.Engine` or one like it. Not thread-safe."""

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
    """Receives the progress of one call, in the engine's thread between steps, so it must be quick. An exception ends
    the call.

    `index`: of the prompt in the call.
    """

    def scored(self, index: int, scores: PromptScores) -> None: ...

    def made(self, index: int, part: Part) -> int | None:
        """New tokens of a completion, without the one that ends it. Return None to go on, or a number of tokens of the
        completion to keep: it then ends after these, as with a stop token."""
        ...

    def finished(self, index: int, completion: Completion) -> None: ...
