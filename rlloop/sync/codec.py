"""Lossless coding of a tensor for receivers that have the previous version. The shortest of these is sent:

    unchanged   no bytes
    changes     floats up to 32 bits, integers up to 16: gaps and steps, grouped by the old value's exponent
                (`rlloop.sync.steps`), through an entropy coder (`rlloop.sync.entropy`)
    adaptive    types of 8 and 16 bits, small tensors: each element with a learned probability (`rlloop.sync.adaptive`)
    planes      other types: differences in the order of values, zigzag, one plane per byte of the width, through zstd
    full        the bit patterns themselves, exponents apart from the rest; needs no previous version

Chunks of `CHUNK` elements are coded independently: in parallel, and in bounded memory. Every size follows from the
tensor's type and shape, or is checked against them before anything is allocated, so a hostile length costs nothing.
`steps` and `plain` are `changes` and `full` of format 2, which is still read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlloop.sync.bits import UNSIGNED, WIDTH, Bits, size_of
from rlloop.sync.framing import CodecError, framed, unframed
from rlloop.sync.legacy import changes_of
from rlloop.sync.manifest import CodecName
from rlloop.sync.planes import decode_differences, decode_planes, encode_differences, encode_planes
from rlloop.sync.steps import ORDERINGS, Changes, Ordering, Patch

CHUNK = 1 << 22  # elements
SMALL = 1 << 19  # elements; the adaptive coder, some ten nanoseconds an element, is for no more than these
WHOLE = ("full", "plain")  # codecs that need no previous version
SPARSE = 8  # where more than one element in this many changes, copying all of them is faster than those


class StepCoder(Protocol):
    """`rlloop.sync.steps`, or `steps_fast`, which compiles it."""

    def find_changes(self, old: np.ndarray, new: np.ndarray, ordering: Ordering) -> tuple[Changes, np.ndarray]: ...

    def apply_changes(self, array: np.ndarray, changes: Changes, ordering: Ordering) -> Patch | None: ...


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
    places: Sequence[np.ndarray | None] = field(default=(), compare=False)  # changed elements of each chunk; None: many


class _Chunk(NamedTuple):
    changed: int  # elements
    content: bytes
    seconds: float  # spent on finding the changes
    places: np.ndarray | None = None


def fast() -> Coders:
    from rlloop.sync import adaptive_fast, steps_fast  # numba takes a second to import

    return Coders(steps_fast, adaptive_fast)


def reference() -> Coders:
    """The numpy coders, slow, whose results the compiled ones must equal."""
    from rlloop.sync import adaptive, steps

    return Coders(steps, adaptive)


def encode(new: Bits, old: Bits | None, *, pool: Executor | None = None, coders: Coders | None = None) -> Encoded:
    """The shortest encoding of `new` for a receiver that has `old` (None: nothing).

    `pool` encodes chunks in parallel. `coders`: None takes the compiled ones.
    """
    new_flat = new.array.reshape(-1)
    if old is None:
        return begin_full(new, pool)()
    assert (old.dtype, old.shape) == (new.dtype, new.shape), "a delta is between tensors of one type and shape"
    old_flat = old.array.reshape(-1)
    kind: CodecName
    ordering = ORDERINGS.get(new.dtype)
    if ordering is not None:
        coders = coders or fast()
        kind, work = "changes", partial(_encode_changes, ordering=ordering, coder=coders.steps)
    else:
        kind, work = "planes", partial(_encode_differences, floating=new.dtype.startswith("F"))
    chunks: list[_Chunk] = list(_mapped(pool, work, _chunks(old_flat), _chunks(new_flat)))
    changed = sum(chunk.changed for chunk in chunks)
    compared = sum(chunk.seconds for chunk in chunks)
    if changed == 0:
        return Encoded("unchanged", b"", 0, compared)
    delta, chunk_indices = framed(chunk.content for chunk in chunks), [chunk.places for chunk in chunks]
    if ordering is not None and coders is not None and is_small(new_flat.size, ordering):
        shorter = coders.adaptive.encode(old_flat, new_flat, ordering, len(delta))
        kind, delta = (kind, delta) if shorter is None else ("adaptive", shorter)
    if len(delta) > new.nbytes // 3:
        full = begin_full(new, pool)().content
        if len(full) <= len(delta):
            return Encoded("full", full, changed, compared, chunk_indices)
    return Encoded(kind, delta, changed, compared, chunk_indices)


def is_small(elements: int, ordering: Ordering) -> bool:
    """True for a tensor that the adaptive coder may encode."""
    return elements <= SMALL and ordering.bits <= 16


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
    if codec not in WHOLE:
        if old is None or (old.dtype, old.shape) != (dtype, shape):
            raise CodecError(
                f"a tensor of {dtype} {shape} is encoded as {codec}, which needs a predecessor of that type and shape"
            )
        if codec == "unchanged":
            return Bits(dtype, old.array.copy())
    ordering = ordering_for(codec, dtype)
    if codec == "adaptive" and old is not None and ordering is not None:
        if not is_small(count, ordering):
            raise CodecError(f"{count} elements of {dtype} are encoded as adaptive, which is for at most {SMALL}")
        decoded = (coders or fast()).adaptive.decode(old.array.reshape(-1), content, ordering)
        if decoded is None:
            raise CodecError("changes leave the type's range, or do not end as an encoder's")
        return Bits(dtype, decoded.reshape(shape))
    frames = list(unframed(memoryview(content), -(-count // CHUNK)))
    array = np.empty(count, kind)
    out_chunks = list(_chunks(array))
    if codec in WHOLE or old is None:
        turned = dtype if codec == "full" else ""
        done = _mapped(pool, partial(decode_planes, dtype=turned), frames, out_chunks)
    elif ordering is not None:
        work = partial(_decode_changes, codec=codec, ordering=ordering, coder=(coders or fast()).steps)
        done = _mapped(pool, work, frames, _chunks(old.array.reshape(-1)), out_chunks)
    else:
        work = partial(decode_differences, floating=dtype.startswith("F"))
        done = _mapped(pool, work, frames, _chunks(old.array.reshape(-1)), out_chunks)
    for _ in done:
        pass  # raises what a chunk's decoder raised
    return Bits(dtype, array.reshape(shape))


def ordering_for(codec: CodecName, dtype: str) -> Ordering | None:
    """The order of values that a codec's steps use; None for codecs without steps. Raises `CodecError`."""
    if codec not in ("changes", "steps", "adaptive"):
        return None
    ordering = ORDERINGS.get(dtype)
    if ordering is None or (codec != "changes" and ordering.bits > 16):
        raise CodecError(f"{codec} is not for {dtype}")
    return ordering


def max_encoded(dtype: str, shape: tuple[int, ...]) -> int:
    """Upper bound on the bytes of any encoding of such a tensor: a full one, of bits that zstd cannot compress."""
    size = size_of(dtype, shape)
    return size + size // 128 + 256 * (1 + math.prod(shape) // CHUNK)


# ---------------------------------------------------------------------------------------------------- chunks


def read_changes(codec: CodecName, content: memoryview, ordering: Ordering, elements: int) -> Changes:
    """The changes in a chunk of `elements`. Raises `CodecError`."""
    if codec == "steps":
        return changes_of(content, ordering, elements)
    from rlloop.sync import entropy

    changes = entropy.decode(content, ordering.classes, ordering.bits, elements)
    if isinstance(changes, entropy.Damage):
        raise CodecError(entropy.REASONS[changes])
    return changes


def begin_full(new: Bits, pool: Executor | None) -> Callable[[], Encoded]:
    """Start encoding a whole tensor in `pool`; calling the result waits for it."""
    planes = _mapped(pool, partial(encode_planes, dtype=new.dtype), _chunks(new.array.reshape(-1)))
    return lambda: Encoded("full", framed(planes), new.size)


def _encode_changes(old: np.ndarray, new: np.ndarray, *, ordering: Ordering, coder: StepCoder) -> _Chunk:
    from rlloop.sync import entropy

    began = time.perf_counter()
    changes, indices = coder.find_changes(old, new, ordering)
    compared = time.perf_counter() - began
    places = indices if len(indices) * SPARSE <= len(old) else None
    return _Chunk(len(indices), entropy.encode(changes), compared, places)


def _decode_changes(
    content: memoryview, old: np.ndarray, out: np.ndarray, *, codec: CodecName, ordering: Ordering, coder: StepCoder
) -> None:
    np.copyto(out, old)
    if coder.apply_changes(out, read_changes(codec, content, ordering, len(out)), ordering) is None:
        raise CodecError("changes lie outside the tensor")


def _encode_differences(old: np.ndarray, new: np.ndarray, *, floating: bool) -> _Chunk:
    began = time.perf_counter()
    differences, changed = encode_differences(old, new, floating)
    compared = time.perf_counter() - began
    return _Chunk(changed, encode_planes(differences), compared)


def _chunks(flat: np.ndarray) -> Iterator[np.ndarray]:
    return (flat[start : start + CHUNK] for start in range(0, len(flat), CHUNK))


def _mapped(pool: Executor | None, work: Callable[..., Any], *each: Iterable[Any]) -> Iterator[Any]:
    return map(work, *each) if pool is None else pool.map(work, *each)
