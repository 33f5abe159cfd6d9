"""The context of one rank: its device and its communication with other ranks, passed explicitly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from rlloop.parallel.collectives import Ranks
from rlloop.parallel.layout import AXES, Layout

ALONE = Ranks()


@dataclass(frozen=True)
class ParallelContext:
    """A rank of a layout, the device of its tensors, and its communication groups along each axis.

    `rank` counts in the layout, whose first rank is `first` in the process group: several layouts, such as those of
    replicas, may share a world.

    Example: `ParallelContext(torch.device("cuda"))` is one process with one GPU; `join(device, layout)` one of many.
    """

    device: torch.device
    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    first: int = 0
    groups: Mapping[str, Ranks] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def coordinates(self) -> dict[str, int]:
        return self.layout.coordinates(self.rank)

    def ranks(self, axis: str) -> Ranks:
        """The ranks that differ from this one on `axis` alone: one of `AXES`, `dp` (dp_replicate and dp_shard), `ep`,
        `pp_back` (those of pp, for gradients), `expert_shard` (the ranks along dp_shard that hold the same experts), or
        `world` (all of the layout)."""
        return self.groups.get(axis, ALONE)

    @property
    def tp(self) -> Ranks:
        return self.ranks("tp")


def join(device: torch.device, layout: Layout) -> ParallelContext:
    """The context of this process in the default process group, which `layout` fills once or several times over.

    Collective: every process of the group calls it, in the same order. Communicators are created when first used.
    """
    size = layout.world_size
    if not dist.is_initialized():
        assert size == 1, "a layout of several ranks needs a process group (rlloop.parallel.start)"
        return ParallelContext(device, layout)
    world = torch.arange(dist.get_world_size())
    assert len(world) % size == 0, f"{len(world)} processes are no multiple of the layout's {size}"
    axes = ("replica", *AXES)
    grid = world.view(-1, *(getattr(layout, axis) for axis in AXES))
    groups: dict[str, Ranks] = {}
    for name, joined in (
        *((axis, (axis,)) for axis in AXES),
        ("dp", ("dp_replicate", "dp_shard")),
        ("world", AXES),
    ):
        dims = [axes.index(axis) for axis in joined]
        groups[name] = _ranks(grid.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims)))
    # Tensor parallelism without ep divides experts, too: each rank has some of them whole.
    groups["ep"] = groups["tp"] if layout.ep == 1 else _ranks(world.view(-1, layout.ep))
    groups["pp_back"] = _ranks(grid.movedim(axes.index("pp"), -1), fresh=True)  # gradients: none waits for an input
    groups["expert_shard"] = _ranks(grid.unflatten(3, (-1, layout.expert_leaves)).movedim(3, -1))
    here = int(dist.get_rank())
    return ParallelContext(device, layout, here % size, here - here % size, groups)


def _ranks(grid: torch.Tensor, *, fresh: bool = False) -> Ranks:
    """This process's group of those that `grid` [..., R] lists; `fresh`: a group of its own. Collective."""
    size = grid.shape[-1]
    if size == 1:
        return ALONE
    rows = grid.reshape(-1, size)
    group = dist.group.WORLD
    if len(rows) > 1 or fresh:
        group, _ = dist.new_subgroups_by_enumeration(rows.tolist())
    assert isinstance(group, dist.ProcessGroup)
    return Ranks(size, group.rank(), group)
