"""A training service in an actor of Ray: the bits of one in this process, in the order of calls, until it dies. One Ray
serves all cases; the last one ends the actor that the others share."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import rlloop
from rlloop.errors import ConfigError, ModelError, RlloopError, RunError
from rlloop.training.service import TrainingService
from rlloop.training.types import AdamParams, LoraConfig
from tests.support.api_client import Api, output
from tests.support.api_process import ApiProcess
from tests.support.checkpoints import make_checkpoint
from tests.support.command import free_port
from tests.support.small_training import EndsItsReader, datum, trained

ray = pytest.importorskip("ray")

pytestmark = [  # processes of Ray's own, which it ends by itself
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SETTINGS: dict[str, Any] = {"leaf_tokens": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray") / "tiny"
    make_checkpoint(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def remote(model):
    with rlloop.RayTrainingService(model, threads=1, **SETTINGS) as service:
        yield service


def test_the_bits_are_those_of_this_process(model, remote):
    with TrainingService(model, **SETTINGS) as local:
        assert trained(remote) == trained(local)
        assert remote.base_model == local.base_model


def test_calls_keep_their_order(remote):
    """Updates that are sent at once are those that are sent one after another."""
    digests = []
    for pipelined in (True, False):
        model_id = remote.create_model(lora=LoraConfig(4, seed=1)).result().model_id
        for step in range(12):
            made = remote.forward_backward(model_id, [datum(5, 9, step, 7)], "cross_entropy")
            done = remote.optim_step(model_id, AdamParams(learning_rate=0.01 * (step % 3)))
            if not pipelined:
                made.result()
                done.result()
        digests.append(remote.weights_digest(model_id).result())
    assert digests[0] == digests[1]


def test_mistakes_are_the_service_s_own_errors(remote, model, tmp_path):
    with pytest.raises(ConfigError, match="there is no model 'none'"):
        remote.info("none")
    model_id = remote.create_model(lora=LoraConfig(4)).result().model_id
    with pytest.raises(ConfigError, match="loss_fn is 'nothing'"):
        remote.forward_backward(model_id, [datum(5, 9)], "nothing").result()
    with pytest.raises(ConfigError, match="needs 4096 CPU"):
        rlloop.RayTrainingService(model, cpus=4096, address=None)
    with pytest.raises(ModelError, match="nothing"):
        rlloop.RayTrainingService(tmp_path / "nothing", cpus=0.1)
    with pytest.raises(ConfigError, match="dtype is 'int3'"):
        rlloop.RayTrainingService(model, cpus=0.1, dtype="int3")


def test_a_failure_to_start_that_is_nobody_s_mistake_keeps_its_kind(remote, model):
    with pytest.raises(TypeError, match="unknown_setting"):
        rlloop.RayTrainingService(model, cpus=0.1, unknown_setting=1)
    with pytest.raises(RlloopError, match="could not start") as caught:
        rlloop.RayTrainingService(model, cpus=0.1, dtype=EndsItsReader())
    assert caught.value.exit_code == 1


def test_a_server_of_a_shape_whose_actor_dies_ends_and_goes_on(remote, model, tmp_path):
    """With a command that was acknowledged and had no result, and a server that takes it up again."""
    shape = {
        "accelerator_type": "CPU",
        "base_model_weight_precision": "float32",
        "max_batch_tokens": 64,
        "lora_rank": 4,
    }
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps({"model": json.loads((model / "config.json").read_text()), "shapes": {"lora": shape}}))
    address = ray.get_runtime_context().gcs_address
    options = ("--ray", address, "--ray-cpus", "0.1", "--shape", "tiny-lora", "--shape-file", str(file))
    server = ApiProcess(model, tmp_path / "api", free_port(), *options).start()
    try:
        api = Api(server.url).start("tiny", rank=4)
        refused = api.ok(
            "create_model", session_id=api.session, model_seq_id=1, base_model="tiny", lora_config={"rank": 8}
        )
        assert "must be 1 to 4" in api.result(refused["request_id"])["error"]  # the shape's rank
        api.forward_backward([[5, 9, 14, 3]])
        api.optim_step()
        (actor,) = [
            pid for pid, command in children(os.getpid()).items() if "ServiceActor" in command and pid != remote.pid
        ]
        os.kill(actor, signal.SIGSTOP)  # what comes now is not computed
        asked = api.forward_backward_([[5, 9, 14, 7]]).json()["request_id"]
        os.kill(actor, signal.SIGKILL)
        assert server.wait() == 1
        server.start()
        assert output(api.result(asked)).metrics["loss:sum"] > 0
        assert "optim/grad_norm" in api.optim_step()["metrics"]
    finally:
        server.kill()


def children(pid):
    """Command lines of a process's descendants, by id."""
    parents, lines = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                lines[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it ended meanwhile
    found = {pid}
    while new := {child for child, parent in parents.items() if parent in found} - found:
        found |= new
    return {child: lines[child] for child in found}


def test_an_actor_that_dies_fails_its_calls(remote):
    model_id = remote.create_model(lora=LoraConfig(4, seed=0)).result().model_id
    os.kill(remote.pid, signal.SIGKILL)
    made = remote.forward_backward(model_id, [datum(5, 9, 7)], "cross_entropy")
    with pytest.raises(RunError, match="the actor of the training service died"):
        made.result(240)
