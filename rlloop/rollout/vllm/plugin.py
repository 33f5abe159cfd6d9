"""vLLM's entry points: `vllm.general_plugins` calls `register`, `vllm.platform_plugins` calls `cpu_platform`.

vLLM calls both in each of its processes. After them it knows the architecture `RlloopForCausalLM`, the configuration
format `rlloop`, which gives any folder that architecture, and the load format `rlloop`. So this is all of a server:

    vllm serve FOLDER --config-format rlloop --load-format rlloop
"""

from __future__ import annotations

from rlloop.rollout.vllm import versions
from rlloop.rollout.vllm.names import ARCHITECTURE, CPU_PLATFORM, FORMAT, STOCK_FORMAT


def register() -> None:
    if versions.problems():  # another vLLM than rlloop knows: leave it as it is
        return
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import register_config_parser

    from rlloop.rollout.vllm.loading import ConfigParser, Loader, OnGpu, StockLoader
    from rlloop.rollout.vllm.model import RlloopForCausalLM

    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        return
    # The class itself: by its name, vLLM would start a process to look at it.
    ModelRegistry.register_model(ARCHITECTURE, RlloopForCausalLM)
    if versions.on_gpu():  # the CPU's platform is ours, and sees to it
        MODELS_CONFIG_MAP[ARCHITECTURE] = OnGpu
    register_config_parser(FORMAT)(ConfigParser)
    register_model_loader(FORMAT)(Loader)
    register_model_loader(STOCK_FORMAT)(StockLoader)


def cpu_platform() -> str | None:
    """The platform class, where this is the CPU build; None leaves the choice to vLLM."""
    build = versions.installed()
    if build is None or not build[1] or versions.problems():
        return None
    return CPU_PLATFORM
