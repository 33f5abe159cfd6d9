"""Lossless coding of a tensor for receivers that have the previous version. The shortest of these is sent:

    unchanged   no bytes
    steps       8- and 16-bit types: gaps and steps, grouped by the old value's exponent (`rlloop.sync.steps`)
    adaptive    the same types, small tensors: each element with a learned probability (`rlloop.sync.adaptive`)
    planes      any type: differences in the order of values, zigzag, one plane per byte of the width, each through zstd
    full        the bit patterns themselves, in planes likewise; needs no previous version

Chunks of `CHUNK` elements are coded independently: in parallel, and in bounded memory. Every size follows from the
tensor's type and shape, or is checked against them before anything is allocated, so a hostile length costs nothing.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import zstandard

from rlloop.errors import SyncError
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits, size_of
from rlloop.sync.manifest import CodecName
from rlloop.sync.steps import ORDERINGS, Changes, Ordering

CHUNK = 1 << 22  # elements; gaps are below it, so their low bits are at most 21
SMALL = 1 << 19  # elements; the adaptive coder, some ten nanoseconds an element, is for no more than these
LEVEL = 1
BLOCK = 512  # symbols; fewer do not repay an entropy table of their own
_LENGTH = struct.Struct("<I")


class CodecError(SyncError):
    """The encoded bytes are not an encoder's: damaged, or hostile."""


class StepCoder(Protocol):
    """`rlloop.sync.steps`, or `steps_fast`, which compiles it."""

    def find_changes(self, old: np.ndarray, new: np.ndarray, ordering: Ordering) -> Changes: ...

    def apply_changes(self, old: np.ndarray, changes: Changes, ordering: Ordering, out: np.ndarray) -> bool: ...


class AdaptiveCoder(Protocol):
    """`rlloop.sync.adaptive`, or `adaptive_fast`, which compiles it."""

    def encode(self, old: np.ndarray, new: np.ndarray, ordering: Ordering, limit: int) -> bytes | None: ...

    def decode(self, old: np.ndarray, content: bytes, ordering: Ordering) -> np.ndarray | None: ...


class Coders(NamedTuple):
    steps: StepCoder
    adaptive: AdaptiveCoder


@dataclass(frozen=True)
class Encoded:
    codec: CodecName
    content: bytes
    changed: int  # elements
    diff_seconds: float = field(default=0.0, compare=False)  # time spent on finding the changes


def fast() -> Coders:
    from rlloop.sync import adaptive_fast, steps_fast  # numba takes a second to import

    return Coders(steps_fast, adaptive_fast)


def reference() -> Coders:
    """The numpy coders, slow, whose bytes the compiled ones must equal."""
    from rlloop.sync import adaptive, steps

    return Coders(steps, adaptive)


def encode(new: Bits, old: Bits | None, *, pool: Executor | None = None, coders: Coders | None = None) -> Encoded:
    """The shortest encoding of `new` for a receiver that has `old` (None: nothing).

    `pool` encodes chunks in parallel. `coders`: None takes the compiled ones.
    """
    new_flat = new.array.reshape(-1)
    if old is None:
        return Encoded("full", _framed(_mapped(pool, _encode_planes, _chunks(new_flat))), new_flat.size)
    assert (old.dtype, old.shape) == (new.dtype, new.shape), "a delta is between tensors of one type and shape"
    old_flat = old.array.reshape(-1)
    kind: CodecName
    ordering = ORDERINGS.get(new.dtype)
    if ordering is not None:
        coders = coders or fast()
        kind, work = "steps", partial(_encode_steps, ordering=ordering, coder=coders.steps)
    else:
        kind, work = "planes", partial(_encode_differences, floating=new.dtype.startswith("F"))
    chunks = list(_mapped(pool, work, _chunks(old_flat), _chunks(new_flat)))
    changed = sum(count for count, _, _ in chunks)
    delta = _framed(chunk for _, chunk, _ in chunks)
    compared = sum(seconds for _, _, seconds in chunks)
    if changed == 0:
        return Encoded("unchanged", b"", 0, compared)
    if ordering is not None and coders is not None and new_flat.size <= SMALL:
        shorter = coders.adaptive.encode(old_flat, new_flat, ordering, len(delta))
        kind, delta = (kind, delta) if shorter is None else ("adaptive", shorter)
    if len(delta) > new.nbytes // 3:
        full = _framed(_mapped(pool, _encode_planes, _chunks(new_flat)))
        if len(full) <= len(delta):
            return Encoded("full", full, changed, compared)
    return Encoded(kind, delta, changed, compared)


def decode(
    codec: CodecName,
    content: bytes,
    dtype: str,
    shape: tuple[int, ...],
    old: Bits | None,
    *,
    pool: Executor | None = None,
    coders: Coders | None = None,
) -> Bits:
    """The new tensor, in memory of its own, from what `encode` made with the same `old`.

    Raises `CodecError`. Allocates no more than a few times the tensor's size, whatever `content` is.
    """
    kind = UNSIGNED[WIDTH[dtype]]
    count = math.prod(shape)
    if codec != "full":
        if old is None or (old.dtype, old.shape) != (dtype, shape):
            raise CodecError(
                f"a tensor of {dtype} {shape} is {codec}, and there is no predecessor of that type and shape"
            )
        if codec == "unchanged":
            return Bits(dtype, old.array.copy())
    ordering = ORDERINGS.get(dtype)
    if codec in ("steps", "adaptive") and ordering is None:
        raise CodecError(f"{codec} is not for {dtype}")
    if codec == "adaptive" and old is not None and ordering is not None:
        if count > SMALL:
            raise CodecError(f"{count} elements are adaptive, and no more than {SMALL} may be")
        decoded = (coders or fast()).adaptive.decode(old.array.reshape(-1), content, ordering)
        if decoded is None:
            raise CodecError("changes reach outside of the type's range, or end as no encoder's do")
        return Bits(dtype, decoded.reshape(shape))
    frames = list(_unframed(memoryview(content), -(-count // CHUNK)))
    array = np.empty(count, kind)
    out_chunks = list(_chunks(array))
    if codec == "full" or old is None:
        done = _mapped(pool, _decode_planes, frames, out_chunks)
    elif codec == "steps" and ordering is not None:
        work = partial(_decode_steps, ordering=ordering, coder=(coders or fast()).steps)
        done = _mapped(pool, work, frames, _chunks(old.array.reshape(-1)), out_chunks)
    else:
        work = partial(_decode_differences, floating=dtype.startswith("F"))
        done = _mapped(pool, work, frames, _chunks(old.array.reshape(-1)), out_chunks)
    for _ in done:
        pass  # raises what a chunk's decoder raised
    return Bits(dtype, array.reshape(shape))


def max_encoded(dtype: str, shape: tuple[int, ...]) -> int:
    """Upper bound on the bytes of any encoding of such a tensor: a full one, of bits that zstd cannot compress."""
    size = size_of(dtype, shape)
    return size + size // 128 + 256 * (1 + math.prod(shape) // CHUNK)


# ---------------------------------------------------------------------------------------------------- steps


def _encode_steps(
    old: np.ndarray, new: np.ndarray, *, ordering: Ordering, coder: StepCoder
) -> tuple[int, bytes, float]:
    """Number of changes, the encoded chunk, and the seconds that finding the changes took.

    Header, of LEB128 numbers: changes; first class; number of classes less one; lengths of the four overflows; for each
    class its changes and k; length of the frame. Then a zstd frame, with a block for each class's symbols, so that each
    has statistics of its own; then the low bits.
    """
    began = time.perf_counter()
    changes = coder.find_changes(old, new, ordering)
    compared = time.perf_counter() - began
    present = np.flatnonzero(changes.counts)
    if not len(present):
        return 0, b"\0", compared
    first, last = int(present[0]), int(present[-1])
    overflows = (changes.far, changes.farther, changes.large, changes.larger)
    numbers = [len(changes.symbols), first, last - first, *map(len, overflows)]
    frame, start, waiting = zstandard.ZstdCompressor(LEVEL, write_content_size=False).compressobj(), 0, 0
    pieces = []
    for count, k in zip(changes.counts[first : last + 1].tolist(), changes.low_bits[first:].tolist(), strict=False):
        numbers += [count, k] if count else [0]
        pieces.append(frame.compress(changes.symbols[start : start + count].data))
        start, waiting = start + count, waiting + count
        if waiting >= BLOCK:
            pieces.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
            waiting = 0
    pieces += [frame.compress(overflow.tobytes()) for overflow in overflows]
    pieces.append(frame.flush())
    body = b"".join(pieces)
    return len(changes.symbols), _numbers([*numbers, len(body)]) + body + changes.remainders.tobytes(), compared


def _decode_steps(
    content: memoryview, old: np.ndarray, out: np.ndarray, *, ordering: Ordering, coder: StepCoder
) -> None:
    reader = _Numbers(content)
    n = reader.next(len(old))
    if n == 0:
        if reader.rest():
            raise CodecError("bytes follow a chunk without changes")
        np.copyto(out, old)
        return
    first = reader.next(ordering.classes - 1)
    last = first + reader.next(ordering.classes - 1 - first)
    lengths = [reader.next(n) for _ in range(4)]
    counts, low_bits = np.zeros(ordering.classes, np.int64), np.zeros(ordering.classes, np.uint8)
    for class_ in range(first, last + 1):
        counts[class_] = reader.next(n)
        if counts[class_]:
            low_bits[class_] = reader.next(21)
    if counts.sum() != n:
        raise CodecError(f"the classes have {counts.sum()} changes; the chunk has {n}")
    body = reader.bytes(reader.next(len(content)))
    remainders = np.frombuffer(reader.rest(), np.uint8)
    if len(remainders) != -(-int((counts * low_bits).sum()) // 8):
        raise CodecError(f"{len(remainders)} bytes of low bits do not fit the changes")
    sizes = (n, lengths[0], 4 * lengths[1], lengths[2], 4 * lengths[3])
    plain = np.frombuffer(_decompressed(body, sum(sizes)), np.uint8)
    symbols, far, farther, large, larger = np.split(plain, np.cumsum(sizes)[:-1])
    changes = Changes(
        counts, low_bits, symbols, remainders,
        far, np.frombuffer(farther.tobytes(), "<u4"), large, np.frombuffer(larger.tobytes(), "<u4"),
    )  # fmt: skip
    if not coder.apply_changes(old, changes, ordering, out):
        raise CodecError("changes reach outside of the tensor, or of its type")


# ---------------------------------------------------------------------------------------------------- planes


def _encode_planes(patterns: np.ndarray) -> bytes:
    """One zstd frame per byte of the width, each after its length."""
    planes = patterns.view(np.uint8).reshape(len(patterns), patterns.itemsize)
    frames = [zstandard.ZstdCompressor(LEVEL).compress(plane.tobytes()) for plane in planes.T]
    return b"".join(_LENGTH.pack(len(frame)) + frame for frame in frames)


def _decode_planes(content: memoryview, out: np.ndarray) -> None:
    planes = out.view(np.uint8).reshape(len(out), out.itemsize)
    for index, frame in enumerate(_unframed(content, out.itemsize)):
        planes[:, index] = np.frombuffer(_decompressed(frame, len(out)), np.uint8)


def _encode_differences(old: np.ndarray, new: np.ndarray, *, floating: bool) -> tuple[int, bytes, float]:
    """Number of changes, the encoded chunk, and the seconds that finding the changes took."""
    began = time.perf_counter()
    width = 8 * old.itemsize
    one, rest = old.dtype.type(1), old.dtype.type(width - 1)
    step = _monotone(new, floating) - _monotone(old, floating)  # modulo 2^width
    zigzag = (step << one) ^ (old.dtype.type(0) - (step >> rest))
    changed, compared = int(np.count_nonzero(step)), time.perf_counter() - began
    return changed, _encode_planes(zigzag), compared


def _decode_differences(content: memoryview, old: np.ndarray, out: np.ndarray, *, floating: bool) -> None:
    zigzag = np.empty_like(out)
    _decode_planes(content, zigzag)
    one = old.dtype.type(1)
    step = (zigzag >> one) ^ (old.dtype.type(0) - (zigzag & one))
    out[:] = _monotone(_monotone(old, floating) + step, floating)


def _monotone(patterns: np.ndarray, floating: bool) -> np.ndarray:
    """Bit patterns as two's complement integers in the order of the values. Its own inverse."""
    if not floating:
        return patterns
    rest = patterns.dtype.type(8 * patterns.itemsize - 1)
    sign = patterns >> rest
    return patterns ^ ((patterns.dtype.type(0) - sign) >> patterns.dtype.type(1))


# ---------------------------------------------------------------------------------------------------- framing


def _chunks(flat: np.ndarray) -> Iterator[np.ndarray]:
    return (flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK))


def _mapped(pool: Executor | None, work: Callable[..., Any], *each: Iterable[Any]) -> Iterator[Any]:
    return map(work, *each) if pool is None else pool.map(work, *each)


def _framed(parts: Iterable[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _unframed(content: memoryview, count: int) -> Iterator[memoryview]:
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


def _decompressed(frame: memoryview, size: int) -> bytes:
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


def _numbers(values: Iterable[int]) -> bytes:
    """LEB128: seven bits a byte, the low ones first."""
    encoded = bytearray()
    for value in values:
        while value >= 128:
            encoded.append(value & 127 | 128)
            value >>= 7
        encoded.append(value)
    return bytes(encoded)


class _Numbers:
    """Reads a chunk's LEB128 numbers, then its bytes. Raises `CodecError`."""

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
