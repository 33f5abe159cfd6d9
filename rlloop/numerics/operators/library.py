"""Kernels as torch operators: opaque to tracing, differentiable, and chosen by the tensors' device."""

from __future__ import annotations

from typing import Any

import torch

from rlloop.numerics.kernels import follow_registrations, kernel

_library = torch.library.Library("rlloop", "FRAGMENT")
_kernels: dict[str, str] = {}  # operator -> the function of `protocol.Kernels` that it runs
_device_types: list[str] = []
_differentiable: dict[Any, tuple[Any, Any, Any]] = {}  # operator -> its fake, backward and setup


def operator(schema: str, fake: Any, backward: Any = None, setup: Any = None, *, kernel: str | None = None) -> Any:
    """The operator of a schema, which runs the kernel of its name, or `kernel`, of its tensors' device.

    `fake` makes results without values. `backward(ctx, *grads)` returns a gradient for each argument and
    `setup(ctx, inputs, output)` keeps what it needs, as for `torch.library.register_autograd`.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _kernels[name] = kernel or name
    for device_type in _device_types:
        _implement(name, device_type)
    torch.library.register_fake(f"rlloop::{name}", fake, lib=_library)
    made = getattr(torch.ops.rlloop, name).default
    if backward is not None:
        torch.library.register_autograd(f"rlloop::{name}", backward, setup_context=setup, lib=_library)
        _differentiable[made] = fake, backward, setup
    return made


def without_result(operator: Any) -> Any:
    """The same without its kernel, where nothing reads the result: it saves the same tensors and has the same gradient,
    and the result's values are undefined. Not of one whose `setup` saves results."""
    fake, backward, setup = _differentiable[operator]

    def forward(ctx: Any, *inputs: Any) -> Any:
        setup(ctx, inputs, None)
        return fake(*inputs)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Unread", (torch.autograd.Function,), members).apply


def _implement(name: str, device_type: str) -> None:
    key = torch._C._dispatch_key_for_device(device_type)
    _library.impl(name, kernel(device_type, _kernels[name]), key)


def _follow(device_type: str) -> None:
    _device_types.append(device_type)
    for name in _kernels:
        _implement(name, device_type)


follow_registrations(_follow)
