"""Operations of an update, counted by hand on small models."""

import pytest
import torch

from rlloop.algorithms import get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.metrics import Mean
from rlloop.models import load_model, new_model
from rlloop.trainer import Trainer
from rlloop.trainer.mfu import active_weights, operations, peak
from tests.support.train_sequences import make_batch

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def test_a_token_meets_its_experts_and_no_embedding():
    model = new_model(MIXTURE, seed=0, dtype="float32")
    attention = 16 * 4 * 8 * 2 + 16 * 2 * 8 * 2 + 2 * 8  # q, o; k, v; norms of heads
    layer = attention + 16 * 6 + 2 * (3 * 16 * 24) + 2 * 16  # router, two experts, norms
    assert active_weights(model) == pytest.approx(3 * layer + 16 + 40 * 16)


def test_a_tied_embedding_is_the_head(folder):
    model = load_model(folder, dtype="float32")
    assert active_weights(model) == sum(weight.numel() for weight in model.parameters())


def test_attention_grows_with_the_square(folder):
    model = load_model(folder, dtype="float32")
    once, twice = (operations(model, [(0, length)]) for length in (50, 100))
    assert twice - 2 * once == 6 * 2 * 4 * 8 * (100**2 - 2 * 50**2)  # layers, heads, their width
    assert operations(model, [(0, 50), (0, 50)]) == 2 * once
    assert operations(model, [(50, 100)]) == twice - once


def test_only_known_gpus_have_a_peak(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert peak(torch.device("cuda"), torch.bfloat16) == 9.89e14
    assert peak(torch.device("cuda"), torch.float32) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some other")
    assert peak(torch.device("cuda"), torch.bfloat16) is None


@pytest.mark.parametrize("custom", [False, True])
def test_an_update_reports_it_where_the_peak_is_known(folder, monkeypatch, custom):
    trainer, batch = Trainer(load_model(folder, dtype="float32"), TrainerConfig()), make_batch(3)
    update = trainer.forward_backward_custom if custom else trainer.forward_backward
    assert "perf/mfu" not in update(batch, get_loss("grpo")).metrics
    monkeypatch.setattr("rlloop.trainer.mfu.peak", lambda device, dtype: 1e12)
    result = update(batch, get_loss("grpo"))
    lengths = [len(each.token_ids) for each in batch]
    found = result.metrics["perf/mfu"]
    assert isinstance(found, Mean)
    assert found.total == operations(trainer.model, [(0, length) for length in lengths])
    assert 0 < found.value < 1
