"""Experts kept busy: the balance loss by hand, biases that follow the load, and what both do to a skewed router."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlloop.algorithms import LossOutput, loss_for
from rlloop.config.run import AlgorithmConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.models import Model, RoutingRecord, new_model
from rlloop.trainer import Trainer
from rlloop.trainer.batching import TrainSequence
from rlloop.trainer.moe import sum_of_balance_losses
from tests.support.train_sequences import gradients

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "eos_token_id": 0,
}
BIAS, GATE = "model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.1.mlp.gate.weight"
SFT = loss_for(AlgorithmConfig(loss="sft", advantage="grpo"))


def batch() -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    return [
        TrainSequence.supervised(rng.integers(1, 60, 5).tolist(), rng.integers(1, 60, 20).tolist()) for _ in range(6)
    ]


def trainer(model: Model, **settings: float) -> Trainer:
    return Trainer(model, TrainerConfig(**{"lr": 1e-3, "max_batch_tokens": 60, **settings}))


def test_the_balance_loss_by_hand() -> None:
    """Two sequences of 2 and 1 tokens, 4 experts, 1 chosen."""
    scores = torch.tensor([[0.8, 0.2, 0.4, 0.6], [0.5, 0.5, 0.5, 0.5], [0.1, 0.3, 0.3, 0.3]])
    routes, chosen = RoutingRecord(), torch.tensor([[0], [3], [1]])
    routes.record(0, chosen, scores)
    shares = scores / scores.sum(-1, keepdim=True)
    first = 4 / 2 * (shares[:2, 0].mean() + shares[:2, 3].mean())
    second = 4 / 1 * shares[2, 1]
    found = sum_of_balance_losses(routes, chosen[:, None], torch.tensor([2, 1]))
    assert found.item() == pytest.approx((first + second).item(), rel=1e-6)


def test_its_gradient_does_not_depend_on_micro_batches_and_reaches_the_router() -> None:
    found = []
    for budget, coef in ((1000, 0.0), (1000, 0.5), (30, 0.5)):
        model = new_model(CONFIG, seed=0)
        run = trainer(model, balance_coef=coef, max_batch_tokens=budget)
        run.forward_backward(batch(), SFT)
        found.append(gradients(run)[GATE])
    without, whole, cut = found
    assert (whole - without).norm() > 1e-3 * without.norm()
    torch.testing.assert_close(whole, cut, rtol=1e-4, atol=1e-6)


def test_biases_follow_the_load_and_nothing_else_moves_them() -> None:
    model = new_model(CONFIG, seed=0)
    run = trainer(model, expert_bias_rate=0.01)
    run.forward_backward(batch(), SFT)
    load = run.moe._load
    assert load is not None
    assert int(load.sum()) == 2 * sum(len(each.token_ids) - 1 for each in batch())
    metrics = run.optim_step()
    wanted = 0.01 * torch.sign(load[0].float().mean() - load[0])
    assert torch.equal(model.get_parameter(BIAS), wanted)
    assert metrics["experts/load_max"] == pytest.approx((load.max() / load.float().mean()).item())
    still = trainer(new_model(CONFIG, seed=0))
    still.forward_backward(batch(), SFT)
    still.optim_step()
    assert (still.model.get_parameter(BIAS) == 0).all()


def interrupt() -> LossOutput:
    raise KeyboardInterrupt


def test_a_refused_step_moves_no_bias() -> None:
    run = trainer(new_model(CONFIG, seed=0), expert_bias_rate=0.01)
    run.forward_backward(batch(), lambda seen: LossOutput(seen.logprobs.sum() * torch.inf, {}))
    metrics = run.optim_step()
    assert metrics["trainer/refused"] == 1
    assert metrics["experts/load_max"] > 1
    assert (run.model.get_parameter(BIAS) == 0).all()
    assert run.moe._load is None


@pytest.mark.parametrize("dropped", ["drop_gradient", "raises"])
def test_dropped_batches_move_no_bias(dropped: str) -> None:
    clean, run = (trainer(new_model(CONFIG, seed=0), expert_bias_rate=0.01, balance_coef=0.5) for _ in range(2))
    calls = iter(range(2))
    first, *others = batch()
    if dropped == "raises":
        with pytest.raises(KeyboardInterrupt):
            run.forward_backward(others, lambda seen: SFT(seen) if next(calls) == 0 else interrupt())
    else:
        run.forward_backward(others, SFT)
        run.drop_gradient()
    metrics = []
    for each in (clean, run):
        each.forward_backward([first], SFT)
        metrics.append(each.optim_step())
    assert metrics[0] == metrics[1]
    assert torch.equal(*(each.model.get_parameter(BIAS) for each in (clean, run)))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"balance_coef": 1.0, "lr": 2e-2}, {"expert_bias_rate": 0.05}])
def test_a_skewed_router_comes_to_use_its_experts(settings: dict[str, float]) -> None:
    loads = []
    for given in ({}, settings):
        model = new_model(CONFIG, seed=0)
        with torch.no_grad():
            model.get_parameter(BIAS)[:2] += 0.5  # two experts take nearly all
        run = trainer(model, **given)
        for _ in range(15):
            run.forward_backward(batch(), SFT)
            metrics = run.optim_step()
        loads.append(metrics["experts/load_max"])
    alone, balanced = loads
    assert alone > 3
    assert balanced < 0.6 * alone


def test_a_dense_model_has_no_loads() -> None:
    config = {name: value for name, value in CONFIG.items() if name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "eos_token_id",
        "max_position_embeddings")}  # fmt: skip
    model = new_model({**config, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}, seed=0)
    for setting, lacks in (("balance_coef", "no experts to balance"), ("expert_bias_rate", "no experts with a bias")):
        with pytest.raises(ConfigError, match=rf"trainer\.{setting} is 0\.1, and the model .*{lacks}"):
            trainer(model, **{setting: 0.1})
    run = trainer(model)
    run.forward_backward(batch(), SFT)
    assert set(run.optim_step()) == {"loss/grad_norm", "trainer/lr", "trainer/refused"}
    assert run.routing() == {}
