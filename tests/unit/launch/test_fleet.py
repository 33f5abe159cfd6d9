"""Engines in actors, as the loop sees them: one that dies, or makes other bits. Needs no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlloop.config.fleet import FleetConfig
from rlloop.config.run import ParityMode
from rlloop.errors import SyncError
from rlloop.launch.admission import numerics_objection
from rlloop.launch.ray_pool import ActorPool, EngineDied, pool_settings
from rlloop.types import Completion, SamplingParams
from tests.support.waiting import until

PROMPTS = [[index] for index in range(6)]
SAMPLING = SamplingParams(max_tokens=1, seed=0)


class Worker:
    """A handle whose calls do what `script` says, in turn; else what a worker in order does."""

    def __init__(self, name: str, *, print: str = "same", token: int = 7, **script: list[Any]) -> None:
        self.name, self.script, self.called = name, script, list[str]()
        self.print, self.token = print, token

    def call(self, method: str, *args: Any) -> Callable[[], Any]:
        def wait() -> Any:
            self.called.append(method)
            planned = self.script.get(method)
            result = planned.pop(0) if planned else {"profile": self.print} if method == "fingerprint" else {}
            if isinstance(result, Exception):
                raise result
            if method == "generate":
                result = [self._completion(args[0], *each) for each in zip(*args[1:], strict=True)]
            return result

        return wait

    def revive(self) -> None:
        self.called.append("revive")

    def _completion(self, version: int, prompt: list[int], sampling: SamplingParams) -> Completion:
        logprob = np.zeros(1, np.float32)
        return Completion(prompt, [self.token], logprob, logprob, version, "length", sampling)


@contextmanager
def pool_of(*replicas: Worker, mode: ParityMode = ParityMode.require) -> Iterator[tuple[ActorPool, list[Any]]]:
    events: list[Any] = []
    actors = ActorPool(
        Worker("trainer"),
        replicas,
        lambda method, *_: method,
        replace(pool_settings(FleetConfig()), heartbeat=0.01),
        events.append,
        canary=([[1]], [SAMPLING]),
        objection=lambda trainer, state: numerics_objection(trainer, mode, state),
    )
    try:
        yield actors, events
    finally:
        actors.close()


def statuses(actors: ActorPool) -> dict[str, str]:
    return {member["url"]: member["status"] for member in actors.engine.pool.members()}


def test_the_work_is_shared_evenly_and_the_trainer_makes_its_part():
    one, two = Worker("one"), Worker("two")
    with pool_of(one, two) as (actors, _):
        actors.publish(0)
        completions = actors.engine.generate(PROMPTS, SAMPLING)
        assert [completion.prompt_ids for completion in completions] == PROMPTS
        assert {completion.origin for completion in completions} == {None}
        metrics = actors.engine.pool.take_metrics()
        assert (metrics["fleet/engines"], metrics["fleet/node/completions"]) == (3, 6)
        assert one.called.count("generate") == two.called.count("generate") == 2  # its canary, and its share


def test_a_canary_is_made_when_an_engine_joins_and_not_for_every_version():
    one = Worker("one")
    with pool_of(one) as (actors, _):
        for version in range(3):
            actors.publish(version)
        assert one.called == ["fingerprint", "apply", "generate", "apply", "apply"]


def test_a_replica_that_the_delta_does_not_fit_gets_the_whole_version():
    one, two = (
        Worker("one", apply=[{}, SyncError("another root")]),
        Worker("two", apply=[{}, {"sync/pause_seconds": 1.0}]),
    )
    with pool_of(one, two) as (actors, _):
        actors.publish(0)
        assert actors.publish(1)["sync/pause_seconds"] == 1.0
        assert one.called[-2:] == ["apply", "apply"]
        assert two.called[-1] == "apply"
        assert statuses(actors) == dict.fromkeys(("trainer", "one", "two"), "serving")


def test_a_replica_that_dies_is_started_anew_and_serves_after_its_canary():
    one, two = Worker("one", generate=[{}, EngineDied("gone")]), Worker("two")
    with pool_of(one, two) as (actors, events):
        actors.publish(0)
        completions = actors.engine.generate(PROMPTS, SAMPLING)
        assert [completion.prompt_ids for completion in completions] == PROMPTS
        until(lambda: statuses(actors)["one"] == "serving")
        begun = ["fingerprint", "apply", "generate"]
        assert one.called == [*begun, "generate", "revive", *begun]
        ours = [event["event"] for event in events if event["engine"] == "node/one"]
        assert ours[:2] == ours[4:] == ["joined", "serving"]
        assert set(ours[2:4]) == {"lost", "reissued"}
        metrics = actors.engine.pool.take_metrics()
        assert (metrics["fleet/lost"], metrics["fleet/reissued"]) == (1, 2)


def test_one_that_dies_again_before_it_served_is_given_up(caplog):
    one = Worker("one", apply=[{}, EngineDied("gone"), EngineDied("again")])
    with pool_of(one, Worker("two")) as (actors, _):
        actors.publish(0)
        actors.publish(1)
        until(lambda: one.called.count("apply") == 3)
        until(lambda: statuses(actors)["one"] == "lost")
        actors.publish(2)
        assert one.called.count("revive") == 1
        assert len(actors.engine.generate(PROMPTS, SAMPLING)) == 6
        assert "one died again (again) before it had served" in caplog.text


def test_an_engine_with_other_bits_is_quarantined():
    odd = Worker("odd", token=8)
    with pool_of(odd, Worker("two")) as (actors, events):
        actors.publish(0)
        assert statuses(actors) == {"trainer": "serving", "odd": "quarantined", "two": "serving"}
        assert {completion.token_ids[0] for completion in actors.engine.generate(PROMPTS, SAMPLING)} == {7}
        assert "the bits of its canary" in next(each["why"] for each in events if each["event"] == "quarantined")


def test_an_engine_of_other_numerics_is_not_let_in_where_parity_is_required():
    with pool_of(Worker("other", print="another")) as (actors, _):
        assert actors.engine.fingerprint()["differing_engines"] == {"other": {"profile": "another"}}
        actors.publish(0)
        assert statuses(actors) == {"trainer": "serving", "other": "quarantined"}
    with pool_of(Worker("other", print="another"), mode=ParityMode.observe) as (actors, _):
        actors.publish(0)
        assert statuses(actors) == {"trainer": "serving", "other": "serving"}


def test_an_error_of_the_only_engine_is_the_callers_at_once():
    with pool_of() as (actors, _):
        actors.publish(0)
        actors._trainer.script["generate"] = [ValueError("no distribution")]
        with pytest.raises(ValueError, match="no distribution"):
            actors.engine.generate(PROMPTS, SAMPLING)


def test_where_the_trainers_process_dies_the_run_hears_it():
    with pool_of() as (actors, _):
        actors.publish(0)
        actors._trainer.script["generate"] = [EngineDied("the trainer is gone")]
        with pytest.raises(EngineDied, match="the trainer is gone"):
            actors.engine.generate(PROMPTS, SAMPLING)
