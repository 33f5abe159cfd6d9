"""What a client of an engine server does beside its event loop."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from rlloop.rollout.errors import EngineLost
from rlloop.rollout.fleet import client
from rlloop.types import ModelInput, SamplingParams


def test_other_requests_go_on_while_pictures_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    gone_on, pack = threading.Event(), client.pack_prompts

    def slow(prompts: Sequence[ModelInput | list[int]]) -> dict[str, Any]:
        assert gone_on.wait(5), "the loop stood still"
        return pack(prompts)

    monkeypatch.setattr(client, "pack_prompts", slow)

    async def ask() -> None:
        engine = client.EngineClient("http://127.0.0.1:9", attempts=1)
        request = asyncio.create_task(engine.generate([[1, 2]], [SamplingParams(max_tokens=4, seed=0)]))
        asyncio.get_running_loop().call_later(0.01, gone_on.set)
        with pytest.raises(EngineLost):
            await request
        await engine.close()

    asyncio.run(ask())
