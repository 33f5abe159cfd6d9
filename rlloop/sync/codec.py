"""Lossless differences of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import zstandard

from rlloop.errors import SyncError
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits, size_of
from rlloop.sync.manifest import CodecName


class CodecError(SyncError):
    """Encoded bytes that no encoder makes: damaged, or hostile."""


@dataclass(frozen=True)
class Encoded:
    codec: CodecName
    content: bytes
    changed: int  # elements


def encode(new: Bits, old: Bits | None) -> Encoded:
    """The shortest way to `new` for who has `old` (None: nothing, so all of it)."""
    if old is None:
        return Encoded("full", zstandard.ZstdCompressor(1).compress(new.array.tobytes()), new.array.size)
    if new.same(old):
        return Encoded("unchanged", b"", 0)
    xor = new.array ^ old.array
    return Encoded("planes", zstandard.ZstdCompressor(1).compress(xor.tobytes()), int(np.count_nonzero(xor)))


def decode(codec: CodecName, content: bytes, dtype: str, shape: tuple[int, ...], old: Bits | None) -> Bits:
    """The new tensor, in memory of its own. Raises `CodecError`."""
    size = size_of(dtype, shape)
    if codec == "unchanged":
        assert old is not None
        return Bits(dtype, old.array.copy())
    try:
        plain = zstandard.ZstdDecompressor().decompress(content, max_output_size=size)
    except zstandard.ZstdError as error:
        raise CodecError(str(error)) from None
    if len(plain) != size:
        raise CodecError(f"{len(plain)} bytes, not {size}")
    array = np.frombuffer(plain, UNSIGNED[WIDTH[dtype]]).reshape(shape)
    return Bits(dtype, array.copy() if codec == "full" or old is None else array ^ old.array)


def max_encoded(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes that no encoding of such a tensor exceeds."""
    size = size_of(dtype, shape)
    return size + size // 64 + 4096
