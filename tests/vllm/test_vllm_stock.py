"""Stock vLLM: near the trainer and not equal; and its live weights are those that were sent, each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from rlloop import ConfigError, Model, SamplingParams
from rlloop.errors import SyncError
from rlloop.models import new_model
from rlloop.rollout.vllm.stock_engine import StockVllmEngine
from rlloop.sync.live import LiveTarget
from tests.support.mismatch import gaps, k3
from tests.support.tiny_models import tiny_qwen3


@pytest.fixture(scope="module", params=[("bfloat16", True), ("float32", False)], ids=["bf16-tied", "fp32-untied"])
def model(request) -> Model:
    """Heads of 32, the narrowest that vLLM's CPU kernel knows."""
    dtype, tied = request.param
    config = {**tiny_qwen3().config.raw, "hidden_size": 64, "head_dim": 32, "tie_word_embeddings": tied}
    return new_model(config, seed=0, dtype=dtype)


@pytest.fixture(scope="module")
def engine(model) -> Iterator[StockVllmEngine]:
    engine = StockVllmEngine(model, max_running=32)
    yield engine
    engine.close()


def test_near_the_trainer_and_not_equal_before_and_after_an_update(model, engine):
    near = {torch.bfloat16: 2e-3, torch.float32: 1e-9}[model.dtype]
    gap = gaps(model, engine)
    assert 0 < k3(gap) < near
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    assert k3(gaps(model, engine)) > 10 * near  # vLLM's parameters are its own
    engine.set_version(1)
    assert 0 < k3(gaps(model, engine)) < near
    assert engine.fingerprint() != model.fingerprint()


def test_each_weight_reaches_a_live_parameter(model, engine):
    """One tensor at a time: the fused ones, too, by their own names, and the tied head."""
    engine.set_version(2)
    layer = "model.layers.1."
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"]
    parameters = dict(model.named_parameters())
    for name in [*(f"{layer}{each}.weight" for each in names), "model.embed_tokens.weight", "model.norm.weight"]:
        before = {each: part.clone() for each, part in engine.live_parts().items()}
        with torch.no_grad():
            parameters[name].neg_()
        engine.set_version(engine.policy_version + 1)
        changed = {each for each, part in engine.live_parts().items() if not torch.equal(part, before[each])}
        tied = {"lm_head.weight"} if name == "model.embed_tokens.weight" and model.config.tied else set()
        assert changed == {name, *tied}


def test_a_weight_without_a_place_is_refused(model, engine, monkeypatch):
    parts = engine.live_parts()
    monkeypatch.setattr(engine, "live_parts", lambda: {k: v for k, v in parts.items() if "k_proj" not in k})
    with pytest.raises(SyncError, match=r"not the same: model\.layers\.0\.self_attn\.k_proj\.weight"):
        engine.set_version(5)
    deaf = _Deaf(parts["model.norm.weight"].clone())
    monkeypatch.setattr(engine, "live_parts", lambda: {**parts, "model.norm.weight": deaf})
    with torch.no_grad():
        dict(model.named_parameters())["model.norm.weight"].mul_(2)
    with pytest.raises(SyncError, match=r"other weights than it was sent: model\.norm\.weight"):
        engine.set_version(5)


class _Deaf(torch.Tensor):
    """Takes no copy: what a swallowed update looks like."""

    def copy_(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self


def test_live_weights_are_a_replicas_target(model, engine):
    target = LiveTarget(engine.live_parts().items(), engine.set_version)
    name = "model.layers.0.self_attn.k_proj.weight"
    bits = target.read(name)
    flipped = dataclasses.replace(bits, array=bits.array ^ 1)
    target.write(name, flipped)
    assert (target.read(name).array == flipped.array).all()
    target.write(name, bits)


def test_what_makes_logprobs_incomparable_is_refused(engine, monkeypatch):
    with pytest.raises(ConfigError, match="at the edge is impossible for the trainer"):
        engine.generate([[5]], SamplingParams(max_tokens=4, top_k=20))
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    with pytest.raises(ConfigError, match="unset it"):
        StockVllmEngine(engine.model)
