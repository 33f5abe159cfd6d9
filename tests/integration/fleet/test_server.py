"""The engine's server and its clients over real sockets: the bits of the engine itself, and every refusal."""

from __future__ import annotations

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import numpy as np
import openai
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from rlloop.errors import ConfigError
from rlloop.rollout import Engine
from rlloop.rollout.engine.service import Busy, EngineService, VersionUnavailable
from rlloop.rollout.fleet import wire
from rlloop.rollout.fleet.client import EngineLost, RemoteEngine
from rlloop.rollout.fleet.engine_server import WAITING, EngineServer
from rlloop.web.clients import bearer
from rlloop.web.server import BackgroundServer, Listen, read_token
from tests.support.certificates import certificate
from tests.support.latent_model import PROMPTS, longest, same
from tests.support.stepper import Stepper
from tests.support.tiny_models import tiny_qwen3
from tests.support.waiting import until

VOCABULARY = 64
TOKEN = "a token of some length"


class Words:
    """Token 7 is the word "7"."""

    has_template = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(f"{id} " for id in token_ids)

    def render(self, messages, arguments, tools=()):
        raise NotImplementedError


class Follower:
    """One whose newest version is set by hand."""

    def __init__(self, service: EngineService, engine: Engine) -> None:
        self.service, self.engine = service, engine
        self.newest = 0
        self.error = ""
        self.progress = wire.Progress(0, wire_bytes=7)
        self.run_id = self.follows = ""
        self.woken = threading.Event()

    @property
    def status(self):
        return "failed" if self.error else "ready" if self.service.version == self.newest else "behind"

    def wake(self) -> None:
        self.woken.set()
        if self.newest > self.service.version:
            self.service.change_weights(lambda: self.engine.set_version(self.newest))

    def wait_for(self, version: int, seconds: float) -> None:
        pass


@dataclasses.dataclass
class Running:
    url: str
    follower: Follower
    server: EngineServer


@pytest.fixture(scope="module")
def running():
    engine = Engine(tiny_qwen3(VOCABULARY))
    service = EngineService(engine, max_waiting=64)
    follower = Follower(service, engine)
    server = EngineServer(service, name="one", region="eu", tokenizer=Words(), follower=follower)
    background = BackgroundServer(server.app, Listen(token=TOKEN, max_body=1 << 16))
    yield Running(background.url, follower, server)
    background.close()
    service.close()


@pytest.fixture
def remote(running):
    with RemoteEngine(running.url, token=TOKEN, timeout=240) as engine:
        yield engine


def http(running, **headers) -> httpx.Client:
    authorization = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.Client(base_url=running.url, headers={**authorization, **headers}, timeout=60, trust_env=False)


def test_a_remote_engine_gives_the_bits_of_the_engine_itself(remote):
    local = Engine(tiny_qwen3(VOCABULARY))
    sampling = [longest(seed=seed, temperature=0.7, top_p=0.9) for seed in range(len(PROMPTS))]
    for here, there in zip(local.generate(PROMPTS, sampling), remote.generate(PROMPTS, sampling), strict=True):
        assert same(here, there)
        assert (here.prompt_ids, here.sampling, here.finish_reason) == (
            there.prompt_ids,
            there.sampling,
            there.finish_reason,
        )
        assert there.logprobs.dtype == there.raw_logprobs.dtype == np.float32
    assert remote.fingerprint() == json.loads(json.dumps(local.fingerprint()))


def test_requests_of_many_clients_share_batches_and_keep_their_bits(running):
    alone = Engine(tiny_qwen3(VOCABULARY)).generate(PROMPTS * 4, longest())
    before = running.server.service.stats()

    def ask(prompts):
        with RemoteEngine(running.url, token=TOKEN) as engine:
            return engine.generate(prompts, longest())

    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(ask, [PROMPTS] * 4))
    for mine, theirs in zip(alone, [made for part in parts for made in part], strict=True):
        assert same(mine, theirs)
    after = running.server.service.stats()
    assert after.requests - before.requests == 16
    assert after.steps - before.steps < 4 * 24, "they were run one after the other"


def test_the_stock_openai_client(running):
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=TOKEN, max_retries=0)
    assert [model.id for model in client.models.list()] == ["rlloop"]
    [local] = Engine(tiny_qwen3(VOCABULARY)).generate([PROMPTS[0]], longest(temperature=0.5))
    made = client.completions.create(
        model="rlloop", prompt=PROMPTS[0], max_tokens=24, temperature=0.5, seed=1, logprobs=1,
        extra_body={"ignore_eos": True, "min_version": 0},
    )  # fmt: skip
    [choice] = made.choices
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == local.token_ids
    assert choice.logprobs is not None
    assert np.array(choice.logprobs.token_logprobs, np.float32).tobytes() == local.logprobs.tobytes()
    assert np.array(choice.model_extra["raw_logprobs"], np.float32).tobytes() == local.raw_logprobs.tobytes()
    assert choice.text == Words().decode(local.token_ids)
    assert choice.logprobs.text_offset == [len(Words().decode(local.token_ids[:i])) for i in range(24)]
    assert choice.finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (3, 24)


def test_openai_text_several_choices_and_streams(running):
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=TOKEN, max_retries=0)
    asked = {"model": "rlloop", "prompt": ["5 6 7", "9"], "n": 2, "max_tokens": 4, "seed": 8}
    whole = client.completions.create(**asked)
    seeds = [choice.model_extra["seed"] for choice in whole.choices]
    assert seeds == [8, 9, 8, 9]
    texts = ["", "", "", ""]
    for event in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert event.usage == whole.usage


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": ["x"] * 17}, "stop has 17 strings"),
        ({"suffix": "x"}, "suffix is 'x'"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logprobs": 21}, "logprobs is 21; it must be from 0 to 20"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e-40}, "temperature is 1e-40; it must be 0 .greedy. or 1e-6"),  # 0 / 0 in float32
        ({"extra_body": {"top_k": 2**63}}, "top_k is 9223372036854775808"),
        ({"prompt": [[5]] * 100, "n": 1000}, "ask for 100000 choices; a request may have 65536"),
        ({"stream": True, "stream_options": {"beams": 1}}, "beams"),
        ({"prompt": [VOCABULARY]}, "not in the vocabulary"),
        ({"prompt": []}, "empty|at least one"),
        ({"extra_body": {"min_tokens": 1, "stop_token_ids": [*range(VOCABULARY)]}}, "every token of the"),
        ({"extra_body": {"beams": 3}}, "beams"),
        ({"extra_body": {"min_version": 1, "policy_version": 1}}, "both given"),
    ],
)  # fmt: skip
def test_openai_requests_that_cannot_be_honoured_are_refused_by_name(running, changes, message):
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=TOKEN, max_retries=0)
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(**{"model": "rlloop", "prompt": PROMPTS[0], **changes})
    with pytest.raises(openai.NotFoundError, match="'rlloop' is"):
        client.completions.create(model="gpt", prompt="5")


def test_what_openai_calls_null_is_left_out(running):
    idle = ["max_tokens", "temperature", "top_p", "n", "seed", "logprobs", "stream", "stream_options", "user", "stop"]
    idle += ["echo", "suffix", "best_of", "presence_penalty", "frequency_penalty", "logit_bias"]
    with http(running) as client:
        asked = {"model": "rlloop", "prompt": [5, 6], "ignore_eos": True, **dict.fromkeys(idle)}
        reply = client.post("/v1/completions", json=asked)
        assert (reply.status_code, reply.json()["usage"]["completion_tokens"]) == (200, 16)
        for content in (b"null", b"[]", b'"x"', b'{"model": "rlloop"}', b'{"x": ' + b"[" * 10_000):
            assert client.post("/v1/completions", content=content).status_code == 400


def test_a_token_that_ends_a_completion_is_in_its_ids_and_not_in_its_text(running):
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=TOKEN, max_retries=0)
    asked = {"model": "rlloop", "prompt": [5, 6], "max_tokens": 8, "seed": 1}
    [whole] = client.completions.create(**asked, extra_body={"ignore_eos": True}).choices
    ids = whole.model_extra["token_ids"]
    last = next(id for place, id in enumerate(ids) if place and id not in ids[:place])
    [cut] = client.completions.create(**asked, extra_body={"ignore_eos": True, "stop_token_ids": [last]}).choices
    made = cut.model_extra["token_ids"]
    assert (cut.finish_reason, made) == ("stop", ids[: ids.index(last) + 1])
    assert cut.text == Words().decode(made[:-1])


def test_a_long_text_holds_nobody_up():
    """Tokenizing and detokenizing are done beside the event loop."""
    begun, go = threading.Event(), threading.Event()

    class Slow(Words):
        def encode(self, text, add_special_tokens=True):
            begun.set()
            assert go.wait(240)
            return super().encode(text, add_special_tokens)

    service = EngineService(Engine(tiny_qwen3(VOCABULARY)))
    server = BackgroundServer(EngineServer(service, name="one", tokenizer=Slow()).app, Listen())
    with httpx.Client(base_url=server.url, trust_env=False) as client, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "/v1/completions", json={"model": "rlloop", "prompt": "5", "max_tokens": 1})
        assert begun.wait(240)
        assert client.get("/health").status_code == 200
        go.set()
        assert asked.result(240).status_code == 200
    server.close()
    service.close()


def test_no_route_answers_without_the_token(running):
    for route in running.server.app.routes:
        path = route.path.replace("{key}", "k")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            for method in ("GET", "POST", "DELETE"):
                reply = httpx.request(method, running.url + path, headers=headers, trust_env=False)
                assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer"), (method, path)
    with RemoteEngine(running.url, token="another") as engine, pytest.raises(ConfigError, match="refuses the token"):
        engine.generate([[5]], longest())


def test_oversize_and_malformed_requests_are_refused(running):
    with http(running) as client:
        assert client.post("/rlloop/generate", content=b"x" * (1 << 17)).status_code == 413

        def endless():
            for _ in range(64):
                yield b"x" * 4096

        assert client.post("/rlloop/generate", content=endless()).status_code == 413
        for content in (b"", b"\xc1", msgspec.msgpack.encode({"prompts": [[1]], "sampling": [{"max_tokens": 0}]})):
            assert client.post("/rlloop/generate", content=content).status_code == 400
        two = wire.Ask([[1], [2]], [longest()])
        reply = client.post("/rlloop/generate", content=msgspec.msgpack.encode(two))
        assert "2 prompts came with 1" in reply.json()["error"]["message"]


def test_more_prompts_than_an_engine_may_have_waiting_are_refused_by_name_though_it_is_idle(running):
    with http(running) as client:
        for prompts, message in (
            ([[1]] * 65, "one request has 65 prompts, and at most 64 may wait"),
            ([[]] * (wire.MOST_PROMPTS + 1), f"length <= {wire.MOST_PROMPTS}"),
        ):
            ask = wire.Ask(prompts, [longest(max_tokens=1)] * min(len(prompts), 65))
            reply = client.post("/rlloop/generate", content=msgspec.msgpack.encode(ask))
            assert reply.status_code == 400
            assert message in reply.json()["error"]["message"]
        ask = wire.Ask([[1]] * 64, [longest(max_tokens=1, seed=1)] * 64)
        assert client.post("/rlloop/generate", content=msgspec.msgpack.encode(ask)).status_code == 200


def test_many_who_wait_for_weights_delay_nobody(running, monkeypatch):
    """More of them than the threads that other requests need, and no more than a number."""
    waiting, go = threading.Semaphore(0), threading.Event()

    def wait_for(version: int, seconds: float) -> None:
        waiting.release()
        go.wait(seconds)

    monkeypatch.setattr(running.follower, "wait_for", wait_for)
    with http(running) as client, ThreadPoolExecutor(WAITING) as pool:

        def wake(_: int = 0) -> int:
            return httpx.post(
                f"{running.url}/rlloop/weights/wake?version=9&wait=60",
                headers=dict(client.headers),
                timeout=240,
                trust_env=False,
            ).status_code

        asked = [pool.submit(wake) for _ in range(WAITING)]
        for _ in range(WAITING):
            assert waiting.acquire(timeout=240)
        try:
            assert wake() == 429
            body = {"model": "rlloop", "prompt": "1 2", "max_tokens": 1}  # parsed in one of the threads for all
            assert client.post("/v1/completions", json=body).status_code == 200
            assert not any(each.done() for each in asked)
        finally:
            go.set()
        assert {each.result() for each in asked} == {200}


def test_a_server_off_loopback_needs_a_token():
    with pytest.raises(ConfigError, match=r"0.0.0.0 would let anyone"):
        Listen(host="0.0.0.0")
    with pytest.raises(ConfigError, match="would let anyone"):
        Listen(host="engine.example")
    with pytest.raises(ConfigError, match="at least 16"):
        Listen(host="::", token="short")
    with pytest.raises(ConfigError, match="both a certificate"):
        Listen(certificate=__file__)  # pyright: ignore[reportArgumentType]
    assert Listen(host="::1").scheme == "http"


def test_another_version_is_a_409_that_makes_the_replica_look_for_it(running, remote):
    running.follower.woken.clear()
    ask = wire.Ask([[5]], [longest()], lowest=1)
    with http(running) as client:
        reply = client.post("/rlloop/generate", content=msgspec.msgpack.encode(ask))
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "version_behind")
        assert reply.json()["error"]["have"] == 0
        assert running.follower.woken.is_set()
        assert client.get("/health").status_code == 200
        running.follower.newest = 3
        assert client.get("/health").status_code == 503
        remote.set_version(3)
        assert remote.generate([[5]], longest())[0].policy_version == 3  # 409, catch up, and again
        assert client.get("/health").json() == {"status": "ready", "version": 3, "error": "", "paused": False}
        running.follower.error = "the root differs"
        assert (client.get("/health").status_code, client.get("/health").json()["status"]) == (503, "failed")
        running.follower.error = ""
    remote.set_version(2)
    with pytest.raises(VersionUnavailable, match="asked for is 2") as passed:
        remote.generate([[5]], longest())
    assert passed.value.passed
    openai_client = openai.OpenAI(base_url=f"{running.url}/v1", api_key=TOKEN, max_retries=0)
    with pytest.raises(openai.ConflictError, match="version 3"):
        openai_client.completions.create(model="rlloop", prompt=[5], extra_body={"min_version": 4})
    with pytest.raises(openai.ConflictError, match="version 3"):
        openai_client.completions.create(model="rlloop", prompt=[5], extra_body={"policy_version": 2})


def test_an_idempotent_request_is_made_once(running):
    content = msgspec.msgpack.encode(wire.Ask([[5, 6]], [longest()]))
    with http(running, **{"Idempotency-Key": "k1"}) as client:
        first = client.post("/rlloop/generate", content=content)
        requests = running.server.service.stats().requests
        again = client.post("/rlloop/generate", content=content)
        assert again.content == first.content
        assert running.server.service.stats().requests == requests
        other = msgspec.msgpack.encode(wire.Ask([[5, 7]], [longest()]))
        assert client.post("/rlloop/generate", content=other).json()["error"]["code"] == "key_reused"
        assert client.delete("/rlloop/requests/k1").status_code == 200
        assert client.delete("/rlloop/requests/k1").status_code == 404


def test_of_answers_only_so_many_completions_are_kept(running, monkeypatch):
    monkeypatch.setattr("rlloop.rollout.fleet.engine_server.REMEMBERED", 3)
    content = msgspec.msgpack.encode(wire.Ask([[5], [6]], [longest(max_tokens=1)] * 2))
    with http(running) as client:
        for key in ("a", "b", "c"):
            client.post("/rlloop/generate", content=content, headers={"Idempotency-Key": key}).raise_for_status()
        codes = [client.delete(f"/rlloop/requests/{key}").status_code for key in ("a", "b", "c")]
        assert codes == [404, 200, 200]  # what comes last is made when it is kept


def test_an_earlier_term_is_fenced(running):
    with http(running) as client:

        def lease(term):
            return client.post("/rlloop/lease", content=msgspec.msgpack.encode(wire.Lease("run", term))).status_code

        def generate(term, holder="run"):
            ask = wire.Ask([[5]], [longest(max_tokens=1)], holder=holder, term=term)
            return client.post("/rlloop/generate", content=msgspec.msgpack.encode(ask)).status_code

        assert (lease(4), generate(4), lease(5), lease(4), generate(4), generate(5)) == (200, 200, 200, 409, 409, 200)
        assert generate(1, holder="another run") == 200


def test_prometheus_reads_the_metrics(running):
    with http(running) as client:
        client.get("/rlloop/state").raise_for_status()
        text = client.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines["rlloop_made_tokens_total"]) > 0
    assert float(lines["rlloop_policy_version"]) == running.server.service.version
    assert float(lines["rlloop_sync_wire_bytes"]) == 7


def test_a_server_that_is_not_there(running):
    with RemoteEngine("http://127.0.0.1:1") as engine, pytest.raises(EngineLost, match="cannot be reached"):
        engine.generate([[5]], longest())


NONSENSE = {
    "damaged": {"content": b"not gzip", "headers": {"content-encoding": "gzip"}},
    "a page": {"content": b"<html>", "status_code": 404},
    "elsewhere": {"headers": {"location": "/"}, "status_code": 302},
    "no version": {"content": b'{"error": {"code": "version_behind", "have": "x"}}', "status_code": 409},
    "nested": {"content": b"\x81\xa1x" + b"\x91" * 100_000},
}


@pytest.mark.parametrize("reply", NONSENSE.values(), ids=NONSENSE)
def test_whatever_a_server_answers_is_one_of_our_errors(reply):
    async def answer(request):
        return Response(**reply)

    server = BackgroundServer(Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])]), Listen())
    with RemoteEngine(server.url) as engine, pytest.raises((wire.BadAnswer, ConfigError)):
        engine.generate([[5]], longest())
    server.close()


def test_a_token_that_fits_in_no_header_is_refused_and_not_repeated(tmp_path, monkeypatch):
    for token in ("a secret of some length\nand another", "a secret of some length ", "ein Geheimwort für alle", ""):
        for used in (lambda token: RemoteEngine("http://127.0.0.1:1", token=token), lambda token: bearer(token)):
            with pytest.raises(ConfigError, match=r"one line of letters") as refused:
                used(token)
            assert "secret" not in str(refused.value)
    (tmp_path / "token").write_text("a secret of some length\nand another\n")
    with pytest.raises(ConfigError, match="one line"):
        read_token(tmp_path / "token")
    with pytest.raises(ConfigError, match=r"No such file or directory; create it: openssl rand -hex 32 > .*/none"):
        read_token(tmp_path / "none")
    (tmp_path / "token").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="not ASCII"):
        read_token(tmp_path / "token")


def test_weights_change_with_nothing_in_flight_and_what_came_meanwhile_has_the_new_version():
    engine = Stepper(Engine(tiny_qwen3(VOCABULARY)))
    engine.may(0)
    service = EngineService(engine)
    early = service.submit([[5]], [longest()])
    until(lambda: engine.has_work)
    changed = threading.Thread(target=service.change_weights, args=(lambda: engine.set_version(1),))
    changed.start()
    until(lambda: service._pause)
    late = service.submit([[5]], [longest()])
    strict = service.submit([[5]], [longest()], highest=0)
    engine.may()
    changed.join()
    assert [early.result()[0].policy_version, late.result()[0].policy_version] == [0, 1]
    with pytest.raises(VersionUnavailable):
        strict.result()
    assert service.load == 0
    service.close()


def test_after_a_change_of_weights_that_failed_nothing_is_served_until_one_succeeds():
    engine = Engine(tiny_qwen3(VOCABULARY))
    service = EngineService(engine)

    def fail():
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        service.change_weights(fail)
    assert service.version == -1
    with pytest.raises(VersionUnavailable, match="has version -1"):
        service.submit([[5]], [longest()]).result()
    service.change_weights(lambda: engine.set_version(4))
    assert service.submit([[5]], [longest()]).result()[0].policy_version == 4
    service.close()


def test_what_waits_when_a_service_is_closed_hears_of_it():
    engine = Stepper(Engine(tiny_qwen3(VOCABULARY)))
    engine.may(0)
    service = EngineService(engine)
    kept = service.submit([[5]], [longest()])
    until(lambda: engine.has_work)
    service.pause("keep")
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(service.change_weights, lambda: engine.set_version(1))
        until(lambda: service._pause)
        service.close()
        with pytest.raises(Busy, match="shut down"):
            changing.result(240)
    with pytest.raises(Busy, match="shut down"):
        kept.result(240)
    for late in (
        lambda: service.change_weights(lambda: None),
        service.pause,
        lambda: service.submit([[5]], [longest()]),
    ):
        with pytest.raises(Busy, match="shut down"):
            late()


def test_cancelled_and_excess_requests_leave_nothing_behind():
    engine = Stepper(Engine(tiny_qwen3(VOCABULARY)))
    engine.may(0)
    service = EngineService(engine, max_waiting=3)
    futures = [service.submit([[5]], [longest()]) for _ in range(3)]
    with pytest.raises(Busy, match="at most 3"):
        service.submit([[5]], [longest()])
    service.cancel(futures[1])
    engine.may()
    with pytest.raises(Busy, match="cancelled"):
        futures[1].result()
    assert len(futures[0].result()) == len(futures[2].result()) == 1
    with pytest.raises(ConfigError, match="empty"):
        service.submit([[5], []], [longest()] * 2).result()
    assert service.load == 0
    assert not engine.has_work
    service.close()


def test_over_tls_only_a_known_certificate_is_believed(running, tmp_path):
    cert, key = certificate(tmp_path)
    server = BackgroundServer(running.server.app, Listen(token=TOKEN, certificate=cert, key=key))
    assert server.url.startswith("https://")
    with RemoteEngine(server.url, token=TOKEN, ca_file=cert) as engine:
        assert len(engine.generate([[5]], longest(max_tokens=3))[0].token_ids) == 3
    with RemoteEngine(server.url, token=TOKEN) as engine, pytest.raises(EngineLost, match="CERTIFICATE_VERIFY_FAILED"):
        engine.fingerprint()
    with pytest.raises(ConfigError, match="cannot be read"):
        RemoteEngine(server.url, ca_file=tmp_path / "nothing")
    server.close()
