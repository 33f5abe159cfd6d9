"""Delta coding on the GPU: a publisher's and a replica's tensors are compared, hashed and patched where they are.

Only the changes cross to the host, for the entropy coder: gaps and steps in the narrowest integers that hold them. All
results are byte-equal with the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future

import numpy as np
import torch
from torch import Tensor

from rlloop.numerics.kernels.triton import blake3
from rlloop.numerics.kernels.triton import changes as kernels
from rlloop.sync import codec
from rlloop.sync.bits import UNSIGNED, WIDTH, Bits
from rlloop.sync.framing import CodecError
from rlloop.sync.steps import ORDERINGS, Changes, Ordering, Patch

CHUNKS = 8  # compared at a time: bounds the device memory needed beside the weights
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


def find_changes(old: DeviceBits, new: DeviceBits) -> Iterator[Changes]:
    """The changes of each chunk in host memory, equal to those of `steps.find_changes`."""
    ordering = ORDERINGS[new.dtype]
    order, span = order_of(ordering), codec.CHUNK * CHUNKS
    for start in range(0, old.size, span):
        was, now = (each.flat[start : start + span] for each in (old, new))
        places = (was != now).nonzero().view(-1)
        chunks = -(-len(was) // codec.CHUNK)
        if not len(places):
            none = np.zeros(0, np.uint32)
            yield from (Changes(np.zeros(ordering.classes, np.int64), none, none) for _ in range(chunks))
            continue
        located = kernels.locate(was, now, places, kernels.before_blocks(was, order, codec.CHUNK), order)
        counts = torch.bincount(located.keys.int(), minlength=chunks * kernels.CLASSES).view(chunks, -1)
        keys, by_class = torch.sort(located.keys, stable=True)
        ranks, zigzags = located.ranks[by_class], located.zigzags[by_class]
        gaps = ranks.clone()
        gaps[1:] -= torch.where(keys[1:] == keys[:-1], ranks[:-1] + 1, 0)
        host_counts = counts.cpu().numpy()
        host_gaps, host_zigzags = _narrow(gaps), _narrow(zigzags)
        at = 0
        for each in host_counts:
            end = at + int(each.sum())
            yield Changes(each[: ordering.classes].astype(np.int64), host_gaps[at:end], host_zigzags[at:end])
            at = end


def begin(new: DeviceBits, old: DeviceBits | None, pool: Executor) -> Callable[[], codec.Encoded]:
    """Start encoding as `codec.encode` does; calling the result waits for the entropy coder, which runs in `pool`.

    Tensors without a device kernel (whole tensors, small ones, other types) are encoded from a copy on the host.
    """
    ordering = ORDERINGS.get(new.dtype)
    if old is None:
        return codec.begin_full(new.host(), pool)
    if ordering is None or codec.is_small(new.size, ordering):
        whole = codec.encode(new.host(), old.host(), pool=pool)
        return lambda: whole
    from rlloop.sync import entropy

    changed, begun = 0, list[Future[bytes]]()
    for changes in find_changes(old, new):
        changed += len(changes.gaps)
        begun.append(pool.submit(entropy.encode, changes))

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
    """The patch that a tensor's changes make. Raises `CodecError` for changes outside the tensor."""
    ordering = ORDERINGS[old.dtype]
    order, device, found = order_of(ordering), old.tensor.device, list[tuple[Tensor, Tensor, int]]()
    for first in range(0, len(chunks), CHUNKS):
        batch, start = chunks[first : first + CHUNKS], first * codec.CHUNK
        was = old.flat[start : start + codec.CHUNK * CHUNKS]
        if not any(len(each.gaps) for each in batch):
            continue
        counts = np.zeros((len(batch), kernels.CLASSES), np.int64)
        for row, each in zip(counts, batch, strict=True):
            row[: ordering.classes] = each.counts
        gaps, zigzags = (
            torch.from_numpy(np.concatenate(each).view(np.int32)).to(device)
            for each in zip(*((each.gaps, each.zigzags) for each in batch), strict=True)
        )
        sizes = torch.from_numpy(counts.reshape(-1)).to(device)
        keys = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes, output_size=len(gaps))
        ends = (gaps.long() + 1).cumsum(0)
        before = torch.cat([ends.new_zeros(1), ends])[sizes.cumsum(0) - sizes]
        ranks = (ends - 1 - before[keys]).clamp(max=codec.CHUNK).int()
        table = kernels.before_blocks(was, order, codec.CHUNK)
        places, values = kernels.place(was, table, kernels.Located(keys.short(), ranks, zigzags), order)
        found.append((places, values, start))
    if not found:
        return Patch(torch.zeros(0, dtype=torch.int64, device=device), old.flat[:0])
    if min(int(places.min()) for places, *_ in found) < 0:
        raise CodecError("changes lie outside the tensor")
    return Patch(
        torch.cat([places + start for places, _, start in found]), torch.cat([values for _, values, _ in found])
    )


def patched(old: DeviceBits, patch: Patch) -> DeviceBits:
    """A copy of `old` with the patch applied; `patch` may be in host memory."""
    return on_top(old.copy(), patch)


def on_top(bits: DeviceBits, patch: Patch) -> DeviceBits:
    """Apply the patch in place; returns the tensor."""
    places, values = on_device(patch, bits.tensor)
    bits.flat[places] = values
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


def patched_digests(patches: Mapping[str, tuple[DeviceBits, Patch]]) -> dict[str, bytes]:
    """Digest of each tensor with its patch applied, by name; copies a few tensors at a time."""
    found, names, news, size = dict[str, bytes](), list[str](), list[Tensor](), 0
    for name, (old, patch) in patches.items():
        names.append(name)
        news.append(patched(old, patch).tensor)
        size += old.nbytes
        if size > HASHED:
            found |= zip(names, blake3.digests(news), strict=True)
            names, news, size = [], [], 0
    return found | dict(zip(names, blake3.digests(news), strict=True))


def digests(tensors: Mapping[str, DeviceBits]) -> dict[str, bytes]:
    """Digest of each tensor, by name; several tensors are hashed in one batch."""
    found, names, size = dict[str, bytes](), list[str](), 0
    for name, bits in tensors.items():
        names.append(name)
        size += bits.nbytes
        if size > HASHED:
            found |= zip(names, blake3.digests([tensors[each].tensor for each in names]), strict=True)
            names, size = [], 0
    return found | dict(zip(names, blake3.digests([tensors[each].tensor for each in names]), strict=True))


def _narrow(values: Tensor) -> np.ndarray:
    """Copy values to the host as uint32, transferred in the narrowest integers that hold them."""
    least, most = torch.stack(values.aminmax()).tolist()
    kind = torch.uint8 if least >= 0 and most < 256 else torch.int16 if least >= 0 and most < 1 << 15 else torch.int32
    plain = values.to(kind).cpu().numpy()
    return plain.view(np.uint32) if kind is torch.int32 else plain.astype(np.uint32)
