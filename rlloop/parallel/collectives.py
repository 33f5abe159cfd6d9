"""Copies between ranks: the only module that calls the network. It copies bits and never adds.

Sums over ranks are computed on one rank from gathered terms, in an order independent of the network library. So gloo
and NCCL, in any version and topology, give the same bits. A test refuses calls that add.

Tensors are sent as bytes, so every torch dtype is supported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlloop.parallel.progress import meets

SMALL = (
    1 << 20
)  # size in bytes below which tensors are sent together: a message costs about as much as copying this many
BUCKET = 16 * SMALL  # limit of bytes sent together


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks along one axis of a layout, of which this process is number `rank`.

    Every rank of the group calls the same method in the same order. With one rank, each method returns its argument.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    _posted: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque, repr=False)

    @property
    def members(self) -> list[int]:
        """The ranks' numbers in the default process group, in order; of one rank alone, none."""
        return [] if self.group is None else dist.get_process_group_ranks(self.group)

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # a copy of a model meets the same ranks

    @meets
    def gather(self, x: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """All ranks' tensors, end to end along `dim`. `sizes`: the extent of each rank's there; None: all have x's."""
        if self.size == 1:
            return x
        dim %= x.ndim
        extents = [x.shape[dim]] * self.size if sizes is None else list(sizes)
        if (largest := max(extents)) > x.shape[dim]:  # all travel at one size
            whole = x.new_empty((*x.shape[:dim], largest, *x.shape[dim + 1 :]))
            whole.narrow(dim, 0, x.shape[dim]).copy_(x)
            x = whole
        gathered = x.new_empty((self.size, *x.shape))
        _gather_into(_bytes(gathered), _bytes(x.contiguous()), group=self.group)
        if dim == 0 and min(extents) == largest:
            return gathered.flatten(0, 1)
        each = zip(gathered.unbind(), extents, strict=True)
        return torch.cat([shard.narrow(dim, 0, extent) for shard, extent in each], dim)

    @meets
    def exchange(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Rows [sum of sends, ...] to [sum of receives, ...]: `sends[r]` rows go to rank r, in order, and the
        `receives[r]` rows from rank r come in order of rank."""
        if self.size == 1:
            return x
        got = x.new_empty((sum(receives), *x.shape[1:]))
        width = x[:1].numel() * x.element_size() if len(x) else got[:1].numel() * x.element_size()
        dist.all_to_all_single(
            _bytes(got), _bytes(x.contiguous()), [n * width for n in receives], [n * width for n in sends],
            group=self.group,
        )  # fmt: skip
        return got

    @meets
    def share_rows(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x [sum of sizes, ...], contiguous, filled in place: rank r has written its own `sizes[r]` rows."""
        if self.size == 1 or not x.numel():
            return x
        rows = x.split(list(sizes))
        if min(sizes) == max(sizes):
            _gather_into(_bytes(x), _bytes(rows[self.rank]), group=self.group)
            return x
        for source, chunk in enumerate(rows):
            if len(chunk):
                dist.broadcast(_bytes(chunk), group=self.group, group_src=source)
        return x

    def share_all_rows(self, shared: Sequence[tuple[Tensor, Sequence[int]]]) -> None:
        """`share_rows` of several tensors, each with its `sizes`; small ones travel together."""
        if self.size == 1:
            return
        for together in buckets([x.nbytes for x, _ in shared]):
            if len(together) == 1:
                self.share_rows(*shared[together[0]])
                continue
            pieces = [_bytes(x).split([x[:1].nbytes * n for n in sizes]) for x, sizes in (shared[i] for i in together)]
            by_rank = list(zip(*pieces, strict=True))
            sizes = [sum(map(len, each)) for each in by_rank]
            got = self.gather(torch.cat(by_rank[self.rank]), 0, sizes)
            every = [piece for each in by_rank for piece in each]
            for piece, received in zip(every, got.split([len(piece) for piece in every]), strict=True):
                piece.copy_(received)

    @meets
    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Rank `source`'s tensor, into x, which must be contiguous."""
        if self.size > 1:
            dist.broadcast(_bytes(x), group=self.group, group_src=source)
        return x

    def post(self, x: Tensor, to: int) -> None:
        """`send` without waiting for rank `to`. It receives in the order in which this rank has posted."""
        x = x.contiguous()
        work = dist.isend(_bytes(x), group=self.group, group_dst=to)
        assert work is not None
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            work.wait()  # the stream's: a graph joins all that it began, and nothing may be polled while it is recorded
            return
        while self._posted and self._posted[0][0].is_completed():
            self._posted.popleft()
        self._posted.append((work, x))  # kept until it has been read

    def post_bytes(self, content: bytes, to: int) -> None:
        """`post` of any number of bytes, which rank `to` receives by `receive_bytes`; over the CPU's network."""
        self.post(torch.tensor([len(content)]), to)
        if content:
            self.post(torch.frombuffer(bytearray(content), dtype=torch.uint8), to)

    def receive_bytes(self, source: int) -> bytes:
        """The next bytes that rank `source` has posted."""
        size = int(self.receive(torch.empty(1, dtype=torch.int64), source))
        return self.receive(torch.empty(size, dtype=torch.uint8), source).numpy().tobytes() if size else b""

    @meets
    def send(self, x: Tensor, to: int) -> None:
        dist.send(_bytes(x.contiguous()), group=self.group, group_dst=to)

    @meets
    def receive(self, x: Tensor, source: int) -> Tensor:
        """Rank `source`'s tensor, into x, which must be contiguous."""
        dist.recv(_bytes(x), group=self.group, group_src=source)
        return x

    @meets
    def gather_objects(self, item: Any) -> list[Any]:
        """All ranks' items, pickled; over the CPU's network."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.group)
        return items

    @meets
    def broadcast_object(self, item: Any, source: int = 0) -> Any:
        """Rank `source`'s item, pickled; over the CPU's network."""
        if self.size == 1:
            return item
        items = [item]
        dist.broadcast_object_list(items, group=self.group, group_src=source, device=torch.device("cpu"))
        return items[0]


def buckets(sizes: Sequence[int], kinds: Sequence[object] | None = None) -> list[list[int]]:
    """Buckets of tensors, of so many bytes each, that travel together: their indices, in the order in which the last of
    each bucket comes. Large ones go alone, and small ones only with others of their kind.

    A function of its arguments alone, so that ranks agree on it.
    """
    complete: list[list[int]] = []
    waiting: dict[object, list[int]] = {}
    for index, (size, kind) in enumerate(zip(sizes, kinds or [None] * len(sizes), strict=True)):
        if size > SMALL:
            complete.append([index])
            continue
        bucket = waiting.setdefault(kind, [])
        bucket.append(index)
        if sum(sizes[each] for each in bucket) + SMALL > BUCKET:
            complete.append(waiting.pop(kind))
    return complete + list(waiting.values())


# torch 2.13's name for what 2.11 and 2.12 call `all_gather_into_tensor`
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as bytes [N]: the same memory."""
    return x.view(-1).view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)
