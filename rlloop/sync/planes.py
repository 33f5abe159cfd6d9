"""Bit patterns, and differences between them, as planes of bytes, each through zstd."""

from __future__ import annotations

import numpy as np
import zstandard

from rlloop.sync.framing import decompressed, framed, unframed

LEVEL = 1


def encode_planes(patterns: np.ndarray, dtype: str = "") -> bytes:
    """One zstd frame per byte of the width, each after its length.

    `dtype`: of bit patterns, whose sign is moved to the end where that makes the upper byte a whole exponent.
    """
    planes = _turned(patterns, dtype, 1).view(np.uint8).reshape(len(patterns), patterns.itemsize)
    return framed(zstandard.ZstdCompressor(LEVEL).compress(np.ascontiguousarray(plane).data) for plane in planes.T)


def decode_planes(content: memoryview, out: np.ndarray, dtype: str = "") -> None:
    """Raises `CodecError`."""
    planes = out.view(np.uint8).reshape(len(out), out.itemsize)
    for index, frame in enumerate(unframed(content, out.itemsize)):
        planes[:, index] = np.frombuffer(decompressed(frame, len(out)), np.uint8)
    out[:] = _turned(out, dtype, 8 * out.itemsize - 1)


def encode_differences(old: np.ndarray, new: np.ndarray, floating: bool) -> tuple[np.ndarray, int]:
    """Zigzag of the differences in the order of values, and the number of elements that changed."""
    width = 8 * old.itemsize
    one, rest = old.dtype.type(1), old.dtype.type(width - 1)
    step = monotone(new, floating) - monotone(old, floating)  # modulo 2^width
    zigzag = (step << one) ^ (old.dtype.type(0) - (step >> rest))
    return zigzag, int(np.count_nonzero(step))


def decode_differences(content: memoryview, old: np.ndarray, out: np.ndarray, floating: bool) -> None:
    zigzag = np.empty_like(out)
    decode_planes(content, zigzag)
    one = old.dtype.type(1)
    step = (zigzag >> one) ^ (old.dtype.type(0) - (zigzag & one))
    out[:] = monotone(monotone(old, floating) + step, floating)


def monotone(patterns: np.ndarray, floating: bool) -> np.ndarray:
    """Bit patterns as two's complement integers in the order of the values. Its own inverse."""
    if not floating:
        return patterns
    rest = patterns.dtype.type(8 * patterns.itemsize - 1)
    sign = patterns >> rest
    return patterns ^ ((patterns.dtype.type(0) - sign) >> patterns.dtype.type(1))


def _turned(patterns: np.ndarray, dtype: str, left: int) -> np.ndarray:
    """Floats' patterns rotated by a bit, so that the exponent lies in the upper byte and the sign is the lowest bit."""
    if not dtype.startswith(("F", "BF")):
        return patterns
    by, rest = (patterns.dtype.type(each) for each in (left, 8 * patterns.itemsize - left))
    return patterns << by | patterns >> rest
