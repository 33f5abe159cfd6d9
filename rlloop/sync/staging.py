"""Decodes a group of tensors beside the live ones, without a second copy of tensors with few changes.

A tensor of codec `changes` becomes a patch: its changed elements and their new values. The digest of the new state is
computed range by range, on a patched copy of one range that fits a core's cache.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from rlloop.sync import codec
from rlloop.sync.bits import Bits
from rlloop.sync.framing import CodecError, unframed
from rlloop.sync.manifest import Entry
from rlloop.sync.packing import elements, joined, unpack
from rlloop.sync.steps import Changes, Ordering, Patch

WAVE = 128 << 20  # encoded bytes; decoded they are up to some ten times as many


class Staged(NamedTuple):
    """A tensor's new state, and its digest if it is known."""

    change: Bits | Patch  # whole, or what to change in the live tensor
    digest: bytes | None = None


class Begun(NamedTuple):
    """A group of tensors of which threads decode the chunks."""

    group: Sequence[Entry]
    content: bytes
    chunks: Sequence[Future[Changes]]


def begin(group: Sequence[Entry], content: bytes, pool: Executor) -> Begun:
    """Start decoding the chunks of a tensor's changes, so that threads share a large one; nothing for other groups."""
    first, count = group[0], math.prod(group[0].shape)
    if len(group) > 1 or first.codec not in ("changes", "steps"):
        return Begun(group, content, [])
    ordering = codec.ordering_for(first.codec, first.dtype)
    assert ordering is not None
    sizes = [min(codec.CHUNK, count - start) for start in range(0, count, codec.CHUNK)]
    frames = unframed(memoryview(content), len(sizes))
    chunks = [
        pool.submit(codec.read_changes, first.codec, frame, ordering, size)
        for frame, size in zip(frames, sizes, strict=True)
    ]
    return Begun(group, content, chunks)


Named = Iterator[tuple[str, Staged]]


def on_host(begun: Iterable[Begun], stage: Callable[[Begun], list[Staged]], pool: Executor) -> Named:
    """Stage groups in `pool`."""
    # All chunks come before the first group that waits for its own: first in, first out.
    pending = [(each.group, pool.submit(stage, each)) for each in begun]
    for group, made in pending:
        yield from _named(group, made.result())


def on_device(begun: Iterable[Begun], stage: Callable[[Begun], list[Staged]]) -> Named:
    """Stage groups in this thread, wave by wave, once a wave is decoded: beside threads that decode, each of thousands
    of operations on the device would wait for Python's lock."""
    groups = iter(begun)
    while wave := list(_wave(groups)):
        wait([chunk for each in wave for chunk in each.chunks])
        for each in wave:
            yield from _named(each.group, stage(each))


def _wave(groups: Iterator[Begun]) -> Iterator[Begun]:
    size = 0
    while size < WAVE and (each := next(groups, None)):
        size += len(each.content)
        yield each


def _named(group: Sequence[Entry], made: Sequence[Staged]) -> Named:
    return ((entry.name, new) for entry, new in zip(group, made, strict=True))


def stage(
    group: Sequence[Entry], content: bytes, chunks: Sequence[Future[Changes]], olds: Sequence[Bits | None]
) -> list[Staged]:
    """The new states of a group of tensors; `olds` are the live ones (None: new), the others as in `Begun`.

    Raises `CodecError` if damaged.
    """
    first = group[0]
    known = [bits for bits in olds if bits is not None]
    if known and not isinstance(known[0], Bits):
        from rlloop.sync import device  # Triton's

        if first.codec in ("changes", "steps") and len(group) == len(known) == 1:
            return [Staged(device.patch_of([each.result() for each in chunks], known[0]))]
        on_device: Sequence[Any] = olds
        hosts = [None if bits is None else bits.host() for bits in on_device]
        news = stage(group, content, chunks, hosts)
        return [new if old is None else _as_patch(new, old) for new, old in zip(news, hosts, strict=True)]
    if first.codec not in ("changes", "steps") or len(known) != len(group):
        return [Staged(bits) for bits in unpack(group, content, olds)]
    ordering = codec.ordering_for(first.codec, first.dtype)
    assert ordering is not None
    if len(group) == 1:
        return [_patched(chunks, known[0], ordering)]
    return _split(
        group, codec.decode(first.codec, content, first.dtype, elements(group), joined(first.dtype, known)), known
    )


def patched(bits: Bits, patch: Patch) -> Bits:
    """A copy of `bits` with the patch applied."""
    if not isinstance(bits, Bits):
        from rlloop.sync import device

        return device.patched(bits, patch)
    copy = bits.copy()
    copy.array.reshape(-1)[patch.places] = patch.values
    return copy


def on_top(new: Staged, old: Bits) -> Staged:
    """The whole new state of a tensor; a patch is applied to `old` in place."""
    if not isinstance(new.change, Patch):
        return new
    if not isinstance(old, Bits):
        from rlloop.sync import device

        return Staged(device.on_top(old, new.change), new.digest)
    old.array.reshape(-1)[new.change.places] = new.change.values
    return Staged(old, new.digest)


def hashed(named: Iterable[tuple[str, Staged]], live: Callable[[str], Any]) -> Named:
    """The same tensors; patches without a digest, which are those of `live` tensors on a device, get one. It hashes
    several at a time, as they come."""
    rest, hashing = dict[str, Patch](), None
    for name, new in named:
        if new.digest is not None or not isinstance(new.change, Patch):
            yield name, new
            continue
        from rlloop.sync import device  # Triton's

        hashing = hashing or device.Digests()
        hashing.add_patched(name, live(name), new.change)
        rest[name] = new.change
    if hashing is not None:
        yield from ((name, Staged(rest[name], digest)) for name, digest in hashing.all().items())


_scratch = threading.local()


def _patched(chunks: Sequence[Future[Changes]], old: Bits, ordering: Ordering) -> Staged:
    from rlloop.sync import steps_fast

    flat, hasher = old.array.reshape(-1), blake3(max_threads=1)
    if getattr(_scratch, "dtype", None) != flat.dtype:
        _scratch.dtype, _scratch.array = flat.dtype, np.empty(steps_fast.RANGE, flat.dtype)
    scratch: np.ndarray = _scratch.array
    known = [chunk.result() for chunk in chunks]
    patch, first = steps_fast.new_patch(sum(len(changes.gaps) for changes in known), flat), 0
    for start, changes in zip(range(0, len(flat), codec.CHUNK), known, strict=True):
        chunk, last = flat[start : start + codec.CHUNK], first + len(changes.gaps)
        if first == last:
            hasher.update(chunk.view(np.uint8).data)
            continue
        own = Patch(patch.places[first:last], patch.values[first:last])
        applier, first = steps_fast.Applier(chunk, changes, ordering, own, start), last
        for at in range(0, len(chunk), len(scratch)):
            work = scratch[: min(len(scratch), len(chunk) - at)]
            applier.advance(work)
            hasher.update(work.view(np.uint8).data)
        if not applier.complete:
            raise CodecError("changes lie outside the tensor")
    return Staged(patch, hasher.digest())


def _moved(indices: np.ndarray, start: int, count: int) -> np.ndarray:
    kind = np.uint32 if count <= 1 << 32 else np.int64
    return indices.astype(kind, copy=False) + kind(start)


def _split(group: Sequence[Entry], new: Bits, olds: Sequence[Bits]) -> list[Staged]:
    """Split a joined group into tensors, each as a patch of its changed elements."""
    starts = np.cumsum([0, *(old.size for old in olds)])
    return [
        _as_patch(Staged(Bits(entry.dtype, new.array[start : start + old.size].reshape(entry.shape))), old)
        for entry, old, start in zip(group, olds, starts[:-1], strict=True)
    ]


def _as_patch(new: Staged, old: Bits) -> Staged:
    """A whole tensor as its changed elements, which need no hashing while requests wait."""
    if isinstance(new.change, Patch):
        return new
    was, now = old.array.reshape(-1), new.change.array.reshape(-1)
    indices = np.flatnonzero(was != now)
    return Staged(Patch(_moved(indices, 0, len(now)), now[indices]), new.change.digest())
