"""Kernels by device type: a module for each, with the functions of `rlloop.numerics.kernels.protocol.Kernels`.

The tensors' device chooses. A module is imported when the first tensor of its device type arrives, so a run on a GPU
imports no numba and a run on a CPU no Triton. Another backend is one module and one registration, either of

    register_kernels("npu", "their_package.kernels", packages=("their_package",))  # before its first tensor

    [project.entry-points."rlloop.kernels"]           # in the pyproject.toml of an installed package
    npu = "their_package.kernels"

`rlloop.numerics.operators` has what kernels do not: schemas, gradients, and the choice by device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import torch

from rlloop.numerics import fp8
from rlloop.numerics.kernels.protocol import Kernels
from rlloop.numerics.packed import read_by

if TYPE_CHECKING:
    from rlloop.numerics.kernels.cpu import backend

    _conforms: Kernels = backend

# A backend may lack these.
RECURRENT, SINKS, VISION, SETTINGS = "recurrent layers", "attention sinks", "a vision tower", "settings"


@dataclass(frozen=True)
class Backend:
    """A registration, which says what a run has to know before anything is imported."""

    module: str
    packages: tuple[str, ...]  # whose versions decide the bits, and stand in fingerprints
    lacks: frozenset[str] = frozenset()  # of RECURRENT, SINKS, VISION and SETTINGS (`NumericsProfile.for_cpus`)


_backends = {
    "cpu": Backend("rlloop.numerics.kernels.cpu.backend", ("numba", "llvmlite")),
    "cuda": Backend("rlloop.numerics.kernels.triton.backend", ("triton",), frozenset({SETTINGS})),
}
_loaded: dict[str, Kernels] = {}
_by_device: dict[torch.device, Kernels] = {}
_followers: list[Callable[[str], None]] = []


def register_kernels(
    device_type: str, module: str, *, packages: tuple[str, ...] = (), lacks: Collection[str] = ()
) -> None:
    """Let `module` have the kernels of `device_type`, as in `torch.device(...).type`.

    `packages` and `lacks` as for `Backend`; models that need what it lacks are refused before they are loaded.

    Raises ValueError where kernels of that type have run already.
    """
    if device_type in _loaded:
        raise ValueError(
            f"kernels for {device_type!r} are in use ({_backends[device_type].module}); register others earlier"
        )
    known = device_type in _backends
    _backends[device_type] = Backend(module, packages, frozenset(lacks))
    if not known:
        for follow in _followers:
            follow(device_type)


def follow_registrations(follow: Callable[[str], None]) -> None:
    """Calls `follow(device_type)` for each type that has kernels, now and whenever one more is registered."""
    _followers.append(follow)
    for device_type in _backends:
        follow(device_type)


def device_types() -> list[str]:
    """The types of devices that have kernels."""
    return list(_backends)


def backend_of(device_type: str) -> Backend:
    """The registration for a type of `device_types`. Imports nothing."""
    return _backends[device_type]


def kernels_for(device: torch.device) -> Kernels:
    """The kernels of a device's type. Raises ValueError where none are registered."""
    kernels = _by_device.get(device)  # a look at `device.type` takes 2 us
    if kernels is None:
        kernels = _by_device[device] = _load(device.type)
    return kernels


def kernel_for(device: torch.device, name: str) -> Callable[..., Any]:
    """The function `name` for tensors of a device. Raises as `kernels_for` does."""
    return getattr(kernels_for(device), name, None) or functools.partial(_missing, device.type, name)


def kernel(device_type: str, name: str) -> Callable[..., Any]:
    """The function `name` for tensors of `device_type`, whose module is imported at the first call."""

    def first(*args: Any) -> Any:
        nonlocal function
        function = kernel_for(torch.device(device_type), name)
        return function(*args)

    function: Callable[..., Any] = first
    return lambda *args: function(*args)


def _load(device_type: str) -> Kernels:
    if device_type not in _backends:
        raise ValueError(f"no kernels for {device_type!r} are registered, only for {', '.join(_backends)}")
    if device_type not in _loaded:
        _loaded[device_type] = importlib.import_module(_backends[device_type].module)  # type: ignore[assignment]
    return _loaded[device_type]


def _missing(device_type: str, name: str, *_: Any) -> Any:
    raise NotImplementedError(f"the kernels for {device_type!r} ({_backends[device_type].module}) have no {name!r}")


read_by(kernels_for)
fp8.read_by(kernels_for)
for _entry in entry_points(group="rlloop.kernels"):
    register_kernels(_entry.name, _entry.value)
