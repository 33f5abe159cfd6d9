"""The tensors of a Hugging Face folder as bits, of any type, mapped and not loaded. Knows no torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rlloop.errors import ModelError
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits, size_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_folder(folder: Path) -> dict[str, Bits]:
    """Every tensor by name. Raises `ModelError` for what is missing, damaged or of an unknown type."""
    if (folder / SINGLE).is_file():
        files = [folder / SINGLE]
    elif (folder / INDEX).is_file():
        try:
            placed = json.loads((folder / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{folder / INDEX} cannot be read: {error!r}") from None
        files = [folder / name for name in sorted(set(placed.values()))]
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
            raise ModelError(f"{path}: {name} has type {dtype}; supported are {', '.join(WIDTH)}")
        part = content[start + begin : start + end]
        if len(part) != size_of(dtype, shape):
            raise ModelError(f"{path}: {name} has {len(part)} bytes for {dtype} {list(shape)}; the file is damaged")
        if (start + begin) % WIDTH[dtype]:
            part = part.copy()  # not aligned
        tensors[name] = Bits(dtype, np.asarray(part).view(UNSIGNED[WIDTH[dtype]]).reshape(shape))
    return tensors
