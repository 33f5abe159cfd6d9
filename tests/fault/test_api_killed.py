"""`rlloop serve api` killed at any moment: nothing is lost, nothing is done twice, results come after a restart."""

import threading

import pytest

from tests.support.api_client import Patient, output, sampled
from tests.support.api_process import ApiProcess
from tests.support.checkpoints import make_checkpoint
from tests.support.command import free_port
from tests.support.image_models import END, START
from tests.support.pictures import make_reading_model, picture

STEPS = 6


PICTURE = picture(24, 16), 6
PROMPTS = {"text": [5, 9, 14], "image": [5, START, PICTURE, END]}


@pytest.fixture(scope="module", params=PROMPTS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory, kind):
    folder = tmp_path_factory.mktemp("killed") / "tiny"
    if kind == "image":
        make_reading_model(folder)
    else:
        make_checkpoint(folder, "qwen3")
    return folder


def train(api, base_model, prompt):
    """A session that samples and trains on its samples, whose names it gives; returns all that its client sees."""
    api.start(base_model, rank=4)
    length = sum(token[1] if isinstance(token, tuple) else 1 for token in prompt) + 1
    seen = []
    for step in range(STEPS):
        sampler = api.sampler(step)
        asked = api.sample_(sampler, 0, [*prompt, step], n=2, max_tokens=4, seed=step)
        completions = sampled(api.result(asked["request_id"]))
        sent = [
            api.forward_backward_([[*prompt, step, *tokens]], names=[name], prompt=length).json()["request_id"]
            for tokens, name in zip(completions, asked["sample_sequence_ids"], strict=True)
        ]
        update = api.command_("optim_step", adam_params={"learning_rate": 0.01})
        results = [output(api.result(request_id)) for request_id in sent]
        metrics = api.result(update)
        assert not any(isinstance(each, dict) for each in results), results
        seen.append((completions, [result.SerializeToString(deterministic=True) for result in results], metrics))
    last = output(api.result(api.forward_backward_([[5, 9, 14, 3, 7, 8]]).json()["request_id"]))
    return seen, last.SerializeToString(deterministic=True)


def test_a_killed_server_goes_on_as_if_it_had_not_been(model, kind, tmp_path):
    server = ApiProcess(model, tmp_path, free_port(), "--state-every", "2").start()
    try:
        api, found, done = Patient(server.url), [], threading.Event()

        def run():
            try:
                found.append(train(api, "tiny", PROMPTS[kind]))
            finally:
                done.set()

        client = threading.Thread(target=run)
        client.start()
        for moment in (8, 24):  # answers; a step has about eight
            while api.answered < moment and not done.wait(0.002):
                pass
            assert not done.is_set(), "it was over before the server was killed"
            server.kill()
            server.start()
        client.join(600)
        assert len(found[0][0]) == STEPS
        assert train(Patient(server.url), "tiny", PROMPTS[kind]) == found[0]  # a new session, without a crash
    finally:
        server.kill()
