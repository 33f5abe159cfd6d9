"""Whole runs with vLLM as engine: `rollout.engine=vllm` is the embedded engine's run over again, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlloop.cli import main
from rlloop.models import new_model, save_model
from rlloop.records import read_records
from rlloop.testing import planted_fault
from tests.fault.tiny_run import history, make_model

OVERRIDES = [
    "model.path=model", "reward._target_=learnable.reward", "trainer.num_steps=2", "trainer.lr=1e-2",
    "rollout.num_prompts=4", "rollout.group_size=4", "eval.num_draws=8",
]  # fmt: skip


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch) -> None:
    make_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def train(run: str, *overrides: str) -> int:
    return main(["train", "--config-name", "countdown", f"run.dir={run}", *OVERRIDES, *overrides])


def test_two_steps_are_the_embedded_engines_bit_for_bit():
    assert train("embedded") == train("vllm", "rollout.engine=vllm") == 0
    assert history(Path("vllm")) == history(Path("embedded"))
    weights = [load_file(f"{run}/checkpoints/step_2/model.safetensors") for run in ("embedded", "vllm")]
    before = load_file("model/model.safetensors")
    assert any((weights[0][name] != before[name]).any() for name in before)
    assert all((weights[0][name] == weights[1][name]).all() for name in before)
    for record in list(read_records(Path("vllm/metrics.jsonl")))[1:]:
        assert record["parity/tokens_different"] == record["parity/k3"] == 0
        assert record["parity/tokens"] > 100


def test_a_broken_contract_stops_the_run(capsys):
    with planted_fault("attention"):
        assert train("broken", "rollout.engine=vllm") == 3
    assert "attention" in capsys.readouterr().err


def test_stock_is_observed_and_not_required(tmp_path, capsys):
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 160, "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": True, "eos_token_id": 1,
    }  # fmt: skip
    save_model(new_model(config, seed=0), tmp_path / "wide")
    stock = ["rollout.engine=vllm_stock", "model.path=wide", "model.dtype=bfloat16"]
    assert train("required", *stock) == 2
    assert "parity.mode=require refuses" in capsys.readouterr().err
    assert train("stock", *stock, "parity.mode=observe") == 0
    for record in list(read_records(Path("stock/metrics.jsonl")))[1:]:
        assert record["parity/tokens_different"] > 0
        assert 0 < record["parity/k3"] < 1e-2
