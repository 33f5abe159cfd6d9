"""Protocols of the parts that the loop drives. It depends on these, not on torch, ray, vllm or a concrete engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlloop.metrics import Reduction
from rlloop.types import (
    Completion,
    Example,
    ModelInput,
    Part,
    PromptScores,
    Recomputed,
    RewardResult,
    Sample,
    SamplingParams,
)


class Engine(Protocol):
    """Samples completions of prompts, with the logprobs that they were sampled with."""

    @property
    def policy_version(self) -> int:
        """The version of the weights that sample; each completion carries it."""
        ...

    def generate(
        self, prompts: Sequence[ModelInput | list[int]], sampling: SamplingParams | list[SamplingParams]
    ) -> list[Completion]:
        """Completions in the order of the prompts; `sampling` is one for all, or a list with one for each.

        A completion is a function of weights, prompt and sampling parameters, whatever it is batched with.
        """
        ...

    def fingerprint(self) -> dict[str, Any]:
        """JSON values of everything that decides the bits: library versions, instruction set, profile, dtype."""
        ...


class InProcessEngine(Engine, Protocol):
    """An engine in the trainer's process, over the trainer's own parameters: what `rollout.engine._target_` makes.

    `close()`, where it has one, is called at the end of the run. Under `parity.mode=require` its `fingerprint` must be
    the trainer's (`model.fingerprint()`, of an engine that runs the model it was given).
    """

    def set_version(self, version: int) -> None:
        """Declare the parameters, changed in place, to be those of `version`: drop everything computed with earlier
        ones."""
        ...


@runtime_checkable
class OverlappingEngine(Engine, Protocol):
    """An engine that computes elsewhere and accepts a batch while others are in flight.

    Optional: without `begin`, a conversation's next turn waits for the call of `generate` that others' turns are in.
    """

    def begin(
        self, prompts: Sequence[ModelInput | list[int]], sampling: list[SamplingParams]
    ) -> Future[list[Completion]]:
        """As `generate`; the future has the completions, or raises what that would."""
        ...


class UpdateResult(Protocol):
    """Logprobs and metrics of one `forward_backward`."""

    @property
    def recomputed(self) -> Recomputed:
        """Logprobs by the update's own forward, in the order of the batch."""
        ...

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """`loss/*` and `is/*` (importance sampling) of the loss, and the trainer's further measurements."""
        ...


class Trainer(Protocol):
    """Owns the master weights (float32). The loop's update is `forward_backward`, then `optim_step`."""

    def forward_backward(
        self, batch: Sequence[Sample], loss: Callable[..., Any], *, old_logprobs: Sequence[np.ndarray] | None = None
    ) -> UpdateResult:
        """Add the gradient of `loss` over the batch.

        `old_logprobs`, [T] per sample, are the policy ratio's denominators; None: this forward's logprobs, so that the
        ratio is 1.
        """
        ...

    def optim_step(self) -> Mapping[str, float]:
        """Apply the gradient to the master weights. Returns `loss/grad_norm` and the like."""
        ...

    def recompute(self, batch: Sequence[Sample]) -> Recomputed:
        """The logprobs that `forward_backward(batch, ...)` would report, bit for bit, without a gradient."""
        ...

    def reference_kl(self, batch: Sequence[Sample], kind: str) -> Sequence[float]:
        """KL(policy ‖ reference) of each completion in nats, summed over its tokens, from the sampled tokens alone.

        `kind`: the estimator, k1, k2 or k3 (`rlloop.algorithms.kl`).
        """
        ...

    def routing(self) -> Mapping[str, float]:
        """`parity/router_different` and the like of the last forward; empty for a model without routers."""
        ...

    def replay_experts(self, on: bool) -> None:
        """Switch router replay on or off: forwards use the experts of `Completion.routed_experts` instead of their
        own."""
        ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...

    def fingerprint(self) -> dict[str, Any]: ...


Publication = Mapping[str, Any] | Future[Mapping[str, Any]]  # its `sync/*` metrics, at once or when it has ended


class WeightSync(Protocol):
    """Brings the trainer's weights to the engines."""

    def publish(self, version: int) -> Publication:
        """Bring engines to `version`; called while nothing is sampled. Returns `sync/*` metrics, empty if nothing
        moves. A future: engines serve the version, and the weights may change again, when it is done."""
        ...


class Reward(Protocol):
    """Scores one completion. Sync or async; a function or an object with `__call__`."""

    def __call__(
        self, prompt: str, completion: str, example: Example
    ) -> float | RewardResult | Awaitable[float | RewardResult]: ...


class Checkpoint(Protocol):
    """A complete checkpoint on disk."""

    @property
    def step(self) -> int: ...

    @property
    def path(self) -> Path: ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """Descriptions of the damage of newer checkpoints, one each; empty where this is the newest."""
        ...


class Checkpoints(Protocol):
    """The store of a run's last few checkpoints, each complete or absent even if the process is killed."""

    def save(self, step: int, writers: Iterable[Callable[[Path], None]]) -> Path:
        """Each writer adds its files to the folder it is given. Returns the checkpoint's folder."""
        ...

    def latest(self) -> Checkpoint | None:
        """The newest one that is not damaged."""
        ...

    def digests(self, step: int) -> Mapping[str, str]:
        """The digest of each checkpoint that is kept, up to `step`, by its step."""
        ...


class Task(Protocol):
    """A source of prompts. Everything is a function of the seed and the step, so a resumed run repeats it.

    `task._target_` is called with the section's other keys, and with the run's `seed` and `model_path` (`model.path` or
    None) unless these are among them.
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

    def decode(self, token_ids: list[int]) -> str:
        """The text of a completion, which rewards and environments read."""
        ...


@runtime_checkable
class MakesModel(Protocol):
    """A task that can say, before it makes a model of its own, what that will be: a layout which such a model cannot
    have is refused first."""

    def model_config(self) -> Mapping[str, Any]:
        """The content of the config.json that `model_folder` will have; asked only without a `model_path`."""
        ...


class Scorer(Protocol):
    """Scores a batch of completions."""

    def score(self, requests: Sequence[tuple[str, str, Example]]) -> Sequence[Any]:
        """A `RewardResult` for each (prompt, completion, example), or a failure with `kind` and `message`."""
        ...


class Observer(Protocol):
    """Receives the metrics of each step: the console, sinks."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...


@runtime_checkable
class SampleObserver(Protocol):
    """An observer that also receives the completions of each step, before its metrics (rlloop.runs.rollouts: rows)."""

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...


class Stateful(Protocol):
    """A part with state of its own, which checkpoints hold."""

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...


class Critic(Stateful, Protocol):
    """Values of states, which make advantages by token: `rlloop.trainer.critic.Critic`."""

    def advantages(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with `token_advantages`; each one's `advantage` is its reward as shaped."""
        ...

    def update(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        """Learn from samples that `advantages` has seen last; returns `critic/*`."""
        ...


class SteppedEngine(Protocol):
    """An engine driven step by step, by one thread: `rlloop.Engine` and its like. `EngineService` puts one behind a
    thread; conversations add turns to it between steps."""

    @property
    def policy_version(self) -> int: ...

    @property
    def has_work(self) -> bool:
        """True while the completion of some request has not been returned by `step`."""
        ...

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        ...

    def add_request(self, prompt: ModelInput | list[int], sampling: SamplingParams, /, *, top_logprobs: int = 0) -> int:
        """Queue one prompt; returns the id under which `step` will return its completion.

        Raises `ConfigError` for a request that the engine cannot take.
        """
        ...

    def so_far(self, request_id: int, begin: int = 0) -> Part:
        """The tokens of a request in flight, from its `begin`-th on."""
        ...

    def score(self, prompt: ModelInput | list[int], top_logprobs: int = 0, /) -> PromptScores:
        """The logprobs of a prompt's own tokens."""
        ...

    def step(self) -> list[tuple[int, Completion]]:
        """Compute one batch of tokens; returns the requests that it finished.

        If it raises, every request in flight is dropped and the engine is ready for new ones.
        """
        ...

    def abort(self, request_id: int) -> Completion | None:
        """End one request now; returns its completion so far, or None if it is not in flight."""
        ...

    def stats(self) -> Any:
        """Counts since the engine was created (`rlloop.rollout.engine.scheduler.EngineStats`)."""
        ...

    def fingerprint(self) -> dict[str, Any]: ...


class Listener(Protocol):
    """Receives the tokens of one call as they are sampled: in the engine's thread, between steps, so it must be quick.

    `index` is that of the prompt in the call. An error of its own ends the call.
    """

    def scored(self, index: int, scores: PromptScores) -> None: ...

    def made(self, index: int, part: Part) -> int | None:
        """Receive the completion's new tokens, without the stop token. Returns None to continue, or the number of the
        completion's tokens to keep: it ends there, as with a stop token."""
        ...

    def finished(self, index: int, completion: Completion) -> None: ...
