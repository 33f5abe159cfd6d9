"""Model families: reads each family's own keys of config.json, and keys with a family-specific meaning."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rlloop.models.architecture import DeltaConfig, LinearScaling, MambaConfig, MixtureConfig, RopeConfig
from rlloop.models.config_reader import Keys, Own, all_are, check_routing, expert_count
from rlloop.models.deepseek_families import deepseek, deepseek_sparse, glm_sparse
from rlloop.numerics.routing import Routing


def _llama(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    _full_attention(keys, num_layers)
    if hidden_size % num_heads:
        keys.refuse("num_attention_heads", num_heads, f"a divisor of hidden_size ({hidden_size})")
    keys.where_null(num_key_value_heads=num_heads, head_dim=hidden_size // num_heads)
    bias = keys.flag("attention_bias", False)
    return {
        "num_kv_heads": keys.count("num_key_value_heads", num_heads),
        "head_dim": keys.count("head_dim", hidden_size // num_heads),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": keys.flag("mlp_bias", False),
    }


def _qwen2(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    _full_attention(keys, num_layers)
    keys.where_null(num_key_value_heads=num_heads)
    return {
        "num_kv_heads": keys.count("num_key_value_heads"),
        "head_dim": keys.count("head_dim", hidden_size // num_heads),
        "qkv_bias": True,
    }


def _qwen3(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    _full_attention(keys, num_layers)
    keys.where_null(num_key_value_heads=num_heads)
    bias = keys.flag("attention_bias", False)
    return {
        "num_kv_heads": keys.count("num_key_value_heads"),
        "head_dim": keys.count("head_dim"),
        "qk_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
    }


def _qwen3_moe(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    if keys.flag("use_sliding_window", False):  # of every layer, whatever layer_types and max_window_layers say
        keys.fixed("sliding_window", None)
    keys.take("sliding_window")
    for name, allowed in (("qkv_bias", False), ("shared_expert_intermediate_size", 0), ("use_qk_norm", True)):
        keys.fixed(name, allowed)  # Qwen3-Coder's files have them
    step, dense = keys.count("decoder_sparse_step", 1), keys.take("mlp_only_layers", [])
    if not all_are(dense, int):
        keys.refuse("mlp_only_layers", dense, "a list of whole numbers")
    count = expert_count(keys, "num_experts", "num_local_experts")
    routing = Routing(top_k=keys.count("num_experts_per_tok"), normalise=keys.flag("norm_topk_prob", False))
    layers = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    mixture = MixtureConfig(count, keys.count("moe_intermediate_size"), routing, layers)
    check_routing(keys, mixture)
    return {**_qwen3(keys, hidden_size, num_heads, num_layers, rope), "mixture": mixture}


def _qwen3_vl_moe(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    """Qwen3-VL's text model: the weights of the chosen experts are renormalised whatever `norm_topk_prob` says."""
    keys.take("norm_topk_prob")
    own = _qwen3_moe(keys, hidden_size, num_heads, num_layers, rope)
    routing = dataclasses.replace(own["mixture"].routing, normalise=True)
    return {**own, "mixture": dataclasses.replace(own["mixture"], routing=routing)}


def _minimax(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    _full_attention(keys, num_layers)
    for name, allowed in (
        ("use_qk_norm", True), ("qk_norm_type", "per_layer"), ("use_routing_bias", True), ("scoring_func", "sigmoid"),
        ("shared_intermediate_size", 0), ("attn_type_list", [1] * num_layers),
    ):  # fmt: skip
        keys.fixed(name, allowed)
    keys.take("router_jitter_noise")  # transformers adds router noise in training, which leaves logprobs undefined
    for name in ("auto_map", "shared_moe_mode", "num_mtp_modules", "mtp_transformer_layers", "use_mtp"):
        keys.take(name)
    head_dim, size = keys.count("head_dim", 128), keys.count("intermediate_size")
    routing = Routing(top_k=keys.count("num_experts_per_tok"), score="sigmoid", normalise=True)
    count = expert_count(keys, "num_experts", "num_local_experts")
    mixture = MixtureConfig(count, size, routing, tuple(range(num_layers)), bias=True, exact_gate=True)
    check_routing(keys, mixture)
    return {
        "num_kv_heads": keys.count("num_key_value_heads"),
        "head_dim": head_dim,
        "qk_norm": True,
        "whole_norm": True,
        "intermediate_size": size,
        "mixture": mixture,
    }


def _qwen35_moe(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    """Qwen3.5: three gated delta networks to one attention layer, and a gate on the shared expert."""
    keys.fixed("attn_output_gate", True)
    keys.fixed("mlp_only_layers", [])
    for name in ("intermediate_size", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"):
        keys.take(name)
    every = keys.count("full_attention_interval", 4)
    kinds = keys.names("layer_types", ("full_attention", "linear_attention"), num_layers) or [
        "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)
    ]
    delta = DeltaConfig(
        num_heads=keys.count("linear_num_value_heads", 32),
        num_key_heads=keys.count("linear_num_key_heads", 16),
        key_dim=keys.count("linear_key_head_dim", 128),
        value_dim=keys.count("linear_value_head_dim", 128),
        conv_width=keys.count("linear_conv_kernel_dim", 4),
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
    )
    if delta.num_heads % delta.num_key_heads:
        keys.refuse("linear_num_value_heads", delta.num_heads, f"a multiple of {delta.num_key_heads} key heads")
    mixture = MixtureConfig(
        num_experts=expert_count(keys, "num_experts"),
        expert_size=keys.count("moe_intermediate_size"),
        routing=Routing(top_k=keys.count("num_experts_per_tok"), normalise=True),
        layers=tuple(range(num_layers)),
        shared_size=keys.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    check_routing(keys, mixture)
    bias = keys.flag("attention_bias", False)
    return {
        "num_kv_heads": keys.count("num_key_value_heads"),
        "head_dim": keys.count("head_dim", 256),
        "qk_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "intermediate_size": mixture.expert_size,
        "output_gate": True,
        "centred_norms": True,
        "mixture": mixture,
        "delta": delta,
    }


BLOCKS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def _nemotron(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    """Nemotron 3: Mamba-2, attention without a rope, and experts without gates that may work on latents."""
    for name, allowed in (
        ("attention_bias", False), ("hidden_dropout", 0), ("residual_in_fp32", False), ("sliding_window", None),
    ):  # fmt: skip
        keys.fixed(name, allowed)
    keys.fixed("mamba_hidden_act", "silu", "swish", null=False)
    keys.fixed("mlp_hidden_act", "relu2", null=False)
    for name in (
        "auto_map", "num_logits_to_keep", "use_mamba_kernels", "expand", "time_step_max", "time_step_limit",
        "time_step_floor", "chunk_size", "mamba_proj_bias", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
        "n_shared_experts", "rescale_prenorm_residual", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
        "tie_word_embeddings",
    ):  # fmt: skip
        keys.take(name)
    kinds = keys.names("layers_block_type", BLOCKS.values(), num_layers)
    kinds = keys.names("hybrid_override_pattern", BLOCKS.values(), num_layers, BLOCKS) or kinds
    if kinds is None:
        keys.refuse("layers_block_type", None, f"{' or '.join(BLOCKS.values())} for each layer")
    bias, inner = keys.flag("use_bias", False), keys.flag("mlp_bias", False)
    eps = keys.number("layer_norm_epsilon", 1e-5)
    keys.fixed("norm_eps", eps)  # released files say it twice
    mamba = MambaConfig(
        num_heads=keys.count("mamba_num_heads", 128),
        head_dim=keys.count("mamba_head_dim", 64),
        num_groups=keys.count("n_groups", 8),
        state_dim=keys.count("ssm_state_size", 128),
        conv_width=keys.count("conv_kernel", 4),
        conv_bias=keys.flag("use_conv_bias", True),
        bias=bias,
        least_step=keys.number("time_step_min", 0.001),
    )
    if mamba.num_heads % mamba.num_groups:
        keys.refuse("mamba_num_heads", mamba.num_heads, f"a multiple of n_groups ({mamba.num_groups})")
    routing = Routing(
        top_k=keys.count("num_experts_per_tok", 2),
        score="sigmoid",
        groups=keys.count("n_group", 1),
        top_groups=keys.count("topk_group", 1),
        normalise=keys.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=keys.number("routed_scaling_factor", 1.0),
    )
    mixture = MixtureConfig(
        num_experts=expert_count(keys, "n_routed_experts", default=8),
        expert_size=keys.count("moe_intermediate_size", 7688),
        routing=routing,
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "moe"),
        shared_size=keys.count("moe_shared_expert_intermediate_size", 7688),
        bias=True,
        exact_gate=True,
        gated=False,
        latent_size=keys.count("moe_latent_size") if keys.has("moe_latent_size") else None,
    )
    check_routing(keys, mixture)
    return {
        "num_kv_heads": keys.count("num_key_value_heads", 8),
        "head_dim": keys.count("head_dim", 128),
        "mlp_bias": inner,
        "rms_norm_eps": eps,
        "rope": dataclasses.replace(rope, share=0.0),
        "tied": False,  # regardless of the file, as in transformers
        "blocks": tuple(kinds),
        "mixture": mixture if mixture.layers else None,
        "mamba": mamba,
    }


def _gpt_oss(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    """gpt-oss: attention sinks, a sliding window in every other layer, experts with biases and a clamped activation."""
    bias = keys.flag("attention_bias", True)
    kinds = keys.names("layer_types", ("full_attention", "sliding_attention"), num_layers) or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
    ]
    count, size = expert_count(keys, "num_local_experts"), keys.count("intermediate_size")
    top_k = keys.count("num_experts_per_tok", 4)
    twins = {"experts_per_token": ("num_experts_per_tok", top_k)}  # which released files repeat under another name
    if rope.scaling is not None and not isinstance(rope.scaling, LinearScaling):
        twins["initial_context_length"] = ("original_max_position_embeddings", rope.scaling.original_positions)
    for name, (twin, said) in twins.items():
        if keys.has(name) and (value := keys.count(name)) != said:
            keys.refuse(name, value, f"what {twin} says ({said})")
    keys.take("initial_context_length")  # without scaling, it changes nothing
    routing = Routing(top_k=top_k, normalise=True)  # a softmax over the chosen experts alone is the same
    clamp = (keys.number("swiglu_limit", 7.0), keys.number("swiglu_alpha", 1.702))
    mixture = MixtureConfig(count, size, routing, tuple(range(num_layers)), router_bias=True, clamp=clamp)
    check_routing(keys, mixture)
    return {
        "num_kv_heads": keys.count("num_key_value_heads"),
        "head_dim": keys.count("head_dim", 64),
        "qkv_bias": bias,
        "output_bias": bias,
        "intermediate_size": size,
        "sinks": True,
        "window": keys.count("sliding_window", 128),
        "windowed": tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"),
        "rms_norm_eps": keys.number("rms_norm_eps", 1e-5),
        "mixture": mixture,
    }


Family = Callable[[Keys, int, int, int, RopeConfig], Own]

FAMILIES: dict[str, tuple[tuple[str, ...], Family]] = {  # architecture -> (model_types, reader of its keys)
    "LlamaForCausalLM": (("llama",), _llama),
    "Qwen2ForCausalLM": (("qwen2",), _qwen2),
    "Qwen3ForCausalLM": (("qwen3",), _qwen3),
    "Qwen3MoeForCausalLM": (("qwen3_moe",), _qwen3_moe),
    "DeepseekV3ForCausalLM": (("deepseek_v3", "kimi_k2"), deepseek),
    "DeepseekV32ForCausalLM": (("deepseek_v32",), deepseek_sparse),
    "GlmMoeDsaForCausalLM": (("glm_moe_dsa",), glm_sparse),
    "MiniMaxM2ForCausalLM": (("minimax_m2",), _minimax),
    "Qwen3_5MoeForCausalLM": (("qwen3_5_moe_text",), _qwen35_moe),
    "Qwen3VLForConditionalGeneration": (("qwen3_vl",), _qwen3),
    "Qwen3VLMoeForConditionalGeneration": (("qwen3_vl_moe",), _qwen3_vl_moe),
    "Qwen3_5MoeForConditionalGeneration": (("qwen3_5_moe",), _qwen35_moe),
    "NemotronHForCausalLM": (("nemotron_h",), _nemotron),
    "GptOssForCausalLM": (("gpt_oss",), _gpt_oss),
    "KimiK25ForConditionalGeneration": (("kimi_k25",), deepseek),
}
ALIASES = {"Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration"}  # transformers' name -> the released
LACKING = {  # model_type of families that are refused -> the parts that rlloop does not have, and the keys they are of
    "deepseek_v4": (
        "attention over compressed keys and values (compress_ratios)", "one head that is key and value (head_dim)",
        "output projections by groups of heads (o_groups)", "hyper-connections (hc_mult)",
        "experts chosen by token id (num_hash_layers)", "router scores sqrt(softplus(x)) (scoring_func)",
        "FP4 experts (expert_dtype)",
    ),
}  # fmt: skip


def _full_attention(keys: Keys, num_layers: int) -> None:
    """Refuse sliding windows. A window that no layer uses may be named, as in Qwen's files."""
    window, uses = keys.take("sliding_window"), keys.flag("use_sliding_window", True)
    first = keys.count("max_window_layers", 0, least=0)
    kinds = keys.names("layer_types", ("full_attention",), num_layers)
    if kinds is None and window is not None and uses and first < num_layers:
        keys.refuse("sliding_window", window, "null, or any with use_sliding_window false: full attention only")
