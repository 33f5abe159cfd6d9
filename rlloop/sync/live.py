"""Torch's side of the weight sync: parameters as bits, and live parameters as a replica's target.

A live parameter may be a part of a larger tensor: engines fuse projections and stack experts, while versions name them
one by one. Targets take views into such tensors, so a write lands in the fused tensor itself: `named_weights` gives
them for rlloop's own models, `split` and `unstack` help with others.
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
from rlloop.sync.target import Layout

T = TypeVar("T")

NAMES = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # of the same widths


def bits_of(tensor: Tensor) -> Bits:
    """The tensor's bits. On the CPU, where it is contiguous, they are its own memory; else a copy."""
    if tensor.dtype not in NAMES:
        raise SyncError(f"a tensor of type {tensor.dtype} cannot be published; known are {', '.join(map(str, NAMES))}")
    plain = _integers(tensor.detach()).cpu().contiguous().numpy()
    return Bits(NAMES[tensor.dtype], plain.view(UNSIGNED[tensor.element_size()]))


def tensor_of(bits: Bits, dtype: torch.dtype) -> Tensor:
    """The tensor with these bits, over the same memory. `dtype` must be the one that they name."""
    assert bits.dtype == NAMES[dtype], (bits.dtype, dtype)
    return _as_integers(bits).view(dtype)


def tensors_of(named: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Bits], dict[str, str]]:
    """What `Publisher.publish` takes: tensors by name, and the aliases of those that are tied.

    Give all names, tied ones too: `named_weights(model).items()`, or another framework's names and tensors.
    """
    tensors, aliases = untie(dict(named))
    return {name: bits_of(tensor) for name, tensor in tensors.items()}, aliases


def untie(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each memory once, under its first name; and the other names it has."""
    first: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        owner = first.setdefault(place, name) if tensor.numel() else name
        if owner != name:
            aliases[name] = owner
    return {name: tensor for name, tensor in named.items() if name not in aliases}, aliases


def named_weights(model: Model) -> dict[str, Tensor]:
    """The parameters of rlloop's own model as checkpoints name them: `ParameterStore.as_stored`."""
    return ParameterStore(model).as_stored()


class LiveTarget:
    """A replica's target over live tensors.

    `named`: Hugging Face name -> parameter, or a view into one; tied weights may stand under each of their names.
    `set_version` drops what was computed with other weights, as `Engine.set_version` does. `exclusively` runs a change
    with nothing in flight, as `EngineService.between_batches` does; the default is for callers that do so themselves.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        set_version: Callable[[int], None],
        exclusively: Callable[[Callable[[], Any]], Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """`aliases`: names of tied weights that `named` leaves out, such as lm_head.weight."""
        self._live, found = untie(dict(named))
        self._aliases = {**found, **(aliases or {})}
        self._layout = {name: (NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in self._live.items()}
        self._set_version, self._exclusively = set_version, exclusively

    def layout(self) -> Layout:
        return self._layout

    def aliases(self) -> Mapping[str, str]:
        return self._aliases

    def read(self, name: str) -> Bits:
        return bits_of(self._live[name])

    @torch.no_grad()
    def write(self, name: str, bits: Bits) -> None:
        assert (bits.dtype, bits.shape) == self._layout[name], name
        _integers(self._live[name].detach()).copy_(_as_integers(bits))

    def exclusively(self, change: Callable[[], T]) -> T:
        return change() if self._exclusively is None else self._exclusively(change)

    def set_version(self, step: int) -> None:
        self._set_version(step)


def _integers(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that no copy can touch a NaN."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _as_integers(bits: Bits) -> Tensor:
    width = bits.array.itemsize
    return torch.from_numpy(bits.array.reshape(-1).view(f"i{width}" if width > 1 else "u1")).view(bits.shape)


def split(fused: Tensor, rows: Mapping[str, int]) -> dict[str, Tensor]:
    """Views of a tensor that holds several along its first dimension: name -> rows, in order."""
    assert sum(rows.values()) == fused.shape[0], (rows, fused.shape)
    return dict(zip(rows, fused.split(list(rows.values())), strict=True))


def unstack(stacked: Tensor, pattern: str) -> dict[str, Tensor]:
    """Views of a tensor that holds one for each expert: `pattern` has {} where its number goes."""
    return {pattern.format(index): part for index, part in enumerate(stacked.unbind(0))}
