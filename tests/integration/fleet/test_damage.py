"""Bits that flip between a client and an engine: what they hit is sent again."""

from __future__ import annotations

import random

import httpx
import pytest

from rlloop.rollout import Engine
from rlloop.rollout.fleet import wire
from rlloop.rollout.fleet.client import RemoteEngine
from rlloop.types import SamplingParams
from tests.support.chaos.proxy import Message, Network, flipped
from tests.support.command import free_port
from tests.support.router_fleet import OneEngine, check
from tests.support.tiny_models import tiny_qwen3

PROMPTS = [[3 + place % 5, 7, 9, place] for place in range(4)]
SAMPLING = [SamplingParams(max_tokens=6, seed=place, ignore_eos=True) for place in range(4)]


@pytest.fixture(scope="module")
def engine():
    engine = OneEngine()
    yield engine
    engine.close()


def test_an_answer_with_a_flipped_bit_is_asked_for_again(engine):
    expected = Engine(tiny_qwen3(64)).generate(PROMPTS, SAMPLING)
    network, dice, left, port = Network(), random.Random(0), [2], free_port()
    network.add("line", port, int(engine.url.rpartition(":")[2]))

    def flip(request: Message, answer: Message) -> Message:
        if request.path != "/rlloop/generate" or not left[0]:
            return answer
        left[0] -= 1
        at = dice.randrange(len(answer.body))
        return answer.with_body(answer.body[:at] + bytes([answer.body[at] ^ 16]) + answer.body[at + 1 :])

    network.begin("line", "false", 0, flip)
    try:
        with RemoteEngine(f"http://127.0.0.1:{port}") as remote:
            check(remote.generate(PROMPTS, SAMPLING), expected)
        assert left == [0]
        assert engine.made() == len(PROMPTS)  # made once: the engine knows what it answered
    finally:
        network.close()


@pytest.mark.parametrize("path", ["/rlloop/generate", "/rlloop/lease"])
def test_a_request_with_a_flipped_bit_is_refused_as_damaged(engine, path):
    body = b"anything"
    sent = flipped(b"\r\n\r\n" + body, random.Random(1))[4:]
    answer = httpx.post(engine.url + path, content=sent, headers=wire.digest_of(body), trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "damaged")
