"""launch=local: trainer and engine in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from rlloop.config.run import RunConfig
from rlloop.launch.make import (
    doctor_for,
    load,
    make_critic,
    make_engine,
    make_history,
    make_trainer,
    take_turns,
    vocabulary_of,
)
from rlloop.launch.prepare import Prepared
from rlloop.loop.partial import measured, schedule_of
from rlloop.loop.parts import Parts
from rlloop.numerics.profile import Drift
from rlloop.rollout import Engine
from rlloop.runs.folder import RunFolder
from rlloop.study.drifted import BothSidesSync, DriftedSync, both_sides_view, drifted_copy
from rlloop.sync.colocated import ColocatedSync
from rlloop.trainer import CheckpointStore


@contextmanager
def local_parts(config: RunConfig, prepared: Prepared, folder: RunFolder) -> Iterator[Parts]:
    """Trainer and engine in this process, sharing one model's parameters."""
    path = prepared.task.model_folder()
    model = load(config, path, trains=True)
    drift = Drift(**vars(config.rollout.drift)) if config.rollout.drift.declared else None
    departs = drift is not None and not drift.both_sides
    if drift is not None and drift.both_sides:
        model = both_sides_view(model, drift)
    trainer = make_trainer(model, config, path)
    history, critic = make_history(model, trainer, config), make_critic(config, path)
    schedule = schedule_of(config, history)
    sampled = config.rollout.profile.over(config.model.profile)
    differs = departs or sampled != config.model.profile
    with ExitStack() as stack:
        make = partial(make_engine, rollout=config.rollout, beside=True)
        engine = eval_engine = make(drifted_copy(model) if departs else model, sampled, drift=drift)
        if differs:
            eval_engine = make(model, config.model.profile, drift=None if departs else drift)
        engines = dict.fromkeys((engine, eval_engine))
        take_turns(engines, trainer, history, critic)
        for each in engines:
            if close := getattr(each, "close", None):
                stack.callback(close)  # vLLM's sleep mode and process groups are the process's
        sync = ColocatedSync(*engines)
        if departs:
            assert isinstance(engine, Engine), "only the embedded engine drifts"
            sync = DriftedSync(model, engine, eval_engine)
        elif drift is not None:
            sync = BothSidesSync(model, trainer, drift, *engines)
        yield Parts(
            task=prepared.task,
            engine=engine,
            engine_lag=config.rollout.drift.stale_steps,
            eval_engine=eval_engine,
            trainer=trainer,
            sync=sync,
            scorer=prepared.scorer,
            advantages=prepared.advantages,
            loss=prepared.loss,
            critic=critic,
            checkpoints=CheckpointStore(folder.checkpoints, config.checkpoint.keep),
            vocabulary=vocabulary_of(model.config),
            doctor=doctor_for(engine, model),
            schedule=schedule,
            measured=partial(measured, dict, schedule),
            stateful=(sync,) if isinstance(sync, DriftedSync) else (),
        )
