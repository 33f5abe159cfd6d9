"""Reads parts and numbers of an encoding from untrusted bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import zstandard

from rlloop.errors import SyncError

_LENGTH = struct.Struct("<I")


class CodecError(SyncError):
    """Encoded bytes that no encoder wrote: damaged, or hostile."""


def framed(parts: Iterable[bytes]) -> bytes:
    """Parts one after the other, each after its length."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unframed(content: memoryview, count: int) -> Iterator[memoryview]:
    """Exactly `count` parts, with nothing after them. Raises `CodecError`."""
    offset = 0
    for _ in range(count):
        if offset + _LENGTH.size > len(content):
            raise CodecError("the content ends before its parts do")
        [length] = _LENGTH.unpack_from(content, offset)
        offset += _LENGTH.size
        if offset + length > len(content):
            raise CodecError("a part is longer than what is left of the content")
        yield content[offset : offset + length]
        offset += length
    if offset != len(content):
        raise CodecError(f"{len(content) - offset} bytes are left over")


def decompressed(frame: memoryview, size: int) -> bytes:
    """Exactly `size` bytes, whatever size the frame announces. Raises `CodecError`."""
    try:
        if zstandard.frame_content_size(frame) not in (-1, size):
            raise CodecError(f"a frame announces {zstandard.frame_content_size(frame)} bytes, not {size}")
        plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"a frame cannot be read: {error}") from None
    if len(plain) != size:
        raise CodecError(f"a frame has {len(plain)} bytes, not {size}")
    return plain


class Numbers:
    """Reads LEB128 numbers, seven bits a byte, the low ones first; then bytes. Raises `CodecError`."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._offset = content, 0

    def next(self, limit: int) -> int:
        value = shift = 0
        while True:
            if self._offset >= len(self._content) or shift > 28:
                raise CodecError("a number does not end")
            byte = self._content[self._offset]
            self._offset += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if value > limit:
            raise CodecError(f"a number is {value}, above {limit}")
        return value

    def bytes(self, length: int) -> memoryview:
        content = self._content[self._offset : self._offset + length]
        if len(content) != length:
            raise CodecError("the content ends early")
        self._offset += length
        return content

    def rest(self) -> memoryview:
        return self._content[self._offset :]
