"""Encodes a whole state as a manifest's entries and a stream, joining small tensors; and takes groups apart again.

Each encoding costs a header and tables of statistics. So changed tensors of fewer than `JOINED` elements are
concatenated with others of their dtype, up to a chunk: a mixture's experts, norms, biases, all of a small model. The
first of a group carries the encoding; the others are `joined` to it. Groups are contiguous, since a listing has large
tensors first and then the small ones by dtype.

Over ranks (`rlloop.sync.shares`) each encodes some of these units; the bytes are those of one.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlloop.sync import codec
from rlloop.sync.bits import Bits, Tensors, each
from rlloop.sync.manifest import CodecName, Entry, Listing
from rlloop.sync.store import Store
from rlloop.sync.stream import StreamWriter

AHEAD = 64  # units whose changes a device finds ahead of the entropy coder
WHOLE_AHEAD = 4  # whole tensors that are encoded at a time: bounds the memory
JOINED = 1 << 20  # elements
_UNCHANGED: tuple[CodecName, int] = ("unchanged", 0)
_JOINED: tuple[CodecName, int] = ("joined", 0)
Unit = tuple[list[str], codec.Encoded, list[bytes]]  # names encoded together, their encoding and digests


class Sharing(Protocol):
    """Ranks that encode a state together: `rlloop.sync.shares.Shares`."""

    def own(self, units: Sequence[list[str]]) -> list[list[str]]: ...

    def gathered(self, units: Sequence[list[str]], own: Iterator[Unit]) -> Generator[Unit]: ...

    def hand_out(
        self, listing: Listing | None, state: Tensors, digests: Mapping[str, bytes]
    ) -> tuple[Listing | None, Tensors, Mapping[str, bytes]]: ...

    def order(self, order: str) -> None: ...


@dataclass(frozen=True)
class Packed:
    """An encoded state, whose pieces are in the store. Complete on the first rank; others know their own share."""

    entries: tuple[Entry, ...]  # in the listing's order
    digests: dict[str, bytes]  # by name, of the new state
    pieces: tuple[bytes, ...]  # hashes
    written: tuple[str, ...]  # of this rank's tensors, those that may differ from `base`
    changed: int  # elements
    diff_seconds: float  # spent on finding the changes, summed over threads
    store_seconds: float  # spent in the store
    places: dict[str, Sequence[np.ndarray | None]] = field(default_factory=dict)  # changed elements of each chunk


def listing_of(tensors: Tensors, aliases: Mapping[str, str]) -> Listing:
    """`listing_from` of tensors."""
    return listing_from(((name, bits.dtype, bits.shape) for name, bits in tensors.items()), aliases)


def listing_from(tensors: Iterable[tuple[str, str, tuple[int, ...]]], aliases: Mapping[str, str]) -> Listing:
    """The listing of a state: large tensors in the order given, then the small ones by dtype.

    `tensors`: (name, dtype, shape) each.
    """
    listed = sorted(tensors, key=lambda one: (True, one[1]) if is_joined(one[2]) else (False, ""))
    return Listing(tuple(listed), dict(aliases))


def is_joined(shape: Sequence[int]) -> bool:
    """True for a tensor that is small enough to be encoded together with others."""
    return math.prod(shape) < JOINED


def pack(
    store: Store | None,
    listing: Listing,
    tensors: Tensors,
    base: Tensors,
    digests: Mapping[str, bytes],
    threads: int,
    shares: Sharing | None = None,
) -> Packed:
    """Encode `tensors` for receivers that have `base` (empty: nothing), and put the pieces into the store.

    `digests`: of `base`'s tensors, so that unchanged ones need not be hashed again. `shares`: of several ranks, each of
    which has its own `tensors` and `base`; the first has the store, and writes what all have encoded. Collective.
    """
    began = time.perf_counter()
    units = _units(listing, tensors, base)
    own = units if shares is None else shares.own(units)
    # Over ranks always in threads, so that a rank encodes while it waits for another's.
    every = _encoded(own, tensors, base, digests, threads, at_once=shares is not None)
    if shares is not None:
        every = shares.gathered(units, every)
    stream, changed = None if store is None else StreamWriter(store), 0
    encoding_of = dict[str, tuple[CodecName, int]]()  # name -> codec and size
    indices_of = dict[str, Sequence[np.ndarray | None]]()
    hashes = dict[str, bytes]()
    compared = time.perf_counter() - began
    with closing(every):
        for names, encoded, unit_digests in every:
            if stream is not None:
                stream.write(encoded.content)
            changed, compared = changed + encoded.changed, compared + encoded.diff_seconds
            encoding_of.update(dict.fromkeys(names, _JOINED))
            encoding_of[names[0]] = encoded.codec, len(encoded.content)
            if len(names) == 1 and encoded.places:
                indices_of[names[0]] = encoded.places
            hashes |= zip(names, unit_digests, strict=True)
    if stream is not None:
        stream.end()
    written = [name for names in units if encoding_of.get(names[0]) != _UNCHANGED for name in names if name in tensors]
    others = set(written) - hashes.keys()  # small tensors that another rank has encoded
    entries, offset = list[Entry](), 0
    for name, dtype, shape in listing.tensors:
        codec_name, size = encoding_of.get(name, _UNCHANGED)
        entries.append(Entry(name, dtype, shape, codec_name, offset, size))
        offset += size
        if name in tensors and name not in hashes and name not in others:
            hashes[name] = digests.get(name) or tensors[name].digest()
    pieces, seconds = ((), 0.0) if stream is None else (tuple(stream.pieces), stream.seconds)
    return Packed(tuple(entries), hashes, pieces, tuple(written), changed, compared, seconds, indices_of)


def adopt(base: Tensors, tensors: Tensors, packed: Packed, threads: int) -> None:
    """Make `base` equal to `tensors`, which were packed for receivers of it."""

    from rlloop.sync import steps_fast

    def one(name: str) -> None:
        if not isinstance(base[name], Bits):
            on_device: Any = base[name], tensors[name]
            on_device[0].tensor.copy_(on_device[1].tensor)
            return
        old, new = base[name].array.reshape(-1), tensors[name].array.reshape(-1)
        chunk_indices = packed.places.get(name, ())
        for number, start in enumerate(range(0, old.size, codec.CHUNK)):
            into, source = (each[start : start + codec.CHUNK] for each in (old, new))
            few = chunk_indices[number] if number < len(chunk_indices) else None
            if few is None:
                np.copyto(into, source)
            else:
                steps_fast.adopt(into, few, source)

    each(one, packed.written, threads)


def beside(state: Tensors, tensors: Tensors) -> Tensors:
    """`state` where `tensors` are: one that was rebuilt from a store is in the host's memory."""
    if not state or _on_host(tensors) or not _on_host(state):
        return state
    from rlloop.sync import device  # Triton's

    on_device: Mapping[str, Any] = tensors
    moved: Any = {name: device.sent(bits, on_device[name].tensor.device) for name, bits in state.items()}
    return moved


def _on_host(tensors: Mapping[str, Any]) -> bool:
    return all(isinstance(bits, Bits) for bits in itertools.islice(tensors.values(), 1))


def on_host(tensors: Tensors) -> Tensors:
    """The tensors in the host's memory: copies of those on a device."""
    each: Mapping[str, Any] = tensors
    return {name: bits if isinstance(bits, Bits) else bits.host() for name, bits in each.items()}


def copied(tensors: Tensors, threads: int) -> dict[str, Bits]:
    """Copies of the tensors."""
    return dict(zip(tensors, each(lambda bits: bits.copy(), tensors.values(), threads), strict=True))


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
    if first.codec not in codec.WHOLE:
        known = [bits for bits in olds if bits is not None]
        if len(known) != len(group):
            raise codec.CodecError(f"{first.name} is {first.codec}, and there is no predecessor to apply it to")
        old = joined(first.dtype, known)
    decoded = codec.decode(first.codec, content, first.dtype, elements(group), old)
    if len(group) == 1:
        return [decoded]
    arrays = np.split(decoded.array, np.cumsum([_size(entry) for entry in group])[:-1])
    return [Bits(entry.dtype, array.reshape(entry.shape)) for entry, array in zip(group, arrays, strict=True)]


def _units(listing: Listing, tensors: Tensors, base: Tensors) -> list[list[str]]:
    """Groups of names that are encoded together, in the listing's order, without small tensors that did not change."""
    units, group, size, group_dtype = list[list[str]](), list[str](), 0, ""
    same = _unchanged([name for name, _, shape in listing.tensors if is_joined(shape)], tensors, base)
    for name, dtype, shape in listing.tensors:
        elements = math.prod(shape)
        if not is_joined(shape):
            units.append([name])
        elif name not in same:
            if dtype != group_dtype or size + elements > codec.CHUNK:
                group, size, group_dtype = [], 0, dtype
                units.append(group)
            group.append(name)
            size += elements
    return units


def _unchanged(names: Sequence[str], tensors: Mapping[str, Any], base: Mapping[str, Any]) -> set[str]:
    """Names of the tensors that are the same in `base`."""
    pairs = {name: (base[name], tensors[name]) for name in names if name in base}
    if not _on_host(tensors):
        from rlloop.sync import device  # Triton's

        return device.unchanged(pairs)
    return {name for name, (old, new) in pairs.items() if new.same(old)}


def _encoded(
    units: list[list[str]],
    tensors: Tensors,
    base: Tensors,
    digests: Mapping[str, bytes],
    threads: int,
    *,
    at_once: bool = False,
) -> Generator[Unit]:
    """Names, encoding and digests of each unit, in order. With several threads, or `at_once`, units are encoded ahead
    of need.

    Deltas are small, so all of them are begun at once, the largest tensors first; of whole tensors a few.
    """
    if not _on_host(tensors):
        yield from _encoded_on_device(units, tensors, base, digests, threads)
        return

    def one(names: list[str]) -> tuple[codec.Encoded, list[bytes]]:
        dtype = tensors[names[0]].dtype
        new = joined(dtype, [tensors[name] for name in names])
        old = joined(dtype, [base[name] for name in names]) if base else None
        encoded = codec.encode(new, old)
        if encoded.codec == "unchanged" and names[0] in digests:
            return encoded, [digests[names[0]]]
        return encoded, [tensors[name].digest() for name in names]

    few = threads == 1 or sum(tensors[name].size for names in units for name in names) <= codec.CHUNK
    if few and not at_once:
        yield from ((names, *one(names)) for names in units)
        return
    with ThreadPoolExecutor(threads) as pool:
        if base:
            order = sorted(units, key=lambda names: -sum(tensors[name].size for name in names))
            begun = {names[0]: pool.submit(one, names) for names in order}
            yield from ((names, *begun.pop(names[0]).result()) for names in units)
            return
        hashes = dict[str, Future[bytes]]()

        def begin(names: list[str]) -> Callable[[], codec.Encoded]:
            hashes.update((name, pool.submit(tensors[name].digest)) for name in names)
            return codec.begin_full(joined(tensors[names[0]].dtype, [tensors[name] for name in names]), pool)

        for names, encoded in _in_turn(units, begin, WHOLE_AHEAD):
            yield names, encoded, [hashes.pop(name).result() for name in names]


def _in_turn(
    units: list[list[str]], begin: Callable[[list[str]], Callable[[], codec.Encoded]], ahead: int
) -> Iterator[tuple[list[str], codec.Encoded]]:
    """Each unit with its encoding; so many are begun before the first of them is waited for."""
    begun, waiting = deque[Callable[[], codec.Encoded]](), iter(units)
    for names in units:
        begun.extend(begin(later) for later in itertools.islice(waiting, ahead - len(begun)))
        yield names, begun.popleft()()


def _encoded_on_device(
    units: list[list[str]],
    tensors: Mapping[str, Any],  # `device.DeviceBits`
    base: Mapping[str, Any],
    digests: Mapping[str, bytes],
    threads: int,
) -> Iterator[Unit]:
    from rlloop.sync import device  # Triton's

    def whole(state: Any, names: list[str]) -> Any:
        return device.joined([state[name] for name in names])

    with ThreadPoolExecutor(threads) as pool:
        pairs: Any = {names[0]: (whole(base, names) if base else None, whole(tensors, names)) for names in units}
        both = {first: pair for first, pair in pairs.items() if base and device.encodes(pair[1])}
        hashes = device.digests({name: tensors[name] for names in units for name in names})
        comparisons = dict(zip(both, device.compare(list(both.values())), strict=True))

        def begin(names: list[str]) -> Callable[[], codec.Encoded]:
            old, new = pairs.pop(names[0])
            return device.begin(new, old, comparisons.get(names[0]), pool)

        for names, encoded in _in_turn(units, begin, AHEAD if base else WHOLE_AHEAD):
            yield names, encoded, [hashes[name] for name in names]


def joined(dtype: str, several: Sequence[Bits]) -> Bits:
    """Concatenate tensors of one type into one dimension; a single one stays as it is."""
    if len(several) == 1:
        return several[0]
    return Bits(dtype, np.concatenate([bits.array.reshape(-1) for bits in several]))


def _size(entry: Entry) -> int:
    return math.prod(entry.shape)
