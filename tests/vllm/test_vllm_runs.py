"""Whole runs with vLLM as engine: `rollout.engine=vllm` is the embedded engine's run over again, bit for bit."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlloop.cli.main import main
from rlloop.models import new_model, save_model
from rlloop.rollout.vllm.engine import VllmEngine
from rlloop.runs.folder import read_records
from rlloop.testing import planted_fault
from tests.support.tiny_run import history, make_model
from tests.support.vllm_families import FAMILIES, SMALL

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


def test_two_steps_are_the_embedded_engines_bit_for_bit(monkeypatch):
    closed, close = [], VllmEngine.close
    monkeypatch.setattr(VllmEngine, "close", lambda engine: (closed.append(weakref.ref(engine)), close(engine)))
    assert train("embedded") == train("vllm", "rollout.engine=vllm") == 0
    assert history(Path("vllm")) == history(Path("embedded"))
    weights = [load_file(f"{run}/checkpoints/step_2/model.safetensors") for run in ("embedded", "vllm")]
    before = load_file("model/model.safetensors")
    assert any((weights[0][name] != before[name]).any() for name in before)
    assert all((weights[0][name] == weights[1][name]).all() for name in before)
    for record in list(read_records(Path("vllm/metrics.jsonl")))[1:]:
        assert record["parity/tokens_different"] == record["parity/k3"] == 0
        assert record["parity/tokens"] > 100
    gc.unfreeze()  # vLLM froze what there was before its engine
    gc.collect()
    assert [engine() for engine in closed] == [None]


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_and_latent_attention_too(tmp_path, family):
    """Under `require`, the default: choices of experts, as recorded by either engine, are the trainer's as well."""
    save_model(new_model({**SMALL, **FAMILIES[family]}, seed=0, dtype="bfloat16"), tmp_path / family)
    shared = [f"model.path={family}", "model.dtype=bfloat16"]
    assert train("embedded", *shared) == train("vllm", *shared, "rollout.engine=vllm") == 0
    assert history(Path("vllm")) == history(Path("embedded"))
    for record in list(read_records(Path("vllm/metrics.jsonl")))[1:]:
        assert record["parity/tokens_different"] == record["parity/router_different"] == 0


def test_pictures_too(tmp_path, monkeypatch):
    """Both engines' own prefill of a prompt with an image is compared as well."""
    monkeypatch.setattr("rlloop.cache.cache_root", lambda: tmp_path)
    sizes = ["rollout.num_prompts=2", "rollout.group_size=3", "trainer.num_steps=2", "eval.num_draws=2"]
    shared = ["train", "--config-name", "images", *sizes, "task.demonstrations=4", "task.warm_steps=2"]
    for run, engine in (("embedded", "embedded"), ("vllm", "vllm")):
        assert main([*shared, f"run.dir={run}", f"rollout.engine={engine}"]) == 0
    assert history(Path("vllm")) == history(Path("embedded"))
    for record in list(read_records(Path("vllm/metrics.jsonl")))[1:]:
        assert record["parity/tokens"] > 0 < record["parity/prompt_tokens"]
        assert record["parity/tokens_different"] == record["parity/k3_image"] == record["parity/k3_text"] == 0


def test_in_actors_of_ray(tmp_path):
    """A replica takes deltas into its live parameters; vLLM inside it computes with these."""
    assert train("embedded") == 0
    overrides = ["launch=ray", "ray.replicas=1", "ray.cpus_per_worker=0.5", "rollout.engine=vllm"]
    assert train("ray", *overrides) == 0
    assert history(Path("ray")) == history(Path("embedded"))


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
