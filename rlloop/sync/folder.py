"""Tensors of a Hugging Face folder as bits, of any dtype, memory-mapped. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rlloop.errors import ModelError
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits, size_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_folder(folder: Path) -> dict[str, Bits]:
    """Every tensor by name. Raises `ModelError` for files that are missing or damaged, and for unknown dtypes."""
    if (folder / SINGLE).is_file():
        files = [folder / SINGLE]
    elif (folder / INDEX).is_file():
        try:
            weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{folder / INDEX} cannot be read: {error!r}") from None
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}; name a Hugging Face folder with safetensors")
    tensors: dict[str, Bits] = {}
    for file in files:
        tensors |= read_file(file)
    return tensors


def read_file(path: Path) -> dict[str, Bits]:
    """The tensors of one safetensors file."""
    try:
        content = np.memmap(path, np.uint8, "r")
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:start].tobytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if dtype not in WIDTH:
            raise ModelError(f"{path}: {name} has dtype {dtype}; supported are {', '.join(WIDTH)}")
        elements = content[start + begin : start + end]
        if len(elements) != size_of(dtype, shape):
            raise ModelError(f"{path}: {name} has {len(elements)} bytes for {dtype} {list(shape)}; the file is damaged")
        if (start + begin) % WIDTH[dtype]:
            elements = elements.copy()  # not aligned
        tensors[name] = Bits(dtype, np.asarray(elements).view(UNSIGNED[WIDTH[dtype]]).reshape(shape))
    return tensors
