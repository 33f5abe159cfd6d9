"""Models that `rollout.engine=vllm_stock` runs, checked before anything loads. Imports no vLLM."""

from __future__ import annotations

from rlloop.errors import ConfigError
from rlloop.models.architecture import ModelConfig

CPU_LATENT = (512, 64)  # kv_lora_rank and qk_rope_head_dim of the only shape that vLLM's CPU kernel for that knows
CPU_HEADS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # head_dim that its other CPU kernel is built for


def check_stock_model(config: ModelConfig, device: str, tp: int) -> None:
    """Raises `ConfigError` for a model that vLLM's own code does not run, or was not tried with.

    `device`: cpu or cuda. `tp`: ranks that vLLM divides the model over, in equal parts.
    """
    stock, latent = f"rollout.engine=vllm_stock with {config.architecture}", config.latent
    if config.vision is not None:
        raise ConfigError(f"{stock}: vLLM's own vision tower was not tried; set rollout.engine=vllm or embedded")
    if config.delta is not None or config.mamba is not None:
        raise ConfigError(f"{stock}: vLLM's own recurrent layers were not tried; set rollout.engine=vllm or embedded")
    if device != "cpu":
        if latent is not None and latent.indexer is not None:
            raise ConfigError("rollout.engine=vllm_stock with an indexer was not tried; rollout.engine=vllm runs it")
    elif latent is not None:
        if latent.indexer is not None or (latent.kv_rank, latent.rope_dim) != CPU_LATENT:
            shape = f"{latent.kv_rank} and {latent.rope_dim}" if latent.indexer is None else "an indexer"
            raise ConfigError(
                f"rollout.engine=vllm_stock with latent attention: vLLM's CPU kernel knows kv_lora_rank={CPU_LATENT[0]}"
                f" with qk_rope_head_dim={CPU_LATENT[1]}, without an indexer; this model has {shape}. "
                "rollout.engine=vllm runs it"
            )
    elif config.head_dim not in CPU_HEADS:
        raise ConfigError(
            f"{stock}: vLLM's CPU kernel for attention knows head_dim={', '.join(map(str, CPU_HEADS))}; this model has "
            f"{config.head_dim}. rollout.engine=vllm runs it"
        )
    if tp > 1:
        _check_equal_parts(config, tp)


def _check_equal_parts(config: ModelConfig, tp: int) -> None:
    sizes = {"query heads": config.num_heads, "numbers inside an MLP": config.intermediate_size}
    if config.latent is None and config.num_kv_heads > tp:
        sizes["key-value heads"] = config.num_kv_heads
    if config.mixture is not None:
        sizes["numbers inside an expert"] = config.mixture.expert_size
        if config.mixture.layers and tp > (experts := config.mixture.num_experts):
            raise ConfigError(
                f"rollout.layout.tp is {tp}, and with rollout.engine=vllm_stock it is at most the number of experts, "
                f"of which {config.architecture} has {experts}; set tp to at most {experts}, or rollout.engine=vllm"
            )
    for what, size in sizes.items():
        if size % tp:
            raise ConfigError(
                f"rollout.layout.tp is {tp}, and rollout.engine=vllm_stock divides {config.architecture} in equal "
                f"parts, which has {size} {what}; set tp to a number that divides them, or rollout.engine=vllm"
            )
    if config.latent is None and tp % min(tp, config.num_kv_heads):
        raise ConfigError(
            f"rollout.layout.tp is {tp}, and with rollout.engine=vllm_stock each of the {config.num_kv_heads} "
            f"key-value heads of {config.architecture} lies on equally many ranks; set tp to a multiple of them, or "
            "rollout.engine=vllm"
        )
