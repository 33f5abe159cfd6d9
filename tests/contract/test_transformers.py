"""The definition against transformers on random checkpoints: logprobs, and gradients parameter by parameter.

Measured in float32 with the default profile: logprobs (down to -20) within 1.3e-5, gradients within 4e-6 of their norm
(docs/models.md). The bounds below leave room for the order in which transformers sums on other CPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlloop.models import load_model, token_logprobs
from rlloop.types import SamplingParams
from tests.support.checkpoints import FAMILIES, LLAMA3_ROPE, MIXTURES, YARN_ROPE, make_checkpoint
from tests.support.family_checks import compare, logprobs_of, sequences, theirs

LOGPROB_ERROR = 3e-5
GRADIENT_ERROR = 1e-5  # relative, in each parameter's own norm


VARIANTS = {
    **{f"{family}-{'tied' if tied else 'untied'}": (family, {"tie_word_embeddings": tied})
       for family in FAMILIES for tied in (True, False)},
    "qwen3-biases-narrow-heads": ("qwen3", {"attention_bias": True, "head_dim": 8, "num_key_value_heads": 4}),
    "qwen2-one-key-head": ("qwen2", {"num_key_value_heads": 1}),
    "llama-biases-wide-heads": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    **{family: (family, {}) for family in MIXTURES},
    "qwen3_moe-plain-weights-13-experts": ("qwen3_moe", {"norm_topk_prob": False, "num_experts": 13}),
    "qwen3_moe-a-dense-layer": ("qwen3_moe", {"mlp_only_layers": [0], "num_experts_per_tok": 3, "num_experts": 16}),
    "deepseek_v3-no-query-latent": ("deepseek_v3", {"q_lora_rank": None, "rope_interleave": False}),
    "deepseek_v3-yarn-one-group": ("deepseek_v3", {
        "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "attention_bias": True, "rope_parameters": YARN_ROPE,
    }),
    "gpt_oss-13-experts-no-biases-all-windows": ("gpt_oss", {
        "num_local_experts": 13, "num_experts_per_tok": 3, "attention_bias": False, "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 2, "swiglu_limit": 7.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    }),
    "llama-plain-rope": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_and_gradients_are_transformers(tmp_path: Path, variant: str) -> None:
    family, config = VARIANTS[variant]
    error, gradients = compare(tmp_path, make_checkpoint(tmp_path, family, **config))
    assert error < LOGPROB_ERROR
    assert max(gradients.values()) < GRADIENT_ERROR, max(gradients, key=lambda name: gradients[name])


@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", {"rope_parameters": {**LLAMA3_ROPE, "factor": 9.0}}), ("qwen3", {"rms_norm_eps": 1e-3})],
)
def test_the_bounds_are_tight_enough_to_see_a_wrong_constant(tmp_path: Path, family: str, config: dict) -> None:
    make_checkpoint(tmp_path, family)
    error, gradients = compare(tmp_path, make_checkpoint(tmp_path / "other", family, **config))
    assert error > 10 * LOGPROB_ERROR
    assert max(gradients.values()) > 10 * GRADIENT_ERROR


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_checkpoint_in_float32(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    error, gradients = compare(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    assert error < LOGPROB_ERROR
    assert max(gradients.values()) < GRADIENT_ERROR


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_bfloat16_compute_is_no_further_from_float32_than_transformers(tmp_path: Path, family: str) -> None:
    exact = make_checkpoint(tmp_path, family, dtype=torch.bfloat16).float()
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        mine = torch.cat(token_logprobs(load_model(tmp_path, dtype="bfloat16"), sequences()))
        wanted = torch.cat([logprobs_of(exact, *pair) for pair in sequences()])
        other = torch.cat([logprobs_of(rounded, *pair) for pair in sequences()])
    assert mine.dtype == torch.float32
    assert 0 < (mine - wanted).abs().mean() < 1.2 * (other - wanted).abs().mean()


def test_logprobs_under_sampling_parameters(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, eos_token_id=[2, 3])
    (pair,) = sequences()[3:4]
    params = SamplingParams(max_tokens=80, min_tokens=9, temperature=0.7, stop_token_ids=(11,))
    (mine,) = token_logprobs(load_model(tmp_path), [pair], sampling=[params])
    logits = theirs(model, *pair)
    logits[:9, [2, 3, 11]] = -torch.inf
    wanted = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(pair[1])[:, None])[:, 0]
    possible = wanted.isfinite()
    assert torch.equal(mine.isfinite(), possible)
    assert (mine - wanted)[possible].abs().max() < 2 * LOGPROB_ERROR


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3", {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}),
        ("llama", {}),
        ("deepseek_v3", {"rope_parameters": YARN_ROPE}),
        ("llama", {
            "head_dim": 128,
            "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
        }),
    ],
)  # fmt: skip
def test_the_rope_table_has_transformers_bits(tmp_path: Path, family: str, config: dict) -> None:
    model = make_checkpoint(tmp_path, family, num_hidden_layers=1, max_position_embeddings=9000, **config)
    x, positions = torch.zeros(1), torch.arange(9000)[None]
    cos, sin = (table[0] for table in model.model.rotary_emb(x, positions))
    table = load_model(tmp_path).rope.table
    assert torch.equal(torch.stack((cos, sin)), torch.cat((table, table), -1))
