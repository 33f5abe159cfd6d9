"""Drives a run from its configuration to its summary, and releases its resources: locks, signals, the terminal.

Invalid runs are refused before anything slow starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from errno import EDQUOT, EFBIG, ENOSPC
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors import SafetensorError

from rlloop.config.fleet import FleetKind
from rlloop.config.resume import flatten
from rlloop.config.run import Launch, RunConfig
from rlloop.config.tasks import offline_kind
from rlloop.errors import ParityError, RlloopError
from rlloop.launch.callbacks import Callbacks
from rlloop.launch.garbage import collect_rarely
from rlloop.launch.kernels import compile_if_new
from rlloop.launch.layouts import check_launch, check_task, crowd
from rlloop.launch.local import local_parts
from rlloop.launch.prepare import Prepared, prepare
from rlloop.launch.ranks import RankFailed, RankStalled, remaining
from rlloop.launch.ray_pool import EngineDied
from rlloop.launch.signals import Interrupts
from rlloop.launch.timeline import Timeline
from rlloop.launch.torchrun import Leader
from rlloop.loop.loop import Loop
from rlloop.loop.own import Run
from rlloop.loop.parts import Parts
from rlloop.numerics.operators.distribution import NotFinite
from rlloop.parity.certificate import Certificate
from rlloop.parity.monitor import ParityMonitor
from rlloop.parity.witness import Attestor, check_certificate
from rlloop.rewards.digest import note_reward, reward_digest
from rlloop.runs.console import Progress, print_summary
from rlloop.runs.folder import RunFolder, read_records, summarize
from rlloop.runs.machine import MachineUse
from rlloop.runs.sinks import make_sinks
from rlloop.trainer.checkpoint import folder_digest

INTERRUPTED = 130  # exit code
STOPPED = 0  # exit code: by a callback, which is an end as good as the last step
NO_ROOM = ENOSPC, EDQUOT, EFBIG


@dataclass(frozen=True)
class Job:
    """One run, ready to start: its recipe, checked configuration and folder."""

    recipe: str
    config: RunConfig
    plain: Mapping[str, Any]  # the configuration as JSON values: what config.yaml holds
    folder: Path
    command: str  # what resumes it
    reward: Callable[..., Any] | None = None  # the function itself, for callers from Python
    callbacks: Sequence[Any] = ()  # objects with any of on_start(run), on_step(step, metrics), on_end(run)

    @property
    def offline(self) -> str | None:
        """The kind of given completions, of a run that trains on such."""
        return offline_kind(flatten(self.plain))


Builder = Callable[[RunConfig, Prepared, RunFolder], AbstractContextManager[Parts]]


def train(job: Job, console: Console, leader: Leader | None = None) -> int:
    """Run or resume to the last step. Returns the exit code: 0, or 130 for a run that was interrupted.

    `leader`: of the other ranks, under torchrun.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    with ExitStack() as stack:
        if leader is None:
            check_launch(job.config, 1)
        else:
            check_launch(job.config, leader.here.size, leader.machines)
        prepared = prepare(job.config, job.reward)
        stack.callback(prepared.scorer.close)
        check_task(job.config, prepared.task)
        if note := crowd(job.config, 1 if leader is None else leader.here.neighbours or 1):
            say(note)
        check_certificate(job.config.certificate)
        if job.config.fleet.store is not None:
            from rlloop.sync.store import check_store  # brings an HTTP client

            check_store(job.config.fleet.store)
        compile_if_new(job.config, say)
        folder = stack.enter_context(RunFolder(job.folder))
        config_digest = folder.adopt(job.plain)
        attest = Attestor(job.config.certificate, folder.path, folder.log)
        if folder.is_finished(job.config.trainer.num_steps):
            say(
                f"{job.folder} is finished: nothing to do. Raise trainer.num_steps to go on, or start a new run in "
                "another folder (run.dir)"
            )
            return 0
        interrupts = stack.enter_context(Interrupts(say))
        callbacks = Callbacks(job.callbacks, Run(job.folder))
        conclude = partial(_conclude, folder, job.offline)
        try:
            finished = None
            while finished is None:
                certificate = Certificate(folder.parity, attest)
                certificate.note(config=config_digest)
                builder = builder_of(job.config, leader)
                try:
                    finished = _drive(job, prepared, builder, folder, certificate, interrupts, callbacks, console)
                except RankFailed as failure:
                    job = replace(job, config=remaining(job.config, failure))
                    folder.log(f"{failure}; it goes on with {job.config.world.size} ranks")
                    say(f"{failure}. The run goes on from its last checkpoint with {job.config.world.size} ranks")
        except KeyboardInterrupt:
            finished = False
        except RlloopError as error:
            if error.exit_code == 2 and folder.discard():  # refused before anything was recorded
                raise
            folder.log(f"stopped: {error}")
            conclude("parity broken" if isinstance(error, ParityError) else "failed")
            if isinstance(error, EngineDied) and (error.died or isinstance(error.__cause__, RankStalled)):
                again = f"To resume from the last checkpoint, in this or another layout: {_again(job, leader)}"
                error.args = (f"{str(error).rstrip('.')}. {again}",)
            raise
        except (OSError, SafetensorError) as error:
            if not _is_full(error):
                closed = "the output was closed, as by `| head`; the same command resumes the run"
                folder.log(f"stopped: {closed if isinstance(error, BrokenPipeError) else error}")
                conclude("failed")
                raise
            raise RlloopError(
                f"{job.folder} cannot grow: {error}. Make room; to resume: {_again(job, leader)}"
            ) from error
        except NotFinite as error:
            folder.log(f"stopped: {error}")
            conclude("failed")
            raise RlloopError(
                f"{job.folder}: training has diverged: {error}. Train again in another folder (run.dir) with a "
                "lower trainer.lr or trainer.grad_clip"
            ) from error
        except Exception as error:  # a defect, of rlloop or of a recipe's own code: its traceback is printed
            folder.log(f"stopped: {type(error).__name__}: {error}")
            conclude("failed")
            raise
        if not finished:
            folder.log(callbacks.reason or "interrupted")
            conclude("interrupted")
            callbacks.end()
            say(f"{callbacks.reason or 'Interrupted'}. To resume: {_again(job, leader)}")
            return STOPPED if callbacks.reason else INTERRUPTED
        summary, records = conclude("finished")
        callbacks.end()
        print_summary(console, folder.path, summary, records, job.offline)
        return 0


def _ray_parts(config: RunConfig, prepared: Prepared, folder: RunFolder) -> AbstractContextManager[Parts]:
    from rlloop.launch.ray_actors import ray_parts  # which other runs need not import

    return ray_parts(config, prepared, folder)


BUILDERS: dict[Launch, Builder] = {Launch.local: local_parts, Launch.ray: _ray_parts}


def builder_of(config: RunConfig, leader: Leader | None = None) -> Builder:
    """Makes the parts of a run; `leader`: of the other ranks, under torchrun."""
    if config.fleet.kind is FleetKind.regions:
        from rlloop.launch.regions import ranked_region_parts, region_parts  # brings the servers' packages, an extra

        if leader is not None:
            return partial(ranked_region_parts, start=leader.ranks)
        if config.launch is Launch.ray:
            from rlloop.launch.ray_actors import ray_ranks

            return partial(ranked_region_parts, start=ray_ranks, apart=True)
        return region_parts
    return BUILDERS[config.launch] if leader is None else leader.parts


def _drive(
    job: Job,
    prepared: Prepared,
    builder: Builder,
    folder: RunFolder,
    certificate: Certificate,
    interrupts: Interrupts,
    callbacks: Callbacks,
    console: Console,
) -> bool:
    """Takes steps until the last, or an interrupt. Returns True at the last step."""
    config = job.config
    with ExitStack() as stack:
        parts = stack.enter_context(builder(config, prepared, folder))
        engine, trainer = parts.engine.fingerprint(), parts.trainer.fingerprint()
        monitor = ParityMonitor(config.parity, certificate, engine, trainer)
        folder.note_fingerprints({monitor.fingerprints["engine"]: engine, monitor.fingerprints["trainer"]: trainer})
        observers: list[Any] = make_sinks(config.sinks, folder.path, job.plain)
        for sink in observers:
            stack.callback(sink.close)
        machine = MachineUse(folder.path)
        stack.callback(machine.close)
        timeline = Timeline(folder.path, lambda text: progress.note(text), parts.ranks) if config.profile else None
        mark = nullcontext if timeline is None else timeline.phase
        loop = Loop(config, parts, folder, monitor, observers, machine.latest, mark)
        stack.callback(loop.close)
        start = loop.restore()
        certificate.note_layout(config.world.degrees())
        if start == 0:
            certificate.note(model=folder_digest(Path(prepared.task.model_folder())))
        if config.parity.redraw and not config.redraws:
            folder.log("tokens are not drawn again: the engine draws them by another operation than the trainer's")
        changed = note_reward(folder, prepared.scorer.reward, start)
        certificate.note(reward=reward_digest(prepared.scorer.reward))
        folder.log(f"{job.recipe}: starting after step {start} of {config.trainer.num_steps}, process {os.getpid()}")
        progress = stack.enter_context(Progress(console, job.recipe, config.trainer.num_steps, start, job.offline))
        progress.recall(read_records(folder.metrics.path) if start else ())
        progress.note(f"{folder.path}: " + (f"resuming after step {start}" if start else "a new run"))
        if changed is not None:
            progress.note(changed)
        for sink in observers:
            if note := getattr(sink, "note", ""):
                progress.note(note)
        if config.fleet.kind is FleetKind.regions:
            progress.note(f"engines join at {(folder.path / 'fleet_address').read_text().strip()}")
        observers.append(progress)
        observers.append(callbacks)
        if timeline is not None:
            observers.append(stack.enter_context(timeline))
            progress.note(f"the second to fourth step are traced: {timeline.file}, for ui.perfetto.dev")
        callbacks.start()
        collect_rarely(stack)
        with interrupts.held_back():
            last = loop.run(start, lambda: interrupts.asked() or callbacks.reason is not None)
    return last >= config.trainer.num_steps


def _conclude(folder: RunFolder, offline: str | None, status: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """summary.json and curve.png, from the records. Returns the summary and the records."""
    from rlloop.runs.plots import draw  # matplotlib takes a second to import: not at start-up

    metrics = list(read_records(folder.metrics.path))
    summary = summarize(metrics, status)
    if metrics:
        draw({folder.path.name: metrics}, folder.path / "curve.png", offline)
    folder.write_json("summary.json", summary)
    return summary, metrics


def _is_full(error: Exception) -> bool:
    """True if a disk, a quota or a limit on files leaves no room. safetensors says so in its text alone."""
    return any(getattr(error, "errno", None) == code or f"(os error {code})" in str(error) for code in NO_ROOM)


def _again(job: Job, leader: Leader | None) -> str:
    """The command that resumes the run."""
    return job.command if leader is None else leader.here.again(job.command)
