"""Layouts over ranks, of the trainer and of engines, and the world that holds both. Imports no torch.

Fields and defaults are those of `rlloop.parallel.layout.Layout`, here mutable, as Hydra needs them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Any

from rlloop.config.limits import at_least, check_limits, limited
from rlloop.errors import ConfigError
from rlloop.parallel.layout import Layout, with_experts

_Degrees: Any = make_dataclass("_Degrees", [(f.name, int, limited(f.default, at_least(1))) for f in fields(Layout)])


@dataclass
class LayoutConfig(_Degrees):
    """Degrees of parallelism; their product, `ep` left out, is the number of ranks: docs/ranks.md."""

    def checked(self, section: str) -> Layout:
        """The layout. Raises `ConfigError`, naming keys of `section`."""
        check_limits(f"{section}.layout", self)
        try:
            return Layout(**vars(self))
        except ConfigError as error:
            raise ConfigError(f"{section}.{error}") from None


@dataclass(frozen=True)
class World:
    """The ranks of one trainer, each with an engine or a part of one: consecutive ranks make an engine.

    `World.of(trainer, rollout)` makes it of `trainer.layout` and `rollout.layout`.
    """

    trainer: Layout  # fills the world: ranks that `trainer.layout` leaves over are further `dp_replicate`
    engine: Layout  # of one engine: `rollout.layout` without `dp_replicate`, which counts whole engines

    @classmethod
    def of(cls, trainer: Layout, rollout: Layout) -> World:
        """Raises `ConfigError` unless the larger of the two is a multiple of the other."""
        sizes = {"trainer.layout": trainer.world_size, "rollout.layout": rollout.world_size}
        (larger, size), (smaller, divisor) = sorted(sizes.items(), key=lambda item: -item[1])
        if size % divisor:
            fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ConfigError(
                f"{larger} has {size} ranks and {smaller} {divisor}, which leaves {size % divisor} of the {size} over; "
                f"give {smaller} a number of ranks that divides {size} ({fits}), or {larger} a multiple of {divisor}"
            )
        whole = replace(trainer, dp_replicate=trainer.dp_replicate * (size // trainer.world_size))
        return cls(whole, replace(rollout, dp_replicate=1))

    @property
    def layouts(self) -> dict[str, Layout]:
        """Both layouts, by their key in the configuration."""
        return {"trainer.layout": self.trainer, "rollout.layout": self.engine}

    @property
    def stages_agree(self) -> bool:
        """True if each rank's trainer holds its engine's layers: all of them, or the same pipeline stage. Otherwise
        engines have weights of their own."""
        return self.trainer.pp == 1 or all(
            self.trainer.coordinates(rank)["pp"] == self.engine.coordinates(rank % self.engine.world_size)["pp"]
            for rank in range(self.size)
        )

    def degrees(self) -> dict[str, dict[str, int]]:
        """The degrees above 1, as JSON values; empty for one rank."""
        both = {"trainer": self.trainer, "rollout": self.engine}
        above = {name: {k: v for k, v in vars(layout).items() if v > 1} for name, layout in both.items()}
        return {name: degrees for name, degrees in above.items() if degrees}

    @property
    def size(self) -> int:
        return self.trainer.world_size

    @property
    def engines(self) -> int:
        return self.size // self.engine.world_size


def shrunk(trainer: Layout, rollout: Layout, ranks: int) -> tuple[Layout, Layout]:
    """The layouts of trainer and engine that use most of `ranks`, with smaller `dp_replicate` and `dp_shard`; `ep`,
    which decides the memory of a rank's experts, is smaller only where it cannot stay.

    Raises `ConfigError` where the other axes need more ranks than that.
    """
    best: tuple[tuple[int, ...], tuple[Layout, Layout]] | None = None
    for pair in itertools.product(_smaller(trainer), _smaller(rollout)):
        try:
            world = World.of(*pair)
        except ConfigError:
            continue
        if world.size <= ranks:
            kept = (pair[0].ep == trainer.ep) + (pair[1].ep == rollout.ep)
            rank = (kept, world.size, pair[0].dp_shard, pair[0].world_size, pair[1].world_size)
            best = max(best or (rank, pair), (rank, pair), key=lambda each: each[0])
    if best is None:
        fixed = " and ".join(
            f"{name} (" + ", ".join(f"{axis}={value}" for axis, value in _fixed(layout).items()) + ")"
            for name, layout in (("trainer.layout", trainer), ("rollout.layout", rollout))
            if _fixed(layout)
        )
        raise ConfigError(
            f"{ranks} {'rank is' if ranks == 1 else 'ranks are'} left, and {fixed} need more: of a layout only "
            "dp_replicate, dp_shard and ep can shrink"
        )
    return best[1]


def _fixed(layout: Layout) -> dict[str, int]:
    return {axis: degree for axis, degree in vars(layout).items() if degree > 1 and axis in ("cp", "tp", "pp")}


def _smaller(layout: Layout) -> list[Layout]:
    """The layout with every smaller `dp_replicate` and `dp_shard`, itself included, and the largest `ep` up to its own
    that these can have."""
    degrees = itertools.product(range(1, layout.dp_replicate + 1), range(1, layout.dp_shard + 1))
    return [
        with_experts(replace(layout, dp_replicate=copies, dp_shard=shards, ep=1), layout.ep)
        for copies, shards in degrees
    ]
