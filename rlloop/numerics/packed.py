"""Frozen weights that stay packed: 4-bit integers and floats, and 8-bit floats, with a scale for each group of inputs.

All readers share one dequantisation: w = bfloat16(float32(q) * float32(scale)), rounded once, then the usual chain. So
engine and trainer have the bits of the same weights in bfloat16, and only the packed bytes are kept. Products read them
on the fly (`rlloop.numerics.kernels`), in the backward as well. The weights are frozen; adapters train over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of a 4-bit float; the highest bit is the sign


@dataclass(frozen=True)
class Packing:
    """A format: how many numbers a stored element has, the lowest bits first, and what a code and a scale are."""

    name: str
    each: int  # numbers of an element of `codes`
    group: int  # consecutive inputs that share a scale
    codes: torch.dtype
    scales: torch.dtype
    integer: bool = False  # codes are 0 to 15 for −8 to 7; else 4-bit or 8-bit floats

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes that a `PackedWeight` of this shape holds, as checkpoints are loaded."""
        *groups, rows, width = (*shape[:-2], *shape[:-3:-1]) if self is MXFP4 else shape  # it is transposed
        of_row = width // self.each * self.codes.itemsize + -(-width // self.group) * self.scales.itemsize
        return math.prod(groups) * rows * (of_row + (torch.float32.itemsize if self is NVFP4 else 0))


INT4 = Packing("int4 in groups of 32 (compressed-tensors pack-quantized)", 8, 32, torch.int32, torch.bfloat16, True)
MXFP4 = Packing("MXFP4", 2, 32, torch.uint8, torch.uint8)  # scales are powers of 2: 2 ** (scale - 127)
NVFP4 = Packing("NVFP4", 2, 16, torch.uint8, torch.float8_e4m3fn)  # and a scale of the whole tensor
FP8 = Packing("FP8", 1, 128, torch.float8_e4m3fn, torch.float32)


def read_by(kernels: Callable[[torch.device], Any]) -> None:
    """Prepare the weight for its device's kernels (`kernels.protocol.Kernels.READS_PACKED`)."""
    global _kernels
    _kernels = kernels


_kernels: Callable[[torch.device], Any]


class PackedWeight(torch.Tensor):
    """A weight [..., N, K] (`transposed`: [..., K, N]) of bfloat16 values, or of a wider type, stored packed.

    Operations without support for packed weights get the dequantised tensor.
    """

    codes: Tensor  # [..., N, K / each]
    scales: Tensor  # [..., N, ceil(K / group)]
    tensor_scale: Tensor | None  # [..., N, 1] float32, for NVFP4: what each scale is multiplied by
    packing: Packing
    transposed: bool

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Tensor, packing: Packing, *, tensor_scale: Tensor | None = None,
        transposed: bool = False, dtype: torch.dtype = torch.bfloat16,
    ) -> PackedWeight:  # fmt: skip
        *groups, rows, width = codes.shape
        shape = (*groups, *((width * packing.each, rows) if transposed else (rows, width * packing.each)))
        weight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]
        weight.codes, weight.scales, weight.tensor_scale = codes, scales, tensor_scale
        weight.packing, weight.transposed = packing, transposed
        return weight

    def __init__(self, *stored: Any, **options: Any) -> None:
        """As `__new__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedWeight({self.packing.name}, {list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        return self  # nothing changes it

    def like(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> PackedWeight:
        """A copy whose stored tensors are mapped, for example moved or copied."""
        scale = None if self.tensor_scale is None else change(self.tensor_scale)
        return PackedWeight(
            change(self.codes), change(self.scales), self.packing, tensor_scale=scale, transposed=self.transposed,
            dtype=dtype or self.dtype,
        )  # fmt: skip

    def group_scales(self) -> Tensor:
        """[..., N, ceil(K / group)] float32."""
        if self.packing is MXFP4:
            exponent = self.scales.int()  # as a float32's own: 0 is 2 ** -127, a subnormal number, and 255 is NaN
            bits = (exponent << 23).masked_fill(exponent == 0, 0x400000).masked_fill(exponent == 255, 0x7FC00000)
            return bits.view(torch.float32)
        scales = self.scales.float()
        return scales if self.tensor_scale is None else scales * self.tensor_scale

    def values(self) -> Tensor:
        """The codes as float32 numbers, [..., N, K]."""
        packing, codes = self.packing, self.codes
        if packing is FP8:
            return codes.float()
        shifts = 4 * torch.arange(packing.each, device=codes.device, dtype=torch.int32)
        nibbles = (codes.to(torch.int32)[..., None] >> shifts & 15).flatten(-2)
        if packing.integer:
            return (nibbles - 8).float()
        table = torch.tensor((*E2M1, *(-each for each in E2M1)), device=codes.device)
        return table[nibbles]

    def dequantised(self) -> Tensor:
        """The weight itself, in its type."""
        by_kernel = _kernels(self.codes.device).dequantised
        if by_kernel is not None:
            return by_kernel(self)
        if len(self.codes.shape) > 2 and len(self):
            # One matrix at a time: float32 values of all would take twice the memory.
            matrices = [self.matrix(index).dequantised() for index in range(len(self))]
            return torch.stack(matrices)
        values, scales = self.values(), self.group_scales()
        scales = scales.repeat_interleave(self.packing.group, -1)[..., : values.shape[-1]]
        weight = (values * scales).to(torch.bfloat16).to(self.dtype)
        return weight.mT if self.transposed else weight

    def is_finite(self) -> bool:
        """True if no weight is NaN or infinite; dequantises only if the largest codes would be."""
        largest = 448 if self.packing is FP8 else 8 if self.packing.integer else 6
        bound = (self.group_scales().abs() * largest).to(torch.bfloat16).to(self.dtype)
        nan = self.packing is FP8 and bool((self.codes.view(torch.uint8) & 0x7F == 0x7F).any())
        return not nan and (bool(bound.isfinite().all()) or bool(self.dequantised().isfinite().all()))

    def matrix(self, index: int) -> PackedWeight:
        """One of a stack: [N, K]."""
        return self.like(lambda x: x[index])

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].like(lambda x: x)
        if func is torch.ops.aten.clone.default:
            return args[0].like(torch.clone)
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype", args[0].dtype) == args[0].dtype:
            device = kwargs.get("device")
            return args[0].like(lambda x: x.to(device) if device is not None else x.clone())
        if len(args) > 1 and isinstance(args[1], PackedWeight) and func.namespace == "rlloop":
            kernels, name = _kernels(args[1].device), func.name().partition("::")[2]
            if name in kernels.READS_PACKED:
                return getattr(kernels, name)(*args)
        opened = [each.dequantised() if isinstance(each, PackedWeight) else each for each in args]
        return func(*opened, **{k: v.dequantised() if isinstance(v, PackedWeight) else v for k, v in kwargs.items()})


def is_packed(*weights: Tensor | None) -> bool:
    return any(isinstance(weight, PackedWeight) for weight in weights)
