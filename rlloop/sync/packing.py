"""Encodes a whole state as a manifest's entries and a stream, joining small tensors; and takes groups apart again.

Each encoding costs a header and tables of statistics. So changed tensors of fewer than `JOINED` elements are
concatenated with others of their dtype, up to a chunk: a mixture's experts, norms, biases, all of a small model. The
first of a group carries the encoding; the others are `joined` to it. Groups are contiguous, since a listing has large
tensors first and then the small ones by dtype.
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
    """An encoded state, whose pieces are in the store."""

    entries: tuple[Entry, ...]  # in the listing's order
    digests: dict[str, bytes]  # by name, of the new state
    pieces: tuple[bytes, ...]  # hashes
    changed: int  # elements
    diff_seconds: float  # spent on finding the changes, summed over threads
    store_seconds: float  # spent in the store


def listing_of(tensors: Tensors, aliases: Mapping[str, str]) -> Listing:
    """The listing of a state: large tensors in the order given, then the small ones by dtype."""
    each = [(name, bits.dtype, bits.shape) for name, bits in tensors.items()]
    each.sort(key=lambda one: (False, "") if tensors[one[0]].array.size >= JOINED else (True, one[1]))
    return Listing(tuple(each), dict(aliases))


def pack(
    store: Store, listing: Listing, tensors: Tensors, base: Tensors, digests: Mapping[str, bytes], threads: int
) -> Packed:
    """Encode `tensors` for receivers that have `base` (empty: nothing), and put the pieces into the store.

    `digests`: of `base`'s tensors, so that unchanged ones need not be hashed again.
    """
    began = time.perf_counter()
    units = _units(listing, tensors, base)
    stream, changed = StreamWriter(store), 0
    encoding_of = dict[str, tuple[CodecName, int]]()  # name -> codec and size
    hashes = dict[str, bytes]()
    compared = time.perf_counter() - began
    for names, encoded, unit_digests in _encoded(units, tensors, base, digests, threads):
        stream.write(encoded.content)
        changed, compared = changed + encoded.changed, compared + encoded.diff_seconds
        encoding_of.update(dict.fromkeys(names, _JOINED))
        encoding_of[names[0]] = encoded.codec, len(encoded.content)
        hashes |= zip(names, unit_digests, strict=True)
    stream.end()
    entries, offset = list[Entry](), 0
    for name, dtype, shape in listing.tensors:
        codec_name, size = encoding_of.get(name, _UNCHANGED)
        entries.append(Entry(name, dtype, shape, codec_name, offset, size))
        offset += size
        if name not in hashes:
            hashes[name] = digests.get(name) or digest(tensors[name].array)
    return Packed(tuple(entries), hashes, tuple(stream.pieces), changed, compared, stream.seconds)


def groups(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Each entry that has an encoding, followed by those that are joined to it."""
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
    """Shape of the tensor that a group is encoded as: a single tensor's own, else one dimension of all elements."""
    return group[0].shape if len(group) == 1 else (sum(_size(entry) for entry in group),)


def unpack(group: Sequence[Entry], content: bytes, olds: Sequence[Bits | None]) -> list[Bits]:
    """The new tensors of a group, in memory of their own. Raises `CodecError`."""
    first = group[0]
    old = None
    if first.codec != "full":
        known = [bits for bits in olds if bits is not None]
        if len(known) != len(group):
            raise codec.CodecError(f"{first.name} is {first.codec}, and there is no predecessor to apply it to")
        old = known[0] if len(known) == 1 else _joined(first.dtype, known)
    decoded = codec.decode(first.codec, content, first.dtype, elements(group), old)
    if len(group) == 1:
        return [decoded]
    arrays = np.split(decoded.array, np.cumsum([_size(entry) for entry in group])[:-1])
    return [Bits(entry.dtype, array.reshape(entry.shape)) for entry, array in zip(group, arrays, strict=True)]


def _units(listing: Listing, tensors: Tensors, base: Tensors) -> list[list[str]]:
    """Groups of names that are encoded together, in the listing's order, without small tensors that did not change."""
    units, group, size, group_dtype = list[list[str]](), list[str](), 0, ""
    for name, dtype, _ in listing.tensors:
        array = tensors[name].array
        if array.size >= JOINED:
            units.append([name])
        elif name not in base or not np.array_equal(array, base[name].array):
            if dtype != group_dtype or size + array.size > codec.CHUNK:
                group, size, group_dtype = [], 0, dtype
                units.append(group)
            group.append(name)
            size += array.size
    return units


def _encoded(
    units: list[list[str]], tensors: Tensors, base: Tensors, digests: Mapping[str, bytes], threads: int
) -> Iterator[tuple[list[str], codec.Encoded, list[bytes]]]:
    """Names, encoding and digests of each unit, in order. With several threads, units are encoded ahead of need."""

    def one(names: list[str], pool: Executor | None = None) -> tuple[list[str], codec.Encoded, list[bytes]]:
        dtype = tensors[names[0]].dtype
        new = tensors[names[0]] if len(names) == 1 else _joined(dtype, [tensors[name] for name in names])
        old = None
        if base:
            old = base[names[0]] if len(names) == 1 else _joined(dtype, [base[name] for name in names])
        encoded = codec.encode(new, old, pool=pool)
        if encoded.codec == "unchanged" and names[0] in digests:
            return names, encoded, [digests[names[0]]]
        return names, encoded, [digest(tensors[name].array) for name in names]

    if threads == 1 or sum(tensors[name].array.size for names in units for name in names) <= codec.CHUNK:
        yield from map(one, units)
        return
    with ThreadPoolExecutor(threads) as chunks, ThreadPoolExecutor(threads) as pool:
        yield from pool.map(partial(one, pool=chunks), units)  # two pools: a unit waits for its chunks


def _joined(dtype: str, each: Iterable[Bits]) -> Bits:
    return Bits(dtype, np.concatenate([bits.array.reshape(-1) for bits in each]))


def _size(entry: Entry) -> int:
    return math.prod(entry.shape)
