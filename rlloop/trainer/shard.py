"""The rows of a parameter that a rank owns, and their masters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlloop.numerics.fp8 import Fp8Weight
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.cut import shares
from rlloop.trainer.offload import HostMemory

NARROW = (torch.bfloat16, torch.float16)  # whose masters are float32
VECTOR = 16  # numbers: AdamW's kernels compute a remainder of vectors by another path, with other bits


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's rows (of dimension 0) of a parameter, and their masters: flat, with zeros up to whole vectors.

    `leaves`: how many micro-batches' gradients this rank has in a round: several, of experts that ranks share.
    """

    name: str
    live: nn.Parameter
    ranks: Ranks  # that the rows are shared among
    sizes: tuple[int, ...]  # rows of each of them
    leaves: int
    begin: int
    end: int
    flat: Tensor
    shares_memory: bool  # with the live parameter
    hosted: bool  # `flat` lies in host memory, whatever the device
    scale: float  # the live value is the master's times this, rounded

    @property
    def rows(self) -> Tensor:
        """This rank's rows of the compute copy; of one in 8 bits, a copy."""
        return self.live.detach()[self.begin : self.end]

    @property
    def master(self) -> Tensor:
        return self.of(self.flat)

    @property
    def scaled(self) -> Tensor:
        """Float32 values of the compute copy, before rounding to its type."""
        return self.master if self.scale == 1.0 else self.master * self.scale

    def of(self, flat: Tensor) -> Tensor:
        """A tensor as long as `flat`, such as a moment or a gradient, in the shape of the rows; a view."""
        shape = (self.end - self.begin, *self.live.shape[1:])
        return flat[: math.prod(shape)].view(shape)


def make_shard(
    name: str,
    live: nn.Parameter,
    ranks: Ranks,
    leaves: int,
    scale: float = 1.0,
    *,
    apart: bool = False,
    home: HostMemory | None = None,
) -> Shard:
    """This rank's shard of a parameter. `apart`: masters never share memory with it; `home`: masters of another type
    than the parameter lie there."""
    sizes = tuple(shares(len(live), ranks.size))
    begin, end = sum(sizes[: ranks.rank]), sum(sizes[: ranks.rank + 1])
    quantised = isinstance(live, Fp8Weight)
    values = live.dequantised(torch.float32) if isinstance(live, Fp8Weight) else live.detach()
    rows = values[begin:end].reshape(-1)
    narrow = live.dtype in NARROW or quantised
    vectors = rows.numel() % VECTOR == 0 and rows.data_ptr() % VECTOR == 0 and live.is_contiguous()
    in_place = vectors and not narrow and scale == 1.0 and not apart
    if not in_place:
        rows = padded(rows.float() if narrow else rows.clone())
    hosted = home is not None and narrow and live.is_contiguous()
    if hosted:
        assert home is not None
        rows = home.zeros_like(rows).copy_(rows)
    return Shard(name, live, ranks, sizes, leaves, begin, end, rows, in_place, hosted, scale)


def share_rows(wholes: Iterable[tuple[Shard, Tensor]]) -> None:
    """Fill whole tensors, of which each rank has written its own rows of the shard beside them. Collective."""
    by_ranks: dict[Ranks, list[tuple[Tensor, tuple[int, ...]]]] = {}
    for shard, whole in wholes:
        by_ranks.setdefault(shard.ranks, []).append((whole, shard.sizes))
    for ranks, shared in by_ranks.items():
        ranks.share_all_rows(shared)


def hosted_bytes(live: nn.Parameter, ranks: Ranks) -> int:
    """Host memory that `make_shard` takes for a parameter's masters, at most."""
    rows = shares(len(live), ranks.size)[ranks.rank]
    numbers = rows * math.prod(live.shape[1:])
    narrow = live.dtype in NARROW or isinstance(live, Fp8Weight)
    return -(-numbers // VECTOR) * VECTOR * torch.float32.itemsize if narrow else 0


def padded(flat: Tensor) -> Tensor:
    """Padded with zeros up to whole vectors; the tensor itself where it has them."""
    rest = -flat.numel() % VECTOR
    return nn.functional.pad(flat, (0, rest)) if rest else flat
