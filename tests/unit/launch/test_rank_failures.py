"""Errors made from failures of ranks, and reports of their progress."""

import json
import signal
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from rlloop.config.layout import LayoutConfig
from rlloop.config.run import AlgorithmConfig, Launch, RayConfig, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.launch.ranks import RankFailed, error_of, remaining
from rlloop.launch.ray_actors import _placed
from rlloop.launch.ray_pool import EngineDied
from rlloop.launch.ray_session import ray_session
from rlloop.parallel import progress
from rlloop.parallel.progress import IDLE, WAITS, Watch, doing, tick


def test_a_death_comes_before_the_errors_that_follow_from_it():
    error = error_of({1: RuntimeError("Connection closed by peer"), 2: EngineDied("killed")}, 4)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.lost, str(error)) == (2, frozenset({2}), "rank 2 of 4: killed")


def test_an_error_keeps_its_exit_code_and_its_kind_in_words():
    assert error_of({1: ConfigError("lr is bad")}, 2).exit_code == 2
    assert str(error_of({1: ValueError("odd")}, 2)) == "rank 1 of 2: ValueError: odd"
    assert error_of({0: EngineDied("no file", died=False)}, 2).lost == frozenset()


def test_an_error_that_all_ranks_raise_is_everybodys():
    alike = {rank: ConfigError("too long") for rank in (1, 0)}
    assert error_of(alike, 2) is alike[1]
    assert isinstance(error_of({0: ConfigError("too long"), 1: ConfigError("other")}, 2), RankFailed)


def test_ranks_that_die_alike_are_lost():
    error = error_of({rank: EngineDied("killed for want of memory") for rank in (1, 0)}, 2)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.lost, str(error)) == (1, frozenset({0, 1}), "rank 1 of 2: killed for want of memory")


def elastic(**ray) -> RunConfig:
    return RunConfig(
        algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm"),
        trainer=TrainerConfig(layout=LayoutConfig(dp_shard=4)),
        launch=Launch.ray,
        ray=RayConfig(**ray),
    )


def test_an_elastic_run_goes_on_with_those_left():
    failure = RankFailed(1, 4, "killed", frozenset({1, 3}))
    left = remaining(elastic(elastic=True), failure)
    assert (left.world.size, left.replicas) == (2, 0)
    with pytest.raises(RankFailed, match="rank 1 of 4: killed"):
        remaining(elastic(), failure)
    with pytest.raises(RankFailed, match="rank 1 of 4: slow"):
        remaining(elastic(elastic=True), RankFailed(1, 4, "slow"))


def test_a_ray_that_is_too_slow_to_start_is_refused_in_a_line():
    def times_out(**given):
        raise Exception("The current node timed out during startup.")  # as `ray._private.node` does, after 30 seconds

    said = "Ray did not start on this machine, which may be overloaded: The current node timed out during startup."
    with pytest.raises(ConfigError, match=rf"{said}$"), ray_session(a_ray(times_out), None, 2.0):
        pass
    with (
        pytest.raises(ConfigError, match=f"{said} Give it longer by ray.timeout"),
        _placed(a_ray(times_out), elastic()),
    ):
        pass


def a_ray(init, get_node=None):
    private = SimpleNamespace(services=SimpleNamespace(get_node=get_node), worker=SimpleNamespace())
    return SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: None, _private=private)


def test_a_node_that_ray_has_not_found_yet_is_asked_for_until_the_timeout():
    answers, asked = iter([RuntimeError("none yet"), RuntimeError("none yet"), {"port": 1}]), []

    def get_node(*args):
        asked.append(args)
        if isinstance(answer := next(answers), RuntimeError):
            raise answer
        return answer

    def init(**given):
        assert ray._private.services.get_node("address", "node") == {"port": 1}

    ray = a_ray(init, get_node)
    with ray_session(ray, None, 2.0, timeout=60.0):
        assert asked == [("address", "node")] * 3
        assert ray._private.services.get_node is get_node


def test_ray_does_not_take_the_place_of_a_handler_of_sigterm():
    def handler(number, frame):
        pass

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with ray_session(a_ray(lambda **given: signal.signal(signal.SIGTERM, signal.SIG_DFL)), None, 2.0):
            assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def report(store, rank, beat, count, what):
    store.set(f"progress/{rank}", json.dumps([beat, count, what]))


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_rank_that_others_wait_for_is_the_one_that_is_stuck(clock):
    store = HashStore()
    watch = Watch(store, 3)
    for beat in range(1, 9):
        report(store, 0, beat, 7, f"{WAITS}gather")
        report(store, 1, beat, 5, "computes")
        report(store, 2, beat, 7 + beat, "computes")
        watch.look()
        if clock[0] <= 1010:
            assert watch.stalled(10) is None
        clock[0] += 2
    assert watch.stalled(10)[0] == 1
    assert "rank 0 waits in gather (after 7 pieces of work); rank 1 computes (after 5" in watch.stalled(10)[1]
    watch.reset()
    assert watch.stalled(10) is None


def test_a_rank_that_reports_no_more_is_silent_and_a_rank_that_is_done_is_not_blamed(clock):
    store = HashStore()
    watch = Watch(store, 2)
    report(store, 0, 1, 3, IDLE)
    report(store, 1, 1, 3, f"{WAITS}exchange")
    watch.look()
    for beat in range(2, 6):
        clock[0] += 5
        report(store, 0, beat, 3, IDLE)
        watch.look()
    assert watch.silent() == [1]
    assert watch.stalled(10)[0] == 1


def test_a_watch_that_was_stopped_with_the_ranks_blames_none_of_them(clock):
    store = HashStore()
    watch = Watch(store, 2)
    for rank in range(2):
        report(store, rank, 1, 3, "computes")
    watch.look()
    clock[0] += 3600  # by Ctrl-Z, say
    watch.look()
    assert watch.silent() == []
    assert watch.stalled(10) is None
    for beat in range(2, 6):  # rank 1 stays stopped
        clock[0] += 4
        report(store, 0, beat, 3 + beat, "computes")
        watch.look()
    assert watch.silent() == [1]
    assert watch.stalled(10)[0] == 1


def test_work_is_counted():
    before = progress._Here.count
    tick()
    with doing("computes"):
        assert progress._Here.doing == "computes"
    assert progress._Here.count == before + 3
