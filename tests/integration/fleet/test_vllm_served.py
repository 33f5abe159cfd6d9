"""A vLLM server as an engine of a fleet, seen from the proxy: what it asks of vLLM, and what it makes of the answers.
Needs no vLLM; tests/vllm has the real one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.rollout.engine.service import VersionUnavailable
from rlloop.rollout.fleet.weight_follower import Source
from rlloop.rollout.fleet.wire import Answer, Ask, pack, pack_array, unpack
from rlloop.rollout.vllm.messages import Chosen, Facts, ReplicaState
from rlloop.rollout.vllm.remote_vllm import (
    ServedEngine,
    ServedReplica,
    ServedService,
)
from rlloop.rollout.vllm.upstream import Upstream, UpstreamError, facts_of
from rlloop.sync.replica import State
from rlloop.sync.target import TORN
from rlloop.types import SamplingParams
from rlloop.web.server import BackgroundServer, Listen

FACTS = Facts(folder="/model", vocabulary=64, positions=128, eos_token_ids=(2,), fingerprint={"profile": "x"})
EXPERTS = np.arange(8 * 2 * 2, dtype=np.uint8).reshape(8, 2, 2)  # a block of tokens, more than were computed
SELECTED = np.arange(8, dtype=np.int64)[:, None] - 3
SOURCE = Source("/store", "00" * 32)


class Vllm:
    """Answers like vLLM's server whose worker has the extension; a version waits in it whenever `next_step` is set."""

    def __init__(self) -> None:
        self.facts, self.asked = FACTS, list[str]()
        self.bodies: list[dict[str, Any]] = []
        self.next_step: int | None = None
        self.step, self.changes, self.label = TORN, 0, "default"
        self.named = list[str]()  # the requests that were asked about
        self.missing = ""  # a route that is not there
        self.raw_id = -1  # of the second column of logprobs
        every = Route("/{path:path}", self.answer, methods=["GET", "POST"])
        self.server = BackgroundServer(Starlette(routes=[every]), Listen())

    async def answer(self, request: Request) -> JSONResponse:
        path = request.url.path
        if path == self.missing:
            return JSONResponse({"error": "not here"}, 404)
        body = await request.json() if await request.body() else None
        if path == "/collective_rpc":
            return JSONResponse({"results": [self.rpc(body["method"], body["args"])]})
        self.asked.append(path + ("?" + request.url.query if request.url.query else ""))
        if path == "/update_weight_version":
            self.label = body["new_version"]
        if path == "/inference/v1/generate":
            self.bodies.append(body)
            return JSONResponse({"request_id": "x", "choices": [self.choice()]})
        return JSONResponse({})

    def rpc(self, method: str, arguments: list[str]) -> Any:
        if method == "rlloop_facts":
            return msgspec.to_builtins(self.facts)
        if method == "rlloop_chosen":
            self.named = msgspec.json.decode(arguments[0])
            experts, selected = (pack_array(EXPERTS), pack_array(SELECTED)) if self.facts.chooses else (None, None)
            count = len(self.named)
            return msgspec.to_builtins(Chosen(f"boot/{self.changes}", [experts] * count, [selected] * count))
        if method == "rlloop_commit":
            self.asked.append("commit")
            if self.next_step is not None:
                self.step, self.next_step, self.changes = self.next_step, None, self.changes + 1
        waiting, torn = self.next_step is not None, self.step == TORN
        return msgspec.to_builtins(
            ReplicaState(waiting, waiting, State.idle, "", not torn, torn, self.step, f"boot/{self.changes}", {})
        )

    def choice(self) -> dict[str, Any]:
        if not self.facts.says_weights:
            return self.choice_of_026()
        content = [
            {"token_id": id, "logprob": logprob, "top_logprobs": [
                {"token_id": id, "logprob": logprob}, {"token_id": self.raw_id, "logprob": 2 * logprob}]}
            for id, logprob in ((7, -0.5), (9, -1.25))
        ]  # fmt: skip
        spans = [{"version": self.label, "start": 0, "end": 2}]
        return {
            "token_ids": [7, 9],
            "logprobs": {"content": content},
            "finish_reason": "length",
            "weight_versions": spans,
        }

    def choice_of_026(self) -> dict[str, Any]:
        content = [
            {"token": f"token_id:{id}", "logprob": -0.5, "bytes": None, "top_logprobs": [
                {"token": f"token_id:{id}", "logprob": -0.5}, {"token": "token_id:-1", "logprob": -1.0}]}
            for id in (7, 9)
        ]  # fmt: skip
        return {"token_ids": [7, 9], "logprobs": {"content": content}, "finish_reason": "length", "index": 0}


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    vllm = Vllm()
    yield vllm
    vllm.server.close()


@pytest.fixture
def upstream(vllm) -> Iterator[Upstream]:
    upstream = Upstream(vllm.server.url, "key", timeout=120)
    yield upstream
    upstream.close()


@pytest.fixture
def line(vllm, upstream):
    engine = ServedEngine(upstream, facts_of(upstream))
    service = ServedService(engine)
    vllm.asked.clear()
    yield vllm, engine, service, ServedReplica(upstream, engine, SOURCE, service.change_weights)
    service.close()


def ask(service: ServedService, **options: Any):
    return service.submit([[5, 6]], [SamplingParams(max_tokens=2, seed=3, **options)]).result(240)[0]


def test_a_version_is_committed_with_vllm_paused_and_named_before_it_goes_on(line):
    vllm, engine, service, replica = line
    assert replica.poll() is False
    assert (vllm.asked, replica.ready, service.version) == ([], False, TORN)
    for step in (4, 5):
        vllm.asked.clear()
        vllm.next_step = step
        assert replica.poll() is True
        assert vllm.asked == ["/pause?mode=wait", "commit", "/update_weight_version", "/resume"]
        assert (replica.ready, replica.error, service.version, engine.label) == (True, "", step, vllm.label)
    assert replica.metrics["sync/pause_seconds"] > 0
    made = ask(service, stop_token_ids=(8,), temperature=0.7)
    assert (made.token_ids, made.policy_version, made.finish_reason) == ([7, 9], 5, "length")
    assert made.logprobs.tobytes() == np.array([-0.5, -1.25], np.float32).tobytes()
    assert made.raw_logprobs.tobytes() == np.array([-1.0, -2.5], np.float32).tobytes()
    params = vllm.bodies[-1]["sampling_params"]
    assert (params["stop_token_ids"], params["ignore_eos"], params["seed"], params["logprobs"]) == ([2, 8], True, 3, 2)


def test_choices_are_asked_of_the_worker_once_a_request_has_ended(vllm, upstream):
    vllm.facts = msgspec.structs.replace(FACTS, chooses=True)
    engine = ServedEngine(upstream, facts_of(upstream))
    engine.label = vllm.label
    id = engine.add_request([5, 6], SamplingParams(max_tokens=2, seed=3))
    while not (done := engine.step()):
        pass
    [(ended, made)] = done
    name = vllm.bodies[-1]["sampling_params"]["extra_args"]["rlloop_choices"]
    assert (ended, vllm.named) == (id, [name])
    again = unpack(Ask([[5, 6]], [made.sampling]), Answer([pack(made)], "boot"))[0]  # as the proxy's own clients get it
    for each in (made, again):
        for array, whole in ((each.routed_experts, EXPERTS), (each.selected, SELECTED)):
            assert array is not None
            assert array.dtype == whole.dtype
            assert np.array_equal(array, whole[:3])  # the last token is only drawn


def test_a_server_of_026_is_asked_which_weights_serve(vllm, upstream):
    """Its answers do not say it, and it has no name for them."""
    vllm.facts = msgspec.structs.replace(FACTS, says_weights=False)
    engine = ServedEngine(upstream, facts_of(upstream))
    assert vllm.asked == ["/abort_requests"]
    service = ServedService(engine)
    replica = ServedReplica(upstream, engine, SOURCE, service.change_weights)
    try:
        vllm.next_step = 4
        vllm.asked.clear()
        assert replica.poll() is True
        assert vllm.asked == ["/pause?mode=wait", "commit", "/resume"]
        made = ask(service)
        assert (made.policy_version, made.token_ids, made.routed_experts) == (4, [7, 9], None)
        assert made.raw_logprobs.tolist() == [-1.0, -1.0]
        vllm.changes += 1  # as after a start
        with pytest.raises(VersionUnavailable, match="has version -1"):
            ask(service)
    finally:
        service.close()


def test_another_proxy_takes_over_what_vllm_serves(line, upstream):
    vllm, _, _, replica = line
    vllm.next_step = 3
    replica.poll()
    other = ServedEngine(upstream, FACTS)
    heir = ServedReplica(upstream, other, SOURCE, lambda change: change())
    assert heir.poll() is True
    assert (other.policy_version, other.label, heir.ready) == (3, vllm.label, True)


def test_a_torn_commit_leaves_vllm_paused_and_nothing_served(line):
    vllm, _, service, replica = line
    vllm.next_step = 1
    replica.poll()
    vllm.asked.clear()
    vllm.next_step = TORN
    assert replica.poll() is False
    assert vllm.asked == ["/pause?mode=wait", "commit"]
    assert (replica.torn, replica.ready, service.version) == (True, False, TORN)
    with pytest.raises(VersionUnavailable):
        ask(service)
    vllm.next_step = 2
    assert replica.poll() is True
    assert ask(service).policy_version == 2


def test_completions_of_other_weights_are_refused_until_they_are_settled(line):
    vllm, engine, service, replica = line
    vllm.next_step = 1
    replica.poll()
    vllm.label = "default"  # as after a start
    with pytest.raises(VersionUnavailable, match="has version -1"):
        ask(service)
    assert (replica.ready, engine.has_work, service.load) == (False, False, 0)
    replica.poll()
    assert replica.ready
    assert ask(service).policy_version == 1


def test_what_is_kept_in_a_pause_is_kept_in_vllm(line):
    vllm, _, service, replica = line
    vllm.next_step = 1
    replica.poll()
    vllm.asked.clear()
    service.pause("keep")
    service.pause("wait")
    service.resume()
    assert vllm.asked == ["/pause?mode=keep", "/resume"]


def test_vllm_that_was_not_started_for_this_is_refused_by_name(vllm, upstream, capsys):
    for route in ("/collective_rpc", "/inference/v1/abort_requests"):
        vllm.missing = route
        with pytest.raises(ConfigError, match=r"VLLM_SERVER_DEV_MODE=1.*--worker-extension-cls.*--enable-scale-out"):
            facts_of(upstream)
    vllm.missing, vllm.facts = "", Facts(refused="its logprobs are raw_logprobs")
    with pytest.raises(ConfigError, match="cannot be followed: its logprobs are raw_logprobs"):
        facts_of(upstream)
    assert main(["serve", "proxy", "--upstream", vllm.server.url, "--join", "http://trainer"]) == 2
    assert "--join needs --store" in capsys.readouterr().err


def test_requests_that_vllm_would_take_otherwise_never_reach_it(line, upstream):
    vllm, _, service, replica = line
    vllm.next_step = 1
    replica.poll()
    for options, named in (({"temperature": 0.001}, "at least 0.01"), ({"stop_token_ids": (64,)}, "token id 64")):
        with pytest.raises(ConfigError, match=named):
            ask(service, **options)
    stock = ServedEngine(upstream, msgspec.structs.replace(FACTS, stock=True))
    for options, named in (({"top_k": 3}, "at the edge is impossible"), ({"min_tokens": 1}, "bans other tokens")):
        with pytest.raises(ConfigError, match=named):
            stock.add_request([5], SamplingParams(max_tokens=2, **options))
    assert vllm.bodies == []


def test_an_answer_that_is_no_completion_ends_what_is_in_flight_and_no_more(line):
    vllm, engine, service, replica = line
    vllm.next_step = 1
    replica.poll()
    vllm.raw_id = 5
    params = SamplingParams(max_tokens=2, seed=3)
    with pytest.raises(UpstreamError, match=r"not a completion: KeyError\(-1\)"):
        service.submit([[5, 6]] * 4, [params] * 4).result(240)
    id = engine.add_request([5], params)
    assert engine.abort(id) is None
    vllm.raw_id = -1
    assert ask(service).token_ids == [7, 9]


def test_a_server_that_goes_away(line):
    vllm, engine, service, replica = line
    vllm.next_step = 1
    replica.poll()
    vllm.missing = "/inference/v1/generate"
    with pytest.raises(UpstreamError, match="404"):
        ask(service)
    id = engine.add_request([5], SamplingParams(max_tokens=2, seed=1))
    assert engine.abort(id) is None
    assert not engine.has_work
    vllm.missing = "/collective_rpc"
    assert replica.poll() is False
    assert "404" in replica.error
    assert replica.state is State.error
    vllm.missing = ""
    replica.poll()
    assert (replica.error, ask(service).policy_version) == ("", 1)
