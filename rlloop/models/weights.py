"""Loads and saves Hugging Face folders: every tensor is accounted for, and unchanged files are byte-equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlloop.errors import ConfigError, ModelError
from rlloop.models import fp8
from rlloop.models.architecture import ModelConfig
from rlloop.models.attention import end_to_end
from rlloop.models.checkpoint_names import EMBEDDING, HEAD, form_of, stored_state
from rlloop.models.config import parse_config, read_config
from rlloop.models.experts import BIAS
from rlloop.models.layers import Norm
from rlloop.models.parameters import ParameterStore
from rlloop.models.ropes import RopeTable
from rlloop.models.safetensors_io import StoredWeights, write_single
from rlloop.models.transformer import Model
from rlloop.models.vision_processor import with_numbers
from rlloop.models.weight_reader import check_shapes, read_weights, shapes_of, tensors_left_out, type_in_memory
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.kernels import RECURRENT, SINKS, VISION, backend_of, device_types
from rlloop.numerics.packed import is_packed
from rlloop.numerics.profile import NumericsProfile
from rlloop.parallel.context import ParallelContext

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

# Files that a saved folder takes over from its source, beside config.json and weights.
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip


def load_model(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    profile: NumericsProfile | None = None,
    context: ParallelContext | None = None,
    quantize: str = "none",
) -> Model:
    """Load a Hugging Face checkpoint folder of one of `families.FAMILIES`.

    `dtype` is the compute type; weights of another type are rounded to it once, to nearest (float64 is for the
    `reference` profile). `profile` names the implementation of each operation; None: the batch-invariant ones.
    `context`: one rank of many, whose device counts instead of `device`, and which reads the parts that it holds; None:
    one rank. `quantize="fp8"` keeps the weights that `models.fp8` lists in 8 bits, rounded from the stored ones, which
    train (`numerics.fp8`).

    Multi-token-prediction layers are left out, and so is what `text_config.LEFT_OUT` names, which is logged. Every
    weight is checked for NaN and infinity, at 1 to 1.5 ms a million on a CPU: as long as copying it takes where the
    file is in memory already.

    Raises `ModelError` for a missing folder, an unsupported configuration, an adapter in the folder, unknown, missing
    or misshapen tensors, and weights that are not finite in `dtype`; `ConfigError` for a type, device or profile that
    cannot be used.
    """
    context = context or ParallelContext(usable_device(device))
    where, compute, config = context.device, _dtype(dtype), with_numbers(read_config(path), path)
    recurs = config.delta is not None or config.mamba is not None
    sees = config.vision is not None
    for feature, needed in ((RECURRENT, recurs), (SINKS, config.sinks), (VISION, sees)):
        if needed and feature in backend_of(where.type).lacks:
            raise ConfigError(
                f"{config.architecture} has {feature}, which the kernels of {where.type} lack; use device=cpu"
            )
    in_8_bits = _quantised(config, compute, context, quantize)
    if in_8_bits and config.quantization is not None:
        raise ConfigError(f"quantize={quantize} trains weights, and those of {path} are packed; load it without")
    state = read_weights(config, Path(path), compute, context, in_8_bits)
    return _assemble(config, state, context, profile, Path(path), in_8_bits)


def new_model(
    config: Mapping[str, Any],
    seed: int,
    *,
    dtype: str = "float32",
    profile: NumericsProfile | None = None,
    context: ParallelContext | None = None,
    quantize: str = "none",
) -> Model:
    """A randomly initialised model for `config`, the content of a config.json; the same seed gives the same bits.

    `context`: the rank, of which the model has the parts, and its device; None: one rank on the CPU.

    Initialised much as transformers does: matrices and sinks normal with `initializer_range`, norms 1 (0 if centred),
    biases 0; in recurrent layers `dt_bias` and `D` are 1, and `A_log` is the logarithm of the head's number from 1 on.
    `quantize`: as for `load_model`.
    """
    compute, context = _dtype(dtype), context or ParallelContext(torch.device("cpu"))
    parsed = parse_config(config)
    with torch.device("meta"):
        model = Model(parsed, None, context)
        every = model if model.stage.whole else Model(parsed)  # a stage of a pipeline draws for all of them
    held, entries, modules = ParameterStore(model).entries, ParameterStore(every).entries, every.named_modules()
    centred = {f"{name}.weight" for name, module in modules if isinstance(module, Norm) and module.centred}
    in_8_bits = _quantised(parsed, compute, context, quantize)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, entry in entries.items():
        shape = entry.shape
        if name.endswith("A_log"):
            tensor = torch.log(torch.arange(1.0, shape[0] + 1))
        elif (name.endswith("bias") and not name.endswith("dt_bias")) or name in centred:
            tensor = torch.zeros(shape)
        elif len(shape) == 1 and not name.endswith("sinks"):
            tensor = torch.ones(shape)
        else:
            tensor = torch.randn(shape, generator=generator) * parsed.initializer_range
        if name not in held:
            continue
        shard = held[name].part(tensor)  # a view would keep the whole
        kind = None if name in in_8_bits else type_in_memory(name, compute)
        state[name] = (shard if shard is tensor else shard.clone()).to(context.device, kind)
    return _assemble(parsed, state, context, profile, None, in_8_bits)


def read_state(folder: str | Path) -> dict[str, Tensor]:
    """The weights of a folder by parameter name, in their stored types, checked against its config.json."""
    return read_weights(read_config(folder), Path(folder), None, ParallelContext(torch.device("cpu")))


def save_model(
    model: Model | Mapping[str, Tensor],
    path: str | Path,
    source_path: str | Path | None = None,
    *,
    config: ModelConfig | None = None,
) -> None:
    """Write a Hugging Face folder: weights, config.json, and the source's tokenizer and generation files.

    `model` is a model (with an adapter: its base; collective: all ranks gather it, and the first writes), or weights by
    parameter name. Files are laid out as in the source (`source_path`, or the folder that `model` was loaded from):
    same names, shards, order and metadata, so unchanged weights come out byte-equal, and what loading left out is
    copied. Without a source there is one model.safetensors, and config.json is that of `config` (or of the model).

    Raises `ModelError` for weights that do not fit the configuration, and a folder that holds other weight files.
    """
    if isinstance(model, Model):
        state = dict(ParameterStore(model.with_adapter(None)).wholes())
        source_path, config = source_path or model.source_path, config or model.config
        if model.context.rank > 0:
            return
    else:
        state = dict(model)
    folder, source = Path(path), None if source_path is None else Path(source_path)
    if source is not None:
        config = read_config(source)
    if config is None:
        raise ModelError("weights alone make no model folder; give source_path or config as well")
    state = {name: x.dequantised() if isinstance(x, Fp8Weight) else x for name, x in state.items()}
    if is_packed(*state.values()):
        raise ModelError("packed weights are frozen, and their folder holds them already; copy it instead of saving")
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_shapes(config, shapes, shapes_of(config), "the state to save")
    folder.mkdir(parents=True, exist_ok=True)
    if source is None:
        write_single(folder, stored_state(state, config.architecture))
    else:
        stored = StoredWeights.open(source)
        left_out = tensors_left_out(config, stored)
        if config.tied and HEAD in stored.tensors:
            state[HEAD] = state[EMBEDDING]
        form = form_of({name: x.shape for name, x in stored.tensors.items()}, shapes_of(config), config.architecture)
        whole = {**stored_state(state, config.architecture, form), **dict(stored.read(left_out))}
        stored.write(folder, _as_stored(whole, stored))
        if not folder.samefile(source):
            for name in COMPANIONS:
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)
    _write_config(folder, config.raw, source, str(state[EMBEDDING].dtype).removeprefix("torch."))


def _write_config(folder: Path, raw: Mapping[str, Any], source: Path | None, dtype: str) -> None:
    """Write config.json with the weights' type; the source's own bytes where its type is that already."""
    key = "torch_dtype" if "torch_dtype" in raw else "dtype"
    if source is not None and raw.get(key) in (dtype, None):
        text = (source / "config.json").read_bytes()
    else:
        text = (json.dumps({**raw, key: dtype}, indent=2, sort_keys=True) + "\n").encode()
    (folder / "config.json").write_bytes(text)


def _quantised(config: ModelConfig, dtype: torch.dtype, context: ParallelContext, quantize: str) -> set[str]:
    """The parameters to keep in 8 bits. Raises `ConfigError` where that cannot be."""
    if quantize not in fp8.QUANTIZE:
        raise ConfigError(f"quantize is {quantize!r}; it must be one of {', '.join(fp8.QUANTIZE)}")
    if quantize == "none":
        return set()
    with torch.device("meta"):
        model = Model(config)
    fp8.check_can_quantise(model, dtype, context.layout)
    return set(fp8.quantised_names(model))


def _as_stored(state: Mapping[str, Tensor], stored: StoredWeights) -> dict[str, Tensor]:
    """`state` with routers' biases, float32 in memory, in the source's type where that is lossless."""
    kept = dict(state)
    for name, tensor in stored.tensors.items():
        narrow = kept[name].to(tensor.dtype)
        if name.endswith(BIAS) and torch.equal(narrow.to(kept[name].dtype), kept[name]):
            kept[name] = narrow
    return kept


def _assemble(
    config: ModelConfig,
    state: dict[str, Tensor],
    context: ParallelContext,
    profile: NumericsProfile | None,
    source: Path | None,
    in_8_bits: Collection[str] = (),
) -> Model:
    with torch.device("meta"):
        model = Model(config, profile, context)
    if in_8_bits:
        compute = state[EMBEDDING].dtype
        state = {name: fp8.quantised(name, x, compute) if name in in_8_bits else x for name, x in state.items()}
    lay_end_to_end(state)
    model.load_state_dict(state, assign=True)
    for parameter in model.parameters():
        if is_packed(parameter):
            parameter.requires_grad_(False)
    model.rope = RopeTable(config, "cpu").to(context.device)  # the same bits on every device
    model.source_path = source
    model.check_profile(model.profile)
    return model


def lay_end_to_end(state: dict[str, Tensor]) -> None:
    """`attention.end_to_end` of each layer's queries, keys and values, in place: old memory is free at once."""
    for name in [name for name in state if name.endswith("q_proj.weight")]:
        names = [name.replace("q_proj", each) for each in ("q_proj", "k_proj", "v_proj")]
        if all(each in state for each in names):
            state.update(zip(names, end_to_end([state[each] for each in names]), strict=True))


def usable_device(name: str | torch.device) -> torch.device:
    """The device of a name, as tensors on it name it. Raises `ConfigError` where it has no kernels or is not here, and
    for a GPU other than the current one, on which kernels would run all the same."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in device_types():
        raise ConfigError(f"device is {str(name)!r}; it must be {' or '.join(device_types())}")
    if device.type == "cpu":
        return device
    module = torch.get_device_module(device)
    if not module.is_available():
        raise ConfigError(
            f"device is {str(name)!r}, and this machine has no {device.type.upper()} device; use device=cpu"
        )
    current = torch.device(device.type, module.current_device())
    if device.index not in (None, current.index):
        raise ConfigError(
            f"device is {str(name)!r}, and kernels run on the current one, {current}; let the process see that GPU "
            f"alone (CUDA_VISIBLE_DEVICES) and use device={device.type}, or call torch.cuda.set_device first"
        )
    return current


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]
