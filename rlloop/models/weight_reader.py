"""Reads the weights that a rank holds from a Hugging Face folder; every stored tensor is accounted for."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlloop.errors import ModelError
from rlloop.models.adapter_weights import some
from rlloop.models.architecture import ModelConfig
from rlloop.models.checkpoint_names import (
    EMBEDDING,
    HEAD,
    TOWER,
    StoredSlice,
    form_of,
    shapes_in_any_form,
    stored_name,
    stored_shapes,
    stored_slices,
)
from rlloop.models.experts import BIAS
from rlloop.models.packed import PackedReader, check_named, check_plain, finished, place, without_experts
from rlloop.models.packed_config import read_scheme
from rlloop.models.parameters import ParameterStore
from rlloop.models.safetensors_io import StoredWeights
from rlloop.models.stored_parameter import StoredParameter
from rlloop.models.transformer import Model
from rlloop.numerics.packed import PackedWeight, Packing
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.progress import tick

log = logging.getLogger(__name__)


def read_weights(
    config: ModelConfig, folder: Path, dtype: torch.dtype | None, context: ParallelContext,
    exact: Collection[str] = (),
) -> dict[str, Tensor]:  # fmt: skip
    """The rank's weights by parameter name, those of `exact` in their stored types; names and shapes are checked before
    any tensor is read."""
    with torch.device("meta"):
        entries = ParameterStore(Model(config, None, context)).entries
    stored, shapes = StoredWeights.open(folder), shapes_of(config)
    left_out = tensors_left_out(config, stored)
    packed, checkpoint_shapes, form = _found(config, stored, shapes, left_out)
    expected = stored_shapes(shapes, config.architecture, form)
    if (others := {name: part for name, part in left_out.items() if part}) and dtype is not None:
        parts = " and ".join(dict.fromkeys(others.values()))
        log.warning("%s: %s are left out: %s", folder, parts, some(sorted(others)))
    if packed is not None and packed.scheme.left_out and dtype is not None:
        log.warning("%s: %s are left out: they stay in the compute type", folder, " and ".join(packed.scheme.left_out))
    check_shapes(config, checkpoint_shapes, expected, str(folder))
    plain = checkpoint_shapes.keys() - (packed.names if packed is not None else {})
    for name in plain:
        check_plain(str(folder), name, stored.tensors[name])
    slices = {name: rows for name, rows, _ in stored_slices(shapes, config.architecture, form)}
    tied = StoredSlice(EMBEDDING)  # it may be stored under its other name as well
    held = {name for name in checkpoint_shapes if _holds(entries, slices.get(name, tied))}
    of_none = {name for name, entry in entries.items() if 0 in entry.live.shape}  # experts, of a rank without any
    cuts = {name: entries[rows.parameter].cut for name, rows in slices.items() if name in held and rows.expert is None}
    state: dict[str, Tensor] = {}
    for name, tensor in stored.read(plain & held, {name: cut for name, cut in cuts.items() if cut is not None}):
        tick()
        rows = slices.get(name)
        tensor = tensor.mT.contiguous() if rows is not None and rows.transposed else tensor
        as_it_is = rows is not None and rows.parameter in exact
        kind = tensor.dtype if as_it_is else type_in_memory(name, dtype) or tensor.dtype
        if rows is None or rows.expert is None:
            kept = state[name if rows is None else rows.parameter] = tensor.to(context.device, kind, copy=True)
        else:
            entry = entries[rows.parameter]
            if rows.parameter not in state:
                state[rows.parameter] = torch.empty(entry.live.shape, dtype=kind, device=context.device)
            first = 0 if entry.cut is None else entry.cut.ranges[0][0]
            kept = replace(rows, expert=rows.expert - first).of(state[rows.parameter]).copy_(tensor)
        if not _finite(kept):
            raise ModelError(f"{folder}: {name} holds NaN or infinity (as {kept.dtype}); such a model scores NaN")
    if packed is not None:
        held |= {name for name, rows in slices.items() if rows.parameter in of_none and rows.expert == 0}
        aside: dict[str, dict[int, dict[int, PackedWeight]]] = {}
        for name, weight in packed.read(str(folder), dtype or torch.bfloat16, context.device, held):
            tick()
            if not weight.is_finite():
                raise ModelError(f"{folder}: {name} holds NaN or infinity; such a model scores NaN")
            rows = slices.get(name)
            if rows is not None and rows.expert is None and entries[rows.parameter].division is not None:
                shard = entries[rows.parameter].part(weight)
                assert isinstance(shard, PackedWeight)
                weight = shard.like(torch.clone)  # a view would keep the whole
            place(state, aside, rows, name, weight)
        for name, weight in finished(aside, state, str(folder)):  # the first expert's, of which none is kept
            state[name] = without_experts(weight) if name in of_none else weight
    for name in of_none - state.keys():
        kind = type_in_memory(name, dtype)
        state[name] = torch.empty(entries[name].live.shape, dtype=kind, device=context.device)
    if config.tied and HEAD in state and not torch.equal(state.pop(HEAD), state[EMBEDDING]):
        raise ModelError(
            f"{folder}: config.json ties {HEAD} to {EMBEDDING}, and the stored two differ; "
            "set tie_word_embeddings to false, or store one"
        )
    return state


def packed_parameters(config: ModelConfig, folder: Path) -> dict[str, Packing]:
    """The parameters that stay packed when `folder` is loaded, and how, by name; only the files' headers are read.

    Raises `ModelError` where these are missing, since config.json does not say which are packed."""
    if config.quantization is None:
        return {}
    stored, shapes = StoredWeights.open(folder), shapes_of(config)
    packed, _, form = _found(config, stored, shapes, tensors_left_out(config, stored))
    slices = stored_slices(shapes, config.architecture, form)
    return {rows.parameter: packed.scheme.packing for name, rows, _ in slices if packed and name in packed.names}


def _found(
    config: ModelConfig, stored: StoredWeights, shapes: Mapping[str, tuple[int, ...]], left_out: Container[str]
) -> tuple[PackedReader | None, dict[str, tuple[int, ...]], str | None]:
    """The reader of packed weights, names and shapes of all weights as plain ones, and the form of experts."""
    found = {name: tensor.shape for name, tensor in stored.tensors.items() if name not in left_out}
    packed = None
    if config.quantization is None:
        check_named(str(stored.folder), {name: stored.tensors[name] for name in found})
    else:
        in_any_form = shapes_in_any_form(shapes, config.architecture)
        packed = PackedReader(read_scheme(config.quantization), stored, in_any_form)
        found = packed.found(found)
        tower = stored_name(TOWER, config.architecture)
        if of_tower := sorted(name for name in packed.names if name.startswith(tower)):
            raise ModelError(
                f"{stored.folder}: weights of the vision tower are packed, which is not supported: {some(of_tower)}; "
                "store them in bfloat16"
            )
    return packed, found, form_of(found, shapes, config.architecture)


def _holds(entries: Mapping[str, StoredParameter], rows: StoredSlice) -> bool:
    """True if a rank with the parameters `entries` holds a stored tensor or a part of it."""
    entry = entries.get(rows.parameter)
    if entry is None or entry.cut is None or rows.expert is None:
        return entry is not None
    return any(begin <= rows.expert < end for begin, end in entry.cut.ranges)


def tensors_left_out(config: ModelConfig, stored: StoredWeights) -> dict[str, str]:
    """Stored tensors that are not the model's, and the part that each is of: multi-token-prediction layers, what
    `config.left_out` names, or "" for empty tensors."""
    further = range(config.num_layers, config.num_layers + config.further_layers)
    layers = stored_name("model.layers.", config.architecture)
    found: dict[str, str] = {}
    for name, tensor in stored.tensors.items():
        layer = name.removeprefix(layers).split(".")[0]
        if 0 in tensor.shape:
            found[name] = ""
        elif (further and name.startswith("mtp.")) or (layer.isdecimal() and int(layer) in further):
            found[name] = "multi-token-prediction heads"
        elif part := next((part for part, prefix in config.left_out.items() if name.startswith(prefix)), None):
            found[name] = part
    return found


def _finite(tensor: Tensor) -> bool:
    """True if it has neither NaN nor infinity; makes no copy."""
    if not tensor.numel():
        return True
    least, most = tensor.aminmax()
    return bool(least.isfinite() & most.isfinite())


def type_in_memory(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The type of a tensor in memory where the model computes in `dtype`; None: its stored type."""
    return torch.float32 if dtype is not None and dtype != torch.float64 and name.endswith(BIAS) else dtype


def check_shapes(
    config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], where: str
) -> None:
    """Raises `ModelError` for names and shapes other than `expected`; `where` names them in messages."""
    ours = EMBEDDING in expected
    embedding, head = (name if ours else stored_name(name, config.architecture) for name in (EMBEDDING, HEAD))
    allowed = {**expected, head: expected[embedding]}  # some checkpoints of tied models store both
    if unknown := sorted(shapes.keys() - allowed.keys()):
        raise ModelError(f"{where} has tensors that {config.architecture} does not know: {some(unknown)}")
    if missing := sorted(expected.keys() - shapes.keys()):
        raise ModelError(f"{where} lacks tensors that {config.architecture} needs: {some(missing)}")
    for name, shape in shapes.items():
        if shape != allowed[name]:
            raise ModelError(f"{where}: {name} has shape {list(shape)}; config.json says {list(allowed[name])}")


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return ParameterStore(Model(config)).shapes()
