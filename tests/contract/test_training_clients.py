"""Clients in process: docs/training.md runs as it stands, and takes other libraries' types."""

import asyncio
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import rlloop
from rlloop.errors import ConfigError
from rlloop.models import save_model
from rlloop.training.types import AdamParams, SamplingParams
from tests.support.tiny_models import tiny_qwen3
from tests.support.training_data import digest, sampled, supervised

PAGE = Path(__file__).resolve().parents[2] / "docs/training.md"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clients") / "base"
    save_model(tiny_qwen3(), folder)
    with rlloop.ServiceClient(folder) as made:
        yield made


def test_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_model(tiny_qwen3(), tmp_path / "my-model")
    block, _of_a_cluster = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), {})
    out = capsys.readouterr().out
    assert out.count("'parity/tokens_checked:sum': 48.0, 'parity/tokens_different:sum': 0.0") == 3


@dataclass
class TheirInput:
    tokens: list[int]

    def to_ints(self):
        return self.tokens


@dataclass
class TheirDatum:
    model_input: TheirInput
    loss_fn_inputs: dict = field(default_factory=dict)


@dataclass
class TheirAdam:
    learning_rate: float = 1e-2
    beta1: float = 0.9


def test_other_libraries_types_give_the_same_bits(service):
    data = supervised(0, 4)
    theirs = [
        TheirDatum(
            TheirInput(each.model_input.token_ids),
            {key: torch.from_numpy(value) for key, value in each.loss_fn_inputs.items()},
        )
        for each in data
    ]
    clients = [service.create_lora_training_client(rank=4, seed=0).result() for _ in range(2)]
    for client, given, adam in zip(clients, (data, theirs), (AdamParams(1e-2), TheirAdam()), strict=True):
        client.forward_backward(given, "cross_entropy")
        client.optim_step(adam).result(120)
    assert digest(service.service, clients[0].model_id) == digest(service.service, clients[1].model_id)


def test_a_loss_of_all_logprobs_is_its_surrogate(service):
    data = supervised(1, 3)
    clients = [service.create_lora_training_client(rank=4, seed=0) for _ in range(2)]
    clients[0].forward_backward(data, "cross_entropy").result(120)

    def same(data, logprobs):
        weights = [torch.from_numpy(each.loss_fn_inputs["weights"]) for each in data]
        loss = -sum((a * b).sum() for a, b in zip(logprobs, weights, strict=True))
        return loss, {"custom/count:sum": float(len(data))}

    result = clients[1].forward_backward_custom(data, same).result(120)
    assert result.metrics["custom/count:sum"] == 3
    assert result.metrics["loss:sum"] == pytest.approx(result.metrics["surrogate_loss:sum"], rel=1e-5)
    for client in clients:
        client.optim_step(AdamParams(1e-2)).result(120)
    assert digest(service.service, clients[0].model_id) == digest(service.service, clients[1].model_id)


def test_coroutines_and_checkpoints(service):
    async def train():
        client = service.create_lora_training_client(rank=2, seed=1)
        sampling = await client.save_weights_and_get_sampling_client_async()
        answer = await sampling.sample_async([5, 6, 7], 2, SamplingParams(max_tokens=4, seed=0))
        done = await client.forward_backward_async(
            [sampled([5, 6, 7], each) for each in answer.sequences], "importance_sampling"
        )
        step = await client.optim_step_async(AdamParams(1e-2))
        return client, await done, await step, await sampling.compute_logprobs_async([5, 6, 7])

    client, done, step, logprobs = asyncio.run(train())
    assert done.metrics["parity/tokens_checked:sum"] == 8
    assert step.metrics["optim/grad_norm"] > 0
    path = client.save_state("mine").result(120).path
    assert [each.tinker_path for each in service.list_checkpoints(client.model_id)] == [path]
    twin = service.create_training_client_from_state_with_optimizer(path)
    assert digest(service.service, twin.model_id) == digest(service.service, client.model_id)
    assert client.load_state_with_optimizer(path).result(120).path == path
    assert service.create_sampling_client(path).compute_logprobs([5, 6, 7]).result(120) != logprobs
    base = service.create_sampling_client().compute_logprobs([5, 6, 7]).result(120)
    assert base == logprobs  # B is 0 in a new adapter
    info = client.get_info()
    assert (info.is_lora, info.lora_rank, info.model_name) == (True, 2, "base")
    with pytest.raises(ConfigError, match="folder has no tokenizer"):
        client.get_tokenizer()
    with pytest.raises(ConfigError, match="base_model is 'other'"):
        service.create_sampling_client(base_model="other")
    assert service.get_server_capabilities().supported_models[0].max_context_length == 256
    assert np.isfinite(logprobs[1:]).all()
