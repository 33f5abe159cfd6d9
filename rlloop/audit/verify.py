"""`rlloop verify`: a run's records against each other, against the certificate, and against recomputed values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlloop.audit import chain
from rlloop.audit.completions import (
    Advantages,
    Aggregates,
    CompletionCheck,
    Files,
    Outcomes,
    Requests,
)
from rlloop.audit.history import Check, History
from rlloop.audit.parts import Parts, find_parts
from rlloop.audit.provenance import Fleet, Orphaned
from rlloop.audit.rescore import Rescored
from rlloop.audit.rewards import Rewards
from rlloop.audit.versions import WEIGHTS, check_versions
from rlloop.parity.witness import read_public_key
from rlloop.runs.folder import SIGNATURES, require_run


@dataclass(frozen=True)
class Extent:
    """The amount to check. Numbers are of completions; None: all of them."""

    rescored: int | None = 0  # drawn and scored again; None also makes a task's own model if it is missing
    rewarded: int | None = 1000  # whose reward is computed again
    run_code: bool = False  # call the task and the reward that config.yaml names even if they are not rlloop's
    replay: bool = False  # train the run again
    public_key: Path | None = None
    witness: Path | None = None  # its file


def verify(
    run: Path, extent: Extent = Extent(), progress: Callable[[str], None] = lambda text: None
) -> Iterator[Check]:
    """Every check in turn. Damaged records are problems of a check, not errors. Reads only; the run may be running.

    Raises `RunError` if `run` is not a run's folder, `ConfigError` for a public key that cannot be read.
    """
    require_run(run)
    key = None if extent.public_key is None else read_public_key(extent.public_key)
    history = History(run)
    yield _safe("metrics", lambda: chain.check_metrics(history))
    yield _safe("ledger", lambda: chain.check_ledger(history))
    yield _safe("certificate", lambda: chain.check_certificate(history))
    yield _safe("summary", lambda: chain.check_summary(history))
    yield _safe("checkpoints", lambda: chain.check_checkpoints(history))
    asked = not isinstance(history.built, str) and history.built.certificate.key is not None
    if asked or key is not None or (run / SIGNATURES).exists():
        yield _safe("signature", lambda: chain.check_signature(history, key))
    if (run / WEIGHTS / "latest").exists():
        yield _safe("versions", lambda: check_versions(history))
    if (witness := extent.witness) is not None:
        yield _safe("witness", lambda: chain.check_witness(history, witness))
    if history.is_own:
        yield Check("requests, rewards, advantages", f"not checked: {history.built}")
    parts = find_parts(history, extent.run_code, make_model=extent.rescored is None or extent.replay)
    try:
        yield from _check_completions(history, _makers(history, parts, extent), progress)
        if extent.replay:
            from rlloop.audit.replay import replay

            yield replay(history, parts, progress)
    finally:
        parts.close()


def _makers(run: History, parts: Parts, extent: Extent) -> list[Callable[[], CompletionCheck]]:
    """Constructors of the checks over completions, called one by one, since damaged records may make one fail."""
    makers: list[Callable[[], CompletionCheck]] = [lambda: Files(run), lambda: Outcomes(run)]
    if (run.path / "fleet.jsonl").exists():
        makers.append(lambda: Fleet(run))
    if (run.path / "orphaned").exists():
        makers.append(lambda: Orphaned(run))
    if not isinstance(config := run.built, str):
        makers += [
            lambda: Requests(config, parts), lambda: Rewards(parts, extent.rewarded), lambda: Advantages(config, parts)
        ]  # fmt: skip
    makers.append(lambda: Aggregates(run))
    if extent.rescored != 0:
        makers.append(lambda: Rescored(run, parts, extent.rescored))
    return makers


def _check_completions(
    run: History, makers: Sequence[Callable[[], CompletionCheck]], progress: Callable[[str], None]
) -> Iterator[Check]:
    """One pass over the rollouts, with every check of each step."""
    checks = list[CompletionCheck]()
    if unmade := [
        problem for make in makers for problem in _guarded(lambda make=make: checks.append(make()) or [], "a check")
    ]:
        yield Check("completions", "not all can be checked", unmade)
    problems: dict[str, list[str]] = {check.name: [] for check in checks}
    recorded = {step for step in (*run.records, *run.by_step) if step > 0}
    if run.is_own:
        recorded = {step for step, line in run.by_step.items() if line.rollouts is not None}
    problems["rollouts"] += [f"step {step} has no rollouts" for step in sorted(recorded - run.files.keys())]
    ended = run.status is not None
    beyond = [step for step in run.files if step > run.latest + (not ended)]
    problems["rollouts"] += [f"{run.files[step].name} is of a step that has no records" for step in beyond]
    for step in sorted(run.files):
        progress(f"step {step} of {max(run.files)}")
        rollouts = run.rollouts_of(step)
        if isinstance(rollouts, str):
            problems["rollouts"].append(rollouts)
            continue
        evidence = step == 0 and rollouts.line is not None and rollouts.line.held_out  # held-out completions, no step's
        for check in checks[:1] if evidence else checks:  # the first is of files
            problems[check.name] += _guarded(lambda check=check, step=rollouts: check.check(step), rollouts.name)
    for check in checks:
        if isinstance(check, Rewards | Rescored):
            progress(f"{check.name}: computing")
            problems[check.name] += _guarded(check.finish, check.name)
        yield Check(check.name, check.summary(), problems[check.name])


def _guarded(work: Callable[[], list[str]], what: str) -> list[str]:
    """The problems that `work` returns; an exception, which damaged records may cause, becomes one."""
    try:
        return work()
    except Exception as error:
        return [f"{what} cannot be checked: {type(error).__name__}: {error}"]


def _safe(name: str, check: Callable[[], Check]) -> Check:
    done: list[Check] = []
    problems = _guarded(lambda: done.append(check()) or [], "it")
    return done[0] if done else Check(name, "", problems)
