"""Hugging Face folders in and out: every tensor accounted for, and byte-equal where nothing changed."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlloop.errors import ConfigError, ModelError
from rlloop.models.checkpoint_names import EMBEDDING, HEAD, places, stored_name, stored_shapes, stored_state
from rlloop.models.config import ModelConfig, parse_config, read_config
from rlloop.models.experts import BIAS
from rlloop.models.layers import Norm
from rlloop.models.parameters import ParameterStore
from rlloop.models.safetensors_io import StoredWeights, write_single
from rlloop.models.transformer import Model, RopeTable
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.context import ParallelContext

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

# What a saved folder takes over from its source, beside config.json and weights.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def load_model(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    profile: NumericsProfile | None = None,
) -> Model:
    """The model of a Hugging Face checkpoint folder of one of `families.FAMILIES`.

    `dtype` is the compute type; weights of another type are rounded to it once, to nearest (float64 is for the
    `reference` profile). `profile` says which implementation runs each operation; None: the invariant ones.

    Heads that predict further tokens are left out, by a line in the log. Every weight is read once more for NaN and
    infinity, at 1 to 1.5 ms a million on a CPU: as long as copying it takes where the file is in memory already.

    Raises `ModelError` for a missing folder, an unsupported configuration, an adapter in the folder, unknown, missing
    or misshapen tensors, and weights that are not finite in `dtype`; `ConfigError` for a type, device or profile that
    cannot be used.
    """
    context, compute, config = ParallelContext(_device(device)), _dtype(dtype), read_config(path)
    where = context.device
    if where.type == "cuda" and (config.delta is not None or config.mamba is not None):
        raise ConfigError(f"{config.architecture} has recurrent layers, whose kernels are for CPUs; use device=cpu")
    if where.type == "cuda" and config.sinks:
        raise ConfigError(f"{config.architecture} has attention sinks, whose kernels are for CPUs; use device=cpu")
    return _assemble(config, _read(config, Path(path), compute, where), context, profile, Path(path))


def new_model(
    config: Mapping[str, Any], seed: int, *, dtype: str = "float32", profile: NumericsProfile | None = None
) -> Model:
    """A randomly initialised model for `config`, the content of a config.json; the same seed gives the same bits.

    Matrices are normal with the configuration's `initializer_range`, norms 1 (0 where they are added to 1), biases 0,
    steps of recurrent layers 1 and their rates the numbers of the heads, sinks normal, much as transformers does.
    """
    compute = _dtype(dtype)
    parsed = parse_config(config)
    with torch.device("meta"):
        modules = Model(parsed).named_modules()
    centred = {f"{name}.weight" for name, module in modules if isinstance(module, Norm) and module.centred}
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in _shapes(parsed).items():
        if name.endswith("A_log"):
            tensor = torch.log(torch.arange(1.0, shape[0] + 1))
        elif (name.endswith("bias") and not name.endswith("dt_bias")) or name in centred:
            tensor = torch.zeros(shape)
        elif len(shape) == 1 and not name.endswith("sinks"):
            tensor = torch.ones(shape)
        else:
            tensor = torch.randn(shape, generator=generator) * parsed.initializer_range
        state[name] = tensor.to(_compute(name, compute))
    return _assemble(parsed, state, ParallelContext(torch.device("cpu")), profile, None)


def read_state(folder: str | Path) -> dict[str, Tensor]:
    """The weights of a folder by parameter name, in the types they are stored in, checked against its config.json."""
    return _read(read_config(folder), Path(folder), None, torch.device("cpu"))


def save_model(
    model: Model | Mapping[str, Tensor],
    path: str | Path,
    source_path: str | Path | None = None,
    *,
    config: ModelConfig | None = None,
) -> None:
    """Write a Hugging Face folder: weights, config.json, and the source's tokenizer and generation files.

    The weights are a model's, or those of a state by parameter name. The files are laid out as those of the source
    (`source_path`, or the folder that `model` was loaded from): same names, shards, order and metadata, so that
    weights that did not change come out byte-equal, and heads that predict further tokens are the source's. Without a
    source there is one model.safetensors, and config.json is `config`'s (or the model's).
    """
    if isinstance(model, Model):
        state = ParameterStore(model).tensors()
        source_path, config = source_path or model.source_path, config or model.config
    else:
        state = dict(model)
    folder, source = Path(path), None if source_path is None else Path(source_path)
    if source is not None:
        config = read_config(source)
    if config is None:
        raise ModelError("weights alone make no model folder; give source_path or config as well")
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    _check(config, found, _shapes(config), "the state to save")
    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        write_single(folder, stored_state(state, config.architecture))
    else:
        stored = StoredWeights.open(source)
        beside = _beside(config, stored)
        if config.tied and HEAD in stored.tensors:
            state[HEAD] = state[EMBEDDING]
        whole = {**stored_state(state, config.architecture), **dict(stored.read(beside))}
        stored.write(folder, _as_stored(whole, stored))
        if not folder.samefile(source):
            for name in COMPANIONS:
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)
    _write_config(folder, config.raw, source, str(state[EMBEDDING].dtype).removeprefix("torch."))


def _write_config(folder: Path, raw: Mapping[str, Any], source: Path | None, dtype: str) -> None:
    """config.json, saying the type that the weights have; the source's own bytes where it does already."""
    key = "torch_dtype" if "torch_dtype" in raw else "dtype"
    if source is not None and raw.get(key) in (dtype, None):
        text = (source / "config.json").read_bytes()
    else:
        text = (json.dumps({**raw, key: dtype}, indent=2, sort_keys=True) + "\n").encode()
    (folder / "config.json").write_bytes(text)


def _read(config: ModelConfig, folder: Path, dtype: torch.dtype | None, device: torch.device) -> dict[str, Tensor]:
    """By parameter name; nothing is read before names and shapes are known to fit."""
    stored, shapes = StoredWeights.open(folder), _shapes(config)
    beside = _beside(config, stored)
    found = {name: tensor.shape for name, tensor in stored.tensors.items() if name not in beside}
    if (heads := [name for name in beside if math.prod(stored.tensors[name].shape)]) and dtype is not None:
        log.warning("%s: heads that predict further tokens are left out: %s", folder, _some(sorted(heads)))
    _check(config, found, stored_shapes(shapes, config.architecture), str(folder))
    where = {name: place for name, place, _ in places(shapes, config.architecture)}
    state: dict[str, Tensor] = {}
    for name, tensor in stored.read(found):
        kind, place = _compute(name, dtype) or tensor.dtype, where.get(name)
        if place is None or place.expert is None:
            kept = state[name if place is None else place.parameter] = tensor.to(device=device, dtype=kind, copy=True)
        else:
            if place.parameter not in state:
                state[place.parameter] = torch.empty(shapes[place.parameter], dtype=kind, device=device)
            kept = place.of(state[place.parameter]).copy_(tensor)
        if not _finite(kept):
            raise ModelError(f"{folder}: {name} holds NaN or infinity (as {kept.dtype}); such a model scores NaN")
    if config.tied and HEAD in state and not torch.equal(state.pop(HEAD), state[EMBEDDING]):
        raise ModelError(
            f"{folder}: config.json ties {HEAD} to {EMBEDDING}, and the stored two differ; "
            "set tie_word_embeddings to false, or store one"
        )
    return state


def _beside(config: ModelConfig, stored: StoredWeights) -> set[str]:
    """Stored tensors that are no part of the model: heads that predict further tokens, and tensors without numbers."""
    further = range(config.num_layers, config.num_layers + config.further_layers)

    def is_further(name: str) -> bool:
        layer = name.removeprefix("model.layers.").split(".")[0]
        return (bool(further) and name.startswith("mtp.")) or (layer.isdecimal() and int(layer) in further)

    return {name for name, tensor in stored.tensors.items() if 0 in tensor.shape or is_further(name)}


def _finite(tensor: Tensor) -> bool:
    """No NaN and no infinity; without a copy of the tensor."""
    least, most = tensor.aminmax()
    return bool(least.isfinite() & most.isfinite())


def _compute(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The type that a tensor is kept in where the model computes in `dtype`."""
    return torch.float32 if dtype is not None and dtype != torch.float64 and name.endswith(BIAS) else dtype


def _as_stored(state: Mapping[str, Tensor], stored: StoredWeights) -> dict[str, Tensor]:
    """MoeTraining' biases, which are float32 in memory, in the source's type where that loses nothing."""
    kept = dict(state)
    for name, tensor in stored.tensors.items():
        narrow = kept[name].to(tensor.dtype)
        if name.endswith(BIAS) and torch.equal(narrow.to(kept[name].dtype), kept[name]):
            kept[name] = narrow
    return kept


def _check(
    config: ModelConfig, found: Mapping[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], where: str
) -> None:
    embedding = stored_name(EMBEDDING, config.architecture) if EMBEDDING not in expected else EMBEDDING
    allowed = {**expected, HEAD: expected[embedding]}  # where the two are tied, some checkpoints store both
    if unknown := sorted(found.keys() - allowed.keys()):
        raise ModelError(f"{where} has tensors that {config.architecture} does not know: {_some(unknown)}")
    if missing := sorted(expected.keys() - found.keys()):
        raise ModelError(f"{where} lacks tensors that {config.architecture} needs: {_some(missing)}")
    for name, shape in found.items():
        if shape != allowed[name]:
            raise ModelError(f"{where}: {name} has shape {list(shape)}; config.json says {list(allowed[name])}")


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return ParameterStore(Model(config)).shapes()


def _assemble(
    config: ModelConfig,
    state: Mapping[str, Tensor],
    context: ParallelContext,
    profile: NumericsProfile | None,
    source: Path | None,
) -> Model:
    with torch.device("meta"):
        model = Model(config, profile, context)
    model.load_state_dict(state, assign=True)
    model.rope = RopeTable(config, "cpu").to(context.device)  # the same bits on every device
    model.source_path = source
    model.check_profile(model.profile)
    return model


def _device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {str(name)!r}; it must be cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {str(name)!r}, and this machine has no CUDA device; use device=cpu")
    return device


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
