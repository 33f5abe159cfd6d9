"""vLLM as rollout engine: its scheduler, paging, prefix cache and server around rlloop's model, or around its own.

`build` makes what `rollout.engine` names. Nothing here imports vLLM until an engine is built or vLLM itself calls in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlloop.config import RolloutConfig
    from rlloop.models import Model
    from rlloop.rollout.vllm.engine import VllmEngine


def build(model: Model, rollout: RolloutConfig) -> VllmEngine:
    """The engine that `rollout.engine` names, in this process: `vllm` (tier 1) or `vllm_stock` (tier 2).

    Raises `ConfigError` where vLLM is missing, of another version, or cannot run the model.
    """
    from rlloop.rollout.vllm.engine import VllmEngine
    from rlloop.rollout.vllm.stock import StockVllmEngine

    kind = {"vllm": VllmEngine, "vllm_stock": StockVllmEngine}[rollout.engine]
    return kind(
        model,
        page_size=rollout.page_size,
        max_batch_tokens=rollout.max_batch_tokens,
        max_cache_tokens=rollout.max_cache_tokens,
        prefix_caching=rollout.prefix_caching,
    )
