"""Trainable weights in 8 bits (`quantize="fp8"`): the weights that are quantised, and the settings that allow it.

Quantised are the projections of attention and of MLPs, and experts. Left in the compute type are the embedding and the
head, norms, biases, routers, the gate of a shared expert, the indexer of sparse attention, `kv_b_proj` of latent
attention (which is read transposed, and a head at a time), projections into and out of experts' own width, and those of
recurrent layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from rlloop.errors import ConfigError
from rlloop.models.checkpoint_names import GATE_UP
from rlloop.models.experts import Experts
from rlloop.models.layers import Linear
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.layout import Layout

QUANTIZE = ("none", "fp8")
SCALES = "_scale_inv"  # of a stored weight's name, after `weight`; as DeepSeek-V3 is released
PROJECTIONS = frozenset({
    "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj",
    "down_proj",
})  # fmt: skip
OPERATIONS = ("linear", "experts")  # knobs of a profile that must be rlloop's own


def quantised_names(model: nn.Module) -> Iterator[str]:
    """The parameters that are quantised."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            yield from (f"{name}.{own}" for own, _ in module.named_parameters())
        elif isinstance(module, Linear) and name.rpartition(".")[2] in PROJECTIONS:
            yield f"{name}.weight"


def quantised(name: str, values: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of that name, to compute with in `dtype`. Gates and ups of experts are two tensors in checkpoints."""
    span = values.shape[-2] // (2 if name.endswith(GATE_UP) else 1)
    return nn.Parameter(Fp8Weight.of(values, span, dtype))


def is_quantised(model: nn.Module) -> bool:
    return any(isinstance(parameter, Fp8Weight) for parameter in model.parameters())


def as_stored(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A weight as two tensors, its codes and scales, under the names of DeepSeek-V3's layout; other tensors as they
    are."""
    return {name: tensor.codes, name + SCALES: tensor.scales} if isinstance(tensor, Fp8Weight) else {name: tensor}


def from_stored(name: str, stored: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """The weight of which `as_stored` made `stored`, among others; `like` has its span and type."""
    if not isinstance(like, Fp8Weight):
        return stored[name]
    return Fp8Weight(stored[name], stored[name + SCALES], like.span, like.dtype)


def check_can_quantise(model: nn.Module, dtype: torch.dtype, layout: Layout) -> None:
    """Raises `ConfigError` for a model (which may have no weights yet), type or layout that fp8 does not support."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"quantize=fp8 with dtype {str(dtype).removeprefix('torch.')}: use bfloat16 or float32, which hold 8-bit "
            "weights exactly"
        )
    cut = {axis: getattr(layout, axis) for axis in ("tp", "ep", "pp", "cp") if getattr(layout, axis) > 1}
    if cut:
        said = ", ".join(f"{axis}={size}" for axis, size in cut.items())
        raise ConfigError(f"quantize=fp8 needs whole weights on each rank; the layout has {said}")
    if any(isinstance(module, Experts) and module.clamp is not None for module in model.modules()):
        raise ConfigError("quantize=fp8 is not for experts with biases that are stored by column (gpt-oss)")


def check_profile(profile: NumericsProfile) -> None:
    """Raises `ConfigError` for settings that change the products."""
    others = [f"{knob}={getattr(profile, knob)}" for knob in OPERATIONS if getattr(profile, knob) != "rlloop"]
    if profile.tp_segments != "1":
        others.append(f"tp_segments={profile.tp_segments}")
    if others:
        raise ConfigError(f"quantize=fp8 has products of its own; leave out the profile's {', '.join(others)}")
