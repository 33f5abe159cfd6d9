"""One rank's place in a layout, handed to whatever needs a device or a sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from rlloop.parallel.layout import Layout


@dataclass(frozen=True)
class ParallelContext:
    """A rank of a layout, and the device that its tensors lie on.

    Example: `ParallelContext(torch.device("cuda"))` is one process with one GPU.
    """

    device: torch.device
    layout: Layout = field(default_factory=Layout)
    rank: int = 0

    @property
    def coordinates(self) -> dict[str, int]:
        return self.layout.coordinates(self.rank)

    def total_norm(self, shards: Sequence[Tensor]) -> Tensor:
        """The L2 norm over all numbers of tensors of which this rank holds `shards`: today the whole of each."""
        assert self.layout.world_size == 1, "sums over ranks are not there yet"
        return get_total_norm(shards)
