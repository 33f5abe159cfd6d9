"""What sets the families apart: the keys of their config.json that others do not have, or that mean something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlloop.models.keys import Keys
from rlloop.models.shape import IndexerConfig, LatentConfig, MixtureConfig, RopeConfig, YarnScaling
from rlloop.numerics.routing import Routing

Own = dict[str, Any]  # arguments of ModelConfig


def _llama(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    _full_attention(keys, num_layers)
    bias = keys.flag("attention_bias", False)
    return {
        "num_kv_heads": keys.count("num_key_value_heads", num_heads),
        "head_dim": keys.count("head_dim", hidden_size // num_heads),
        "qk_norm": False,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": keys.flag("mlp_bias", False),
    }


def _qwen2(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    _full_attention(keys, num_layers)
    return {
        "num_kv_heads": keys.count("num_key_value_heads"),
        "head_dim": keys.count("head_dim", hidden_size // num_heads),
        "qk_norm": False,
        "qkv_bias": True,
        "output_bias": False,
        "mlp_bias": False,
    }


def _qwen3(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    _full_attention(keys, num_layers)
    bias = keys.flag("attention_bias", False)
    return {
        "num_kv_heads": keys.count("num_key_value_heads"),
        "head_dim": keys.count("head_dim"),
        "qk_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": False,
    }


def _qwen3_moe(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    step, dense = keys.count("decoder_sparse_step", 1), keys.take("mlp_only_layers", [])
    count = keys.count("num_experts" if keys.has("num_experts") else "num_local_experts")
    routing = Routing(top_k=keys.count("num_experts_per_tok"), normalise=keys.flag("norm_topk_prob", False))
    layers = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    mixture = MixtureConfig(count, keys.count("moe_intermediate_size"), routing, layers)
    _check_routing(keys, mixture)
    return {**_qwen3(keys, hidden_size, num_heads, num_layers, rope), "mixture": mixture}


def _deepseek(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    """DeepSeek-V3 and what is built like it, Kimi K2 for one."""
    keys.take("auto_map", None)  # Kimi K2's names DeepSeek-V3's own code
    keys.fixed("topk_method", "noaux_tc")
    keys.fixed("scoring_func", "sigmoid")
    keys.fixed("moe_layer_freq", 1)
    keys.take("num_key_value_heads", None)  # latent attention has one for each head
    dense, kinds = keys.take("first_k_dense_replace", 3), keys.take("mlp_layer_types", None)
    layers = tuple(range(dense, num_layers))
    if kinds is not None:
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    experts, size = keys.count("n_routed_experts"), keys.count("moe_intermediate_size")
    mixture = MixtureConfig(
        num_experts=experts,
        expert_size=size,
        routing=Routing(
            top_k=keys.count("num_experts_per_tok"),
            score="sigmoid",
            groups=keys.count("n_group", 1),
            top_groups=keys.count("topk_group", 1),
            normalise=keys.flag("norm_topk_prob", True),
            epsilon=1e-20,
            scale=keys.number("routed_scaling_factor", 2.5),
        ),
        layers=layers,
        shared_size=size * keys.count("n_shared_experts", 1),
        bias=True,
        exact_gate=True,
    )
    _check_routing(keys, mixture)
    nope, rotary = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
    keys.fixed("qk_head_dim", nope + rotary)
    keys.take("head_dim", None)  # Hugging Face's name for the part that has a rope, or a leftover
    scale = (nope + rotary) ** -0.5
    if isinstance(rope.scaling, YarnScaling):
        scale *= rope.scaling.score_factor
    bias, rank = keys.flag("attention_bias", False), keys.take("q_lora_rank", None)
    latent = LatentConfig(
        q_rank=rank,
        kv_rank=keys.count("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotary,
        v_dim=keys.count("v_head_dim"),
        scale=scale,
        interleaved=keys.flag("rope_interleave", True),
    )
    return {
        "num_kv_heads": num_heads,
        "head_dim": nope + rotary,
        "qk_norm": False,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": False,
        "mixture": mixture,
        "latent": latent,
    }


def _sparse(keys: Keys, num_layers: int, own: Own, *, interleaved: bool, indexed: tuple[int, ...]) -> Own:
    """Latent attention over the past tokens that a lightning indexer selects."""
    keys.fixed("layer_types", ["indexed_attention"] * num_layers)
    keys.fixed("mlp_bias", False)
    if own["latent"].q_rank is None:
        keys.refuse("q_lora_rank", None, "a positive whole number: the indexer reads the queries' latents")
    indexer = IndexerConfig(
        num_heads=keys.count("index_n_heads"),
        head_dim=keys.count("index_head_dim"),
        top_k=keys.count("index_topk"),
        interleaved=interleaved,
        layers=indexed,
    )
    return {**own, "latent": LatentConfig(**{**vars(own["latent"]), "indexer": indexer})}


def _deepseek_sparse(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    own = _deepseek(keys, hidden_size, num_heads, num_layers, rope)
    return _sparse(keys, num_layers, own, interleaved=False, indexed=tuple(range(num_layers)))


def _glm_sparse(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    """GLM-5: some layers may read what the indexer of a layer below them selected."""
    own = _deepseek(keys, hidden_size, num_heads, num_layers, rope)
    kinds, pattern = keys.take("indexer_types", None), keys.take("index_topk_pattern", None)
    every, skipped = keys.take("index_topk_freq", 1), keys.take("index_skip_topk_offset", 2)
    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if kinds is None:
        kinds = ["shared" if max(i - skipped + 1, 0) % max(every, 1) else "full" for i in range(num_layers)]
    if len(kinds) != num_layers or kinds[0] != "full" or not {*kinds} <= {"full", "shared"}:
        keys.refuse("indexer_types", kinds, f"full or shared for each of {num_layers} layers, full for the first")
    indexed = tuple(layer for layer, kind in enumerate(kinds) if kind == "full")
    return _sparse(keys, num_layers, own, interleaved=True, indexed=indexed)


Family = Callable[[Keys, int, int, int, RopeConfig], Own]

FAMILIES: dict[str, tuple[tuple[str, ...], Family]] = {  # architecture -> (model_types, what is its own)
    "LlamaForCausalLM": (("llama",), _llama),
    "Qwen2ForCausalLM": (("qwen2",), _qwen2),
    "Qwen3ForCausalLM": (("qwen3",), _qwen3),
    "Qwen3MoeForCausalLM": (("qwen3_moe",), _qwen3_moe),
    "DeepseekV3ForCausalLM": (("deepseek_v3", "kimi_k2"), _deepseek),
    "DeepseekV32ForCausalLM": (("deepseek_v32",), _deepseek_sparse),
    "GlmMoeDsaForCausalLM": (("glm_moe_dsa",), _glm_sparse),
}


def _full_attention(keys: Keys, num_layers: int) -> None:
    """A window may be named where no layer uses it, as Qwen's files do."""
    window, uses = keys.take("sliding_window", None), keys.take("use_sliding_window", None)
    first, kinds = keys.take("max_window_layers", None), keys.take("layer_types", None)
    if kinds is not None:
        other = sorted({kind for kind in kinds if kind != "full_attention"})
        if other or len(kinds) != num_layers:
            keys.refuse("layer_types", other or kinds, f"full_attention, once for each of {num_layers} layers")
    elif window is not None and uses is not False and (first is None or first < num_layers):
        keys.refuse("sliding_window", window, "null, or any with use_sliding_window false: full attention only")


def _check_routing(keys: Keys, mixture: MixtureConfig) -> None:
    count, rule = mixture.num_experts, mixture.routing
    if count % rule.groups or (rule.groups > 1 and count // rule.groups < 2):
        keys.refuse("n_group", rule.groups, f"1, or a divisor of the {count} experts that leaves two in a group")
    if rule.top_groups > rule.groups:
        keys.refuse("topk_group", rule.top_groups, f"at most n_group ({rule.groups})")
    if rule.top_k > count // rule.groups * rule.top_groups:
        keys.refuse("num_experts_per_tok", rule.top_k, "at most the number of experts that can be chosen")
