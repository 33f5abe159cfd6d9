"""The context of one rank, passed to whatever needs its device or a sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from rlloop.parallel.layout import Layout


@dataclass(frozen=True)
class ParallelContext:
    """A rank of a layout, and the device of its tensors.

    Example: `ParallelContext(torch.device("cuda"))` is one process with one GPU.
    """

    device: torch.device
    layout: Layout = field(default_factory=Layout)
    rank: int = 0

    @property
    def coordinates(self) -> dict[str, int]:
        return self.layout.coordinates(self.rank)

    def total_norm(self, shards: Sequence[Tensor]) -> Tensor:
        """The L2 norm of all tensors together, of which this rank holds `shards`; today each is whole."""
        assert self.layout.world_size == 1, "norms over several ranks are not supported yet"
        return get_total_norm(shards)
