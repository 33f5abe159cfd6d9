"""Engines in workers, as the loop sees them: what becomes of a worker that dies. Needs no Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlloop.errors import SyncError
from rlloop.launch.ray_pool import EngineDied, FleetEngine, FleetSync
from rlloop.types import SamplingParams


class Worker:
    """A handle whose calls do what `script` says, in turn; else what a worker in order does."""

    def __init__(self, name: str, **script: list[Any]) -> None:
        self.name, self.script, self.called = name, script, list[str]()

    def call(self, method: str, *args: Any) -> Callable[[], Any]:
        def wait() -> Any:
            self.called.append(method)
            planned = self.script.get(method)
            result = planned.pop(0) if planned else {}
            if isinstance(result, Exception):
                raise result
            return [f"{self.name}: {prompt}" for prompt in args[1]] if method == "generate" else result

        return wait

    def revive(self) -> bool:
        self.called.append("revive")
        return True


def fleet_of(*replicas: Worker) -> tuple[FleetEngine, FleetSync]:
    engine = FleetEngine(Worker("trainer"), replicas)
    return engine, FleetSync(engine, lambda method, *_: method)


def test_a_replica_that_dies_while_it_gets_all_of_the_weights_is_started_anew():
    lost, dead = SyncError("another root"), EngineDied("gone")
    one, two = Worker("one", apply=[lost, dead]), Worker("two", apply=[{"sync/pause_seconds": 1.0}])
    engine, sync = fleet_of(one, two)
    assert sync.publish(3)["sync/pause_seconds"] == 1.0
    assert one.called == ["apply", "apply", "revive", "apply"]
    assert engine.replicas == [one, two]


def test_one_that_dies_again_and_again_is_left_out_and_its_requests_go_to_the_others():
    one, two = Worker("one", generate=[EngineDied("gone")], apply=[EngineDied("again")]), Worker("two")
    engine, _ = fleet_of(one, two)
    made = engine.generate([[place] for place in range(6)], SamplingParams(max_tokens=1))
    assert [str(each).partition(" ")[2] for each in made] == [f"[{place}]" for place in range(6)]
    assert engine.replicas == [two]
