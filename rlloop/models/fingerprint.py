"""A model's fingerprint (profile, type, device and versions, which decide its bits), and the check of profiles."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from rlloop.errors import ConfigError
from rlloop.models import fp8
from rlloop.models.layers import Linear
from rlloop.numerics.kernels import SETTINGS, backend_of
from rlloop.numerics.profile import NumericsProfile


def check_profile(model: nn.Module, profile: NumericsProfile, dtype: torch.dtype, device: torch.device) -> None:
    """Raises `ConfigError` for settings that the model does not support on its device or in its type."""
    if fp8.is_quantised(model):
        fp8.check_profile(profile)
    narrow = [op for op in profile.operations() if getattr(profile, op) == "rlloop"]
    if dtype == torch.float64 and narrow:
        raise ConfigError(
            f"dtype is float64, and the profile's kernels of {', '.join(narrow[:3])} are for narrower types; use "
            "dtype=float32, or NumericsProfile.preset('reference')"
        )
    if profile.for_cpus and SETTINGS in backend_of(device.type).lacks:
        raise ConfigError(
            f"the profile has {', '.join(profile.for_cpus)}, whose kernels are for CPUs; leave out "
            f"{'it' if len(profile.for_cpus) == 1 else 'them'}, or use device=cpu"
        )
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.across and module.weight.shape[1] % int(profile.tp_segments):
            raise ConfigError(
                f"profile.tp_segments is {profile.tp_segments}, and {name} sums over {module.weight.shape[1]} "
                "inputs; set a number that divides them"
            )


def fingerprint(profile: NumericsProfile, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The fingerprint, as JSON values."""
    kind = device.type
    facts = {
        "dtype": str(dtype).removeprefix("torch."),
        "profile": profile.as_dict(),
        "device": kind if kind == "cpu" else torch.get_device_module(kind).get_device_name(device),
        "instruction_set": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "versions": {name: _version(name) for name in ("rlloop", "torch", "numba", "llvmlite")},
    }
    facts["versions"] |= {package: version(package) for package in backend_of(kind).packages}
    if kind == "cuda":
        facts["versions"]["cuda"] = torch.version.cuda
    # rlloop's operations never depend on the number of threads; stock ones do.
    return facts if profile.holds_contract else {**facts, "threads": torch.get_num_threads()}


@cache
def _version(package: str) -> str | None:
    """None: not installed, such as rlloop itself in a checkout on the path, or a CPU's compiler on a GPU machine."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
