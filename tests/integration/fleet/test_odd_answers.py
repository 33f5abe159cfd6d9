"""An engine that answers oddly, beside one in order: the work is made by the other, and the records say why."""

from __future__ import annotations

import asyncio
import dataclasses
import gzip
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlloop.errors import ConfigError
from rlloop.rollout import Engine
from rlloop.rollout.fleet import wire
from rlloop.rollout.fleet.client import LoopThread, RemoteEngine
from rlloop.rollout.fleet.membership import NoEngine
from rlloop.rollout.fleet.pool import EnginePool, http_pool
from rlloop.types import Completion, SamplingParams
from tests.support.router_fleet import CANARY, FAST, Events, OneEngine, check, fleet
from tests.support.tiny_models import tiny_qwen3
from tests.support.waiting import until

VOCABULARY = 64
PROMPTS = [[3 + place, 7, 9] for place in range(8)]
SAMPLING = [SamplingParams(max_tokens=4, min_tokens=2, seed=place, ignore_eos=True) for place in range(8)]

Reply = Callable[[wire.Ask, wire.Answer], bytes | None]  # all that is sent; None: it hangs up


def http(body: bytes, status: str = "200 OK", *headers: bytes, length: int | None = None) -> bytes:
    size = b"Content-Length: %d" % (len(body) if length is None else length)
    return b"\r\n".join([b"HTTP/1.1 " + status.encode(), size, b"Connection: close", *headers, b"", body])


def packed(answer: Any) -> bytes:
    return http(msgspec.msgpack.encode(answer))


class Odd:
    """A server of which nothing is right but its state: `answer` says what comes of a generation."""

    def __init__(self, expected: list[Completion]) -> None:
        self._known = {(tuple(made.prompt_ids), made.sampling.seed): wire.pack(made) for made in expected}
        self.boot, self.asked = "first", 0
        self.state: bytes | None = None  # in place of its state
        self.answer: Reply = lambda ask, answer: packed(answer)
        self._thread = LoopThread("odd")
        self._server = self._thread.run(self._listen())
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            reply = self._route(head.split()[1].decode(), await reader.readexactly(length))
            if reply is not None:
                writer.write(reply)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass  # the client has given up
        finally:  # a socket that is left open fails whichever test is running when it is collected
            writer.close()

    def _route(self, path: str, body: bytes) -> bytes | None:
        if path == "/rlloop/generate":
            self.asked += 1
            ask = msgspec.msgpack.decode(body, type=wire.Ask)
            keys = [(tuple(prompt), params.seed) for prompt, params in zip(ask.prompts, ask.sampling, strict=True)]
            return self.answer(ask, wire.Answer([self._known.get(key) for key in keys], self.boot))
        if path == "/rlloop/state" or path.startswith("/rlloop/weights/wake"):
            return self.state or packed(wire.EngineState(self.boot, "odd", "r1", "ready", 0, 0, {"odd": True}))
        return http(b"{}")

    def close(self) -> None:
        self._server.close()
        self._thread.close()


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    engine = Engine(tiny_qwen3(VOCABULARY))
    return engine.generate(PROMPTS, SAMPLING) + engine.generate(CANARY.prompts, CANARY.sampling)


@pytest.fixture(scope="module")
def pair(expected) -> Iterator[tuple[EnginePool, Events, Odd]]:
    odd = Odd(expected)
    settings = dataclasses.replace(FAST, calls=1)
    with fleet(OneEngine(), settings=settings, vocabulary=VOCABULARY) as (router, events):
        router.join(odd.url, "odd")
        router.serve_version(0, None)
        yield router, events, odd
    odd.close()


def made_with(pair, expected, answer: Reply) -> list[str]:
    """One `generate` that both engines are asked for; what became of the odd one: the events' names, and why."""
    router, events, odd = pair
    odd.boot, odd.asked, odd.state = secrets.token_hex(4), 0, None
    odd.answer = lambda ask, whole: packed(whole)
    until(lambda: [each for each in events.of("serving") if each["boot"] == odd.boot])
    events.clear()
    odd.answer = answer
    check(router.begin(PROMPTS, SAMPLING, 0).result(240), expected[:8])
    assert odd.asked >= 1
    assert all(each["engine"].startswith("odd/") and each["why"] for each in events if each["event"] != "serving")
    return [each["event"] for each in list(events)]


def changed(**changes: Any) -> Reply:
    """A completion that differs from a good one."""

    def answer(ask: wire.Ask, whole: wire.Answer) -> bytes:
        first, *rest = whole.completions
        made = {name: change(getattr(first, name)) if callable(change) else change for name, change in changes.items()}
        row = [made.get(name, getattr(first, name)) for name in wire.Made.__struct_fields__]
        return packed({"completions": [row, *rest], "boot": whole.boot})

    return answer


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def ints(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def raw(content: bytes, *arguments: Any, **options: Any) -> Reply:
    return lambda ask, whole: http(content, *arguments, **options)


def edited(old: bytes, new: bytes) -> Reply:
    def answer(ask: wire.Ask, whole: wire.Answer) -> bytes:
        content = msgspec.msgpack.encode(whole)
        assert old in content
        return http(content.replace(old, new, 1))

    return answer


BAD: dict[str, Reply] = {  # nothing that an engine in order answers: it is quarantined
    "a byte that is no UTF-8": edited(b"\xa4boot", b"\xa4b\xff\xfet"),
    "a text that is no UTF-8": edited(b"\xa6length", b"\xa6l\xffngth"),
    "nothing": raw(b""),
    "no content": raw(b"", "204 No Content"),
    "a page": raw(b"<html>"),
    "another page": raw(b"<html>", "404 Not Found"),
    "elsewhere": raw(b"", "302 Found", b"Location: /"),
    "elsewhere without a place": raw(b"", "301 Moved Permanently"),
    "JSON": raw(b'{"completions": [], "boot": ""}'),
    "a number": raw(b"\x07"),
    "null": raw(b"\xc0"),
    "nested": raw(b"\x91" * 100_000),
    "a length beyond the end": raw(b"\x82\xabcompletions\xdd\xff\xff\xff\xff"),
    "cut": lambda ask, whole: http(msgspec.msgpack.encode(whole)[:-40]),
    "more after it": lambda ask, whole: http(msgspec.msgpack.encode(whole) + b"\xc0"),
    "packed": lambda ask, whole: http(gzip.compress(packed(whole)), "200 OK", b"Content-Encoding: gzip"),
    "said to be packed": raw(b"not gzip", "200 OK", b"Content-Encoding: gzip"),
    "packed by nobody knows what": raw(b"x", "200 OK", b"Content-Encoding: \xff\xfe"),
    "no completions": lambda ask, whole: packed({"completions": [], "boot": whole.boot}),
    "one too few": lambda ask, whole: packed({"completions": whole.completions[1:], "boot": whole.boot}),
    "one too many": lambda ask, whole: packed({"completions": whole.completions[:1] * 99, "boot": whole.boot}),
    "completions of another kind": lambda ask, whole: packed({"completions": [7], "boot": whole.boot}),
    "completions in a map": lambda ask, whole: packed({"completions": {}, "boot": whole.boot}),
    "no boot": lambda ask, whole: packed({"completions": whole.completions}),
    "a boot that is a number": lambda ask, whole: packed({"completions": whole.completions, "boot": 7}),
    "another version": changed(policy_version=3),
    "a negative version": changed(policy_version=-1),
    "a version beyond 63 bits": changed(policy_version=2**64 - 1),
    "a version that is no number": changed(policy_version="0"),
    "a version that is a fraction": changed(policy_version=0.5),
    "another seed": changed(seed=99),
    "a seed beyond 63 bits": changed(seed=2**63),
    "another reason": changed(finish_reason="content_filter"),
    "a length that it has not": changed(token_ids=ints(5), logprobs=floats(-1), raw_logprobs=floats(-1)),
    "a stop before it may": changed(
        token_ids=ints(5), logprobs=floats(-1), raw_logprobs=floats(-1), finish_reason="stop"
    ),
    "no tokens": changed(token_ids=b"", logprobs=b"", raw_logprobs=b""),
    "half a token": changed(token_ids=lambda content: content[:-1]),
    "a text for tokens": changed(token_ids="tokens"),
    "too many tokens": changed(token_ids=ints(*range(9)), logprobs=floats(*[-1] * 9), raw_logprobs=floats(*[-1] * 9)),
    "a negative token": changed(token_ids=ints(5, 6, -7, 8)),
    "a token that no model has": changed(token_ids=ints(5, 6, VOCABULARY, 8)),
    "fewer logprobs": changed(logprobs=floats(-1)),
    "more raw logprobs": changed(raw_logprobs=lambda content: content * 2),
    "a logprob that is no number": changed(logprobs=floats(-1, -1, np.nan, -1)),
    "a raw logprob that is no number": changed(raw_logprobs=floats(-1, -1, np.nan, -1)),
    "a logprob above 0": changed(logprobs=floats(-1, -1, 2, -1)),
    "an infinite raw logprob": changed(raw_logprobs=floats(-1, -1, np.inf, -1)),
    "choices of objects": changed(routed_experts=[[6], "|O", b"x" * 48]),
    "choices of no type": changed(routed_experts=[[6], "\udcff".encode("utf8", "replace").decode(), b""]),
    "choices of texts": changed(routed_experts=[[6], "<U2", b"x" * 48]),
    "choices of another shape": changed(selected=[[2, 2], "<i8", b"x" * 48]),
    "choices of a shape beyond 63 bits": changed(selected=[[2**63, 2], "<i8", b"x" * 48]),
    "choices for fewer tokens": changed(selected=[[3, 2], "<i8", b"x" * 48]),
    "choices that are fractions": changed(routed_experts=[[6], "<f4", b"x" * 24]),
    "unasked: no token": raw(b"", "401 Unauthorized"),
    "fenced": raw(b'{"error": {"code": "fenced", "message": "no"}}', "409 Conflict"),
}

PASSING: dict[str, Reply] = {  # may be over in a moment: it goes back into service
    "it hangs up": lambda ask, whole: None,
    "fewer bytes than it says": raw(b"xy", length=99),
    "no HTTP": lambda ask, whole: b"\xff\xfe\r\n\r\n",
    "a head that is none": lambda ask, whole: b"HTTP/1.1 200 OK\r\n: \xff\r\n\r\n",
    "two lengths": raw(b"xy", "200 OK", b"Content-Length: 1"),
    "a negative length": raw(b"xy", length=-1),
    "a status that is none": raw(b"", "999999 \xff"),
    "it failed": raw(b"\xff", "500 Internal Server Error"),
    "it is busy": raw(b"", "429 Too Many Requests"),
    "an error of odd bytes": raw(b'{"error": {"message": "\xff"}}', "503 Service Unavailable"),
    "behind": raw(b'{"error": {"code": "version_behind", "have": -5}}', "409 Conflict"),
    "passed": raw(b'{"error": {"code": "version_passed", "have": 7}}', "409 Conflict"),
    "another process": lambda ask, whole: packed({"completions": whole.completions, "boot": "other"}),
    "cut short": changed(finish_reason="abort"),
    "cut short at once": changed(finish_reason="abort", token_ids=b"", logprobs=b"", raw_logprobs=b""),
}


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_an_engine_that_answers_nonsense_is_out_and_the_work_is_made_elsewhere(pair, expected, answer):
    assert made_with(pair, expected, answer) == ["quarantined", "reissued"]


@pytest.mark.parametrize("answer", PASSING.values(), ids=PASSING)
def test_what_may_pass_is_made_elsewhere_and_said(pair, expected, answer):
    events = made_with(pair, expected, answer)
    assert events[0] == "reissued"
    assert "quarantined" not in events


def test_a_refusal_of_one_engine_is_not_the_requests_fault(pair, expected):
    refusal = raw(b'{"error": {"message": "the cache holds 8 tokens"}}', "400 Bad Request")
    assert made_with(pair, expected, refusal) == ["reissued"]
    router, _, odd = pair
    too_long = [SamplingParams(max_tokens=10**6, seed=1)] * 8
    odd.answer = refusal
    with pytest.raises(ConfigError):  # which both refuse
        router.begin(PROMPTS, too_long, 0).result(240)


@given(st.data())
def test_a_damaged_answer_is_a_bad_one_or_one_that_could_have_been(expected, data):
    ask = wire.Ask(PROMPTS, SAMPLING, lowest=0, highest=0)
    content = bytearray(msgspec.msgpack.encode(wire.Answer([wire.pack(made) for made in expected[:8]], "b")))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.sampled_from([len(content), len(content), len(content) // 2]))]
    try:
        made = wire.unpack(ask, wire.decode(bytes(content), wire.Answer, "it"), VOCABULARY)
    except wire.BadAnswer:
        return
    for completion, params in zip(made, SAMPLING, strict=True):
        assert completion.policy_version == 0
        assert completion.sampling == params
        assert len(completion.logprobs) == len(completion.raw_logprobs) == len(completion.token_ids) <= 4
        assert all(0 <= token < VOCABULARY for token in completion.token_ids)
        assert np.isfinite(completion.logprobs).all() or completion.logprobs.min() == -np.inf


ODD_STATES = {
    "a byte that is no UTF-8": http(b"\x81\xa4b\xff\xfet\x01"),
    "nothing": http(b""),
    "a version that is a text": packed({"boot": "b", "name": "", "region": "", "status": "ready", "version": "x"}),
    "times that are none": packed(
        {
            **msgspec.structs.asdict(wire.EngineState("b", "", "", "ready", 0, 0, {})),
            "weights": {"version": 0, "drain_seconds": float("nan")},
        }
    ),
    "a fingerprint that is no JSON": packed(
        wire.EngineState("b", "", "", "ready", 0, 0, {"x": msgspec.msgpack.Ext(5, b"\xff")})
    ),
}  # fmt: skip


@pytest.mark.parametrize("state", ODD_STATES.values(), ids=ODD_STATES)
def test_an_odd_state_keeps_an_engine_out_and_its_caretaker_alive(pair, expected, state):
    router, events, odd = pair
    made_with(pair, expected, lambda ask, whole: packed(whole))
    odd.state = state
    until(lambda: events.of("quarantined"))
    check(router.begin(PROMPTS, SAMPLING, 0).result(240), expected[:8])
    odd.state = None
    made_with(pair, expected, lambda ask, whole: packed(whole))  # it is looked at again


@pytest.mark.parametrize(
    "error", [RuntimeError("odd"), KeyError("x"), AssertionError(), MemoryError(), ExceptionGroup("g", [ValueError()])]
)
def test_no_error_of_a_request_loses_its_work(expected, error):
    bad, good = OneEngine(), OneEngine()
    with fleet(bad, good) as (router, events):
        router.serve_version(0, None)

        async def fail(*_, **__):
            raise error

        router._members._all[bad.url].client.generate = fail
        check(router.begin(PROMPTS, SAMPLING, 0).result(240), expected[:8])
        [quarantined] = events.of("quarantined")
        assert type(error).__name__ in quarantined["why"]


def test_records_that_cannot_be_written_end_the_wait(expected):
    for full_at in ("joined", "serving", "reissued"):
        engine = OneEngine()

        def record(event, full_at=full_at):
            if event["event"] == full_at:
                raise OSError(28, "No space left on device")

        router = http_pool(FAST, record)
        router.join(engine.url, "r0")

        async def fail(*_, **__):
            raise RuntimeError

        with pytest.raises(OSError, match="No space"):  # noqa: PT012
            router.serve_version(0, None)
            router._members._all[engine.url].client.generate = fail
            router.begin(PROMPTS, SAMPLING, 0).result(240)
        router.close()
        engine.close()


def test_what_no_engine_makes_is_given_up_in_a_while(expected):
    odd = Odd(expected)
    odd.boot = "b"
    odd.answer = raw(b"", "500 Internal Server Error")
    with fleet() as (router, _):
        router.join(odd.url, "r0")
        router.serve_version(0, None)
        router.settings = dataclasses.replace(FAST, patience=2.0)
        failed = r"4 prompts failed in \d\d tries; the last: .*HTTP 500"
        # On a busy machine it may be out of service for so long before its tenth try.
        with pytest.raises(NoEngine, match=f"{failed}|no engine has served version 0 for 2 s"):
            router.begin(PROMPTS, SAMPLING, 0).result(240)
    odd.close()


def test_an_aborted_canary_keeps_an_engine_out_until_it_is_whole(expected):
    odd = Odd(expected)
    odd.boot = "b"
    odd.answer = changed(finish_reason="abort")
    good = OneEngine()
    with fleet(good, settings=dataclasses.replace(FAST, settle=0.1)) as (router, events):
        router.join(odd.url, "odd")
        router.serve_version(0, CANARY)
        assert [each["engine"].partition("/")[0] for each in events.of("serving")] == ["r0"]
        odd.answer = lambda ask, whole: packed(whole)
        until(lambda: len(events.of("serving")) == 2)
        assert events.of("quarantined") == []
    odd.close()


def test_an_engine_may_tell_no_raw_logprobs(expected):
    """vLLM gives one of the two kinds."""
    made = [dataclasses.replace(each, raw_logprobs=np.full(4, np.nan, np.float32)) for each in expected[:8]]
    answer = wire.Answer([wire.pack(each) for each in made], "b")
    back = wire.unpack(wire.Ask(PROMPTS, SAMPLING), answer, VOCABULARY)
    check(back, made)


def test_a_single_engine_over_http_calls_nonsense_by_its_name(expected):
    odd = Odd(expected)
    with RemoteEngine(odd.url) as engine:
        for name in ("a byte that is no UTF-8", "a seed beyond 63 bits", "packed", "choices of a shape beyond 63 bits"):
            odd.answer = BAD[name]
            with pytest.raises(wire.BadAnswer):
                engine.generate(PROMPTS, SAMPLING)
    odd.close()
