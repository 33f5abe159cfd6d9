"""Reading of config.json, and refusal by name of unsupported settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlloop.errors import ModelError
from rlloop.models.architecture import LinearScaling, Llama3Scaling, RopeConfig
from rlloop.models.config import parse_config, read_config
from rlloop.models.ropes import rope_table
from tests.support.checkpoints import EVERY
from tests.support.raw_config import raw

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def test_what_sets_the_families_apart():
    qwen3, qwen2, llama = (parse_config(raw(family)) for family in ("qwen3", "qwen2", "llama"))
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen3.output_bias, qwen3.head_dim) == (True, False, False, 16)
    assert (qwen2.qk_norm, qwen2.qkv_bias, qwen2.output_bias, qwen2.head_dim) == (False, True, False, 12)
    assert (llama.qk_norm, llama.qkv_bias, llama.output_bias, llama.head_dim) == (False, False, False, 12)
    assert qwen3.rope.scaling is None
    assert llama.rope == RopeConfig(500.0, Llama3Scaling(8.0, 1.0, 4.0, 64))
    assert qwen3.eos_token_ids == (2,)


PUBLISHED = {
    "Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
            "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
            "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
            "vocab_size": 151936,
        },
        (64, True, (151643,), RopeConfig(1e6)),
    ),
    "Qwen3-0.6B": (
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
            "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
            "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        },
        (128, True, (151645,), RopeConfig(1e6)),
    ),
    "Llama-3.1-8B-Instruct": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False,
            "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
            "rope_scaling": {
                "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 128256,
        },
        (128, False, (128001, 128008, 128009), RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))),
    ),
    "SmolLM2-135M-Instruct": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
            "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
            "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
            "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
            "transformers_version": "4.42.3", "unk_token_id": 0, "use_cache": True, "vocab_size": 49152,
        },
        (64, True, (2,), RopeConfig(1e5)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    published, wanted = PUBLISHED[name]
    config = parse_config(published)
    assert (config.head_dim, config.tied, config.eos_token_ids, config.rope) == wanted


def test_biases_where_the_config_asks_for_them():
    llama = parse_config(raw("llama", attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)


@pytest.mark.parametrize("rope", [{"type": "llama3", **LLAMA3}, {"rope_type": "llama3", **LLAMA3}])
def test_both_spellings_of_rope_say_the_same(rope):
    """And `type` is what `rope_type` was called."""
    older = raw("llama", rope_parameters=..., rope_theta=500.0, rope_scaling=rope)
    assert parse_config(older).rope == parse_config(raw("llama")).rope
    plain = raw("qwen3", rope_parameters=..., rope_theta=1e6, rope_scaling=None)
    assert parse_config(plain).rope == RopeConfig(1e6)
    assert parse_config(raw("qwen3", rope_parameters=...)).rope == RopeConfig(10000.0)


def test_keys_of_older_files_that_change_nothing():
    older = raw(torch_dtype="bfloat16", _name_or_path="x", top_p=0.9, quantization_config=None, something_new=None)
    assert parse_config(older) == parse_config(raw())
    tokens = {"unk_token_id": 0, "cls_token_id": 1, "mask_token_id": 4}
    assert parse_config(raw(**tokens, tf_legacy_loss=False, is_causal=True, hidden_act="swish")) == parse_config(raw())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM.*Qwen3ForCausalLM"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "Qwen3ForSequenceClassification"),
        ({"architectures": ..., "model_type": "gpt2"}, "gpt2"),
        ({"model_type": "llama"}, "'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is \"silu\" or \"swish\""),
        ({"is_causal": False}, "is_causal is False; supported is true"),
        ({"is_causal": None}, "is_causal is null; supported is true"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config of quant_method 'awq'.*bfloat16"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "layer_types": ...}, "window is 1"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}, "rope_type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [4, 4]}}, "rope_parameters.mrope_section"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "longrope", "factor": 2.0}}, "g.rope_type is 'longrope'"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; supported is null or an object"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, "both rope_scaling and rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "no rope_parameters.low_freq_factor"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor is 1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"num_experts": 8}, "num_experts"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
        ({"mlp_bias": True}, "mlp_bias"),  # not Qwen3's
        ({"hidden_size": ...}, "no hidden_size"),
        ({"head_dim": ...}, "no head_dim"),
        ({"vocab_size": "97"}, "vocab_size is '97'"),
        ({"num_hidden_layers": 0, "layer_types": ...}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps is null; supported is a positive number"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; supported is a positive number"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf"),
        ({"hidden_size": 10**30}, "hidden_size is 1000.*; supported is at most"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"eos_token_id": 97}, "eos_token_id is 97.*0 to 96"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(changes, named):
    with pytest.raises(ModelError, match=named):
        parse_config(raw(**changes))


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"num_attention_heads": 5}, "num_attention_heads is 5; supported is a divisor of hidden_size"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("deepseek_v3", {"first_k_dense_replace": 1.0}, "first_k_dense_replace is 1.0; supported is a whole number"),
        ("deepseek_v3", {"first_k_dense_replace": "1"}, "first_k_dense_replace is '1'"),
        ("deepseek_v3", {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),  # transformers passes it over
        ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank is -1; supported is a positive whole number"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2; supported is 4"),
        ("deepseek_v32", {"num_key_value_heads": None}, "num_key_value_heads is null"),
        ("deepseek_v3", {"head_dim": 20}, "head_dim is 20; supported is 8"),
        ("deepseek_v3", {"n_group": None}, "n_group is null"),
        ("glm_moe_dsa", {"indexer_types": ["full", "none", "full"]}, "indexer_types.*full or shared for each of 3"),
        ("glm_moe_dsa", {"indexer_types": ..., "index_topk_pattern": "SFF"}, "full for the first"),
        ("glm_moe_dsa", {"indexer_types": ..., "index_topk_freq": "2"}, "index_topk_freq is '2'"),
        ("minimax_m2", {"rotary_dim": 17, "rope_parameters": ...}, "rotary_dim is 17; supported is at most 16"),
        ("qwen3_5_moe", {"full_attention_interval": 0}, "full_attention_interval is 0"),
        ("nemotron_h", {"moe_latent_size": -1}, "moe_latent_size is -1; supported is a positive whole number"),
        ("nemotron_h", {"layers_block_type": 3}, "layers_block_type is 3"),
        ("gpt_oss", {"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
    ],
)  # fmt: skip
def test_what_a_family_does_not_have_is_refused_by_name(family, changes, named):
    parse_config(raw(family))
    with pytest.raises(ModelError, match=named):
        parse_config(raw(family, **changes))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast is 1.0; supported is at least beta_slow"),
        ({"original_max_position_embeddings": 6}, "original_max_position_embeddings is 6; supported is at least 7"),
        ({"beta_slow": 11.0}, "original_max_position_embeddings is 64; supported is at least 70"),
        ({"rope_theta": 1}, "rope_theta is 1.0; supported is above 1 under yarn"),
        ({"factor": None}, "factor is null"),
        ({"factor": ...}, "no rope_parameters.factor"),
        ({"beta_fast": "32"}, "beta_fast is '32'"),
        ({"mscale": True}, "mscale is True"),
        ({"rope_type": None}, "rope_type is null; supported is default or linear or llama3 or yarn"),
    ],
)  # fmt: skip
def test_yarn_that_no_table_follows_from_is_refused_by_name(changes, named):
    rope = {name: value for name, value in {**YARN, **changes}.items() if value is not ...}
    with pytest.raises(ModelError, match=named):
        parse_config(raw(rope_parameters=rope))


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"beta_fast": 1.0}, {"original_max_position_embeddings": 7}, {"beta_fast": 9.0, "beta_slow": 8.0},
        {"truncate": False, "beta_fast": 2.0, "beta_slow": 2.0}, {"rope_theta": 2.0}, {"beta_fast": None},
        {"rope_theta": 1.5, "original_max_position_embeddings": 4096},  # all frequencies beyond the ramp
        {"truncate": None}, {"mscale": None, "mscale_all_dim": 0}, {"attention_factor": None},
    ],
)  # fmt: skip
def test_yarn_has_transformers_bits_to_the_edges(changes):
    written = raw(rope_parameters={**YARN, **changes})
    frequency, factor = ROPE_INIT_FUNCTIONS["yarn"](Qwen3Config(**written), "cpu")
    config = parse_config(written)
    angle = torch.outer(torch.arange(256.0), frequency)
    table = torch.stack(rope_table(config.rope, config.rope_dim, 256))
    assert torch.equal(table, torch.stack((angle.cos() * factor, angle.sin() * factor)))


# Which tokens end a sequence is the generation's business; without a rank of queries the tensors are others.
OURS_TO_SAY = ("architectures", "eos_token_id", "q_lora_rank")


@pytest.mark.parametrize("family", EVERY)
def test_a_key_that_is_left_out_means_what_it_means_to_transformers_or_is_asked_for(family):
    defaults = EVERY[family][0](head_dim=128) if family == "qwen3_moe" else EVERY[family][0]()
    written = json.loads(defaults.to_json_string())
    written["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[defaults.model_type]]
    whole, asked = parse_config(written), 0
    for name in written.keys() - {*OURS_TO_SAY}:
        try:
            assert parse_config({key: value for key, value in written.items() if key != name}) == whole, name
        except ModelError:
            asked += 1
    assert 6 <= asked < 18
    rope = written.get("rope_parameters") or {}
    for name in {"rope_theta", "partial_rotary_factor"} & rope.keys():
        less = {key: value for key, value in rope.items() if key != name}
        assert parse_config({**written, "rope_parameters": less}) == whole, name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_window_layers": 2},  # these two are the dense models': they say nothing here
        {"layer_types": ["full_attention"] * 24},
    ],
)
def test_a_window_of_qwen3_moe_is_every_layers(changes):
    written = {**json.loads(EVERY["qwen3_moe"][0](head_dim=128).to_json_string()), **changes, "sliding_window": 16}
    written["architectures"] = ["Qwen3MoeForCausalLM"]
    assert parse_config({**written, "use_sliding_window": False}).window == 0
    with pytest.raises(ModelError, match="sliding_window is 16; supported is null"):
        parse_config({**written, "use_sliding_window": True})


GLM5 = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829], "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
    "head_dim": 64, "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048,
    "indexer_rope_interleave": True, "initializer_range": 0.02, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 202752, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "model_type": "glm_moe_dsa", "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 4, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1, "pad_token_id": 154820, "pretraining_tp": 1, "q_lora_rank": 2048,
    "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_interleave": True, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip


def test_glm5_reads_as_it_was_released() -> None:
    config = parse_config(GLM5)
    assert config.latent is not None
    assert config.latent.indexer is not None
    assert config.latent.indexer.interleaved
    assert config == parse_config({**GLM5, "moe_router_dtype": "float32", "index_share_for_mtp_iteration": True})
    for name in ("indexer_rope_interleave", "rope_interleave"):
        with pytest.raises(ModelError, match=f"{name} is False; supported is true"):
            parse_config({**GLM5, name: False})


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "hidden_act": "silu", "initial_context_length": 4096, "max_position_embeddings": 131072,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "attention_bias": True,
    "attention_dropout": 0.0, "eos_token_id": 200002, "pad_token_id": 199999, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "output_router_logits": False, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip


def test_layers_by_their_older_names() -> None:
    kinds = ["deepseek_sparse_attention"] * GLM5["num_hidden_layers"]
    assert parse_config({**GLM5, "layer_types": kinds}) == parse_config(GLM5)
    with pytest.raises(ModelError, match=r"layer_types.*indexed_attention for each of 4 layers"):
        parse_config({**GLM5, "layer_types": ["full_attention"] * 4})


@pytest.mark.parametrize(
    ("released", "own"), [(GLM5, "n_routed_experts"), (GPT_OSS, "num_local_experts")], ids=["glm5", "gpt_oss"]
)
def test_the_number_of_experts_under_other_names_must_be_the_same(released: dict[str, Any], own: str) -> None:
    others = {"num_experts", "num_local_experts", "n_routed_experts"} - {own}
    assert parse_config({**released, **dict.fromkeys(others, released[own])}) == parse_config(released)
    for name in others:
        with pytest.raises(ModelError, match=f"{name} is 64; supported is the number of experts that {own} says"):
            parse_config({**released, name: 64})
        with pytest.raises(ModelError, match=f"{name} is 'all'; supported is a positive whole number"):
            parse_config({**released, name: "all"})
        with pytest.raises(ModelError, match=rf"config\.json has no {own}"):
            parse_config({key: value for key, value in released.items() if key != own} | {name: 32})


def test_gpt_oss_reads_as_it_was_released() -> None:
    config = parse_config(GPT_OSS)
    assert config.mixture is not None
    assert (config.window, config.windowed, config.mixture.clamp) == (128, (0, 2), (7.0, 1.702))
    kinds = ["full_attention"] * 3 + ["sliding_attention"]
    assert parse_config({**GPT_OSS, "layer_types": kinds}).windowed == (3,)
    assert parse_config({**GPT_OSS, "experts_per_token": None, "initial_context_length": None}) == config
    assert parse_config({**GPT_OSS, "rope_scaling": {"rope_type": "default"}}).rope.scaling is None
    linear = {"rope_type": "linear", "factor": 2.0}
    assert parse_config({**GPT_OSS, "rope_scaling": linear}).rope.scaling == LinearScaling(2.0)
    for changes, named in (
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types.*sliding_attention for each of 4 layers"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"num_experts_per_tok": 33, "experts_per_token": None}, "num_experts_per_tok is 33"),
        ({"num_experts_per_tok": 2}, r"experts_per_token is 4; supported is what num_experts_per_tok says \(2\)"),
        ({"initial_context_length": 2048}, r"length is 2048; .* what original_max_position_embeddings says \(4096\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config of quant_method 'fp8'"),
    ):
        with pytest.raises(ModelError, match=named):
            parse_config({**GPT_OSS, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 16, "layer_types": ...},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "layer_types": ...},
        {"use_sliding_window": True, "sliding_window": 16},  # its layer_types say full attention
    ],
)
def test_a_window_that_no_layer_uses_is_fine(changes):
    assert parse_config(raw("qwen2", **changes)) == parse_config(raw("qwen2"))


def test_the_generation_config_says_what_ends_a_sequence(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(raw()))
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert read_config(tmp_path).eos_token_ids == (5, 6)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True}))
    assert read_config(tmp_path).eos_token_ids == (2,)


def test_a_folder_that_is_none(tmp_path: Path):
    with pytest.raises(ModelError, match="does not exist"):
        read_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_config(tmp_path)
    for text in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json is not JSON"):
            read_config(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json is no folder; give a"):
        read_config(tmp_path / "config.json")


def test_an_adapter_beside_the_model_is_not_passed_over(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(raw()))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter \(adapter_config\.json\), which would not be applied; merge it"):
        read_config(tmp_path)
