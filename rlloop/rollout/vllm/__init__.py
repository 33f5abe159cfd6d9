"""vLLM as rollout engine: its scheduler, paging, prefix cache and server, around rlloop's model or its own.

`build` creates the engine that `rollout.engine` names. Nothing here imports vLLM until an engine is built, or vLLM
itself calls in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlloop.config.rollout import EngineKind
    from rlloop.models import Model
    from rlloop.rollout.vllm.engine import VllmEngine


def build(kind: EngineKind, model: Model, **settings: Any) -> VllmEngine:
    """The engine `vllm` or `vllm_stock` in this process, over `model`; `settings` are those of `rlloop.Engine`.

    Raises `ConfigError` where vLLM is missing, of another version, or cannot run the model.
    """
    from rlloop.rollout.vllm.engine import VllmEngine
    from rlloop.rollout.vllm.stock_engine import StockVllmEngine

    return {"vllm": VllmEngine, "vllm_stock": StockVllmEngine}[kind](model, **settings)
