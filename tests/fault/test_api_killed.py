"""`rlloop serve api` killed at any moment: nothing is lost, nothing is done twice, results come after a restart."""

import threading

import pytest

from tests.support.api_client import Patient, output, sampled
from tests.support.api_process import ApiProcess, free_port
from tests.support.checkpoints import make_checkpoint

STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "tiny"
    make_checkpoint(folder, "qwen3")
    return folder


def train(api, base_model):
    """A session that samples and trains on its samples; returns all that its client sees."""
    api.start(base_model, rank=4)
    seen = []
    for step in range(STEPS):
        sampler = api.sampler(step)
        asked = api.sample_(sampler, 0, [5, 9, 14, step], n=2, max_tokens=4)
        completions = sampled(api.result(asked["request_id"]))
        sent = [api.forward_backward_([[5, 9, 14, step, *tokens]]).json()["request_id"] for tokens in completions]
        update = api.command_("optim_step", adam_params={"learning_rate": 0.01})
        results = [output(api.result(request_id)) for request_id in sent]
        metrics = api.result(update)
        seen.append((completions, [result.SerializeToString(deterministic=True) for result in results], metrics))
    last = output(api.result(api.forward_backward_([[5, 9, 14, 3, 7, 8]]).json()["request_id"]))
    return seen, last.SerializeToString(deterministic=True)


def test_a_killed_server_goes_on_as_if_it_had_not_been(model, tmp_path):
    server = ApiProcess(model, tmp_path, free_port(), "--state-every", "2").start()
    try:
        api, found, done = Patient(server.url), [], threading.Event()

        def run():
            found.append(train(api, "tiny"))
            done.set()

        client = threading.Thread(target=run)
        client.start()
        for moment in (8, 24):  # answers; a step has about eight
            while api.answered < moment and not done.wait(0.002):
                pass
            assert not done.is_set(), "it was over before the server was killed"
            server.kill()
            server.start()
        client.join(120)
        assert len(found[0][0]) == STEPS
        assert undisturbed(server, found[0]) == found[0][1]
    finally:
        server.kill()


def undisturbed(server, found):
    """The last result of a new session that trains on the same completions, without a crash."""
    fresh = Patient(server.url).start("tiny", rank=4)
    for step, (completions, results, metrics) in enumerate(found[0]):
        fresh.sampler(step)
        for tokens, result in zip(completions, results, strict=True):
            again = output(fresh.result(fresh.forward_backward_([[5, 9, 14, step, *tokens]]).json()["request_id"]))
            assert again.SerializeToString(deterministic=True) == result, step
        assert fresh.optim_step() == metrics, step
    last = output(fresh.result(fresh.forward_backward_([[5, 9, 14, 3, 7, 8]]).json()["request_id"]))
    return last.SerializeToString(deterministic=True)
