"""Training an adapter over a frozen base."""

import copy

import numpy as np
import pytest
import torch

from rlloop import Engine, SamplingParams, load_model
from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.models import save_model
from rlloop.models.adapter_files import WEIGHTS, read_adapter, save_adapter, with_stored_adapter
from rlloop.models.adapter_weights import Adapter, choose_targets, fresh_weights
from rlloop.trainer import Trainer
from tests.support.adapters import random_adapter
from tests.support.checkpoints import make_checkpoint
from tests.support.samples import as_sample, different
from tests.support.tiny_models import tiny_qwen3

CONFIG = TrainerConfig(lr=1e-2, max_batch_tokens=200, weight_decay=0.01)


def adapted(folder, dtype, alpha=6.0, targets=("all-linear", "lm_head")):
    model = load_model(folder, dtype=dtype).requires_grad_(False)
    chosen = choose_targets(model.adapter_targets(), targets)
    return model.with_adapter(Adapter(fresh_weights(chosen, 4, alpha, seed=3), chosen))


def sampled(engine, count=12):
    prompts = [[3 + i, 5, 7 + i] for i in range(count)]
    sampling = [SamplingParams(max_tokens=10, seed=i, ignore_eos=True) for i in range(count)]
    rng = np.random.default_rng(0)
    return [as_sample(i, c, float(rng.normal())) for i, c in enumerate(engine.generate(prompts, sampling))]


def state(model):
    return {name: tensor.detach().clone() for name, tensor in model.adapter.named_parameters().items()}


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(params=["qwen3", "qwen3_moe", "deepseek_v3"])
def folder(request, tmp_path, dtype):
    make_checkpoint(tmp_path / "base", request.param, dtype=getattr(torch, dtype))
    return tmp_path / "base"


def test_only_the_adapter_moves_and_the_engine_has_the_trainers_bits(folder, dtype, tmp_path):
    model = adapted(folder, dtype)
    base = {name: tensor.clone() for name, tensor in model.with_adapter(None).named_parameters()}
    engine, trainer = Engine(model), Trainer(model, CONFIG)
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in trainer.masters)
    for step in range(2):
        samples = sampled(engine)
        result = trainer.forward_backward(samples, get_loss("grpo"))
        assert different(samples, result.logprobs) == 0
        assert trainer.optim_step()["loss/grad_norm"] > 0
        assert different(samples, trainer.logprobs(samples)) > 50
        engine.set_version(step + 1)
    for name, tensor in model.with_adapter(None).named_parameters():
        assert torch.equal(tensor, base[name]), name
        assert tensor.grad is None, name
    moved = [name for name, value in trainer.masters.items() if name.endswith("lora_B.weight") and value.any()]
    assert len(moved) == len(trainer.masters) // 2
    # the base handle is the base still, and takes no weights of its own
    samples = sampled(Engine(model.with_adapter(None)))
    assert different(samples, Trainer(load_model(folder, dtype=dtype), CONFIG).logprobs(samples)) == 0


def test_a_checkpoint_is_a_peft_folder_that_resumes_with_the_same_bits(folder, dtype, tmp_path):
    model = adapted(folder, dtype)
    engine, trainer = Engine(model), Trainer(model, CONFIG)

    def step(engine, trainer, version):
        trainer.forward_backward(sampled(engine), get_loss("grpo"))
        trainer.optim_step()
        engine.set_version(version)

    step(engine, trainer, 1)
    trainer.save(tmp_path / "step_1")
    step(engine, trainer, 2)
    other = adapted(folder, dtype)
    engine_again, again = Engine(other), Trainer(other, CONFIG)
    again.restore(tmp_path / "step_1")
    engine_again.set_version(1)
    stored = read_adapter(other, tmp_path / "step_1")
    for name, value in other.adapter.state_of(stored).items():
        assert value.dtype == torch.float32
        assert torch.equal(value, again.masters[name])
    loaded = with_stored_adapter(load_model(folder, dtype=dtype), tmp_path / "step_1")
    assert different(sampled(engine_again), Trainer(loaded, CONFIG).logprobs(sampled(engine_again))) == 0
    step(engine_again, again, 2)
    for name, value in state(model).items():
        assert torch.equal(value, state(other)[name]), name
        assert torch.equal(trainer.masters[name], again.masters[name]), name
    assert (tmp_path / "step_1" / WEIGHTS).stat().st_size < 4e5


def test_an_adapter_from_a_folder_trains_as_the_one_that_was_stored(folder, dtype, tmp_path):
    """Experts' factors are stored in one matrix of all, whose parts are transposed."""
    base = load_model(folder, dtype=dtype).requires_grad_(False)
    weights = random_adapter(base, 0)
    save_adapter(base, weights, tmp_path / "stored")
    trained = []
    for model in (
        base.with_adapter(Adapter(weights, choose_targets(base.adapter_targets(), ["all-linear"]))),
        with_stored_adapter(base, tmp_path / "stored"),
    ):
        trainer = Trainer(model, CONFIG)
        trainer.forward_backward(sampled(Engine(model)), get_loss("grpo"))
        assert trainer.optim_step()["loss/grad_norm"] > 0
        trained.append({**trainer.masters, **{f"live {name}": x for name, x in state(model).items()}})
    assert trained[0].keys() == trained[1].keys()
    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name]), name


def test_a_copy_of_the_model_keeps_its_adapter(tmp_path):
    save_model(tiny_qwen3(), tmp_path / "base")
    model = adapted(tmp_path / "base", "float32")
    with torch.no_grad():
        for parameter in model.adapter.named_parameters().values():
            parameter.add_(0.05)
    twin = copy.deepcopy(model)
    params = [SamplingParams(max_tokens=6, seed=1, ignore_eos=True)]
    (a,), (b,) = (Engine(each).generate([[3, 4]], params) for each in (model, twin))
    (c,) = Engine(model.with_adapter(None)).generate([[3, 4]], params)
    assert a.raw_logprobs.tobytes() == b.raw_logprobs.tobytes() != c.raw_logprobs.tobytes()
