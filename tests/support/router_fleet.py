"""Engines with their servers, and a router over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlloop.rollout import Engine
from rlloop.rollout.engine.service import EngineService
from rlloop.rollout.fleet.engine_server import EngineServer
from rlloop.rollout.fleet.membership import Canary, PoolSettings, same_bits
from rlloop.rollout.fleet.pool import EnginePool, http_pool
from rlloop.testing import plant_fault
from rlloop.types import SamplingParams
from rlloop.web.server import BackgroundServer, Listen
from tests.support.stepper import Stepper
from tests.support.tiny_models import tiny_qwen3

FAST = PoolSettings(heartbeat=0.05, timeout=10.0, patience=60.0, settle=60.0)
CANARY = Canary([[5, 6, 7]], [SamplingParams(max_tokens=8, seed=0, ignore_eos=True)])


class OneEngine:
    """An engine with its server; like a process, it can die, and come back at the same address."""

    def __init__(self, fault: str | None = None) -> None:
        engine = Engine(tiny_qwen3(64))
        if fault is not None:
            plant_fault(engine, fault)
        self.engine = Stepper(engine)
        self.service = EngineService(self.engine)
        self.server = EngineServer(self.service, name="test")
        self.http = BackgroundServer(self.server.app, Listen())
        self.url = self.http.url

    def made(self) -> int:
        return self.service.stats().requests

    def close(self) -> None:
        self.engine.may()
        self.http.close()
        self.service.close()


class Events(list):
    def of(self, event: str) -> list:
        return [each for each in self if each["event"] == event]


@contextmanager
def fleet(*engines: OneEngine, settings: PoolSettings = FAST, **options) -> Iterator[tuple[EnginePool, Events]]:
    events = Events()
    router = http_pool(settings, events.append, **options)
    try:
        for place, engine in enumerate(engines):
            router.join(engine.url, f"r{place}")
        yield router, events
    finally:
        router.close()
        for engine in engines:
            engine.close()


def check(made, expected) -> None:
    assert all(same_bits(a, b) for a, b in zip(made, expected, strict=True))
