"""The training API on a full disk: what could not be written may be sent again, and nothing is done twice or lost."""

import errno

import pytest

from rlloop.api.core import Base, keep_base
from rlloop.errors import ConfigError
from tests.support.api_client import Api, output
from tests.support.api_serving import serving
from tests.support.waiting import until

SESSION = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}
FINISHED = {"reason": {"type": "success"}, "detail": None}


class Disk:
    """Of the API's own files. `tries`: writes that found it full."""

    def __init__(self, monkeypatch):
        self._patch, self.tries = monkeypatch, 0

    def fill(self):
        for name in ("rlloop.api.sessions.write_bytes", "rlloop.api.log.os.write"):
            self._patch.setattr(name, self.refuse)

    def refuse(self, *_):
        self.tries += 1
        raise OSError(errno.ENOSPC, "No space left on device")

    def free(self):
        self._patch.undo()


@pytest.fixture
def disk():
    with pytest.MonkeyPatch.context() as patch:
        yield Disk(patch)


def refused(answer):
    return answer.status_code == 503 and answer.headers["retry-after"] == "1"


def test_requests_are_refused_and_done_once_when_they_come_again(tmp_path, disk):
    with serving(tmp_path) as (server, fake):
        api = Api(server.url)
        disk.fill()
        assert refused(api.post("create_session", **SESSION))
        disk.free()
        assert list(server.sessions) == []
        api.start()
        sampler = api.sampler(0)
        nodes = [{"op": "call_function", "name": "a", "target": "torch.exp", "args": [], "kwargs": {}}]
        loss = {"session_id": api.session, "custom_loss_seq_id": 0, "name": "l",
                "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"format": 1, "nodes": nodes}}  # fmt: skip
        sample = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "sampling_params": {},
                  "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}  # fmt: skip
        step = {"model_id": api.model_id, "seq_id": api.next(), "adam_params": {}}
        asked = {"create_custom_loss": loss, "asample": sample, "optim_step": step}
        disk.fill()
        for route, body in asked.items():
            assert refused(api.post(route, **body)), route
        disk.free()
        for route, body in asked.items():
            assert api.result(api.ok(route, **body)["request_id"], 5.0), route
        assert sum(call[0] in ("sample", "optim_step") for call in fake.calls) == 2


def test_a_session_that_could_not_be_ended_goes_on_until_it_is(tmp_path, disk):
    with serving(tmp_path) as (server, fake):
        api = Api(server.url).start()
        disk.fill()
        assert refused(api.post(f"sessions/{api.session}/finish", **FINISHED))
        disk.free()
        api.forward_backward([[1, 2, 3]])
        assert api.post(f"sessions/{api.session}/finish", **FINISHED).status_code == 204
        until(lambda: api.model_id not in fake.weights)
    with serving(tmp_path) as (server, _):
        assert Api(server.url).post("session_heartbeat", session_id=api.session).status_code == 410


def test_idle_sessions_end_once_there_is_room(tmp_path, disk, monkeypatch):
    monkeypatch.setattr("rlloop.api.server.SWEEP_SECONDS", 0.02)
    with serving(tmp_path, idle_seconds=3.0) as (server, _):
        api = Api(server.url).start()
        disk.fill()
        until(lambda: disk.tries > 2)
        disk.free()
        until(lambda: api.session in server.sessions.ended)


def test_a_failure_is_told_when_it_is_on_disk(tmp_path, disk):
    """Else a restarted server would do again what the client was told to have failed."""
    with serving(tmp_path) as (server, fake):
        api = Api(server.url).start()
        fake.gate.clear()
        failed = api.forward_backward_([[1, 2, 3]], names=["nobody's"]).json()["request_id"]
        disk.fill()
        fake.gate.set()
        until(lambda: disk.tries > 1)
        assert api.post("retrieve_future", request_id=failed).status_code == 408
        disk.free()
        told = api.result(failed)
        assert "is not known" in told["error"]
    with serving(tmp_path) as (server, fake):
        fake.sequences["nobody's"] = [3]  # done again, it would not fail
        again = Api(server.url)
        assert again.result(failed) == told
        again.session, again.model_id, again.seq_id = api.session, api.model_id, api.seq_id
        assert "metrics" in again.optim_step()


def test_that_tokens_were_compared_is_on_disk_before_a_restart(tmp_path, disk):
    with serving(tmp_path) as (server, fake):
        api = Api(server.url).start()
        asked = api.sample_(api.sampler(0), 0, [1, 2])
        api.result(asked["request_id"])
        fake.gate.clear()
        trained = api.forward_backward_([[1, 2, 3]], names=asked["sample_sequence_ids"]).json()["request_id"]
        disk.fill()
        fake.gate.set()
        metrics = dict(output(api.result(trained)).metrics)
        until(lambda: disk.tries > 1)
        disk.free()
        (log,) = [model.log for session in server.sessions for model in session.models.values()]
        until(lambda: b"checked" in (log.folder / "000000.log").read_bytes())
        next(iter(server.sessions)).samples.log.shrink(lambda records: []).result(240)
    with serving(tmp_path) as (server, fake):
        again = Api(server.url)
        assert dict(output(again.result(trained)).metrics) == metrics


def test_a_state_that_found_no_room_is_made_after_the_next_update(tmp_path, disk, monkeypatch):
    with serving(tmp_path, state_every=5) as (server, fake):
        api = Api(server.url).start()

        def save(*_, original=fake.save_weights, **__):
            fake.save_weights = original
            return fake._do(disk.refuse, "save")

        fake.save_weights = save
        for _ in range(5):
            api.optim_step()
        until(lambda: disk.tries)
        (log,) = [model.log for session in server.sessions for model in session.models.values()]
        api.optim_step()
        until(lambda: (log.folder / "000007.log").exists())


def test_what_logs_were_made_with_is_there_whole_or_not(tmp_path, monkeypatch):
    base = Base("model", "name", {"dtype": "float32"})
    monkeypatch.setattr("rlloop.api.log.fsync", Disk(monkeypatch).refuse)
    with pytest.raises(OSError, match="No space"):
        keep_base(tmp_path, base)
    assert not (tmp_path / "base.json").exists()
    monkeypatch.undo()
    keep_base(tmp_path, base)
    with pytest.raises(ConfigError, match="other weights"):
        keep_base(tmp_path, Base("model", "name", {"dtype": "bfloat16"}))
