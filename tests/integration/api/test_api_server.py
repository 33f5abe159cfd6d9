"""The training API's server over HTTP, on a service without a model: order, repetition, limits, keys, restarts."""

import asyncio
import re
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import zstandard

from rlloop.api.calls import HIDDEN
from rlloop.api.keys import Client, Keys, Quota
from rlloop.api.log import Command, CommandLog, Committer, Weights, read_segment
from rlloop.api.models import SMALL
from rlloop.api.sampling import Samples
from rlloop.errors import ConfigError
from rlloop.web.server import Listen
from tests.support.api_client import PROTOBUF, Api, datums, output, sampled
from tests.support.api_serving import serving
from tests.support.fake_training import FakeTraining
from tests.support.waiting import until

KEYS = Keys({"tml-alice-0123456789": Client("alice"), "tml-bob-01234567890": Client("bob", operator=True)})


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("api")) as pair:
        yield pair


@pytest.fixture
def api(served):
    return Api(served[0].url, f"tml-{secrets.token_hex(8)}")  # a key has a quota of models


def test_parts_of_a_call_are_executed_in_order_however_they_come(served, api):
    api.start()
    sent = [api.forward_backward_([[number, 1, 2]], seq_id=number).json()["request_id"] for number in (3, 2)]
    step = api.command_("optim_step", seq_id=4, adam_params={"learning_rate": 0.5})
    assert api.post("retrieve_future", request_id=sent[0]).status_code == 408
    first = api.forward_backward_([[1, 1, 2]], seq_id=1).json()["request_id"]
    for request_id in (first, *sent):
        assert output(api.result(request_id)).metrics["loss:sum"] == 1.0
    assert api.result(step)["metrics"] == {"optim/grad_norm": 1.0}  # JSON has no infinity
    mine = [call for call in served[1].calls if call[1] == api.model_id and call[0] != "digest"][1:]
    assert [call[0] for call in mine] == ["forward_backward"] * 3 + ["optim_step"]
    assert [call[2] for call in mine[:3]] == [[[1, 1]], [[2, 1]], [[3, 1]]]


def test_a_repeated_request_is_the_same_future_and_done_once(served, api):
    api.start()
    ids = {api.forward_backward_([[7, 8, 9]], seq_id=1).json()["request_id"] for _ in range(3)}
    assert len(ids) == 1
    assert output(api.result(ids.pop())).metrics["loss:sum"] == 1.0
    assert sum(call[:2] == ("forward_backward", api.model_id) for call in served[1].calls) == 1
    served[1].gate.clear()
    api.forward_backward_([[7, 8, 9]], seq_id=2)
    other = api.forward_backward_([[7, 7, 7]], seq_id=2)
    served[1].gate.set()
    assert other.status_code == 422
    assert "came before, with another request" in other.json()["error"]


def test_the_same_command_at_once_from_many_connections_is_done_once(served, api):
    api.start()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: api.forward_backward_([[4, 5, 6]], seq_id=1).status_code, range(8)))
    assert answers == [200] * 8
    api.command("optim_step", seq_id=2, adam_params={})
    assert sum(call[:2] == ("forward_backward", api.model_id) for call in served[1].calls) == 1


def test_bad_input_fails_its_own_future_and_nothing_else(api):
    api.start()
    bad = [
        (api.forward_backward_([[1, 2, 3]], weights=float("nan")).json()["request_id"], "not finite"),
        (api.forward_backward_([]).json()["request_id"], "no datum"),
        (api.command_("optim_step", optimizer_params={"type": "dimuon", "learning_rate": 1.0}), "AdamW"),
        (api.command_("optim_step", adam_params={"learning_rat": 1.0}), "learning_rat"),
        (api.command_("save_weights", path="rlloop-log-1"), "reserved"),
        (api.command_("load_weights", path="tinker://elsewhere:train:0/weights/a", optimizer=True), "no checkpoint"),
        (api.command_("save_weights", path="x", ttl_seconds=0), "ttl_seconds is 0"),
        (api.command_("save_weights_for_sampler"), "neither a path"),
    ]
    for request_id, words in bad:
        done = api.result(request_id)
        assert words in done["error"], (request_id, done)
        assert done["category"] == "user"
    assert api.forward_backward([[1, 2, 3]]).metrics["loss:sum"] == 1.0


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("create_session", {"tags": 3}, 422, "CreateSession"),
        ("create_session", {"surprise": 1}, 422, "surprise"),
        ("session_heartbeat", {"session_id": "s-none"}, 404, "no session"),
        ("retrieve_future", {"request_id": "s-none:train:0:1"}, 404, "no session"),
        ("optim_step", {"model_id": "s-none:train:0", "seq_id": 1}, 404, "no session"),
        ("asample", {"prompt": {"chunks": []}, "sampling_params": {}}, 422, "sampling_session_id"),
        ("get_info", {}, 422, "model_id"),
    ],
)
def test_malformed_requests_say_what_is_wrong(api, path, body, status, words):
    answer = api.post(path, **body)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def test_a_wrong_number_or_content_type_is_refused(api):
    api.start()
    assert api.forward_backward_([[1, 2]], seq_id=0).status_code == 422
    assert "next one" in api.forward_backward_([[1, 2]], seq_id=9999).json()["error"]
    assert api.http.post("forward_backward", content=b"x").status_code == 415
    assert api.http.post("forward_backward", content=b"\x0a\xff", headers=PROTOBUF).status_code == 422


@pytest.mark.parametrize("number", ["9" * 5000, "٠", "00", "-0", ""])
def test_an_id_whose_number_is_written_otherwise_is_no_id(api, number):
    api.start()
    assert api.post("get_info", model_id=f"{api.session}:train:{number}").status_code == 404
    assert api.post("join_sampling_session", sampling_session_id=f"{api.session}:sample:{number}").status_code == 404


@pytest.mark.parametrize("number", [-1, 10**300])
def test_sampling_sessions_are_numbered_from_0(api, number):
    api.start()
    new = {"session_id": api.session, "sampling_session_seq_id": number, "base_model": "fake"}
    saved = {"model_id": api.model_id, "seq_id": 1, "sampling_session_seq_id": number}
    for route, body in (("create_sampling_session", new), ("save_weights_for_sampler", saved)):
        answer = api.post(route, **body)
        assert answer.status_code == 422
        assert "it counts from 0" in answer.json()["error"]


def test_a_sampling_session_has_the_weights_that_it_was_made_for(api):
    api.start()
    api.ok("create_sampling_session", session_id=api.session, sampling_session_seq_id=1, base_model="fake")
    again = api.post("save_weights_for_sampler", model_id=api.model_id, seq_id=1, sampling_session_seq_id=1)
    assert again.status_code == 422
    assert "with another model" in again.json()["error"]
    both = api.post("save_weights_for_sampler", model_id=api.model_id, seq_id=1, sampling_session_seq_id=1, path="..")
    assert both.status_code == 422
    assert "one of the two" in both.json()["error"]
    assert api.sample(f"{api.session}:sample:1", 1, [1, 2], max_tokens=2)


def test_a_sample_repeated_with_another_content_is_refused(api):
    api.start()
    sampler = api.sampler(0)
    first = api.sample_(sampler, 1, [1, 2, 3], max_tokens=2)
    assert api.sample_(sampler, 1, [1, 2, 3], max_tokens=2) == first
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    other = api.post("asample", sampling_session_id=sampler, seq_id=1, num_samples=2, prompt=prompt, sampling_params={})
    assert other.status_code == 422
    assert "came before, with another content" in other.json()["error"]


@pytest.mark.parametrize(
    "targets",
    [
        {"data": [10**20, 1], "dtype": "int64", "shape": [2, 1]},
        {"data": [1e300, 1], "dtype": "int64", "shape": [2, 1]},
        {"data": [1, 1], "dtype": "int64", "shape": [10**20, 1]},
        {"data": [1], "dtype": "int64", "shape": [2, 1], "sparse_crow_indices": [0, 10**20, 1]},
    ],
)
def test_targets_beyond_int64_are_the_clients_mistake(api, targets):
    api.start()
    made = api.ok(
        "asample", sampling_session_id=api.sampler(0), seq_id=1, target_prompt_logprobs=targets, sampling_params={},
        prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
    )  # fmt: skip
    assert api.result(made["request_id"])["category"] == "user"


def test_a_model_that_was_unloaded_is_not_made_again(api):
    api.start()
    api.ok("unload_model", model_id=api.model_id)
    lora = {"rank": 8, "seed": 0}
    again = api.post("create_model", session_id=api.session, model_seq_id=0, base_model="fake", lora_config=lora)
    assert again.status_code == 410
    assert "was unloaded" in again.json()["error"]
    assert api.start(model=1).forward_backward([[1, 2]]).metrics["loss:sum"] == 1.0


def test_logs_of_what_has_ended_are_closed_and_samples_that_wait_for_weights_fail(served, api, monkeypatch):
    monkeypatch.setattr("rlloop.api.models.LAST_SECONDS", 0.0)
    api.start().start(model=1)
    folder = served[0].core.settings.folder / "sessions" / api.session

    def opened() -> int:
        return sum(fd.resolve().is_relative_to(folder) for fd in Path("/proc/self/fd").iterdir())

    assert opened() == 3
    api.command_("save_weights_for_sampler", seq_id=3, sampling_session_seq_id=4)  # 1 and 2 never come
    waiting = api.sample_(f"{api.session}:sample:4", 1, [1, 2])["request_id"]
    api.ok("unload_model", model_id=api.model_id)
    assert "was unloaded" in api.result(waiting)["error"]
    until(lambda: opened() == 2)
    assert api.http.post(f"sessions/{api.session}/finish", content=b"{}").status_code == 204
    until(lambda: not opened())


def test_zstd_bodies_are_unpacked(api):
    api.start()
    body = zstandard.compress(datums(api.model_id, 1, [[1, 2, 3]]))
    answer = api.http.post("forward_backward", content=body, headers={**PROTOBUF, "content-encoding": "zstd"})
    assert output(api.result(answer.json()["request_id"])).metrics["loss:sum"] == 1.0


def test_samples_of_frozen_weights_a_checkpoint_and_the_base(api):
    api.start()
    frozen = api.sampler(0)
    assert frozen == f"{api.session}:sample:0"
    asked = api.sample_(frozen, 0, [1, 2], n=3)
    assert asked["sample_sequence_ids"] == [f"{frozen}:0:{index}" for index in range(3)]
    assert len(sampled(api.result(asked["request_id"]))) == 3
    again = api.sample_(frozen, 0, [1, 2], n=3)
    assert again == asked
    path = api.command("save_weights_for_sampler", path="final")["path"]
    of_path = api.ok("create_sampling_session", session_id=api.session, sampling_session_seq_id=1, model_path=path)
    of_base = api.ok("create_sampling_session", session_id=api.session, sampling_session_seq_id=2, base_model="fake")
    for each in (of_path, of_base):
        assert len(api.sample(each["sampling_session_id"], 0, [1])) == 1
    sampler = api.http.get(f"samplers/{of_path['sampling_session_id']}").json()
    assert (sampler["base_model"], sampler["model_path"]) == ("fake", path)
    wrong = api.post("create_sampling_session", session_id=api.session, sampling_session_seq_id=3, base_model="other")
    assert "this server has 'fake'" in wrong.json()["error"]
    joined = [api.ok("join_sampling_session", sampling_session_id=frozen)["client_counter"] for _ in range(2)]
    assert joined == [1, 2]


def test_weights_of_a_checkpoint_are_in_memory_only_while_a_sampling_session_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr("rlloop.api.server.SWEEP_SECONDS", 0.1)
    with serving(tmp_path) as (server, fake):
        api = Api(server.url).start()
        paths = [api.command("save_weights_for_sampler", path=f"step-{step}")["path"] for step in range(3)]
        api.command("save_weights_external", path="whole")
        assert fake.samplers == {}
        new = {"session_id": api.session}
        ids = [
            api.ok("create_sampling_session", **new, sampling_session_seq_id=number, model_path=path)[
                "sampling_session_id"
            ]
            for number, path in enumerate(paths)
        ]
        assert all(len(api.sample(each, 0, [1])) == 1 for each in ids)
        assert set(fake.samplers) == set(ids)
        routes = [f"training_runs/{api.model_id}/checkpoints/sampler_weights/step-{step}" for step in range(3)]
        assert api.http.delete(routes[0]).status_code == 204
        assert set(fake.samplers) == set(ids[1:])
        api.http.put(f"{routes[1]}/ttl", json={"ttl_seconds": 1})
        until(lambda: set(fake.samplers) == {ids[2]})
        for each in ids[:2]:
            assert "was deleted" in api.result(api.sample_(each, 1, [1])["request_id"])["error"]
        assert len(api.sample(ids[2], 1, [1])) == 1
        fake.gate.clear()  # one that is loaded when its session ends is not kept either
        api.ok("create_sampling_session", **new, sampling_session_seq_id=3, model_path=paths[2])
        assert api.post(f"sessions/{api.session}/finish", reason={"type": "success"}, detail=None).status_code == 204
        fake.gate.set()
        done = fake.create_sampler(paths[2], sampler="last")
        done.result(60)
        until(lambda: set(fake.samplers) == {"last"})


def test_one_poll_tells_of_all_samples_of_a_session(api):
    api.start()
    sampler = api.sampler(0)
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    ids = [api.sample_(sampler, number, [1, number])["request_id"] for number in range(4)]
    for request_id in ids:
        api.result(request_id)
    first = api.ok("retrieve_futures", target=target, prev_cursor=0, timeout=5, retrieved_request_ids=[])
    assert {each["request_id"] for each in first["completions"]} == set(ids)
    assert all(each["state"] == "finished" for each in first["completions"])
    last = api.sample_(sampler, 4, [9])["request_id"]
    api.result(last)
    second = api.ok("retrieve_futures", target=target, prev_cursor=first["cursor"], retrieved_request_ids=ids)
    assert [each["request_id"] for each in second["completions"]] == [last]
    empty = api.ok("retrieve_futures", target=target, prev_cursor=second["cursor"], timeout=0)
    assert empty == {"completions": [], "cursor": second["cursor"]}


def test_a_sample_is_cancelled_and_a_command_is_not(served, api):
    api.start()
    sampler = api.sampler(0)
    served[1].gate.clear()
    sample = api.sample_(sampler, 0, [1])["request_id"]
    step = api.command_("optim_step", adam_params={})
    for request_id in (sample, step):
        assert api.post("cancel_future", request_id=request_id).status_code == 204
    served[1].gate.set()
    assert "cancelled" in api.result(sample)["error"]
    assert "metrics" in api.result(step)


def test_custom_losses_are_checked_when_they_come(api):
    api.start()
    inputs = [{"name": "logprobs", "rank": 1}]
    for number, target in enumerate(("torch.exp", "os.system")):
        nodes = [{"op": "call_function", "name": "a", "target": target, "args": [], "kwargs": {}}]
        asked = api.ok("create_custom_loss", session_id=api.session, custom_loss_seq_id=number, name="l",
                       inputs=inputs, graph={"format": 1, "nodes": nodes})  # fmt: skip
        done = api.result(asked["request_id"])
        assert done.get("loss_id", "").startswith("loss-") if number == 0 else "not allowed" in done["error"]


def test_checkpoints_are_listed_downloaded_expired_and_deleted(api):
    api.start()
    paths = [api.command("save_weights", path=name)["path"] for name in ("a", "b")]
    external = api.command("save_weights_external", path="c")["path"]
    assert external == f"tinker://{api.model_id}/external_weights/c"
    listed = api.http.get(f"training_runs/{api.model_id}/checkpoints").json()["checkpoints"]
    assert {each["tinker_path"]: each["checkpoint_type"] for each in listed} == {
        paths[0]: "training", paths[1]: "training", external: "external"
    }  # fmt: skip
    assert api.http.put(
        f"training_runs/{api.model_id}/checkpoints/weights/a/ttl", json={"ttl_seconds": 3600}
    ).is_success
    page = api.http.get("checkpoints", params={"limit": 2, "offset": 0}).json()
    assert page["cursor"]["total_count"] >= 3
    assert len(page["checkpoints"]) == 2
    listed = api.http.get(f"training_runs/{api.model_id}/checkpoints").json()["checkpoints"]
    assert {each["checkpoint_id"] for each in listed if each["expires_at"]} == {"weights/a"}
    urls = api.http.get(f"training_runs/{api.model_id}/checkpoints/external_weights/c/external_weights_urls").json()
    url = urls["urls"]["weights"]
    assert b"weights" in httpx.get(url, trust_env=False).content
    for tampered in (url.replace("external-c", "external-d"), url[:-1] + ("0" if url[-1] != "0" else "1")):
        assert httpx.get(tampered, trust_env=False).status_code == 403
    assert api.http.delete(f"training_runs/{api.model_id}/checkpoints/weights/a").status_code == 204
    assert api.http.delete(f"training_runs/{api.model_id}/checkpoints/weights/a").status_code == 404
    run = api.http.get(f"training_runs/{api.model_id}").json()
    assert run["last_checkpoint"]["tinker_path"] == paths[1]
    assert api.http.get("training_runs").json()["cursor"]["total_count"] >= 1
    assert api.http.get(f"sessions/{api.session}").json()["training_run_ids"] == [api.model_id]


def test_a_model_that_is_being_made_is_not_listed_yet(served, api):
    api.start()
    served[1].gate.clear()
    lora = {"rank": 8, "seed": 0}
    made = api.ok("create_model", session_id=api.session, model_seq_id=1, base_model="fake", lora_config=lora)
    first = api.http.get("training_runs").json()
    served[1].gate.set()
    assert [run["training_run_id"] for run in first["training_runs"]] == [api.model_id]
    api.result(made["request_id"])
    assert api.http.get("training_runs").json()["cursor"]["total_count"] == 2


def test_a_model_is_made_from_a_checkpoint(served, api):
    api.start()
    api.forward_backward([[1, 2, 3]])
    api.optim_step()
    path = api.command("save_weights", path="mid")["path"]
    made = api.ok("load_weights", session_id=api.session, model_seq_id=1, path=path, optimizer=True)["request_id"]
    assert api.result(made)["model_id"] == f"{api.session}:train:1"
    assert served[1].weights[f"{api.session}:train:1"] == served[1].weights[api.model_id]
    api.forward_backward([[1, 2, 3]])
    api.optim_step()
    assert api.command("load_weights", path=path, optimizer=False)["path"] == path
    assert served[1].weights[f"{api.session}:train:1"] == served[1].weights[api.model_id]


def test_a_model_that_could_not_be_made_fails_what_follows(api):
    session = api.ok("create_session", tags=[], user_metadata=None, sdk_version="0.38.0")["session_id"]
    made = api.ok("create_model", session_id=session, model_seq_id=0, base_model="fake", lora_config={"rank": 999})
    assert "at most 64" in api.result(made["request_id"])["error"]
    api.model_id = f"{session}:train:0"
    assert "cannot be used" in api.optim_step()["error"]


def test_commands_that_came_before_a_model_was_refused_fail(served, api, monkeypatch):
    api.start()
    path = api.command("save_weights", path="a")["path"]
    come, create = threading.Event(), served[1].create_model
    monkeypatch.setattr(served[1], "create_model", lambda **asked: (come.wait(60), create(**asked))[1])
    large = {"note": " " * SMALL}  # which is read in a thread, so that others can come
    made = api.ok("create_model", session_id=api.session, model_seq_id=1, base_model="fake", lora_config={"rank": 999},
                  user_metadata=large)  # fmt: skip
    api.model_id, api.seq_id = f"{api.session}:train:1", 0
    sent = [api.command_("load_weights", path=path, optimizer=True), api.command_("save_weights", path="b")]
    come.set()
    assert "at most 64" in api.result(made["request_id"])["error"]
    assert all("error" in api.result(each, 20) for each in sent)


# ------------------------------------------------------------------------------------------------ keys and limits


def test_a_client_sees_only_what_is_its_own(tmp_path):
    with serving(tmp_path, KEYS) as (server, _):
        alice, bob = Api(server.url, "tml-alice-0123456789").start(), Api(server.url, "tml-bob-01234567890").start()
        path = alice.command("save_weights", path="mine")["path"]
        future = alice.command_("optim_step", adam_params={})
        sampler = alice.sampler(0)
        for answer in (
            bob.post("retrieve_future", request_id=future),
            bob.post("get_info", model_id=alice.model_id),
            bob.post("optim_step", model_id=alice.model_id, seq_id=9),
            bob.post("asample", sampling_session_id=sampler, seq_id=1, prompt={"chunks": []}, sampling_params={}),
            bob.post("session_heartbeat", session_id=alice.session),
            bob.http.get(f"samplers/{sampler}"),
            bob.http.get(f"training_runs/{alice.model_id}/checkpoints"),
            bob.http.delete(f"training_runs/{alice.model_id}/checkpoints/weights/mine"),
        ):
            assert answer.status_code == 404, answer.text
        assert "no checkpoint" in bob.command("load_weights", path=path, optimizer=True)["error"]
        wrong = bob.post("create_sampling_session", session_id=bob.session, sampling_session_seq_id=0, model_path=path)
        assert wrong.status_code == 422
        token = {"weights_access_token": "tml-alice-0123456789"}
        assert bob.command("load_weights", path=path, optimizer=True, **token)["path"] == path
        assert [each["tinker_path"] for each in bob.http.get("checkpoints").json()["checkpoints"]] == []
        assert len(alice.http.get("../../status").json()["sessions"]) == 1
        assert len(bob.http.get("../../status").json()["sessions"]) == 2  # the operator
        for key in ("", "tml-alice", "tml-alice-0123456789x"):
            assert Api(server.url, key).http.get("healthz").status_code == 401
        metrics = bob.http.get("../../metrics").text
        assert "rlloop_api_models 2.0" in metrics
        assert 'rlloop_api_parity_tokens_checked_total{client="alice"} 0.0' in metrics
        seen = alice.http.get("../../metrics").text  # no operator: her own name alone, and an id for the other
        ids = re.findall(r'parity_tokens_checked_total{client="(.*)"}', seen)
        assert "bob" not in seen
        assert "alice" in ids
        assert sorted(len(each) for each in ids) == [len("alice"), 12]


def test_any_tinker_key_is_a_client_of_its_own_on_loopback(served):
    one, two = Api(served[0].url, "tml-one").start(), Api(served[0].url, "tml-two")
    assert two.post("get_info", model_id=one.model_id).status_code == 404
    assert Api(served[0].url, "sk-other").http.get("healthz").status_code == 401


def test_off_loopback_needs_keys():
    with pytest.raises(ConfigError, match="let anyone on the network"):
        Listen("0.0.0.0")
    Listen("0.0.0.0", admits=lambda request: False)


def test_quotas_hold_back_one_client_and_not_the_next_request_of_a_model(tmp_path):
    with serving(tmp_path, KEYS, quota=Quota(models=2, futures=4)) as (server, fake):
        alice, bob = Api(server.url, "tml-alice-0123456789").start(), Api(server.url, "tml-bob-01234567890").start()
        fake.gate.clear()
        accepted = [alice.forward_backward_([[1, 2]], seq_id=number) for number in (5, 4, 3, 2)]
        assert [answer.status_code for answer in accepted] == [200] * 4
        held = alice.forward_backward_([[1, 2]], seq_id=6)
        assert held.status_code == 429
        assert held.headers["retry-after"] == "1"
        assert alice.forward_backward_([[1, 2]], seq_id=1).status_code == 200  # the others wait for it
        assert bob.forward_backward_([[1, 2]], seq_id=1).status_code == 200
        fake.gate.set()
        assert output(alice.result(accepted[0].json()["request_id"])).metrics["loss:sum"] == 1.0
        assert alice.forward_backward_([[1, 2]], seq_id=6).status_code == 200
        alice.start(model=1)
        third = alice.post("create_model", session_id=alice.session, model_seq_id=2, base_model="fake")
        assert (third.status_code, "2 models" in third.json()["error"]) == (403, True)
        alice.ok("unload_model", model_id=alice.model_id)
        alice.start(model=2)


def test_a_session_without_heartbeats_ends(tmp_path):
    with serving(tmp_path, idle_seconds=3.0) as (server, fake):
        api = Api(server.url).start()
        ended = threading.Event()
        original = fake.drop_model
        fake.drop_model = lambda model_id: (ended.set(), original(model_id))[1]
        assert ended.wait(240)
        answer = api.post("session_heartbeat", session_id=api.session)
        assert (answer.status_code, "no heartbeat" in answer.json()["error"]) == (410, True)


# ------------------------------------------------------------------------------------------------ restarts


def trained(api: Api, steps: int) -> None:
    for step in range(steps):
        api.forward_backward([[step, 1, 2], [step, 3, 4]])
        api.optim_step()


def test_a_restarted_server_goes_on_with_the_same_weights(tmp_path):
    with serving(tmp_path, state_every=1000) as (server, fake):
        api = Api(server.url).start()
        sampler = api.sampler(0)
        before = api.sample(sampler, 0, [1, 2, 3])
        trained(api, 3)
        last = api.forward_backward_([[9, 9, 9]]).json()["request_id"]
        api.result(last)
        weights, gradients = dict(fake.weights), dict(fake.gradients)
    with serving(tmp_path) as (server, fake):
        again = Api(server.url)
        again.session, again.model_id, again.seq_id = api.session, api.model_id, api.seq_id
        assert output(again.result(last)).metrics["loss:sum"] == 1.0
        assert fake.weights == weights
        assert fake.gradients == gradients
        assert again.forward_backward_([[9, 9, 9]], seq_id=api.seq_id).json()["request_id"] == last
        assert again.sample(sampler, 1, [1, 2, 3]) != []
        assert sampled(again.result(f"{sampler}:0")) == before
        assert sum(call[0] == "sample" for call in fake.calls) == 1  # what had its answer was not made again
        assert fake.sequences[f"{sampler}:0:0"] == before[0]
        trained(again, 1)


def test_a_restart_that_makes_other_weights_refuses_what_follows(tmp_path):
    with serving(tmp_path) as (server, _):
        api = Api(server.url).start()
        trained(api, 2)
        (log,) = [model.log for session in server.sessions for model in session.models.values()]
    (segment,) = log.folder.glob("*.log")
    update = min(read_segment(segment).digests)
    committer = Committer()
    CommandLog(log.folder, committer).append(Weights(update, b"others")).result(240)
    committer.close()
    with serving(tmp_path) as (server, fake):
        again = Api(server.url)
        again.session, again.model_id, again.seq_id = api.session, api.model_id, api.seq_id
        failed = again.result(again.forward_backward_([[9, 9, 9]]).json()["request_id"])
        assert f"update {update} of its log gave other weights before the restart" in failed["error"]
        assert sum(call[0] == "optim_step" for call in fake.calls) == 1  # no update after that one
        again.post(f"sessions/{api.session}/finish", reason={"type": "success"}, detail=None)
        until(lambda: api.model_id not in fake.weights)


def test_a_state_shortens_the_replay_and_keeps_what_nobody_has_collected(tmp_path):
    with serving(tmp_path, state_every=2) as (server, fake):
        api = Api(server.url).start()
        api.sampler(0)
        trained(api, 3)
        sampler = api.sampler(1)  # the state is made after it
        uncollected = api.forward_backward_([[5, 5, 5]]).json()["request_id"]
        trained(api, 2)
        sent = f"{api.model_id}:{api.seq_id}"  # the answer may be lost on its way
        last_sampler = api.sampler(2)
        trained(api, 1)
        weights = dict(fake.weights)
        (log,) = [model.log for session in server.sessions for model in session.models.values()]
        until(lambda: (log.folder / "000015.log").exists())  # after the last sampler
        until(lambda: [each.checkpoint_id for each in fake.checkpoints()] == ["weights/rlloop-log-000015"])
    with serving(tmp_path) as (server, fake):
        again = Api(server.url)
        again.session, again.model_id, again.seq_id = api.session, api.model_id, api.seq_id
        assert output(again.result(uncollected)).metrics["loss:sum"] == 1.0
        assert "metrics" in again.result(sent)
        trained(again, 0)
        assert again.sample(last_sampler, 0, [1, 2]) != []
        again.optim_step()
        assert sum(call[0] == "create" for call in fake.calls) == 0
        listed = again.http.get(f"training_runs/{api.model_id}/checkpoints").json()["checkpoints"]
        assert listed == []  # a log's own are not shown
        lost = again.result(again.sample_(f"{api.session}:sample:0", 0, [1])["request_id"])
        assert "were not on disk" in lost["error"]
        assert weights[api.model_id] != fake.weights[api.model_id]  # one update later
    assert sampler != last_sampler


def test_loads_at_once_each_have_a_state_and_a_deleted_checkpoint_is_not_needed(tmp_path):
    with serving(tmp_path) as (server, fake):
        api = Api(server.url).start()
        paths = []
        for name in ("a", "b"):
            trained(api, 1)
            paths.append(api.command("save_weights", path=name)["path"])
        loads = [api.command_("load_weights", path=path, optimizer=True) for path in (paths[0], paths[1], paths[0])]
        assert [api.result(load)["path"] for load in loads] == [paths[0], paths[1], paths[0]]
        for name in ("a", "b"):
            api.http.delete(f"training_runs/{api.model_id}/checkpoints/weights/{name}")
        weights = dict(fake.weights)
    with serving(tmp_path) as (server, fake):
        again = Api(server.url)
        assert again.result(loads[2])["path"] == paths[0]
        again.session, again.model_id, again.seq_id = api.session, api.model_id, api.seq_id
        again.forward_backward([[1, 2, 3]])
        assert fake.weights == weights


def test_a_log_s_state_is_no_checkpoint_of_the_client(served, api):
    api.start()
    path = api.command("save_weights", path="a")["path"]
    api.command("load_weights", path=path, optimizer=True)
    (state,) = [each for each in served[1].checkpoints(api.model_id) if HIDDEN in each.tinker_path]
    route, hidden = f"training_runs/{api.model_id}/checkpoints/{state.checkpoint_id}", state.tinker_path
    assert api.http.delete(route).status_code == 404
    assert api.http.put(f"{route}/ttl", json={"ttl_seconds": 1}).status_code == 404
    assert api.http.get(f"{route}/external_weights_urls").status_code == 404
    assert api.http.post(f"{route}/publish").status_code == 403  # as of any other
    new = {"session_id": api.session, "sampling_session_seq_id": 0, "model_path": hidden}
    copy = {"session_id": api.session, "model_seq_id": 0, "source_path": hidden}
    asked = {"weights_info": {"tinker_path": hidden}, "create_sampling_session": new, "copy_weights": copy}
    for kind, body in asked.items():
        answer = api.post(kind, **body)
        assert (answer.status_code, "there is no checkpoint" in answer.json()["error"]) == (422, True)
    assert "there is no checkpoint" in api.command("load_weights", path=hidden, optimizer=True)["error"]
    assert "reserved" in api.command("save_weights", path=HIDDEN + "000009")["error"]
    assert served[1].checkpoint_folder(hidden).is_dir()


@pytest.mark.parametrize("at_once", [True, False])  # as of a service in this process, and in another
def test_a_model_whose_state_is_gone_fails_and_others_go_on(tmp_path, monkeypatch, at_once):
    with serving(tmp_path) as (server, fake):
        api, other = Api(server.url).start(), Api(server.url, "tml-other").start()
        path = api.command("save_weights", path="a")["path"]
        api.command("load_weights", path=path, optimizer=True)
        sampler = api.sampler(0)
        trained(api, 1)
        (state,) = [each.tinker_path for each in fake.checkpoints(api.model_id) if HIDDEN in each.tinker_path]
        fake.delete_checkpoint(state)
    if at_once:
        monkeypatch.setattr(FakeTraining, "create_model_from", lambda self, path, **_: self.checkpoint_folder(path))
    with serving(tmp_path) as (server, fake):
        for old in (api, other):
            again = Api(server.url, old.http.headers["X-API-Key"])
            again.session, again.model_id, again.seq_id = old.session, old.model_id, old.seq_id
            error = again.optim_step().get("error", "")
            assert ("cannot be used: the state of its log cannot be loaded" in error) == (old is api), error
            if old is api:
                sample = again.sample_(sampler, 0, [1, 2])["request_id"]
                assert "error" in again.result(sample)


def test_a_gradient_that_a_failure_left_is_not_lost_by_a_state(tmp_path):
    with serving(tmp_path, state_every=1) as (server, fake):
        api = Api(server.url).start()
        api.forward_backward([[1, 2, 3]])
        assert "learning_rate" in api.optim_step(-1.0)["error"]
        assert (
            "no checkpoint" in api.command("load_weights", path="tinker://x:train:0/weights/a", optimizer=True)["error"]
        )
        api.sampler(0)
        gradients, weights = dict(fake.gradients), dict(fake.weights)
        assert len(gradients[api.model_id]) == 1
        until(lambda: fake.checkpoints() == [])  # the states that were begun are given up
    with serving(tmp_path) as (server, fake):
        again = Api(server.url)
        again.session, again.model_id, again.seq_id = api.session, api.model_id, api.seq_id
        again.sample(f"{api.session}:sample:0", 0, [1])
        assert (fake.gradients, fake.weights) == (gradients, weights)


def test_failures_and_saves_are_not_done_again(tmp_path):
    with serving(tmp_path) as (server, fake):
        api = Api(server.url).start()
        failed = api.forward_backward_([[1, 2, 3]], weights=float("nan")).json()["request_id"]
        message = api.result(failed)
        path = api.command("save_weights", path="kept")["path"]
        api.http.delete(f"training_runs/{api.model_id}/checkpoints/weights/kept")
        saved = f"{api.model_id}:{api.seq_id}"
    with serving(tmp_path) as (server, fake):
        again = Api(server.url)
        again.session, again.model_id, again.seq_id = api.session, api.model_id, api.seq_id
        assert again.result(failed) == message
        assert again.result(saved)["path"] == path
        assert sum(call[0] == "save" for call in fake.calls) == 0
        trained(again, 1)


def test_a_save_whose_record_was_lost_in_a_crash_is_no_error_and_another_of_its_name_is(tmp_path):
    with serving(tmp_path) as (server, _):
        api = Api(server.url).start()
        trained(api, 1)
        saves = [api.command_("save_weights", path="a"), api.command_("save_weights_for_sampler", path="a")]
        paths = [api.result(saved)["path"] for saved in saves]
        (log,) = [model.log for session in server.sessions for model in session.models.values()]
        assert "already" in api.command("save_weights", path="a")["error"]
    kept = [record for record in read_segment(log.folder / "000000.log").records if isinstance(record, Command)]
    (log.folder / "000000.log").unlink()
    committer = Committer()
    again = CommandLog(log.folder, committer)
    for record in kept[:-1]:  # no result
        again.append(record).result(240)
    committer.close()
    with serving(tmp_path) as (server, _):
        client = Api(server.url)
        assert [client.result(saved)["path"] for saved in saves] == paths
        client.model_id, client.seq_id = api.model_id, api.seq_id - 1
        assert "already" in client.command("save_weights", path="a")["error"]


def test_a_call_whose_tokens_were_compared_is_replayed_without_the_sequences(tmp_path):
    with serving(tmp_path) as (server, fake):
        api = Api(server.url).start()
        sampler = api.sampler(0)
        asked = api.sample_(sampler, 0, [1, 2])
        api.result(asked["request_id"])
        done = api.forward_backward_([[1, 2, 3]], names=asked["sample_sequence_ids"]).json()["request_id"]
        metrics = dict(output(api.result(done)).metrics)
        assert metrics["parity/tokens_checked:sum"] == 1.0
        api.optim_step()
        weights = dict(fake.weights)
        log = next(iter(server.sessions)).samples.log
        log.shrink(lambda records: []).result(240)  # nothing is known of the sequences
    with serving(tmp_path) as (server, fake):
        again = Api(server.url)
        assert dict(output(again.result(done)).metrics) == metrics
        again.session, again.model_id, again.seq_id = api.session, api.model_id, api.seq_id
        again.forward_backward([[1, 2, 3]])
        assert fake.weights == weights


def test_a_call_after_a_restart_waits_for_the_sequences_that_it_names(tmp_path, monkeypatch):
    with serving(tmp_path) as (server, _):
        api = Api(server.url).start()
        asked = api.sample_(api.sampler(0), 0, [1, 2])
        api.result(asked["request_id"])
    may, restore = threading.Event(), Samples._know_again

    async def late(*arguments):
        while not may.is_set():
            await asyncio.sleep(0.01)
        await restore(*arguments)

    monkeypatch.setattr(Samples, "_know_again", late)
    with serving(tmp_path) as (server, _):
        again = Api(server.url)
        again.session, again.model_id, again.seq_id = api.session, api.model_id, api.seq_id
        done = again.forward_backward_([[1, 2, 3]], names=asked["sample_sequence_ids"]).json()["request_id"]
        assert again.post("retrieve_future", request_id=done).status_code == 408
        may.set()
        assert output(again.result(done)).metrics["parity/tokens_checked:sum"] == 1.0


def test_ended_sessions_and_dropped_models_stay_ended(tmp_path):
    with serving(tmp_path) as (server, _):
        api = Api(server.url).start()
        api.start(model=1)
        api.ok("unload_model", model_id=api.model_id)
        other = Api(server.url).start()
        other.post(f"sessions/{other.session}/finish", reason={"type": "success"}, detail=None)
    with serving(tmp_path) as (server, _):
        again = Api(server.url)
        assert again.post("session_heartbeat", session_id=other.session).status_code == 410
        assert again.post("get_info", model_id=f"{api.session}:train:1").status_code == 404
        again.session, again.model_id = api.session, f"{api.session}:train:0"
        again.optim_step()
        assert again.post("get_info", model_id=again.model_id).status_code == 200
