"""A whole state as entries of a manifest and a stream: which tensors are encoded together, and how they come apart.

Each encoding has costs of its own, a header and tables of statistics. So tensors below `JOINED` elements that have
changed are joined with others of their type, one after the other, up to a chunk: a mixture's experts, norms, biases,
the whole of a small model. The first of them carries the encoding; the others are `joined` to it. So that they stand
behind one another, a listing has large tensors first, then the small ones by type.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from rlloop.sync import codec
from rlloop.sync.bits import Bits, Tensors, digest
from rlloop.sync.manifest import CodecName, Entry, Listing
from rlloop.sync.store import Store
from rlloop.sync.stream import StreamWriter

JOINED = 1 << 20  # elements
_UNCHANGED: tuple[CodecName, int] = ("unchanged", 0)
_JOINED: tuple[CodecName, int] = ("joined", 0)


@dataclass(frozen=True)
class Packed:
    """A state that the store holds the encoding of."""

    entries: tuple[Entry, ...]  # in the listing's order
    digests: dict[str, bytes]  # of the state
    pieces: tuple[bytes, ...]
    changed: int  # elements
    diff_seconds: float  # of the encoding, those that went into finding the changes; of all threads together
    store_seconds: float


def listing_of(tensors: Tensors, aliases: Mapping[str, str]) -> Listing:
    """Large tensors as they come, then the small ones by type."""
    each = [(name, bits.dtype, bits.shape) for name, bits in tensors.items()]
    each.sort(key=lambda one: (False, "") if tensors[one[0]].array.size >= JOINED else (True, one[1]))
    return Listing(tuple(each), dict(aliases))


def pack(
    store: Store, listing: Listing, tensors: Tensors, base: Tensors, digests: Mapping[str, bytes], threads: int
) -> Packed:
    """Encode `tensors` for who has `base` (empty: nothing) and hand the store the pieces.

    `digests` of `base`'s tensors, so that unchanged ones need not be hashed again.
    """
    began = time.perf_counter()
    units = _units(listing, tensors, base)
    stream, changed = StreamWriter(store), 0
    made_of = dict[str, tuple[CodecName, int]]()  # codec and size
    hashes = dict[str, bytes]()
    compared = time.perf_counter() - began
    for names, made, found in _encoded(units, tensors, base, digests, threads):
        stream.write(made.content)
        changed, compared = changed + made.changed, compared + made.diff_seconds
        made_of.update(dict.fromkeys(names, _JOINED))
        made_of[names[0]] = made.codec, len(made.content)
        hashes |= zip(names, found, strict=True)
    stream.end()
    entries, place = list[Entry](), 0
    for name, dtype, shape in listing.tensors:
        kind, size = made_of.get(name, _UNCHANGED)
        entries.append(Entry(name, dtype, shape, kind, place, size))
        place += size
        if name not in hashes:
            hashes[name] = digests.get(name) or digest(tensors[name].array)
    return Packed(tuple(entries), hashes, tuple(stream.pieces), changed, compared, stream.seconds)


def groups(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """The entries that have an encoding, each with those that are joined to it."""
    group: list[Entry] = []
    for entry in entries:
        if entry.codec == "joined":
            group.append(entry)
        elif entry.codec != "unchanged":
            if group:
                yield group
            group = [entry]
    if group:
        yield group


def elements(group: Sequence[Entry]) -> tuple[int, ...]:
    """The shape of what a group's encoding holds: its tensor's, or that of all in a row."""
    return group[0].shape if len(group) == 1 else (sum(_size(entry) for entry in group),)


def unpack(group: Sequence[Entry], content: bytes, olds: Sequence[Bits | None]) -> list[Bits]:
    """The new tensors of a group, in memory of their own. Raises `CodecError`."""
    first = group[0]
    old = None
    if first.codec != "full":
        known = [bits for bits in olds if bits is not None]
        if len(known) != len(group):
            raise codec.CodecError(f"{first.name} is {first.codec}, and there is no predecessor")
        old = known[0] if len(known) == 1 else _joined(first.dtype, known)
    made = codec.decode(first.codec, content, first.dtype, elements(group), old)
    if len(group) == 1:
        return [made]
    parts = np.split(made.array, np.cumsum([_size(entry) for entry in group])[:-1])
    return [Bits(entry.dtype, part.reshape(entry.shape)) for entry, part in zip(group, parts, strict=True)]


def _units(listing: Listing, tensors: Tensors, base: Tensors) -> list[list[str]]:
    """Names that are encoded together, in the listing's order; small tensors that did not change are in none."""
    units, filling, size, kind = list[list[str]](), list[str](), 0, ""
    for name, dtype, _ in listing.tensors:
        array = tensors[name].array
        if array.size >= JOINED:
            units.append([name])
        elif name not in base or not np.array_equal(array, base[name].array):
            if dtype != kind or size + array.size > codec.CHUNK:
                filling, size, kind = [], 0, dtype
                units.append(filling)
            filling.append(name)
            size += array.size
    return units


def _encoded(
    units: list[list[str]], tensors: Tensors, base: Tensors, digests: Mapping[str, bytes], threads: int
) -> Iterator[tuple[list[str], codec.Encoded, list[bytes]]]:
    """Names, encoding and digests of each unit, in order; some ahead of the one that is wanted, in threads."""

    def one(names: list[str], pool: Executor | None = None) -> tuple[list[str], codec.Encoded, list[bytes]]:
        dtype = tensors[names[0]].dtype
        new = tensors[names[0]] if len(names) == 1 else _joined(dtype, [tensors[name] for name in names])
        old = None
        if base:
            old = base[names[0]] if len(names) == 1 else _joined(dtype, [base[name] for name in names])
        made = codec.encode(new, old, pool=pool)
        if made.codec == "unchanged" and names[0] in digests:
            return names, made, [digests[names[0]]]
        return names, made, [digest(tensors[name].array) for name in names]

    if threads == 1:
        yield from map(one, units)
        return
    with ThreadPoolExecutor(threads) as chunks, ThreadPoolExecutor(threads) as pool:
        yield from pool.map(partial(one, pool=chunks), units)  # who waits for chunks is in another pool


def _joined(dtype: str, each: Iterable[Bits]) -> Bits:
    return Bits(dtype, np.concatenate([bits.array.reshape(-1) for bits in each]))


def _size(entry: Entry) -> int:
    return math.prod(entry.shape)
