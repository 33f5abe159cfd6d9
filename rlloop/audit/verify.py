"""`rlloop verify`: do a run's records tell one story, is it the certificate's, and is it what had to come of them?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlloop.audit import chain
from rlloop.audit.completions import Advantages, Aggregates, Files, Fleet, Look, Orphaned, Outcomes, Requests
from rlloop.audit.history import Check, History
from rlloop.audit.parts import Parts, find_parts
from rlloop.audit.rescore import Rescored
from rlloop.audit.rewards import Rewards
from rlloop.parity.witness import read_public_key
from rlloop.runs.folder import SIGNATURES, require_run


@dataclass(frozen=True)
class Extent:
    """The amount of work. Numbers are of completions, None: all of them."""

    rescored: int | None = 0  # drawn and scored again; with None, a task's own model is made where it is not there
    rewarded: int | None = 1000  # whose reward is given again
    run_code: bool = False  # call the task and the reward that config.yaml names, though they are not rlloop's
    replay: bool = False  # train the run again
    public_key: Path | None = None
    witness: Path | None = None  # its file


def verify(
    run: Path, extent: Extent = Extent(), progress: Callable[[str], None] = lambda text: None
) -> Iterator[Check]:
    """Every check in turn. Whatever is damaged is a problem of a check, not an error.

    Raises `RunError` where `run` is no run's folder, `ConfigError` for a public key that cannot be read. Reads only;
    the run may be going on.
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
    if (witness := extent.witness) is not None:
        yield _safe("witness", lambda: chain.check_witness(history, witness))
    parts = find_parts(history, extent.run_code, make_model=extent.rescored is None or extent.replay)
    try:
        yield from _completions(history, _looks(history, parts, extent), progress)
        if extent.replay:
            from rlloop.audit.replay import replay

            yield replay(history, parts, progress)
    finally:
        parts.close()


def _looks(run: History, parts: Parts, extent: Extent) -> list[Callable[[], Look]]:
    """To be made one by one, since damaged records may keep one from it."""
    looks: list[Callable[[], Look]] = [lambda: Files(run), lambda: Outcomes(run)]
    if (run.path / "fleet.jsonl").exists():
        looks.append(lambda: Fleet(run))
    if (run.path / "orphaned").exists():
        looks.append(lambda: Orphaned(run))
    if not isinstance(config := run.built, str):
        looks += [
            lambda: Requests(config, parts), lambda: Rewards(parts, extent.rewarded), lambda: Advantages(config, parts)
        ]  # fmt: skip
    looks.append(Aggregates)
    if extent.rescored != 0:
        looks.append(lambda: Rescored(run, parts, extent.rescored))
    return looks


def _completions(
    run: History, makers: Sequence[Callable[[], Look]], progress: Callable[[str], None]
) -> Iterator[Check]:
    """One pass over the rollouts, every look at each step."""
    looks = list[Look]()
    if unmade := [
        each for make in makers for each in _guarded(lambda make=make: looks.append(make()) or [], "a check")
    ]:
        yield Check("completions", "not all can be checked", unmade)
    problems: dict[str, list[str]] = {look.name: [] for look in looks}
    recorded = {step for step in run.records if step > 0} | set(run.by_step)
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
        for look in looks:
            problems[look.name] += _guarded(lambda look=look, at=rollouts: look.at(at), rollouts.name)
    for look in looks:
        if isinstance(look, Rewards | Rescored):
            progress(f"{look.name}: computing")
            problems[look.name] += _guarded(look.finish, look.name)
        yield Check(look.name, look.found(), problems[look.name])


def _guarded(work: Callable[[], list[str]], what: str) -> list[str]:
    try:
        return work()
    except Exception as error:  # whatever damaged records make of it is what was to be found
        return [f"{what} cannot be checked: {type(error).__name__}: {error}"]


def _safe(name: str, check: Callable[[], Check]) -> Check:
    found: list[Check] = []
    problems = _guarded(lambda: found.append(check()) or [], "it")
    return found[0] if found else Check(name, "", problems)
