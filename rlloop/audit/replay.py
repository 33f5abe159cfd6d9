"""`rlloop verify --replay`: trains the run again from its earliest weights and compares every record."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from rlloop.audit.history import Check, History, Rollouts
from rlloop.audit.parts import Parts
from rlloop.config.fleet import FleetConfig
from rlloop.config.layout import LayoutConfig
from rlloop.config.run import CheckpointConfig, Launch, ParityMode, RunConfig
from rlloop.errors import ParityError, RlloopError
from rlloop.metrics import is_timing
from rlloop.parity.certificate import Certificate, comparison_of, content_digest
from rlloop.parity.monitor import ParityMonitor
from rlloop.runs.folder import RunFolder
from rlloop.trainer.checkpoint import Checkpoint, CheckpointStore, find_damage

NAME = "replayed"


def replay(run: History, parts: Parts, progress: Callable[[str], None]) -> Check:
    """Train the run again in a temporary folder. Only a genuine history comes out the same.

    Needs a deterministic run (`parity.mode=require`), and calls its own task and reward.
    """
    target = max((line.step for line in run.lines if line.metrics is not None or line.rollouts is None), default=0)
    obstacle = _obstacle(run, parts, target)
    if obstacle is not None:
        return Check(NAME, f"not done: {obstacle}")
    assert not isinstance(run.built, str)
    start = _start(run, parts)
    if start is None:
        return Check(NAME, f"not done: no weights to begin with ({parts.no_model})")
    with tempfile.TemporaryDirectory(prefix="rlloop-replay-") as name:
        folder = Path(name) / "run"
        try:
            problems, elsewhere = _train(run, _alone(run.built, folder), folder, start, target, progress)
        except ParityError as error:
            return Check(
                NAME, f"stopped after step {start.step}", [f"the contract broke as it was trained again: {error}"]
            )
        except (RlloopError, OSError) as error:
            return Check(NAME, f"not done: {error}")
        again = History(folder)
        if not elsewhere:
            problems += _compare(run, again, start.step, target)
    if elsewhere:
        return Check(
            NAME, "not compared: this machine's numerics are not those that the run recorded (fingerprints.json)"
        )
    return Check(NAME, f"steps {start.step + 1} to {target}, trained again", problems)


def _obstacle(run: History, parts: Parts, target: int) -> str | None:
    if isinstance(run.built, str):
        return run.built
    if run.built.parity.mode is not ParityMode.require:
        return f"parity.mode={run.built.parity.mode} does not promise equal bits"
    if run.built.fleet.max_version_lag:
        return "with fleet.max_version_lag, batches are under way between steps"
    if run.built.rollout.partial.prompts:
        return "with rollout.partial, what a step trains depends on how long tools took"
    refused = parts.no_task or parts.no_reward or parts.no_advantage or parts.no_training
    return refused or (None if target else "no step is certified")


def _start(run: History, parts: Parts) -> Checkpoint | None:
    if parts.model is not None:
        return Checkpoint(0, parts.model)
    store = CheckpointStore(run.path / "checkpoints")
    whole = (step for step in store.steps() if find_damage(store.root / f"step_{step}") is None)
    return next((Checkpoint(step, store.root / f"step_{step}") for step in whole), None)


def _alone(config: RunConfig, folder: Path) -> RunConfig:
    """The same run in this process alone, without sinks."""
    return dataclasses.replace(
        config,
        launch=Launch.local,
        trainer=dataclasses.replace(config.trainer, layout=LayoutConfig()),
        rollout=dataclasses.replace(config.rollout, layout=LayoutConfig()),
        fleet=FleetConfig(),
        run=dataclasses.replace(config.run, dir=str(folder)),
        sinks={},
        checkpoint=CheckpointConfig(every=1),
    )


def _train(
    run: History, config: RunConfig, folder: Path, start: Checkpoint, target: int, progress: Callable[[str], None]
) -> tuple[list[str], bool]:
    """Train from `start` to step `target` in `folder`. Returns problems with checkpoints on the way, and True if this
    machine's numerics are not the run's, so that nothing was trained."""
    from rlloop.launch.local import local_parts
    from rlloop.launch.prepare import prepare
    from rlloop.loop.loop import Loop

    folder.mkdir()
    for name, lines in (("metrics.jsonl", run.metrics), ("parity.jsonl", run.raw_lines)):
        before = [line for line in lines if start.step and line["step"] <= start.step]
        (folder / name).write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in before))
    prepared = prepare(config)
    kept = KeptCheckpoints(run.path / "checkpoints", folder / "checkpoint", start)
    steps = iter(range(start.step + 1, target + 1))

    def stop() -> bool:
        step = next(steps)
        progress(f"step {step} of {target} trained again")
        return step == target

    try:
        with RunFolder(folder) as records, local_parts(config, prepared, records) as parts:
            prints = parts.engine.fingerprint(), parts.trainer.fingerprint()
            certified = {digest for line in run.lines for digest in line.fingerprints.values()}
            if certified and not {content_digest(each) for each in prints} <= certified:
                return [], True
            monitor = ParityMonitor(config.parity, Certificate(records.parity), *prints)
            loop = Loop(config, dataclasses.replace(parts, checkpoints=kept), records, monitor)
            try:
                if loop.restore() < target:
                    loop.run(start.step, stop)
            finally:
                loop.close()
    finally:
        prepared.scorer.close()
    return kept.problems, False


class KeptCheckpoints:
    """A checkpoint store for the loop: starts at one of the run's checkpoints, and compares instead of keeping."""

    def __init__(self, root: Path, scratch: Path, start: Checkpoint) -> None:
        """`root`: the run's checkpoints; `scratch`: folder for a checkpoint while it is compared."""
        self.problems: list[str] = []
        self._root, self._scratch, self._start = root, scratch, start

    def save(self, step: int, writers: Iterable[Callable[[Path], None]]) -> Path:
        theirs = self._root / f"step_{step}"
        if theirs.is_dir():
            self._scratch.mkdir()
            for write in writers:
                write(self._scratch)
            for file in sorted(self._scratch.glob("*.safetensors")):
                if not (theirs / file.name).is_file() or _digest(file) != _digest(theirs / file.name):
                    self.problems.append(f"step_{step}/{file.name} is not what training comes to")
            shutil.rmtree(self._scratch)
        return self._scratch

    def latest(self) -> Checkpoint | None:
        return self._start if self._start.step else None

    def digests(self, step: int) -> dict[str, str]:
        return {}


def _digest(file: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()


def _compare(run: History, again: History, start: int, target: int) -> list[str]:
    problems = []
    lines, ours = ({line["step"]: comparison_of(line) for line in one.raw_lines} for one in (run, again))
    for step in range(start + 1 if start else 0, target + 1):
        record, mine = run.records.get(step, {}), again.records.get(step, {})
        problems += [
            f"step {step}: {name} is {record.get(name)!r:.40}; trained again it is {mine.get(name)!r:.40}"
            for name in sorted(_comparable(run, record, mine))
            if record.get(name) != mine.get(name)
        ]
        if lines.get(step) != ours.get(step):
            problems.append(f"step {step}: its line in the certificate is another, trained again")
        stored, repeated = _rows(run, step), _rows(again, step)
        problems += [
            f"{uid}: another completion, trained again" for uid in repeated if stored.get(uid) != repeated[uid]
        ]
    return problems


def _comparable(run: History, record: Mapping[str, Any], again: Mapping[str, Any]) -> set[str]:
    names = {name for name in record.keys() | again.keys() if not is_timing(name)}
    once = {name for name in record.keys() ^ again.keys() if name.startswith("eval/")}  # eval.every may have changed
    alone = run.config.get("launch") == "local" and run.section("fleet").get("kind") == "node"
    return names - once - {name for name in names if name.startswith("sync/") and not alone}


def _rows(run: History, step: int) -> dict[str, dict[str, Any]]:
    rollouts = run.rollouts_of(step) if step in run.files else None
    if not isinstance(rollouts, Rollouts):
        return {}
    return {row.uid: {**msgspec.to_builtins(row), "origin": None} for row in rollouts.rows}
