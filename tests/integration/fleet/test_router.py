"""Many engines as one, over real sockets: bits, affinity, deaths, canaries, fencing, versions."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest

from rlloop.rollout import Engine
from rlloop.rollout.engine.service import Busy, VersionUnavailable
from rlloop.rollout.fleet import wire
from rlloop.rollout.fleet.client import Fenced
from rlloop.rollout.fleet.membership import NoEngine, hardware_class
from rlloop.rollout.fleet.pool import http_pool
from rlloop.rollout.fleet.trainer_server import trainer_app
from rlloop.sync.publisher import Publisher
from rlloop.sync.store import FolderStore
from rlloop.types import SamplingParams
from rlloop.web.server import BackgroundServer, Guard, Listen
from tests.support.router_fleet import CANARY, FAST, Events, OneEngine, check, fleet
from tests.support.tiny_models import tiny_qwen3
from tests.support.waiting import until
from tests.support.weight_history import KEY, first_weights

PROMPTS = [[3 + place % 5, 7, 9, place] for place in range(40)]
SAMPLING = [SamplingParams(max_tokens=12, seed=place, ignore_eos=True) for place in range(40)]


@pytest.fixture(scope="module")
def expected():
    return Engine(tiny_qwen3(64)).generate(PROMPTS, SAMPLING)


def test_two_engines_make_what_one_would_and_share_the_work(expected):
    engines = OneEngine(), OneEngine()
    with fleet(*engines) as (router, events):
        router.serve_version(0, CANARY)
        made = router.generate(PROMPTS, SAMPLING, 0)
        check(made, expected)
        assert {completion.origin for completion in made} == {f"r{i}/{e.url[7:]}" for i, e in enumerate(engines)}
        assert all(engine.made() > 1 for engine in engines)
        assert len(events.of("serving")) == 2
        metrics = router.take_metrics()
        assert metrics["fleet/engines"] == 2
        assert metrics["fleet/r0/completions"] + metrics["fleet/r1/completions"] == 40
        assert router.generate([], [], 0) == []


def test_prompts_that_begin_alike_stay_together_as_long_as_there_is_room():
    engines = OneEngine(), OneEngine(), OneEngine()
    prompts = [[group, *range(20), place] for group in range(3) for place in range(4)]
    settings = dataclasses.replace(FAST, chunk=4, calls=4)
    with fleet(*engines, settings=settings) as (router, _):
        router.serve_version(0, None)
        homes = []
        for _ in range(2):
            made = router.generate(prompts, [SamplingParams(max_tokens=2, seed=1)] * 12, 0)
            homes.append([{made[4 * group + place].origin for place in range(4)} for group in range(3)])
        assert all(len(origins) == 1 for homes_of_one in homes for origins in homes_of_one)


def test_what_a_dead_engine_leaves_behind_is_made_again_bit_for_bit(expected):
    engines = OneEngine(), OneEngine()
    with fleet(*engines) as (router, events):
        router.serve_version(0, CANARY)
        engines[0].engine.may(0)  # it takes its share, and hangs

        def die():
            until(lambda: engines[0].service.load > 0)
            engines[0].http._server.force_exit = True
            engines[0].http.close()

        death = threading.Thread(target=die)
        death.start()
        check(router.generate(PROMPTS, SAMPLING, 0), expected)
        death.join()
        assert events.of("reissued")
        until(lambda: events.of("lost"))
        assert router.take_metrics()["fleet/engines"] == 1
        check(router.generate(PROMPTS, SAMPLING, 0), expected)


def test_an_engine_that_hangs_is_hedged(expected):
    engines = OneEngine(), OneEngine()
    with fleet(*engines, settings=dataclasses.replace(FAST, hedge=0.2)) as (router, events):
        router.serve_version(0, None)
        engines[0].engine.may(0)
        check(router.generate(PROMPTS, SAMPLING, 0), expected)
        assert events.of("hedged")
        engines[0].engine.may()
        until(lambda: engines[0].service.load == 0)  # what nobody waits for any more was cancelled there


def test_an_engine_whose_bits_are_others_serves_nothing(expected):
    good, bad = OneEngine(), OneEngine("linear")
    reference = Engine(tiny_qwen3(64))
    canary = dataclasses.replace(
        CANARY,
        hardware=hardware_class(reference.fingerprint()),
        expected=reference.generate(CANARY.prompts, CANARY.sampling),
    )
    with fleet(bad, good) as (router, events):
        router.serve_version(0, canary)
        until(lambda: events.of("quarantined"))
        assert "the bits of its canary" in events.of("quarantined")[0]["why"]
        made = router.generate(PROMPTS, SAMPLING, 0)
        check(made, expected)
        assert {completion.origin.partition("/")[0] for completion in made} == {"r1"}


def test_an_engine_of_other_numerics_is_let_in_only_where_nobody_objects():
    with fleet(OneEngine(), objection=lambda state: "not ours", settings=dataclasses.replace(FAST, patience=0.5)) as (
        router,
        events,
    ):
        until(lambda: events.of("quarantined"))
        with pytest.raises(NoEngine, match="is quarantined"):
            router.serve_version(0, None)
        assert events.of("quarantined")[0]["why"] == "not ours"


def test_only_engines_of_the_version_serve_and_they_come_as_they_catch_up():
    engines = OneEngine(), OneEngine()
    with fleet(*engines, settings=dataclasses.replace(FAST, settle=0.0)) as (router, _):
        engines[0].service.change_weights(lambda: engines[0].engine.set_version(3))
        router.serve_version(3, None)
        made = router.generate(PROMPTS, SAMPLING, 3)
        assert {completion.policy_version for completion in made} == {3}
        assert engines[1].made() == 0
        engines[1].service.change_weights(lambda: engines[1].engine.set_version(3))
        until(lambda: router.take_metrics()["fleet/engines"] == 2)
        router._members.settings = dataclasses.replace(FAST, patience=0.5)
        with pytest.raises(NoEngine, match="version 4"):
            router.serve_version(4, None)


def test_engines_join_and_leave_in_the_middle(expected):
    first, second = OneEngine(), OneEngine()
    with fleet(first, settings=dataclasses.replace(FAST, chunk=4, calls=1, together=1)) as (router, events):
        router.serve_version(0, CANARY)
        first.engine.may(0)
        results = []
        work = threading.Thread(target=lambda: results.append(router.generate(PROMPTS, SAMPLING, 0)))
        work.start()
        until(lambda: first.service.load > 0)
        router.join(second.url, "late")
        until(lambda: second.made() > 1)
        router.leave(first.url)
        work.join()
        check(results[0], expected)
        assert [member["region"] for member in router.members()] == ["late"]
        assert [each["why"] for each in events.of("lost")] == ["it left"]
    second.close()


def test_a_process_of_an_earlier_term_is_fenced_off():
    engine = OneEngine()
    settings = dataclasses.replace(FAST, heartbeat=60.0)
    with fleet(engine, settings=settings, holder="run", term=1) as (old, _):
        old.serve_version(0, None)
        new = http_pool(FAST, lambda event: None, holder="run", term=2)
        new.join(engine.url, "r0")
        new.serve_version(0, None)
        assert len(new.generate(PROMPTS[:2], SAMPLING[:2], 0)) == 2
        with pytest.raises(Fenced, match="term 1"):
            old.generate(PROMPTS, SAMPLING, 0)
        new.close()


def test_a_version_that_is_not_the_fleets_is_refused_and_not_waited_for(expected):
    engine = OneEngine()
    with fleet(engine, settings=dataclasses.replace(FAST, settle=0.0, calls=1, chunk=8)) as (router, _):
        router.serve_version(0, None)
        for version in (-1, 7):
            with pytest.raises(VersionUnavailable, match=f"has version 0 of the weights; asked for is {version}"):
                router.generate(PROMPTS, SAMPLING, version)
        engine.engine.may(0)
        waiting = router.begin(PROMPTS, SAMPLING, 0)
        until(lambda: engine.engine.has_work)  # a change of weights would overtake what is only in the service's inbox
        changed = threading.Thread(
            target=engine.service.change_weights, args=(lambda: engine.engine.set_version(1),), daemon=True
        )
        changed.start()
        until(lambda: engine.service._pause is not None)
        published = threading.Thread(target=router.serve_version, args=(1, None))
        published.start()
        until(lambda: router.version == 1)
        engine.engine.may()
        with pytest.raises(VersionUnavailable, match="has version 1 of the weights; asked for is 0"):
            waiting.result(240)
        published.join()
        changed.join()
        assert len(router.generate(PROMPTS, SAMPLING, 1)) == 40


def test_a_router_that_is_closed_in_the_middle_tells_its_engines(caplog):
    gc.freeze()  # what other tests left behind is not collected here
    engine, events = OneEngine(), Events()
    router = http_pool(FAST, events.append)
    router.join(engine.url, "r0")
    router.serve_version(0, None)
    engine.engine.may(0)
    waiting = router.begin(PROMPTS, SAMPLING, 0)
    until(lambda: engine.service.load == len(PROMPTS))
    router.close()
    assert waiting.cancelled()
    assert events.of("reissued") == []
    engine.engine.may()
    until(lambda: engine.service.load == 0)
    assert engine.service.stats().made_tokens < 12 * len(PROMPTS)
    gc.collect()
    gc.unfreeze()
    assert caplog.records == []  # where asyncio tells of a task whose error nobody heard
    engine.close()


def test_an_engine_that_leaves_while_it_is_busy_leaves_its_work_to_the_others(expected):
    busy, good = OneEngine(), OneEngine()
    with fleet(busy, good, settings=dataclasses.replace(FAST, patience=5.0)) as (router, _):
        router.serve_version(0, None)

        async def refuse(*_, **__):
            asyncio.get_running_loop().call_later(0.02, router._members.leave, busy.url)
            raise Busy("full")

        router._members._all[busy.url].client.generate = refuse
        check(router.begin(PROMPTS, SAMPLING, 0).result(240), expected)


def test_one_engine_that_refuses_the_token_does_not_end_the_run(expected):
    engines = OneEngine(), OneEngine()
    settings = dataclasses.replace(FAST, heartbeat=60.0)
    with fleet(*engines, settings=settings, token="a token of some length") as (router, events):
        router.serve_version(0, None)
        guarded = engines[0].http._server.config.loaded_app  # it was started anew, with another token
        assert isinstance(guarded, Guard)
        guarded._expected = b"Bearer another token of some length"
        check(router.generate(PROMPTS, SAMPLING, 0), expected)
        until(lambda: events.of("quarantined"))
        assert "refuses the token" in events.of("quarantined")[0]["why"]


def test_many_who_sample_through_the_trainer_leave_room_for_those_who_fetch(tmp_path):
    """Engines get their weights from the same server, and join there."""
    store = FolderStore(tmp_path)
    publisher = Publisher(store, KEY, "run")
    publisher.publish(first_weights(), 0)
    engine = OneEngine()
    with fleet(engine) as (router, _):
        router.serve_version(0, None)
        server = BackgroundServer(trainer_app(store, router, publisher.squash_for, lambda content, step: {}), Listen())

        def ask(sampling=SAMPLING[:1], **versions) -> httpx.Response:
            content = msgspec.msgpack.encode(wire.Ask(PROMPTS[:1], sampling, **versions))
            return httpx.post(f"{server.url}/fleet/generate", content=content, timeout=60, trust_env=False)

        assert ask([]).status_code == 400
        for url in ("engine:7002", "http://", "http://[x", "http://engine:port"):
            assert httpx.post(f"{server.url}/fleet/join", json={"url": url}, trust_env=False).status_code == 400
        for versions, code in (
            ({"lowest": 1}, "version_behind"),
            ({"highest": -1}, "version_passed"),
            ({"lowest": 3, "highest": 3}, "version_behind"),
        ):
            reply = ask(**versions)
            assert (reply.status_code, reply.json()["error"]["code"]) == (409, code)
        engine.engine.may(0)
        with ThreadPoolExecutor(50) as pool:
            asked = [pool.submit(ask, lowest=0, highest=5) for _ in range(50)]
            until(lambda: len(router._batches) == 50)
            assert httpx.get(f"{server.url}/latest", trust_env=False).content == store.latest()
            engine.engine.may()
            assert {each.result(240).status_code for each in asked} == {200}
        server.close()


def test_without_engines_the_wait_is_bounded():
    with fleet(settings=dataclasses.replace(FAST, patience=0.3)) as (router, _):
        with pytest.raises(NoEngine, match=r"fleet.patience=0.3 s \(engines: none\)"):
            router.serve_version(0, None)
        with pytest.raises(NoEngine, match="no engine has served version 0"):
            router.generate(PROMPTS, SAMPLING, 0)


def test_requests_without_a_seed_are_given_one_so_that_any_engine_makes_the_same():
    with fleet(OneEngine()) as (router, _):
        router.serve_version(0, None)
        made = router.generate([[5]] * 3, [SamplingParams(max_tokens=2)] * 3, 0)
        assert len({completion.sampling.seed for completion in made}) == 3


class Following:
    """A follower's state, as the router reads it."""

    status, error, progress = "ready", "", None

    def __init__(self, run_id: str, follows: str) -> None:
        self.run_id, self.follows = run_id, follows

    def wake(self) -> None: ...

    def wait_for(self, version: int, seconds: float) -> None: ...


def test_an_engine_with_another_runs_weights_serves_nothing(expected):
    pinned, free, ours = OneEngine(), OneEngine(), OneEngine()
    pinned.server.follower = Following("old", "old")
    free.server.follower = between = Following("old", "")
    ours.server.follower = Following("new", "new")
    settings = dataclasses.replace(FAST, settle=0.1)
    with fleet(pinned, free, ours, settings=settings, holder="new", term=1) as (router, events):
        router.serve_version(0, None)  # all of them have a version 0
        until(lambda: events.of("quarantined"))
        [out] = events.of("quarantined")
        assert out["engine"].startswith("r0/")
        assert out["why"] == "it follows run old, and this is new; start it anew, or with --any-run"
        check(router.generate(PROMPTS, SAMPLING, 0), expected)
        assert (pinned.made(), free.made()) == (0, 0)
        between.run_id = "new"  # it has come over
        until(lambda: len(events.of("serving")) == 2)


def test_why_no_engine_serves_is_said():
    engine = OneEngine()
    with fleet(engine, holder="run", term=2) as (router, _):
        router.serve_version(0, None)
        with fleet(settings=dataclasses.replace(FAST, patience=0.5), holder="run", term=1) as (late, _):
            late.join(engine.url, "r0")
            until(lambda: late.members()[0]["status"] == "quarantined")
            with pytest.raises(NoEngine, match=r"is quarantined: .*term 1 of run is over: term 2 drives this engine"):
                late.serve_version(0, None)
