"""Hugging Face folders in and out: every tensor accounted for, and byte-equal where nothing changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlloop.errors import ConfigError, ModelError
from rlloop.models.config import ModelConfig, parse_config, read_config
from rlloop.models.transformer import Model
from rlloop.numerics.profile import NumericsProfile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
HEADER_NAMES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
SINGLE, INDEX, HEAD, EMBEDDING = (
    "model.safetensors", "model.safetensors.index.json", "lm_head.weight", "model.embed_tokens.weight",
)  # fmt: skip


def load_model(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    profile: NumericsProfile | None = None,
) -> Model:
    """The model of a Hugging Face checkpoint folder: Qwen3, Qwen2.5 or Llama 3.

    `dtype` is the compute type; a checkpoint of another type is rounded to it once, to nearest. `profile` says which
    implementation runs each operation; None: the invariant ones.

    Raises ModelError for a missing folder, an unsupported configuration, and unknown, missing or misshapen tensors;
    ConfigError for a type or device that this machine lacks.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {str(device)!r}, and this machine has no CUDA device; use device=cpu")
    config = read_config(path)
    return _build(config, read_state(path), DTYPES[dtype], torch.device(device), profile, Path(path))


def new_model(
    config: Mapping[str, Any], seed: int, *, dtype: str = "float32", profile: NumericsProfile | None = None
) -> Model:
    """A randomly initialised model for `config` (the content of a config.json); the same seed gives the same bits.

    Matrices are normal with the configuration's `initializer_range`, norms 1, biases 0, as transformers does.
    """
    parsed = parse_config(dict(config))
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Model(parsed).named_parameters()}
    state = {}
    for name, shape in shapes.items():
        if name.endswith("bias"):
            state[name] = torch.zeros(shape)
        elif len(shape) == 1:
            state[name] = torch.ones(shape)
        else:
            state[name] = torch.randn(shape, generator=generator) * parsed.initializer_range
    return _build(parsed, state, DTYPES[dtype], torch.device("cpu"), profile, None)


def _build(
    config: ModelConfig,
    state: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    profile: NumericsProfile | None,
    source: Path | None,
) -> Model:
    with torch.device("meta"):
        model = Model(config, profile)
    expected = {name: tensor.shape for name, tensor in model.named_parameters()}
    if config.tied:
        state.pop(HEAD, None)  # some checkpoints store the alias as well
    where = "the checkpoint" if source is None else source
    if unknown := sorted(set(state) - set(expected)):
        raise ModelError(f"{where} has tensors that {config.architecture} does not: {_some(unknown)}")
    if missing := sorted(set(expected) - set(state)):
        raise ModelError(f"{where} lacks tensors that {config.architecture} needs: {_some(missing)}")
    for name, shape in expected.items():
        if state[name].shape != shape:
            raise ModelError(f"{where}: {name} has shape {list(state[name].shape)}; config.json says {list(shape)}")
    for name in expected:
        owner = model.get_submodule(name.rpartition(".")[0])
        # A copy: what safetensors hands out is the file itself, mapped, and unaligned.
        tensor = state.pop(name).to(device=device, dtype=dtype, copy=True)
        setattr(owner, name.rpartition(".")[2], nn.Parameter(tensor))
    model.rope.to(device)
    model.source_path = source
    return model


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _files(folder: Path) -> list[Path]:
    """The weight files of a folder, in the order of their names."""
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        paths = [folder / name for name in sorted(set(index["weight_map"].values()))]
    else:
        paths = [folder / SINGLE]
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{path} does not exist; a checkpoint needs {SINGLE}, or {INDEX} with all its shards")
    return paths


def read_state(folder: str | Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors file or shards, by name, as stored."""
    state: dict[str, Tensor] = {}
    for path in _files(Path(folder)):
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                if name in state:
                    raise ModelError(f"{name} stands in two shards of {folder}")
                state[name] = file.get_tensor(name)
    return state


@dataclass(frozen=True)
class _Layout:
    """A safetensors file's header, verbatim, and its tensors in the order of their bytes."""

    header: bytes
    tensors: list[tuple[str, torch.dtype | None, list[int]]]

    @classmethod
    def of(cls, path: Path) -> _Layout:
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        order = sorted(entries, key=lambda name: entries[name]["data_offsets"])
        return cls(header, [(name, HEADER_NAMES.get(entries[name]["dtype"]), entries[name]["shape"]) for name in order])


def save_model(model: Model | Mapping[str, Tensor], path: str | Path, source_path: str | Path | None = None) -> None:
    """Writes a Hugging Face folder: weights, config.json, and the source's tokenizer and generation files.

    With a source (`source_path`, or the folder that `model` was loaded from) whose tensors have these names, types and
    shapes, the weight files keep its names, shards, order and metadata, so that unchanged weights come out byte-equal.
    Otherwise one model.safetensors is written.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    raw: dict[str, Any] | None = None
    if isinstance(model, Model):
        source_path = source_path or model.source_path
        raw, state = model.config.raw, {name: tensor.detach() for name, tensor in model.named_parameters()}
    else:
        state = dict(model)
    layouts: dict[str, _Layout] = {}
    if source_path is not None:
        source = Path(source_path)
        layouts = {file.name: _Layout.of(file) for file in _files(source)}
        for file in sorted(source.iterdir()):
            if file.is_file() and (file.suffix != ".safetensors" and file.name != INDEX) and _belongs(file):
                shutil.copyfile(file, folder / file.name)
    elif raw is not None:
        (folder / "config.json").write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n")
    if layouts and _fits(layouts, state):
        for name, layout in layouts.items():
            _write(folder / name, layout, state)
        if source_path is not None and (Path(source_path) / INDEX).is_file():
            shutil.copyfile(Path(source_path) / INDEX, folder / INDEX)
    else:
        plain = {name: tensor.to("cpu").contiguous() for name, tensor in state.items()}
        save_file(plain, folder / SINGLE, metadata={"format": "pt"})


def _belongs(file: Path) -> bool:
    """Whether a file of a model folder describes the model rather than a training run that stood beside it."""
    return file.name.startswith(("config", "generation_config", "tokenizer", "special_tokens", "vocab", "merges")) or (
        file.name in ("added_tokens.json", "chat_template.jinja", "preprocessor_config.json", "chat_template.json")
    )


def _tensor(state: Mapping[str, Tensor], name: str) -> Tensor | None:
    return state.get(EMBEDDING) if name == HEAD and HEAD not in state else state.get(name)


def _fits(layouts: Mapping[str, _Layout], state: Mapping[str, Tensor]) -> bool:
    stored = {name: (dtype, shape) for layout in layouts.values() for name, dtype, shape in layout.tensors}
    tensors = {name: _tensor(state, name) for name in stored}
    return set(state) <= set(stored) and all(
        tensor is not None and (tensor.dtype, list(tensor.shape)) == stored[name] for name, tensor in tensors.items()
    )


def _write(path: Path, layout: _Layout, state: Mapping[str, Tensor]) -> None:
    with path.open("wb") as file:
        file.write(len(layout.header).to_bytes(8, "little") + layout.header)
        for name, _, _ in layout.tensors:
            tensor = _tensor(state, name)
            assert tensor is not None
            file.write(tensor.detach().to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
