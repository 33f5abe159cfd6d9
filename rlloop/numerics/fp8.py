"""8-bit weights that train (`model.quantize=fp8`): E4M3 in blocks of 128 x 128, as DeepSeek-V3 (arXiv:2412.19437).

One definition for trainer and engine. A scale is the smallest power of 2 such that 448 times it is at least the largest
magnitude of its block (128 x 128 weights, or a token's 128 inputs), and at least 2 ** -40. Each number times the
scale's inverse is rounded to nearest even. A product has a separate float32 sum for each 128 inputs, times both scales;
these sums are added in a fixed order, and the total is rounded once. Multiplying by a power of 2 is exact, so a
quantised weight is exact in bfloat16, quantising it again changes nothing, and the order of scaling changes no bits.

A block of zeros has the smallest scale and codes of 0. NaN and infinity become NaN, and so do outputs that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

BLOCK = 128
LARGEST = 448.0  # of E4M3
LEAST_EXPONENT = 127 - 40  # of a scale, as float32 stores it: products with two scales stay normal numbers
WRITTEN = 1 << 26  # weights quantised at a time


def scales_of(largest: Tensor) -> Tensor:
    """The scales of blocks whose largest magnitudes, float32, are these."""
    bits = largest.view(torch.int32).clamp(max=0x7F800000)
    exponents = ((bits + 0x1FFFFF) >> 23) - 8  # 448 is 1.75 * 2 ** 8: a fraction above .75 takes the next exponent
    return (exponents.clamp(min=LEAST_EXPONENT) << 23).view(torch.float32)


def codes_of(values: Tensor, scales: Tensor) -> Tensor:
    """float32 values over their scales, in E4M3."""
    scaled = values * scales.reciprocal()
    return torch.where(scaled.abs() <= LARGEST, scaled, torch.nan).to(torch.float8_e4m3fn)


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations [T, K] -> (codes [T, K], scales [T, ceil(K / 128)]); the last block may be shorter."""
    blocks = _blocks(x.float(), x.shape[-1])
    scales = scales_of(blocks.abs().amax(-1))
    return codes_of(blocks, scales[..., None]).flatten(-2)[..., : x.shape[-1]].contiguous(), scales


def _blocks(x: Tensor, size: int) -> Tensor:
    """[..., size] -> [..., ceil(size / 128), 128], with zeros at the end."""
    missing = -size % BLOCK
    return (torch.nn.functional.pad(x, (0, missing)) if missing else x).unflatten(-1, (-1, BLOCK))


class Fp8Weight(torch.Tensor):
    """A weight [..., N, K] stored in 8 bits, with the dtype of the model's compute type.

    Writing into it (`copy_`) quantises; from another `Fp8Weight` it copies the bytes. Operations without support for
    it get the dequantised tensor. Blocks restart every `span` rows, which are one tensor in a checkpoint.
    """

    codes: Tensor  # [..., N, K] float8_e4m3fn
    scales: Tensor  # [..., N / span * ceil(span / 128), ceil(K / 128)] float32
    span: int
    _widened: tuple[tuple[int, int], Tensor] | None

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, span: int, dtype: torch.dtype) -> Fp8Weight:
        weight = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)  # type: ignore[attr-defined]
        weight.codes, weight.scales, weight.span, weight._widened = codes, scales, span, None
        return weight

    def __init__(self, *stored: Any) -> None:
        """As `__new__`."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, values: Tensor, span: int, dtype: torch.dtype) -> Fp8Weight:
        """`values` [..., N, K] quantised, to compute with in `dtype`."""
        *outer, rows, width = values.shape
        blocks = rows // span * -(-span // BLOCK)
        weight = cls(
            torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device),
            torch.empty(*outer, blocks, -(-width // BLOCK), device=values.device), span, dtype,
        )  # fmt: skip
        weight.write(values)
        return weight

    def write(self, values: Tensor) -> None:
        """Quantise `values` [..., N, K] into the bytes, in place."""
        rows, width = self.codes.shape[-2:]
        codes, scales = self.codes.view(-1, rows, width), self.scales.view(-1, *self.scales.shape[-2:])
        matrices = values.detach().reshape(-1, rows, width)
        some = max(1, WRITTEN // max(1, rows * width))
        for at in range(0, len(matrices), some):
            chunk = matrices[at : at + some].to(codes.device, torch.float32)
            spans = _blocks(chunk.unflatten(1, (-1, self.span)), width).movedim(2, -1)  # [e, spans, K / 128, 128, span]
            largest = _blocks(spans, self.span).abs().amax((3, 5))  # [e, spans, K / 128, span / 128]
            scales[at : at + some] = scales_of(largest).mT.flatten(1, 2)
            wide = _row_scales(scales[at : at + some], rows, self.span).repeat_interleave(BLOCK, -1)[..., :width]
            codes[at : at + some] = codes_of(chunk, wide)

    def dequantised(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight itself: exact in bfloat16 and wider types."""
        return _kernels(self.codes.device).fp8_dequantised(self.codes, self.scales, self.span, dtype or self.dtype)

    def widened(self) -> Tensor:
        """The weight in float32, kept until its bytes change: for backends whose kernels do not read 8-bit floats."""
        version = (self.codes._version, self.scales._version)
        if self._widened is None or self._widened[0] != version:
            self._widened = version, self.dequantised(torch.float32)
        return self._widened[1]

    def __getitem__(self, index: Any) -> Tensor:
        """`[i]` of a stack, or `[i, first:last]` of whole spans: a view; else as of the dequantised tensor."""
        if isinstance(index, int) and self.ndim > 2:
            return self.like(lambda x: x[index])
        if isinstance(index, tuple) and len(index) == 2 and self.ndim == 3 and isinstance(index[1], slice):
            first, last, _ = index[1].indices(self.shape[1])
            if isinstance(index[0], int) and first % self.span == 0 and last - first == self.span:
                block, blocks = first // self.span, -(-self.span // BLOCK)
                scales = self.scales[index[0], block * blocks : (block + 1) * blocks]
                return Fp8Weight(self.codes[index[0], first:last], scales, self.span, self.dtype)
        return self.dequantised()[index]

    def like(self, change: Callable[[Tensor], Tensor]) -> Fp8Weight:
        """A copy whose stored tensors are mapped, for example moved or copied."""
        return Fp8Weight(change(self.codes), change(self.scales), self.span, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Fp8Weight({list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        twin = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, self.requires_grad)
        memo[id(self)] = twin
        return twin

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """For `Module.to`, which then moves the stored tensors."""
        return ["codes", "scales"], (self.span, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Fp8Weight:
        return Fp8Weight(inner["codes"], inner["scales"], *context)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, aten = kwargs or {}, torch.ops.aten
        if func in (aten.detach.default, aten.alias.default):
            return args[0].like(lambda x: x)
        if func is aten.clone.default:
            return args[0].like(torch.clone)
        if func is aten._to_copy.default and kwargs.get("dtype", args[0].dtype) == args[0].dtype:
            device = kwargs.get("device")
            return args[0].like(lambda x: x.to(device or x.device, copy=True))
        if func is aten.copy_.default and isinstance(args[0], Fp8Weight):
            to, values = args[:2]
            if isinstance(values, Fp8Weight):
                to.codes.view(torch.uint8).copy_(values.codes.view(torch.uint8))
                to.scales.copy_(values.scales)
            else:
                to.write(values)
            torch.autograd.graph.increment_version(to.codes)  # which is not counted in here
            return to

        def opened(x: Any) -> Any:
            return x.dequantised() if isinstance(x, Fp8Weight) else x

        return func(*map(opened, args), **{key: opened(value) for key, value in kwargs.items()})


def _row_scales(scales: Tensor, rows: int, span: int) -> Tensor:
    """[..., N, ceil(K / 128)]: each row has those of its block."""
    row = torch.arange(rows, device=scales.device)
    return scales.index_select(-2, row // span * -(-span // BLOCK) + row % span // BLOCK)


def dequantised(codes: Tensor, scales: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """[..., N, K] by PyTorch's own operations; kernels have the same bits."""
    wide = _row_scales(scales, codes.shape[-2], span).repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]
    return (codes.float() * wide).to(dtype)


def read_by(kernels: Callable[[torch.device], Any]) -> None:
    """Dequantise by the kernels of the weight's device."""
    global _kernels
    _kernels = kernels


_kernels: Callable[[torch.device], Any]
