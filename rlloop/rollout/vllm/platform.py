"""vLLM's CPU platform with the settings that our model needs, and workarounds for three faults of 0.32."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING

import torch
from vllm.platforms import cpu

from rlloop.rollout.vllm.names import ARCHITECTURE, CPU_WORKER, FORMAT, GATE

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CpuPlatform(cpu.CpuPlatform):
    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = CPU_WORKER
        if model is not None and ARCHITECTURE in model.architectures:
            vllm_config.load_config.load_format = FORMAT
            model.logits_processors = [*(model.logits_processors or ()), GATE]
        _forget_who_imported()
        preload = os.environ.get("LD_PRELOAD")
        super().check_and_update_config(vllm_config)
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            # vLLM intends this for its workers' processes. There are none, and other child processes are not affected.
            os.environ.pop("LD_PRELOAD", None)
            if preload is not None:
                os.environ["LD_PRELOAD"] = preload

    @classmethod
    def import_kernels(cls) -> None:
        super().import_kernels()
        torch.cpu._init_amx()  # asks the kernel for the tiles' state; without it the first tile instruction is illegal

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """vLLM looks through every loaded module, and trips over llvmlite's, whose `__dict__` is none."""
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite.binding")}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of deprecated names, as it touches them
                super().register_triton_kernel_overrides()
        finally:
            sys.modules.update(hidden)


def _forget_who_imported() -> None:
    """vLLM keeps the error of the missing torchcodec, and its traceback every frame above vLLM's first import: with the
    first engine of a process its model and its trainer would stay."""
    from vllm.multimodal.media import audio  # which needs to know the platform

    if audio._torchcodec_import_exc is not None:
        audio._torchcodec_import_exc.__traceback__ = None
