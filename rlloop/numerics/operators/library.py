"""Kernels as torch operators: opaque to tracing, differentiable, and chosen by the tensors' device.

What `operator` returns calls the kernel past torch's dispatcher where that would change nothing, since the dispatcher,
and its autograd in Python, take longer than a small model's kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.nn import Parameter

from rlloop.numerics.kernels import follow_registrations, kernel, kernel_for

PLAIN = Tensor, Parameter  # other classes of tensors have dispatch of their own

_library = torch.library.Library("rlloop", "FRAGMENT")
_kernels: dict[str, str] = {}  # operator -> the function of `protocol.Kernels` that it runs
_device_types: list[str] = []
_differentiable: dict[Any, tuple[Any, Any, Any]] = {}  # operator -> its fake, backward and setup


def operator(schema: str, fake: Any, backward: Any = None, setup: Any = None, *, kernel: str | None = None) -> Any:
    """The operator of a schema, which runs the kernel of its name, or `kernel`, of its tensors' device.

    `fake` makes results without values. `backward(ctx, *grads)` returns a gradient for each argument and
    `setup(ctx, inputs, output)` keeps what it needs, as for `torch.library.register_autograd`. Tracing, dispatch modes
    and profilers see the operator of `torch.ops.rlloop`.
    """
    name, _, arguments = schema.partition("(")
    _library.define(schema)
    _kernels[name] = kernel or name
    for device_type in _device_types:
        _implement(name, device_type)
    torch.library.register_fake(f"rlloop::{name}", fake, lib=_library)
    made = getattr(torch.ops.rlloop, name).default
    if backward is not None:
        torch.library.register_autograd(f"rlloop::{name}", backward, setup_context=setup, lib=_library)
    called = made
    if arguments.startswith("Tensor ") and "!" not in arguments:
        count = arguments.rpartition("->")[0].count(",") + 1
        called = _direct(made, kernel or name, count, backward, setup)
    if backward is not None:
        _differentiable[called] = fake, backward, setup
    return called


def _direct(made: Any, name: str, count: int, backward: Any, setup: Any) -> Callable[..., Any]:
    """`made`, an operator of `count` arguments whose first is a tensor, past the dispatcher where it would just call
    the kernel."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        result = kernel_for(inputs[0].device, name)(*inputs)
        setup(ctx, inputs, result)
        return result

    function = _function(made.name().rpartition(":")[2], forward, backward) if backward is not None else None

    def call(*args: Any, **more: Any) -> Any:
        if len(args) != count or more or torch.compiler.is_compiling() or _watched():
            return made(*args, **more)
        needed = False
        for each in args:
            if isinstance(each, Tensor):
                if type(each) not in PLAIN or each.is_meta:
                    return made(*args)
                needed = needed or each.requires_grad
        if not needed or not torch.is_grad_enabled():
            return kernel_for(args[0].device, name)(*args)
        return made(*args) if function is None else function(*args)

    return call


def _watched() -> bool:
    """True if a profiler or a dispatch mode is to see operators."""
    return profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack() > 0


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members).apply


def without_result(operator: Any) -> Any:
    """The same without its kernel, where nothing reads the result: it saves the same tensors and has the same gradient,
    and the result's values are undefined. Not of one whose `setup` saves results."""
    fake, backward, setup = _differentiable[operator]

    def forward(ctx: Any, *inputs: Any) -> Any:
        setup(ctx, inputs, None)
        return fake(*inputs)

    return _function("Unread", forward, backward)


def _implement(name: str, device_type: str) -> None:
    key = torch._C._dispatch_key_for_device(device_type)
    _library.impl(name, kernel(device_type, _kernels[name]), key)


def _follow(device_type: str) -> None:
    _device_types.append(device_type)
    for name in _kernels:
        _implement(name, device_type)


follow_registrations(_follow)
