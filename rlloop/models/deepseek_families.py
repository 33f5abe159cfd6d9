"""DeepSeek-V3 and families built like it (Kimi K2, DeepSeek-V3.2, GLM-5): latent attention, and its sparse form."""

from __future__ import annotations

from rlloop.models.architecture import IndexerConfig, LatentConfig, MixtureConfig, RopeConfig, YarnScaling
from rlloop.models.config_reader import Keys, Own, check_routing, expert_count
from rlloop.numerics.routing import Routing


def deepseek(
    keys: Keys,
    hidden_size: int,
    num_heads: int,
    num_layers: int,
    rope: RopeConfig,
    *,
    sparse: bool = False,
    groups: tuple[int, int] = (8, 4),
) -> Own:
    """DeepSeek-V3 and models built like it, such as Kimi K2.

    `sparse`: with an indexer. `groups`: the defaults of n_group and topk_group.
    """
    keys.take("auto_map")  # Kimi K2's names DeepSeek-V3's own code
    keys.fixed("topk_method", "noaux_tc")
    keys.fixed("scoring_func", "sigmoid")
    keys.fixed("moe_layer_freq", 1)
    keys.fixed("num_key_value_heads", num_heads, null=not sparse)  # latent attention has one for each head
    dense = keys.count("first_k_dense_replace", 3, least=0)
    kinds = keys.names("mlp_layer_types", ("dense", "sparse"), num_layers) if sparse else None
    if not sparse:
        keys.where_null(norm_topk_prob=False, rope_interleave=False)
    layers = tuple(i for i in range(num_layers) if (kinds[i] == "sparse" if kinds else i >= dense))
    experts, size = expert_count(keys, "n_routed_experts"), keys.count("moe_intermediate_size")
    mixture = MixtureConfig(
        num_experts=experts,
        expert_size=size,
        routing=Routing(
            top_k=keys.count("num_experts_per_tok"),
            score="sigmoid",
            groups=keys.count("n_group", groups[0]),
            top_groups=keys.count("topk_group", groups[1]),
            normalise=keys.flag("norm_topk_prob", True),
            epsilon=1e-20,
            scale=keys.number("routed_scaling_factor", 2.5),
        ),
        layers=layers,
        shared_size=size * keys.count("n_shared_experts", 1, least=0),
        bias=True,
        exact_gate=True,
    )
    check_routing(keys, mixture)
    nope, rotary = keys.count("qk_nope_head_dim"), keys.count("qk_rope_head_dim")
    keys.fixed("qk_head_dim", nope + rotary)
    # transformers' name for the part that has a rope, whatever GLM-5.2's file says
    keys.fixed("head_dim", rotary, *((nope,) if sparse else ()), null=False)
    scale = (nope + rotary) ** -0.5
    if isinstance(rope.scaling, YarnScaling):
        scale *= rope.scaling.score_factor
    bias = keys.flag("attention_bias", False)
    latent = LatentConfig(
        q_rank=keys.count("q_lora_rank") if keys.has("q_lora_rank") else None,
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
        "qkv_bias": bias,
        "output_bias": bias,
        "mixture": mixture,
        "latent": latent,
    }


def _sparse(keys: Keys, num_layers: int, own: Own, *, interleaved: bool, indexed: tuple[int, ...]) -> Own:
    """Latent attention over the past tokens that a lightning indexer selects."""
    if not own["latent"].interleaved:
        keys.refuse("rope_interleave", False, "true")
    keys.fixed("indexer_rope_interleave", interleaved)
    keys.names("layer_types", ("indexed_attention",), num_layers)
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


def deepseek_sparse(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    own = deepseek(keys, hidden_size, num_heads, num_layers, rope, sparse=True)
    return _sparse(keys, num_layers, own, interleaved=False, indexed=tuple(range(num_layers)))


def glm_sparse(keys: Keys, hidden_size: int, num_heads: int, num_layers: int, rope: RopeConfig) -> Own:
    """GLM-5: layers without an indexer read what the nearest indexer below them selected."""
    keys.fixed("moe_router_dtype", "float32")
    keys.take("index_share_for_mtp_iteration")
    own = deepseek(keys, hidden_size, num_heads, num_layers, rope, sparse=True, groups=(1, 1))
    own["rms_norm_eps"] = keys.number("rms_norm_eps", 1e-5)
    kinds = keys.names("indexer_types", ("full", "shared"), num_layers)
    pattern = keys.names("index_topk_pattern", ("full", "shared"), num_layers, {"F": "full", "S": "shared"})
    every, skipped = keys.count("index_topk_freq", 1, least=0), keys.count("index_skip_topk_offset", 2, least=0)
    if (kinds := kinds or pattern) is None:
        kinds = ["shared" if max(i - skipped + 1, 0) % max(every, 1) else "full" for i in range(num_layers)]
    if kinds[0] != "full":
        keys.refuse("indexer_types", kinds, "full for the first layer")
    indexed = tuple(layer for layer, kind in enumerate(kinds) if kind == "full")
    return _sparse(keys, num_layers, own, interleaved=True, indexed=indexed)
