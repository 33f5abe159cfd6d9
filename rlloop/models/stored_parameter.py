"""One parameter as a rank holds it: all of it, or the rank's tensor-parallel part; and parts of another model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlloop.models.layers import Divisions
from rlloop.numerics.packed import PackedWeight, is_packed
from rlloop.parallel.cut import Cut
from rlloop.parallel.division import Division


@dataclass(frozen=True, eq=False)
class StoredParameter:
    """One parameter of a model, as this rank holds it."""

    live: nn.Parameter  # the compute copy, which operations read
    shape: tuple[int, ...]  # of the whole parameter
    trains: bool  # True if it is trained
    scale: float = 1.0  # the live value is its master times this, rounded
    dim: int = 0  # that tensor-parallel ranks divide
    division: Division | None = None  # None: `live` is the whole

    @property
    def cut(self) -> Cut | None:
        """This rank's slice of the parameter; None: all of it."""
        return None if self.division is None else self.division.cut(self.dim)

    @property
    def is_contiguous(self) -> bool:
        """True if this rank's part is one range of the whole parameter's memory."""
        return self.division is None or (self.dim == 0 and len(self.division.own) == 1)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter, or of another tensor of its shape; a view if it is one range. Packed
        weights are cut as they are stored."""
        division = self.division
        if division is None:
            return whole
        if isinstance(whole, PackedWeight):
            assert self.dim == 0
            return whole.like(lambda x: division.take(x.view(_bytes(x)), 0).view(x.dtype).contiguous())
        return division.take(whole, self.dim)

    def whole(self, shard: Tensor | None = None) -> Tensor:
        """The whole parameter, or (`shard`, a tensor like `live`) another tensor of its shape. Collective."""
        shard, division = self.live.detach() if shard is None else shard, self.division
        if division is None:
            return shard
        if isinstance(shard, PackedWeight):
            return shard.like(lambda x: division.gather(x.view(_bytes(x)), 0).view(x.dtype))
        return division.gather(shard, self.dim)


def _bytes(x: Tensor) -> torch.dtype:
    """View as a type of the same width that every operation supports."""
    return torch.uint8 if x.dtype.itemsize == 1 else x.dtype


def entries_of(model: nn.Module) -> dict[str, StoredParameter]:
    """The parameters of a model by name."""
    divisions: Divisions = {
        f"{prefix}.{name}" if prefix else name: division
        for prefix, module in model.named_modules()
        for name, division in getattr(module, "divisions", {}).items()
    }
    return {name: _entry(live, *divisions.get(name, (0, None))) for name, live in model.named_parameters()}


def _entry(live: nn.Parameter, dim: int, division: Division | None) -> StoredParameter:
    shape = list(live.shape)
    if division is not None:
        shape[dim] = division.count
    return StoredParameter(live, tuple(shape), live.requires_grad, dim=dim, division=division)


@dataclass(frozen=True, eq=False)
class CopiedPart:
    """A parameter that is a copy of another model's, or of a part of it."""

    live: nn.Parameter | None  # None: another stage of a pipeline has it, and this rank only sends it there
    entry: StoredParameter | None
    source: StoredParameter

    def refresh(self) -> None:
        """Bring the copy up to date, in place. Collective if the source is cut."""
        whole = self.source.whole()
        if self.live is not None and self.entry is not None:
            self.live.copy_(self.entry.part(whole))


def copies_of(own: Mapping[str, StoredParameter], source: Mapping[str, StoredParameter]) -> list[CopiedPart]:
    """Copies of the source's parameters in those of the same names in `own`.

    Ranks that share a cut source may be in different stages of a pipeline, so all of them gather all of it.
    """
    pairs = [(own.get(name), theirs) for name, theirs in source.items()]
    return [
        CopiedPart(None if mine is None else mine.live, mine, theirs)
        for mine, theirs in pairs
        if mine is not None or theirs.division is not None
    ]


def shared_parts(
    own: Mapping[str, StoredParameter], source: Mapping[str, StoredParameter]
) -> tuple[dict[str, nn.Parameter], list[CopiedPart]]:
    """Parameters of the shapes of `own`, by name: shared with the source's where a part is contiguous in a whole
    parameter; the others are allocated, and listed, since they are to be copied. Collective, as `copies_of` says."""
    state: dict[str, nn.Parameter] = {}
    copies: list[CopiedPart] = []
    for name, theirs in source.items():
        entry, live = own.get(name), theirs.live
        if entry is not None and theirs.division is None and entry.is_contiguous:
            part = None if entry.division is None else entry.part(live.detach())
            state[name] = live if part is None else nn.Parameter(part, requires_grad=False)
        elif is_packed(live):  # frozen, so it is copied once
            whole = theirs.whole()
            if entry is not None:
                state[name] = nn.Parameter(entry.part(whole), requires_grad=False)
        elif entry is None:
            copies += copies_of({}, {name: theirs})
        else:
            shape = list(entry.shape)
            if entry.division is not None:
                shape[entry.dim] = entry.division.size
            state[name] = nn.Parameter(live.new_empty(shape), requires_grad=False)
            copies.append(CopiedPart(state[name], entry, theirs))
    return state, copies
