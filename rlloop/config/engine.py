"""`rollout.engine`: who samples, and what must not be combined with it. Imports neither torch, ray nor vllm."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from rlloop.errors import ConfigError

if TYPE_CHECKING:
    from rlloop.config.run import RunConfig


class EngineKind(StrEnum):
    embedded = "embedded"  # rlloop.Engine
    vllm = "vllm"  # vLLM running rlloop's model and sampler: the same bits
    vllm_stock = "vllm_stock"  # vLLM's own model: measured, and corrected


def check_engine(config: RunConfig) -> None:
    """Raises `ConfigError` for what would make an engine's logprobs incomparable with the trainer's."""
    rollout, kind = config.rollout, config.rollout.engine
    if rollout.sleep and kind is EngineKind.embedded:
        raise ConfigError("rollout.sleep is for rollout.engine=vllm or vllm_stock; leave it off")
    if kind is EngineKind.embedded:
        return
    if config.fleet.kind != "node":
        raise ConfigError(
            f"rollout.engine={kind} is an engine of this process, and fleet=regions has its engines elsewhere: start "
            f"those with `rlloop serve engine --engine {kind}`, and leave rollout.engine at embedded"
        )
    if rollout.drift.declared:
        raise ConfigError(f"rollout.drift is for the embedded engine; rollout.engine is {kind}")
    if kind is EngineKind.vllm:
        return
    if config.parity.mode == "require":
        raise ConfigError(
            "rollout.engine=vllm_stock samples with vLLM's own numerics, which parity.mode=require refuses; set "
            "parity.mode=observe or fallback, or rollout.engine=vllm for the trainer's bits"
        )
    if any(value is not None for value in vars(rollout.profile).values()):
        raise ConfigError("rollout.profile chooses among rlloop's operations; rollout.engine=vllm_stock runs vLLM's")
    if rollout.top_k or rollout.top_p < 1 or rollout.min_p:
        raise ConfigError(
            "rollout.top_k, top_p and min_p with rollout.engine=vllm_stock: which tokens are left is decided by vLLM's "
            "logits, and one at the edge is impossible for the trainer; leave them off, or set rollout.engine=vllm"
        )
