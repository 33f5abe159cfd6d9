"""PyTorch parameters as bits, and live parameters as a replica's target.

A live parameter may be part of a larger tensor: engines fuse projections and stack experts, while versions name them
one by one. Targets take views into such tensors, so that a write lands in the fused tensor itself. `named_weights`
gives the views of rlloop's own models, `split` those of other fused tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlloop.errors import SyncError
from rlloop.models import Model
from rlloop.models.parameters import ParameterStore
from rlloop.sync.bits import UNSIGNED, Bits
from rlloop.sync.staging import patched
from rlloop.sync.steps import Patch
from rlloop.sync.target import Layout, patch_arrays

T = TypeVar("T")

NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of the same widths


def bits_of(tensor: Tensor) -> Bits:
    """The tensor's bits: its own memory where it is contiguous on the CPU, else a copy. Raises `SyncError`."""
    if tensor.dtype not in NAMES:
        raise SyncError(f"dtype {tensor.dtype} cannot be published; supported are {', '.join(map(str, NAMES))}")
    plain = _integers(tensor.detach()).cpu().contiguous().numpy()
    return Bits(NAMES[tensor.dtype], plain.view(UNSIGNED[tensor.element_size()]))


def tensor_of(bits: Bits, dtype: torch.dtype) -> Tensor:
    """A tensor over the same memory. `dtype` must be the one that `bits` names."""
    assert bits.dtype == NAMES[dtype], (bits.dtype, dtype)
    return _as_integers(bits).view(dtype)


def tensors_of(named: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Bits], dict[str, str]]:
    """Arguments of `Publisher.publish`: tensors by name, and the other names of tied ones (alias -> name).

    `named` has every name, tied ones too: `named_weights(model).items()`, or another framework's names and tensors.
    """
    tensors, aliases = untie(dict(named))
    return {name: bits_of(tensor) for name, tensor in tensors.items()}, aliases


def device_tensors_of(named: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Any], dict[str, str]]:
    """`tensors_of` for weights that stay on a GPU; contiguous tensors are used in place."""
    from rlloop.sync.device import DeviceBits  # Triton's

    tensors, aliases = untie(dict(named))
    return {name: DeviceBits(NAMES[tensor.dtype], tensor.contiguous()) for name, tensor in tensors.items()}, aliases


def published_weights(model: Model, *, on_device: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments of `Publisher.publish`. `on_device`: weights on a GPU are encoded there, else from copies."""
    named = named_weights(model).items()
    return device_tensors_of(named) if on_device and model.context.device.type == "cuda" else tensors_of(named)


def untie(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, under its first name; and aliases (other name -> first name) of those with the same memory."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named.items():
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        owner = first.setdefault(memory, name) if tensor.numel() else name
        if owner != name:
            aliases[name] = owner
    return {name: tensor for name, tensor in named.items() if name not in aliases}, aliases


def named_weights(model: Model) -> dict[str, Tensor]:
    """An rlloop model's parameters by their names in checkpoints, as views: `ParameterStore.as_stored`."""
    return ParameterStore(model).as_stored()


class LiveTarget:
    """Live tensors as a replica's target.

    `named`: Hugging Face name -> parameter, or a view into one; a tied weight may be listed under each of its names.
    `set_version` drops what was computed with other weights, as `Engine.set_version` does. `exclusively` runs a change
    with no request in flight, as `EngineService.change_weights` does; None: callers ensure it themselves.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        set_version: Callable[[int], None],
        exclusively: Callable[[Callable[[], Any]], Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`aliases`: names of tied weights that `named` leaves out, such as lm_head.weight."""
        self._live, tied = untie(dict(named))
        self._aliases = {**tied, **(aliases or {})}
        self._layout = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in self._live.items()}
        self._set_version, self._exclusively = set_version, exclusively

    def layout(self) -> Layout:
        return self._layout

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def read(self, name: str) -> Any:
        """`Bits`, or `DeviceBits` over the memory of a contiguous parameter on a GPU."""
        live = self._live[name]
        if live.is_cuda and live.is_contiguous():
            from rlloop.sync.device import DeviceBits  # Triton's

            return DeviceBits(NAMES[live.dtype], live)
        return bits_of(live)

    @torch.no_grad()
    def write(self, name: str, bits: Any) -> None:
        """`bits`: `Bits` or `DeviceBits`."""
        assert (bits.dtype, bits.shape) == self._layout[name], name
        new = _as_integers(bits) if isinstance(bits, Bits) else bits.tensor
        live = _integers(self._live[name].detach())
        live.copy_(new.view(live.dtype))

    @torch.no_grad()
    def prepare(self, patches: Mapping[str, Patch], threads: int) -> Callable[[], list[str]]:
        known = {name: live for name in patches if (live := self._live.get(name)) is not None}  # subclasses have others
        direct = {name: live for name, live in known.items() if live.is_contiguous()}
        flat = {name: bits_of(live).array.reshape(-1) for name, live in direct.items() if live.device.type == "cpu"}
        on_device = {name: live for name, live in direct.items() if live.is_cuda}
        writes = None
        if on_device:
            from rlloop.sync import device  # Triton's

            writes = device.Writes((_integers(live.detach()), patches[name]) for name, live in on_device.items())

        def change() -> list[str]:
            wrong = patch_arrays(flat, {name: patches[name] for name in flat}, threads)
            if writes is not None and not writes.done():
                wrong += on_device
            for name in patches.keys() - flat.keys() - on_device.keys():
                new = patched(self.read(name), patches[name])
                self.write(name, new)
                wrong += [] if self.read(name).same(new) else [name]
            return wrong

        return change

    def exclusively(self, change: Callable[[], T]) -> T:
        return change() if self._exclusively is None else self._exclusively(change)

    def set_version(self, step: int) -> None:
        self._set_version(step)


def _integers(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that a copy cannot alter a NaN."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _as_integers(bits: Bits) -> Tensor:
    width = bits.array.itemsize
    return torch.from_numpy(bits.array.reshape(-1).view(f"i{width}" if width > 1 else "u1")).view(bits.shape)


def split(fused: Tensor, rows: Mapping[str, int]) -> dict[str, Tensor]:
    """Views into a tensor that is several stacked along its first dimension. `rows`: name -> rows, in order."""
    assert sum(rows.values()) == fused.shape[0], (rows, fused.shape)
    return dict(zip(rows, fused.split(list(rows.values())), strict=True))
