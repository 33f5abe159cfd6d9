"""Reads the safetensors of a Hugging Face folder, and writes files of the same layout."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlloop.errors import ModelError
from rlloop.models.config_reader import read_json
from rlloop.parallel.cut import Cut

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
KINDS = {  # parts of packed weights as well
    **FLOATS, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredFile:
    """One safetensors file: its header, and its tensors in the order of their bytes."""

    name: str
    header: bytes  # as in the file, with the eight bytes of its length before it
    metadata: dict[str, str] | None
    tensors: dict[str, StoredTensor]

    @classmethod
    def read(cls, path: Path) -> StoredFile:
        try:
            with safe_open(path, framework="pt") as file:  # checks the header against the file
                metadata = file.metadata()
        except (SafetensorError, FileNotFoundError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        with path.open("rb") as file:
            length = file.read(8)
            header = file.read(int.from_bytes(length, "little"))
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        for name, entry in entries.items():
            if entry["dtype"] not in KINDS:
                raise ModelError(f"{path}: {name} has type {entry['dtype']}; supported are {', '.join(KINDS)}")
        order = sorted(entries, key=lambda name: entries[name]["data_offsets"])
        tensors = {name: StoredTensor(KINDS[entries[name]["dtype"]], tuple(entries[name]["shape"])) for name in order}
        return cls(path.name, length + header, metadata, tensors)

    def write(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write the file with the values of `state`; other bytes stay equal unless a tensor changes its type."""
        partial = folder / f"{self.name}.partial"  # the source may be this very file
        if all(state[name].dtype == stored.dtype for name, stored in self.tensors.items()):
            with partial.open("wb") as file:
                file.write(self.header)
                for name in self.tensors:
                    file.write(state[name].detach().cpu().contiguous().view(torch.uint8).numpy().data)
        else:
            plain = {name: state[name].detach().cpu().contiguous() for name in self.tensors}
            save_file(plain, partial, metadata=self.metadata or {"format": "pt"})
        partial.replace(folder / self.name)


@dataclass(frozen=True)
class StoredWeights:
    """All weights of a folder: one file, or the shards that an index names."""

    folder: Path
    files: list[StoredFile]
    index: Mapping[str, Any] | None

    @classmethod
    def open(cls, folder: Path) -> StoredWeights:
        """Reads headers only. Raises `ModelError` for files that are missing, damaged or contradict the index."""
        if (folder / SINGLE).is_file():  # wins over an index beside it, as it does for transformers
            return cls(folder, [StoredFile.read(folder / SINGLE)], None)
        if not (folder / INDEX).is_file():
            raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors weights are read")
        index = read_json(folder / INDEX)
        file_of = index.get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(name, str) for name in file_of.values()):
            raise ModelError(f"{folder / INDEX} has no weight_map, which says in which file each tensor is")
        files = [StoredFile.read(folder / name) for name in sorted(set(file_of.values()))]
        stored = {name: file.name for file in files for name in file.tensors}
        if stored != file_of or len(stored) != sum(len(file.tensors) for file in files):
            wrong = sorted(name for name in {*stored, *file_of} if stored.get(name) != file_of.get(name))
            raise ModelError(f"{folder}: {INDEX} and the shards disagree about {', '.join(wrong) or 'a tensor'}")
        return cls(folder, files, index)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {name: tensor for file in self.files for name, tensor in file.tensors.items()}

    def read(self, names: Container[str], cuts: Mapping[str, Cut] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors one at a time (for names in `cuts`, only the part). They are memory-mapped and may be
        unaligned, so copy what you keep."""
        for stored in self.files:
            with safe_open(self.folder / stored.name, framework="pt") as file:
                for name in stored.tensors:
                    if name in names:
                        cut = None if cuts is None else cuts.get(name)
                        yield name, file.get_tensor(name) if cut is None else _part(file.get_slice(name), cut)

    def write(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write the same files, index included, with the values of `state`."""
        refuse_other_weights(folder, {file.name for file in self.files})
        for file in self.files:
            file.write(folder, state)
        if self.index is not None:
            size = sum(state[name].nbytes for name in self.tensors)
            text = (self.folder / INDEX).read_bytes()
            if self.index.get("metadata", {}).get("total_size") not in (size, None):
                index = {**self.index, "metadata": {**self.index["metadata"], "total_size": size}}
                text = (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()
            (folder / INDEX).write_bytes(text)


def _part(stored: Any, cut: Cut) -> Tensor:
    """Read only this part of a stored tensor."""
    before = (slice(None),) * cut.dim
    slices = [stored[(*before, slice(begin, end))] for begin, end in cut.ranges]
    return slices[0] if len(slices) == 1 else torch.cat(slices, cut.dim)


def write_single(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Write one model.safetensors, as transformers does."""
    refuse_other_weights(folder, {SINGLE})
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(plain, folder / SINGLE, metadata={"format": "pt"})


def write_tensors(
    path: Path, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterable[Tensor]
) -> None:
    """Write one safetensors file of these names, types and shapes, with one tensor in memory at a time.

    `tensors` come in the order of `entries`.
    """
    names, header, end = {kind: name for name, kind in FLOATS.items()}, {}, 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, (dtype, shape) in zip(tensors, entries.values(), strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape)
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def refuse_other_weights(folder: Path, ours: set[str]) -> None:
    """Raises `ModelError` if the folder holds weight files of other names, which would be read in place of ours."""
    others = sorted(file.name for file in folder.glob("model*.safetensors") if file.name not in ours)
    if others:
        raise ModelError(f"{folder} already holds other weights ({', '.join(others[:3])}); save to another folder")
