"""Small sections of a run's configuration: run, scoring, parity, certificate, checkpoint, eval, ray."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlloop.config.limits import (
    ABOVE_ZERO_TO_ONE,
    BELOW_ONE,
    POSITIVE,
    SECONDS,
    TEMPERATURE,
    Limit,
    at_least,
    check_limits,
    limited,
    or_null,
    require,
    zero_or_more,
)

EVALUATED = Limit(lambda x: x == 0 or TEMPERATURE.holds(x), f"0 (greedy), or {TEMPERATURE.says}")
GPU_SHARE = Limit(ABOVE_ZERO_TO_ONE.holds, "above 0 and at most 1: a rank lies on one GPU")


class Launch(StrEnum):
    local = "local"
    ray = "ray"


class ParityMode(StrEnum):
    require = "require"
    fallback = "fallback"
    observe = "observe"


@dataclass
class RunSection:
    dir: str | None = (
        None  # the run's folder; None: runs/<recipe>/<time>. Of a multirun: the folder of its jobs' folders
    )


@dataclass
class ScoringConfig:
    """Execution of the reward; its own arguments stand in `reward`."""

    timeout: float = limited(60.0, SECONDS)  # limit of one sample; a slower one is rejected, with that reason
    concurrency: int = limited(64, at_least(1))  # samples scored at the same time, for an async reward
    retries: int = limited(
        0, zero_or_more("none")
    )  # retries of a failed step of an environment that declares `idempotent`

    def __post_init__(self) -> None:
        check_limits("scoring", self)


@dataclass
class ParityConfig:
    mode: ParityMode = ParityMode.require  # response to a difference between engine and trainer: docs/how-it-works.md
    max_k3: float = limited(0.1, POSITIVE)  # fallback: train-inference KL (estimate k3, in nats) that stops the run
    replay: bool = False  # observe: in every step the trainer uses the engine's experts instead of its own
    redraw: bool = True  # draw every trained token again in the trainer, by its seed, and compare the ids

    def __post_init__(self) -> None:
        check_limits("parity", self)
        require(
            "parity.replay", self.replay, not self.replay or self.mode is ParityMode.observe,
            f"false under parity.mode={self.mode}: require would not see choices that differ, and fallback replays by "
            "itself once they do",
        )  # fmt: skip


@dataclass
class CertificateConfig:
    """Signing and witnessing of the certificate's head, at each checkpoint: docs/runs.md."""

    key: str | None = None  # PEM of the Ed25519 private key that signs the certificate's head
    witness: str | None = None  # http(s) address that the head is posted to, or file that it is appended to
    token_env: str | None = None  # environment variable with the token, or `Basic ...`, that the witness asks for


@dataclass
class CheckpointConfig:
    every: int = limited(
        50, zero_or_more("only the last step")
    )  # steps between checkpoints; the last step is always saved
    keep: int = limited(2, at_least(1))  # newest checkpoints that are kept

    def __post_init__(self) -> None:
        check_limits("checkpoint", self)


@dataclass
class EvalConfig:
    every: int = limited(
        50, zero_or_more("only first and last")
    )  # steps between evaluations, besides before the first and after the last
    num_draws: int = limited(1000, at_least(1))  # held-out completions of an evaluation
    temperature: float = limited(1.0, EVALUATED)  # temperature of held-out completions
    # The collapse rule, declared before the run: held-out reward at or below `collapse_fraction` of its running best in
    # `collapse_evals` evaluations in a row, or a gradient that is not finite. `rlloop compare` judges by it.
    collapse_fraction: float = limited(
        0.5, BELOW_ONE
    )  # held-out reward at most this fraction of its best so far counts towards a collapse
    collapse_evals: int = limited(3, at_least(1))  # consecutive such evaluations that make a collapse

    def __post_init__(self) -> None:
        check_limits("eval", self)


@dataclass
class RayConfig:
    """Settings of launch=ray."""

    address: str | None = None  # address of a running Ray cluster; null: Ray is started on this machine, for this run
    replicas: int | None = limited(  # engines besides those that share the trainer's ranks
        None, or_null(zero_or_more("none"), "1 beside a trainer of one rank, else 0")
    )
    cpus_per_worker: float = limited(1.0, POSITIVE)  # CPUs reserved by each worker, one per rank
    gpus_per_worker: float = limited(
        1.0, GPU_SHARE
    )  # GPUs reserved by each worker, on GPUs: at 0.5, two workers of one rank share one
    timeout: float = limited(60.0, SECONDS)  # seconds to wait for Ray's start (at least 30) and for free resources
    elastic: bool = False  # after the death of a rank, continue from the last checkpoint on the remaining ones
    rank_timeout: float = limited(
        600.0, SECONDS
    )  # seconds without progress of a rank after which the run stops and names it

    def __post_init__(self) -> None:
        check_limits("ray", self)
