"""Delta coding on the GPU: a publisher's and a replica's tensors are compared, hashed and patched where they are.

Only the changes cross to the host, for the entropy coder, which waits for them; the thread that publishes waits for the
device a few times in all, so that a trainer may use it meanwhile. All results are byte-equal with the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.triton import blake3
from rlloop.numerics.kernels.triton import changes as kernels
from rlloop.sync import codec
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits
from rlloop.sync.framing import CodecError
from rlloop.sync.steps import ORDERINGS, Changes, Ordering, Patch

CHUNKS = 16  # compared at a time: bounds the device memory needed beside the weights
HASHED = 1 << 31  # bytes of tensors hashed in one batch
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DeviceBits:
    """A tensor on a device: its safetensors dtype, and its elements as signed integers of the same width."""

    def __init__(self, dtype: str, tensor: Tensor) -> None:
        """`tensor`: contiguous, of any type of the dtype's width; its memory is used, not copied."""
        assert tensor.is_contiguous()
        self.dtype = dtype
        self.tensor = tensor.detach().view(_INTEGERS[WIDTH[dtype]])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def size(self) -> int:
        return self.tensor.numel()

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def flat(self) -> Tensor:
        return self.tensor.view(-1)

    def same(self, other: DeviceBits) -> bool:
        return self.dtype == other.dtype and torch.equal(self.tensor, other.tensor)

    def copy(self) -> DeviceBits:
        return DeviceBits(self.dtype, self.tensor.clone())

    def digest(self) -> bytes:
        return blake3.digests([self.tensor])[0]

    def host(self) -> Bits:
        return Bits(self.dtype, self.tensor.cpu().numpy().view(UNSIGNED[WIDTH[self.dtype]]))


def sent(bits: Bits, device: torch.device) -> DeviceBits:
    """A copy on the device."""
    signed = bits.array.view(f"i{bits.array.itemsize}")
    return DeviceBits(bits.dtype, torch.from_numpy(signed).to(device))


def joined(several: Sequence[DeviceBits]) -> DeviceBits:
    """Concatenate tensors of one type into one dimension; a single one stays as it is."""
    if len(several) == 1:
        return several[0]
    return DeviceBits(several[0].dtype, torch.cat([bits.flat for bits in several]))


def order_of(ordering: Ordering) -> kernels.Order:
    return kernels.Order(*ordering)


class Comparison(NamedTuple):
    """Number of changes of a tensor, by block and by batch."""

    blocks: Tensor  # `kernels.changed`
    found: list[int]  # changes of each batch of `CHUNKS` chunks


def compare(pairs: Sequence[tuple[DeviceBits, DeviceBits]]) -> list[Comparison]:
    """The changes of each (old, new). Waits for the device once."""
    per_batch = codec.CHUNK * CHUNKS // kernels.BLOCK
    blocks = [kernels.changed(old.flat, new.flat) for old, new in pairs]
    batches = [each.split(per_batch) if len(each) else () for each in blocks]
    sums = [batch.sum() for each in batches for batch in each]
    totals = iter(torch.stack(sums).tolist() if sums else ())
    return [Comparison(each, [next(totals) for _ in some]) for each, some in zip(blocks, batches, strict=True)]


def unchanged(pairs: Mapping[str, tuple[DeviceBits, DeviceBits]]) -> set[str]:
    """Names of tensors whose (old, new) are equal. Waits for the device once."""
    equal = [(old.tensor == new.tensor).all() for old, new in pairs.values()]
    return {name for name, same in zip(pairs, torch.stack(equal).tolist() if equal else (), strict=True) if same}


def find_changes(
    old: DeviceBits, new: DeviceBits, comparison: Comparison | None = None
) -> Iterator[Callable[[], Changes]]:
    """The changes of each chunk, equal to those of `steps.find_changes`: a call waits until the host has them.

    `comparison`: `compare` of the two.
    """
    ordering = ORDERINGS[new.dtype]
    order, span = order_of(ordering), codec.CHUNK * CHUNKS
    comparison = comparison or compare([(old, new)])[0]
    blocks = comparison.blocks.split(span // kernels.BLOCK)
    for batch, count in enumerate(comparison.found):
        was, now = (each.flat[batch * span : (batch + 1) * span] for each in (old, new))
        chunks = -(-len(was) // codec.CHUNK)
        if not count:
            yield from [partial(_no_changes, ordering.classes)] * chunks
            continue
        indices = kernels.places_of(was, now, blocks[batch], count)
        located = kernels.locate(was, now, indices, kernels.before_blocks(was, order, codec.CHUNK), order)
        keys, gaps, zigzags = kernels.gaps_of(located)
        classes = torch.arange(chunks * kernels.CLASSES, dtype=keys.dtype, device=keys.device)
        wait = _to_host(torch.searchsorted(keys, classes, right=True), gaps, zigzags)
        yield from (partial(_changes_of, wait, chunk, ordering.classes) for chunk in range(chunks))


def _no_changes(classes: int) -> Changes:
    return Changes(np.zeros(classes, np.int64), np.zeros(0, np.uint32), np.zeros(0, np.uint32))


def _changes_of(wait: Callable[[], Sequence[np.ndarray]], chunk: int, classes: int) -> Changes:
    ends, gaps, zigzags = wait()
    first = chunk * kernels.CLASSES
    begin, here = ends[first - 1] if chunk else 0, ends[first : first + kernels.CLASSES]
    counts = np.diff(here, prepend=begin)
    return Changes(counts[:classes], *(each[begin : here[-1]].view(np.uint32) for each in (gaps, zigzags)))


def encodes(bits: DeviceBits) -> bool:
    """False for tensors without a device kernel: small ones, and other types."""
    ordering = ORDERINGS.get(bits.dtype)
    return ordering is not None and not codec.is_small(bits.size, ordering)


def begin(
    new: DeviceBits, old: DeviceBits | None, comparison: Comparison | None, pool: Executor
) -> Callable[[], codec.Encoded]:
    """Start encoding as `codec.encode` does; calling the result waits for the entropy coder, which runs in `pool`.

    `comparison`: `compare` of the two; None: not encoded on the device, but from copies on the host, as whole tensors
    (`old` None) are.
    """
    if old is None:
        return codec.begin_full(new.host(), pool)
    if comparison is None:
        whole = codec.encode(new.host(), old.host(), pool=pool)
        return lambda: whole
    from rlloop.sync import entropy

    changed = sum(comparison.found)
    begun = [pool.submit(lambda wait: entropy.encode(wait()), each) for each in find_changes(old, new, comparison)]

    def finish() -> codec.Encoded:
        delta = codec.framed(each.result() for each in begun)
        if changed == 0:
            return codec.Encoded("unchanged", b"", 0)
        if len(delta) > new.nbytes // 3:
            full = codec.encode(new.host(), None, pool=pool)
            if len(full.content) <= len(delta):
                return codec.Encoded("full", full.content, changed)
        return codec.Encoded("changes", delta, changed)

    return finish


def patch_of(chunks: Sequence[Changes], old: DeviceBits) -> Patch:
    """The patch that a tensor's changes make; its places are -1 for changes outside the tensor (`Digests`). Waits for
    nothing, so that the host prepares the next tensor's."""
    ordering = ORDERINGS[old.dtype]
    order, device, patches = order_of(ordering), old.tensor.device, list[tuple[Tensor, Tensor, int]]()
    for first in range(0, len(chunks), CHUNKS):
        batch, start = chunks[first : first + CHUNKS], first * codec.CHUNK
        was = old.flat[start : start + codec.CHUNK * CHUNKS]
        if not any(len(each.gaps) for each in batch):
            continue
        counts = np.zeros((len(batch), kernels.CLASSES), np.int64)
        for row, each in zip(counts, batch, strict=True):
            row[: ordering.classes] = each.counts
        gaps, zigzags = (
            _to_device(each, device).view(torch.int32)
            for each in zip(*((each.gaps, each.zigzags) for each in batch), strict=True)
        )
        sizes = _to_device([counts.reshape(-1)], device)
        keys = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes, output_size=len(gaps))
        ends = (gaps.long() + 1).cumsum(0)
        before = torch.cat([ends.new_zeros(1), ends])[sizes.cumsum(0) - sizes]
        ranks = (ends - 1 - before[keys]).clamp(max=codec.CHUNK).int()
        table = kernels.before_blocks(was, order, codec.CHUNK)
        indices, values = kernels.place(was, table, kernels.Located(keys.short(), ranks, zigzags), order)
        patches.append((indices, values, start))
    if not patches:
        return Patch(torch.zeros(0, dtype=torch.int64, device=device), old.flat[:0])
    places = [torch.where(indices < 0, -1, indices + start) for indices, _, start in patches]
    return Patch(torch.cat(places), torch.cat([values for _, values, _ in patches]))


def patched(old: DeviceBits, patch: Patch) -> DeviceBits:
    """A copy of `old` with the patch applied; `patch` may be in host memory."""
    return on_top(old.copy(), patch)


def on_top(bits: DeviceBits, patch: Patch) -> DeviceBits:
    """Apply the patch in place; returns the tensor."""
    indices, values = on_device(patch, bits.tensor)
    bits.flat[indices] = values
    return bits


def on_device(patch: Patch, like: Tensor) -> Patch:
    if isinstance(patch.places, Tensor):
        return patch
    values = torch.from_numpy(patch.values.view(f"i{like.element_size()}")).to(like.device)
    return Patch(torch.from_numpy(patch.places.astype(np.int64)).to(like.device), values)


class Writes:
    """Changed elements of contiguous tensors on one device: one kernel writes them, another reads them back."""

    def __init__(self, patches: Iterable[tuple[Tensor, Patch]]) -> None:
        by_width = dict[int, list[tuple[Tensor, Patch]]]()
        for tensor, patch in patches:
            by_width.setdefault(tensor.element_size(), []).append((tensor, on_device(patch, tensor)))
        self._batches = [
            (
                torch.cat([patch.places * width + tensor.data_ptr() for tensor, patch in some]),
                torch.cat([patch.values for _, patch in some]),
            )
            for width, some in by_width.items()
        ]

    def done(self) -> bool:
        """Write them. True if memory holds the values afterwards."""
        wrong = [kernels.put(addresses, values) for addresses, values in self._batches]
        return not any(int(each) for each in wrong)


class Digests:
    """Digests of tensors, which are hashed several at a time, as they come."""

    def __init__(self) -> None:
        self._digest_of, self._waiting, self._size = dict[str, bytes](), dict[str, Tensor](), 0
        self._least: list[Tensor] = []  # of patches' places

    def add(self, name: str, bits: DeviceBits) -> None:
        self._waiting[name], self._size = bits.tensor, self._size + bits.nbytes
        if self._size > HASHED:
            self._hash()

    def add_patched(self, name: str, bits: DeviceBits, patch: Patch) -> None:
        """`bits` with the patch applied."""
        self.add(name, patched(bits, patch))
        if len(patch.places) and isinstance(patch.places, Tensor):
            self._least.append(patch.places.min())

    def all(self) -> dict[str, bytes]:
        """All digests by name. Raises `CodecError` for patches of changes outside their tensors."""
        self._hash()
        if self._least and int(torch.stack(self._least).min()) < 0:
            raise CodecError("changes lie outside the tensor")
        return self._digest_of

    def _hash(self) -> None:
        self._digest_of |= zip(self._waiting, blake3.digests(list(self._waiting.values())), strict=True)
        self._waiting, self._size = {}, 0


def digests(tensors: Mapping[str, DeviceBits]) -> dict[str, bytes]:
    """Digest of each tensor, by name."""
    hashing = Digests()
    for name, bits in tensors.items():
        hashing.add(name, bits)
    return hashing.all()


def _to_device(arrays: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Arrays of one type end to end."""
    kind = torch.from_numpy(arrays[0][:0]).dtype
    whole = torch.empty(sum(map(len, arrays)), dtype=kind, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=whole.numpy())
    return whole.to(device, non_blocking=True)


def _to_host(*tensors: Tensor) -> Callable[[], list[np.ndarray]]:
    """Start copies; the call that this returns waits for them."""
    copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
    for copy, each in zip(copies, tensors, strict=True):
        copy.copy_(each, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> list[np.ndarray]:
        done.synchronize()
        return [copy.numpy() for copy in copies]

    return wait
