"""Decodes a group of tensors beside the live ones, without a second copy of tensors with few changes.

A tensor of codec `changes` becomes a patch: its changed elements and their new values. The digest of the new state is
computed range by range, on a patched copy of one range that fits a core's cache.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3

from rlloop.sync import codec
from rlloop.sync.bits import Bits
from rlloop.sync.framing import CodecError, unframed
from rlloop.sync.manifest import Entry
from rlloop.sync.packing import elements, joined, unpack
from rlloop.sync.steps import Ordering, Patch


class Staged(NamedTuple):
    """A tensor's new state, and its digest if it is known."""

    change: Bits | Patch  # whole, or what to change in the live tensor
    digest: bytes | None = None


def stage(group: Sequence[Entry], content: bytes, olds: Sequence[Bits | None]) -> list[Staged]:
    """The new states of a group of tensors; `olds` are the live ones (None: new). Raises `CodecError` if damaged."""
    first = group[0]
    known = [bits for bits in olds if bits is not None]
    if known and not isinstance(known[0], Bits):
        from rlloop.sync import device  # Triton's

        if first.codec in ("changes", "steps") and len(group) == len(known) == 1:
            return [Staged(device.stage(first.codec, content, known[0]))]
        on_device: Sequence[Any] = olds
        return stage(group, content, [None if bits is None else bits.host() for bits in on_device])
    if first.codec not in ("changes", "steps") or len(known) != len(group):
        return [Staged(bits) for bits in unpack(group, content, olds)]
    ordering = codec.ordering_for(first.codec, first.dtype)
    assert ordering is not None
    if len(group) == 1:
        return [_patched(first, content, known[0], ordering)]
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


_scratch = threading.local()


def _patched(entry: Entry, content: bytes, old: Bits, ordering: Ordering) -> Staged:
    from rlloop.sync import steps_fast

    flat, hasher = old.array.reshape(-1), blake3(max_threads=1)
    if getattr(_scratch, "dtype", None) != flat.dtype:
        _scratch.dtype, _scratch.array = flat.dtype, np.empty(steps_fast.RANGE, flat.dtype)
    scratch: np.ndarray = _scratch.array
    patches = list[Patch]()
    starts = range(0, len(flat), codec.CHUNK)
    for start, frame in zip(starts, unframed(memoryview(content), len(starts)), strict=True):
        chunk = flat[start : start + codec.CHUNK]
        changes = codec.read_changes(entry.codec, frame, ordering, len(chunk))
        if not len(changes.gaps):
            hasher.update(chunk.view(np.uint8).data)
            continue
        applier = steps_fast.Applier(chunk, changes, ordering)
        for at in range(0, len(chunk), len(scratch)):
            work = scratch[: min(len(scratch), len(chunk) - at)]
            np.copyto(work, chunk[at : at + len(work)])  # four times as fast as a compiled loop
            applier.advance(work)
            hasher.update(work.view(np.uint8).data)
        if not applier.complete:
            raise CodecError("changes lie outside the tensor")
        patches.append(Patch(_moved(applier.patch.places, start, len(flat)), applier.patch.values))
    if not patches:
        return Staged(Patch(np.zeros(0, np.uint32), flat[:0]), hasher.digest())
    places, values = (np.concatenate(each) for each in zip(*patches, strict=True))
    return Staged(Patch(places, values), hasher.digest())


def _moved(places: np.ndarray, start: int, count: int) -> np.ndarray:
    kind = np.uint32 if count <= 1 << 32 else np.int64
    return places.astype(kind, copy=False) + kind(start)


def _split(group: Sequence[Entry], new: Bits, olds: Sequence[Bits]) -> list[Staged]:
    """Split a joined group into tensors, each as a patch of its changed elements."""
    staged, flat, start = list[Staged](), new.array, 0
    for entry, old in zip(group, olds, strict=True):
        own = Bits(entry.dtype, flat[start : start + math.prod(entry.shape)].reshape(entry.shape))
        start += own.size
        places = np.flatnonzero(own.array.reshape(-1) != old.array.reshape(-1)).astype(np.uint32)
        staged.append(Staged(Patch(places, own.array.reshape(-1)[places]), own.digest()))
    return staged
