"""Failures of ranks: one rank's failure ends the call on all, and the error names it; layouts of the remaining ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlloop.config.layout import LayoutConfig, shrunk
from rlloop.config.run import Launch, RunConfig
from rlloop.errors import ConfigError, RlloopError
from rlloop.launch.ray_pool import EngineDied

GRACE = 5.0  # seconds after a failure in which others may show that they are its cause


class RankStalled(EngineDied):
    """A rank made no progress for `ray.rank_timeout`; its process is there."""


class RankFailed(EngineDied):
    """One of several ranks raised, died or made no progress, which ends them all.

    `rank`: its number. `lost`: the ranks whose processes ended by themselves.
    """

    def __init__(self, rank: int, size: int, reason: str, lost: frozenset[int] = frozenset()) -> None:
        super().__init__(f"rank {rank} of {size}: {reason}", died=bool(lost))
        self.rank, self.size, self.lost = rank, size, lost


def error_of(failures: Mapping[int, Exception], size: int) -> Exception:
    """The error of a call that failed on some of `size` ranks; `failures` in the order in which they came.

    A death takes precedence, since errors of ranks that communicate with the dead one follow from it. If all ranks
    raised the same error and none died, that is returned: no rank waits for another, so they can continue.
    """
    errors = list(failures.values())
    deaths = {rank: error for rank, error in failures.items() if isinstance(error, EngineDied)}
    lost = frozenset(rank for rank, error in deaths.items() if error.died)
    if not lost and len(failures) == size and len({repr(error) for error in errors}) == 1:
        return errors[0]
    rank, cause = next(iter((deaths or failures).items()))
    failed = RankFailed(rank, size, in_words(cause), lost)
    failed.exit_code = cause.exit_code if isinstance(cause, RlloopError) else failed.exit_code
    failed.__cause__ = cause
    return failed


def in_words(error: Exception) -> str:
    return str(error) if isinstance(error, RlloopError) else f"{type(error).__name__}: {error}"


def remaining(config: RunConfig, failure: RankFailed) -> RunConfig:
    """The configuration for the ranks that remain after `failure`, under `ray.elastic`.

    Raises `failure` if the run must not continue: no rank died, or the layouts cannot shrink that far.
    """
    left = failure.size - len(failure.lost)
    if not (config.launch is Launch.ray and config.ray.elastic and failure.lost and left):
        raise failure
    try:
        trainer, rollout = shrunk(
            config.trainer.layout.checked("trainer"), config.rollout.layout.checked("rollout"), left
        )
    except ConfigError as refusal:
        failure.args = (f"{failure}. {refusal}",)
        raise failure from None
    return replace(
        config,
        ray=replace(config.ray, replicas=config.replicas),
        trainer=replace(config.trainer, layout=LayoutConfig(**vars(trainer))),
        rollout=replace(config.rollout, layout=LayoutConfig(**vars(rollout))),
    )
