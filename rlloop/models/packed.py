"""Packed weights of Hugging Face folders (config.json's quantization_config), as `numerics.packed.PackedWeight`.

    quant_method        what is stored of X                                      format
    compressed-tensors  X.weight_packed int32, X.weight_scale, X.weight_shape    pack-quantized: int4, groups of 32
    compressed-tensors  X.weight_packed, X.weight_scale, X.weight_global_scale   nvfp4-pack-quantized
    modelopt            X.weight uint8, X.weight_scale, X.weight_scale_2         NVFP4
    modelopt            X.weight float8, X.weight_scale                          FP8: one scale, or one for each row
    mxfp4               X_blocks uint8, X_scales uint8                           MXFP4, as gpt-oss is released
    fp8                 X float8, X_scale_inv (X: Y.weight, or all experts)      FP8 in 128 x 128, as DeepSeek-V3 is

Codes are the checkpoint's bytes. Inputs are not quantized: scales for them in the files are not read. The keys of the
quantization_config are `packed_config`'s.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlloop.errors import ModelError
from rlloop.models.checkpoint_names import StoredSlice
from rlloop.models.packed_config import CACHE_8, MODELOPT, SUPPORTED, Scheme
from rlloop.models.safetensors_io import FLOATS, KINDS, StoredTensor, StoredWeights
from rlloop.numerics.packed import FP8, INT4, MXFP4, NVFP4, PackedWeight

BESIDE = (".input_scale", ".input_global_scale")  # of activations
CACHES = (".k_proj.k_scale", ".v_proj.v_scale")  # of keys and values, where those are left out


class PackedReader:
    """The packed weights of a folder. `shapes`: of all weights, by the name of the plain one."""

    def __init__(self, scheme: Scheme, stored: StoredWeights, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.scheme, self._stored = scheme, stored
        tensors = stored.tensors
        self.names = {
            name: scheme.parts(name)
            for name in shapes
            if (codes := tensors.get(scheme.parts(name)["codes"])) is not None and codes.dtype == scheme.packing.codes
        }
        self._shapes = {name: shapes[name] for name in self.names}
        endings = (*BESIDE, *CACHES) if CACHE_8 in scheme.left_out else BESIDE
        beside = {each for each in tensors if each.endswith(endings)}
        self.parts = beside | {name for names in self.names.values() for name in names.values()}

    def found(self, plain: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the equivalent plain weights; `plain`: those of the stored tensors."""
        return {**{name: shape for name, shape in plain.items() if name not in self.parts}, **self._shapes}

    def read(
        self, where: str, dtype: torch.dtype, device: torch.device, held: Container[str]
    ) -> Iterator[tuple[str, PackedWeight]]:
        """Packed weights in `held` by plain name. Raises `ModelError` for parts that are missing or misshapen."""
        tensors, weight_of = self._stored.tensors, dict[str, tuple[str, str]]()
        for name, stored_names in self.names.items():
            if missing := [each for each in stored_names.values() if each not in tensors]:
                raise ModelError(f"{where} lacks {', '.join(missing)}, without which {name} cannot be read")
            self._check(name, where)
            if name in held:
                weight_of |= {stored: (name, kind) for kind, stored in stored_names.items()}
        begun: dict[str, dict[str, Tensor]] = {}  # weights some of whose parts have been read
        for stored, tensor in self._stored.read(weight_of):
            name, kind = weight_of[stored]
            components = begun.setdefault(name, {})
            components[kind] = tensor.to(device, copy=True)
            if len(components) < len(self.names[name]):
                continue
            yield name, self._made(name, begun.pop(name), where).like(lambda x: x, dtype)

    def _check(self, name: str, where: str) -> None:
        """Raises `ModelError` for parts of other shapes or types than a weight of this shape has."""
        packing, shape = self.scheme.packing, self._shapes[name]
        *groups, rows, width = (*shape[:-2], *shape[:-3:-1]) if packing is MXFP4 else shape
        blocks = -(-width // packing.group)
        codes = (*groups, rows, width / packing.each)  # a fraction fits no stored shape
        fits: dict[str, tuple[tuple[float, ...], Collection[torch.dtype]]] = {
            "codes": ((*groups, rows, width / packing.group, 16) if packing is MXFP4 else codes, (packing.codes,)),
            "scales": ((*groups, rows, blocks), (packing.scales,)),
        }
        if packing is FP8:
            fits["scales"] = self._grid(shape), FLOATS.values()
        elif packing is INT4:
            fits["scales"] = fits["scales"][0], FLOATS.values()  # those of bfloat16 values
        for kind, (wanted, dtypes) in fits.items():
            tensor = self._stored.tensors[stored := self.names[name][kind]]
            fitting = tensor.shape == wanted
            if packing is FP8 and kind == "scales":  # one of a tensor has no sizes, and those of rows have one or two
                fitting = [size for size in tensor.shape if size != 1] == [size for size in wanted if size != 1]
            if not fitting or tensor.dtype not in dtypes:
                needed = ", ".join(f"{size:g}" for size in wanted)
                raise ModelError(
                    f"{where}: {stored} is {tensor.dtype} {list(tensor.shape)}; {packing.name} of {rows} x {width} (so "
                    f"config.json) needs {' or '.join(map(str, dtypes))} [{needed}]"
                )
        if (stored := self.names[name].get("of_tensor")) is not None:
            tensor = self._stored.tensors[stored]
            if math.prod(tensor.shape) != 1 or tensor.dtype not in FLOATS.values():
                raise ModelError(f"{where}: {stored} is {tensor.dtype} {list(tensor.shape)}; it must be one number")

    def _grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of FP8's scales: [..., blocks of rows, blocks of inputs]."""
        *groups, rows, width = shape
        of_rows, of_inputs = self.scheme.block
        return (*groups, -(-rows // (of_rows or rows)), -(-width // (of_inputs or width)))

    def _made(self, name: str, components: Mapping[str, Tensor], where: str) -> PackedWeight:
        packing, codes, scales = self.scheme.packing, components["codes"], components["scales"]
        if packing is MXFP4:
            codes = codes.flatten(-2)
        rows = codes.shape[-2]
        if packing is FP8:  # a row has the scales of its block of rows, also where all its inputs have one
            scales = scales.float().reshape(self._grid(tuple(codes.shape)))
            scales = scales.repeat_interleave(self.scheme.block[0] or rows, -2)[..., :rows, :]
            scales = scales.expand(*scales.shape[:-1], -(-codes.shape[-1] // packing.group)).contiguous()
        if packing is INT4:
            exact, scales = scales, scales.to(torch.bfloat16)
            if not torch.equal(scales.to(exact.dtype), exact) and not exact.isnan().any():
                raise ModelError(
                    f"{where}: scales of {name} are {exact.dtype} with values that bfloat16 does not have, which "
                    f"{packing.name} is read with; store them in bfloat16"
                )
            said = components["shape"].flatten().tolist()
            if said != list(self._shapes[name]):
                raise ModelError(
                    f"{where}: {self.names[name]['shape']} says {said}; config.json says {list(self._shapes[name])}"
                )
        of_tensor = None
        if "of_tensor" in components:
            whole = components["of_tensor"].float().reshape(())
            if not whole.isfinite():
                raise ModelError(f"{where}: the scale of the whole {name} is {whole.item()}; it must be finite")
            of_tensor = (1 / whole if self.scheme.divides else whole).expand(rows, 1).contiguous()
        return PackedWeight(codes, scales, packing, tensor_scale=of_tensor, transposed=packing is MXFP4)


def stacked(matrices: Mapping[int, Mapping[int, PackedWeight]]) -> PackedWeight:
    """Experts' matrices as one weight: by expert, and by the first of its rows."""
    first = next(iter(matrices[min(matrices)].values()))

    def gathered(kind: str) -> Tensor:
        return torch.stack([
            torch.cat([getattr(matrices[expert][begin], kind) for begin in sorted(matrices[expert])])
            for expert in sorted(matrices)
        ])  # fmt: skip

    scale = None if first.tensor_scale is None else gathered("tensor_scale")
    return PackedWeight(gathered("codes"), gathered("scales"), first.packing, tensor_scale=scale, dtype=first.dtype)


def check_named(where: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises `ModelError` for ModelOpt's codes where nothing says how they are read."""
    for name, tensor in tensors.items():
        if tensor.dtype in (FP8.codes, NVFP4.codes):
            raise ModelError(
                f"{where}: {name} is {tensor.dtype}, and neither config.json (quantization_config) nor a {MODELOPT} "
                "beside it names its format; releases by ModelOpt have that file"
            )


def check_plain(where: str, name: str, tensor: StoredTensor) -> None:
    """Raises `ModelError` for a tensor that is neither a float nor part of a packed weight."""
    if tensor.dtype not in FLOATS.values():
        kind = next(name for name, dtype in KINDS.items() if dtype == tensor.dtype)
        raise ModelError(f"{where}: {name} has type {kind}; supported are {', '.join(FLOATS)} and {SUPPORTED}")


def place(state: dict[str, Any], packed: dict[str, dict[int, dict[int, PackedWeight]]], rows: StoredSlice | None,
          name: str, weight: PackedWeight) -> None:  # fmt: skip
    """Put a weight into `state` under its parameter's name, or aside until all of its experts have come."""
    if rows is None or rows.expert is None:
        state[name if rows is None else rows.parameter] = torch.nn.Parameter(weight, requires_grad=False)
    else:
        packed.setdefault(rows.parameter, {}).setdefault(rows.expert, {})[rows.begin] = weight


def finished(
    packed: Mapping[str, dict[int, dict[int, PackedWeight]]], state: Mapping[str, Tensor], where: str
) -> Iterator[tuple[str, Tensor]]:
    """The experts that `place` put aside. Raises `ModelError` where some of a layer's are packed and others plain."""
    for parameter, experts in packed.items():
        if parameter in state:
            raise ModelError(f"{where}: some experts of {parameter} are packed and some are not; store all alike")
        yield parameter, torch.nn.Parameter(stacked(experts), requires_grad=False)


def without_experts(experts: Tensor) -> Tensor:
    """A weight packed like `experts` that has none of them, for a rank that holds none."""
    assert isinstance(experts, PackedWeight)
    return torch.nn.Parameter(experts.like(lambda x: x[:0].clone()), requires_grad=False)
