"""Stock vLLM with experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlloop import ConfigError, SamplingParams
from rlloop.models import new_model
from rlloop.models.scoring import ScoreRow, score
from rlloop.rollout.vllm.stock_engine import StockVllmEngine
from rlloop.rollout.vllm.weights import plain
from rlloop.sync.live import named_weights
from tests.support.mismatch import gaps, k3

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 64, "moe_intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [1], "max_position_embeddings": 256, "tie_word_embeddings": True,
    "eos_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_live_packed_and_their_choices_come_back(dtype):
    """vLLM's CPU kernel wants an expert's numbers in an order of its own; 48 rows are padded to 64 for it."""
    model = new_model(MIXTURE, seed=0, dtype=dtype)
    engine = StockVllmEngine(model, max_running=32)
    near = {torch.bfloat16: 5e-3, torch.float32: 1e-9}[model.dtype]
    assert abs(k3(gaps(model, engine))) < near
    names = [f"model.layers.2.mlp.experts.5.{part}_proj.weight" for part in ("gate", "up", "down")]
    weights = named_weights(model)
    for version, name in enumerate([*names, "model.layers.0.mlp.gate.weight", "model.layers.1.mlp.up_proj.weight"], 1):
        before = {each: plain(part).clone() for each, part in engine.live_parts().items()}
        with torch.no_grad():
            weights[name].copy_(weights[name].roll(1, 0))
        engine.set_version(version)
        changed = {each for each, part in engine.live_parts().items() if not torch.equal(plain(part), before[each])}
        assert changed == {name}
    prompts = [[5, 6, 7], list(range(10, 60)), list(range(10, 55))]
    made = engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
    for each in made:
        tokens = [*each.prompt_ids, *each.token_ids]
        row = ScoreRow(tokens, range(len(each.prompt_ids), len(tokens)), each.sampling, each.routed_experts)
        own: list[torch.Tensor] = []
        score(model, [row], watch=lambda routes, _, own=own: own.append(routes.chosen()))
        assert each.routed_experts is not None
        assert each.routed_experts.shape == own[0].shape == (len(tokens) - 1, 2, 2)
        same = np.sort(each.routed_experts, -1) == own[0].sort(-1).values.numpy()
        assert same.mean() > 0.95  # near ties fall otherwise
        replayed, _ = score(model, [row], replay=True)
        assert abs(k3(replayed.detach().double().numpy() - each.logprobs)) < near
    engine.close()


OF_QWEN = {"num_experts", "decoder_sparse_step", "mlp_only_layers", "head_dim"}
LATENT = {name: value for name, value in MIXTURE.items() if name not in OF_QWEN} | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 48, "kv_lora_rank": 512,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "tie_word_embeddings": False,
}  # fmt: skip


def test_latent_attention_follows_the_trainers_weights():
    """vLLM multiplies by two matrices that it makes of `kv_b_proj`; they are made anew."""
    model = new_model(LATENT, seed=0)
    engine = StockVllmEngine(model, max_running=32)
    assert abs(k3(gaps(model, engine))) < 1e-9
    weights = named_weights(model)
    assert weights.keys() == engine.live_parts().keys()
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    with torch.no_grad():
        weights[name].copy_(2 * weights[name].roll(1, 0))
    assert k3(gaps(model, engine)) > 1e-6
    engine.set_version(1)
    assert abs(k3(gaps(model, engine))) < 1e-9
    engine.close()


@pytest.mark.parametrize("other", [{"kv_lora_rank": 256}, {"qk_rope_head_dim": 32}])
def test_latent_attention_of_other_shapes_is_refused(other):
    with pytest.raises(ConfigError, match="knows kv_lora_rank=512 with qk_rope_head_dim=64"):
        StockVllmEngine(new_model({**LATENT, **other}, seed=0))
