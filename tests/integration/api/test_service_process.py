"""A training service in a process of its own: the bits of one in this process, in the order of calls, until it dies.
One process serves all cases; the last one kills it."""

import os
import shutil
import signal
from typing import Any

import pytest

from rlloop.errors import ConfigError, ModelError, RlloopError, RunError
from rlloop.recipes.custom.tiny import write_tiny
from rlloop.training.service import TrainingService
from rlloop.training.service_process import ProcessTrainingService
from rlloop.training.types import AdamParams, LoraConfig
from tests.support.checkpoints import make_checkpoint
from tests.support.small_training import EndsItsReader, datum, trained

SETTINGS: dict[str, Any] = {"leaf_tokens": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("process") / "tiny"
    make_checkpoint(folder, "qwen3")
    write_tiny(folder.parent / "words", hidden_size=16, num_layers=1)
    for file in (folder.parent / "words").glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def remote(model):
    with ProcessTrainingService(model, threads=1, **SETTINGS) as service:
        yield service


def test_the_bits_are_those_of_this_process(model, remote):
    with TrainingService(model, **SETTINGS) as local:
        assert trained(remote) == trained(local)
        assert remote.base_model == local.base_model
        assert remote.status().keys() == local.status().keys()
        assert remote.tokenizer is not None
        assert local.tokenizer is not None
        assert remote.tokenizer.decode([5, 6], False) == local.tokenizer.decode([5, 6], False)
    assert remote.pid != os.getpid()


def test_a_whole_model_s_digest_may_be_left_out(remote):
    model_id = remote.create_model(lora=None).result().model_id
    assert remote.weights_digest(model_id, adapters_only=True).result() == b""
    assert len(remote.weights_digest(model_id).result()) == 32


def test_mistakes_are_the_service_s_own_errors(remote, tmp_path):
    with pytest.raises(ConfigError, match="there is no model 'none'"):
        remote.info("none")
    model_id = remote.create_model(lora=LoraConfig(4)).result().model_id
    with pytest.raises(ConfigError, match="loss_fn is 'nothing'"):
        remote.forward_backward(model_id, [datum(5, 9)], "nothing").result()
    with pytest.raises((ConfigError, ModelError), match="nothing"):
        ProcessTrainingService(tmp_path / "nothing")


def test_a_process_that_ends_before_it_has_started_is_nobody_s_mistake(model):
    with pytest.raises(RlloopError, match="ended with code 7") as caught:
        ProcessTrainingService(model, dtype=EndsItsReader())
    assert caught.value.exit_code == 1


def test_what_waits_for_a_process_that_died_fails_and_says_so(remote):
    model_id = remote.create_model(lora=LoraConfig(4)).result().model_id
    os.kill(remote.pid, signal.SIGSTOP)  # what comes now is not computed
    waits = remote.forward_backward(model_id, [datum(5, 9)], "cross_entropy")
    assert not waits.cancel()  # as a caller may who stops waiting: the answer is still to come
    os.kill(remote.pid, signal.SIGKILL)
    for _ in range(2):  # also what comes after its end
        with pytest.raises(RunError, match="process of the training service ended with code -9"):
            waits.result(60)
        waits = remote.optim_step(model_id, AdamParams())
