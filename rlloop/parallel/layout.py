"""The number of ranks on each axis of parallelism. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

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
            shards = self.ep // math.gcd(self.ep, self.cp * self.tp)
            raise ConfigError(
                f"layout.ep is {self.ep}, and experts are laid over dp_shard x cp x tp = {shared} ranks; set ep to a "
                f"number that divides it, or dp_shard to a multiple of {shards}"
            )

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def layers_alone(self) -> bool:
        """True if a rank computes its layers without the others, which it meets in gradients and weights."""
        return self.cp == self.tp == self.ep == 1

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


def beside(trainer: Layout) -> Layout:
    """The smallest engine's layout that has the same layers, heads and experts on each rank as the trainer's."""
    tp, pp, ep = trainer.tp, trainer.pp, trainer.ep
    shards = max(1, ep // tp) if pp == 1 else trainer.world_size // (tp * pp)  # stages lie apart: pp is outermost
    return Layout(dp_shard=shards, tp=tp, pp=pp, ep=ep)


def keys_of(layout: Layout, prefix: str = "") -> str:
    """The axes above 1, as configuration keys; empty for one rank. Example: `dp_shard=4 ep=2`."""
    return " ".join(f"{prefix}{axis}={degree}" for axis, degree in vars(layout).items() if degree > 1)


Misfit = tuple[str, Layout]  # the rule that a layout violates, and one of as many ranks to try instead


def misfit(layout: Layout, *, trains: bool) -> Misfit | None:
    """The first violated rule of those that hold for every model. `trains`: it is a trainer's, whose cp ranks split
    sequences; an engine's has cp 1."""
    if layout.cp > 1 and not trains:
        return f"cp is {layout.cp}, and an engine does not split sequences", with_at_most(layout, "cp", 1)
    if layout.cp > 1 and layout.tp > 1:
        return f"cp is {layout.cp} and tp {layout.tp}, which both split heads", with_at_most(layout, "cp", 1)
    if not _experts_meet(layout, layout.ep):
        alike = layout.cp * layout.tp
        fault = f"ep is {layout.ep}, which neither divides tp nor is a multiple of cp x tp = {alike}"
        return fault, with_experts(layout, layout.ep)
    return None


def with_at_most(layout: Layout, axis: str, most: int) -> Layout:
    """The layout with the largest degree up to `most` that divides an axis' ranks; those that this frees are along
    dp_shard, and experts that lie within cp and tp stay there.

    Example: of `Layout(pp=6)` with at most 4 stages, `Layout(pp=3, dp_shard=2)`.
    """
    ranks = getattr(layout, axis)
    degree = next(degree for degree in range(most, 0, -1) if ranks % degree == 0)
    divided = replace(layout, dp_shard=layout.dp_shard * ranks // degree, **{axis: degree})
    return with_experts(divided, min(layout.ep, divided.cp * divided.tp)) if layout.expert_leaves == 1 else divided


def with_experts(layout: Layout, most: int) -> Layout:
    """The layout with the largest ep up to `most` that it can have."""
    shared = layout.dp_shard * layout.cp * layout.tp
    return replace(layout, ep=next(ep for ep in range(most, 0, -1) if shared % ep == 0 and _experts_meet(layout, ep)))


def _experts_meet(layout: Layout, ep: int) -> bool:
    """True if the ranks of an expert group have whole micro-batches together, or (tp) the same tokens each."""
    return ep == 1 or ep % (layout.cp * layout.tp) == 0 or (layout.cp == 1 and layout.tp % ep == 0)


def refuse_misfits(layouts: Mapping[str, Layout], find: Callable[[str, Layout], Misfit | None], what: str) -> None:
    """Raises `ConfigError` for the first fault that `find` finds in each layout, naming the nearest layouts without
    any, of as many ranks.

    `layouts`: by their key in the configuration, `trainer.layout` or `rollout.layout`. `what`: that they do not fit.
    """
    faults, keys = [], []
    for key, layout in layouts.items():
        fitting = layout
        while (found := find(key, fitting)) is not None:
            if fitting is layout:
                faults.append(f"{key} does not fit {what}: {found[0]}")
            fitting = found[1]
        keys += changes(key, layout, fitting)
    if faults:
        raise ConfigError(f"{'; '.join(faults)}; set {', '.join(keys)}")


def without_stages(layout: Layout) -> str:
    """The keys of `trainer.layout` that make it one of as many ranks without a pipeline."""
    return " and ".join(changes("trainer.layout", layout, with_at_most(layout, "pp", 1)))


def changes(key: str, layout: Layout, other: Layout) -> list[str]:
    """The keys, below `key`, that make `other` of `layout`. Example: `["trainer.layout.pp=1"]`."""
    names = sorted(vars(layout), key="dp_shard".__eq__)  # which follows from the others
    return [f"{key}.{name}={getattr(other, name)}" for name in names if getattr(other, name) != getattr(layout, name)]


def is_other_rank(*, of_machine: bool = False) -> bool:
    """True in a process of a launcher such as torchrun that is not the first, or not the first of its machine."""
    rank, *others = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if not (rank and all(others)) or others[0] == "1":
        return False
    return (os.environ.get("LOCAL_RANK", "0") if of_machine else rank) != "0"
