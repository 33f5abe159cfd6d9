"""The number of ranks on each axis of parallelism. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from rlloop.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # that make up the world, outermost first


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism, under torchtitan's names. `ep` reuses the ranks of other axes, so it adds none.

    Raises `ConfigError` for a degree below 1, or an `ep` that does not divide dp_shard x cp x tp.

    Example: `Layout(dp_shard=4, ep=2).world_size` is 4.
    """

    dp_replicate: int = 1  # whole copies of the model
    dp_shard: int = 1  # ranks that split parameters, gradients and optimizer state (ZeRO, FSDP)
    cp: int = 1  # ranks that split the tokens of a sequence
    tp: int = 1  # ranks that split the outputs of each product
    pp: int = 1  # ranks that split the layers
    ep: int = 1  # ranks that split the experts

    def __post_init__(self) -> None:
        for name, degree in dataclasses.asdict(self).items():
            if type(degree) is not int or degree < 1:
                raise ConfigError(f"layout.{name} is {degree!r}; it must be a whole number, at least 1")
        if (shared := self.dp_shard * self.cp * self.tp) % self.ep:
            raise ConfigError(
                f"layout.ep is {self.ep}, and experts are laid over dp_shard x cp x tp = {shared} ranks; "
                "set ep to a number that divides it"
            )

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def expert_leaves(self) -> int:
        """Ranks along dp_shard that share one set of experts: so many micro-batches meet there at a time."""
        return max(1, self.ep // (self.cp * self.tp))

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's index on each axis; consecutive ranks differ on the last one, tp.

        Example: `Layout(dp_shard=2, tp=2).coordinates(3)` is 1 on dp_shard and tp, 0 on the others.
        """
        index = {}
        for axis in reversed(AXES):
            rank, index[axis] = divmod(rank, getattr(self, axis))
        assert rank == 0, "a rank is below the world's size"
        return index
