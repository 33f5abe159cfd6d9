"""The parameter store: names, tensors and shapes of a model's parameters, which of them train, and tied names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlloop.models.checkpoint_names import EMBEDDING, HEAD, stored_state
from rlloop.models.layers import Divisions
from rlloop.models.transformer import Model
from rlloop.parallel.cut import Cut
from rlloop.parallel.division import Division


@dataclass(frozen=True, eq=False)
class StoredParameter:
    """One parameter of a model, as this rank holds it."""

    live: nn.Parameter  # what operations read: the compute copy
    shape: tuple[int, ...]  # of the whole parameter
    trains: bool  # whether a gradient moves it
    dim: int = 0  # that tensor-parallel ranks divide
    division: Division | None = None  # None: `live` is the whole

    @property
    def cut(self) -> Cut | None:
        """What this rank holds of the whole parameter; None: all of it."""
        return None if self.division is None else self.division.cut(self.dim)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole parameter, or of another tensor of its shape; a view if it is one range."""
        return whole if self.division is None else self.division.take(whole, self.dim)

    def whole(self, part: Tensor | None = None) -> Tensor:
        """The whole parameter, or (`part`, a tensor like `live`) another tensor of its shape. Collective."""
        part = self.live.detach() if part is None else part
        return part if self.division is None else self.division.gather(part, self.dim)


class ParameterStore:
    """The parameters of `model` by name, as this rank holds them. A tied weight has one entry, and its other name
    stands in `aliases`.

    A parameter trains if it requires a gradient: `parameter.requires_grad_(False)` freezes it. A store refers to the
    model's tensors; after a parameter is replaced or frozen, construct another.

    Example: `ParameterStore(model).snapshot()` copies all weights.
    """

    def __init__(self, model: Model) -> None:
        divisions = divisions_of(model)
        self.entries: dict[str, StoredParameter] = {
            name: _entry(live, *divisions.get(name, (0, None))) for name, live in model.named_parameters()
        }
        self.aliases: dict[str, str] = {HEAD: EMBEDDING} if model.lm_head is None else {}
        self._architecture = model.config.architecture

    def tensors(self) -> dict[str, Tensor]:
        """The live parameters, detached: writing into them changes the model."""
        return {name: entry.live.detach() for name, entry in self.entries.items()}

    def as_stored(self) -> dict[str, Tensor]:
        """The live parameters as checkpoints name them: experts one by one, as views into the tensor that holds all of
        them; tied weights under each of their names."""
        live = self.tensors()
        return {**stored_state(live, self._architecture), **{alias: live[name] for alias, name in self.aliases.items()}}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all values."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def wholes(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole parameter, one at a time. Collective."""
        for name, entry in self.entries.items():
            yield name, entry.whole()

    @torch.no_grad()
    def copy_from(self, state: Mapping[str, Tensor]) -> None:
        """Write values into the live parameters, in place. `state` has what this rank holds, as `snapshot` does."""
        for name, entry in self.entries.items():
            entry.live.copy_(state[name])

    @torch.no_grad()
    def copy_wholes(self, wholes: Iterable[tuple[str, Tensor]]) -> None:
        """Write this rank's parts of whole parameters into the live ones, in place, as they come."""
        for name, whole in wholes:
            entry = self.entries[name]
            entry.live.copy_(entry.part(whole))


def divisions_of(model: Model) -> Divisions:
    """How tensor-parallel ranks divide the parameters of `model`, by their full names; those left out are whole."""
    return {
        f"{prefix}.{name}" if prefix else name: division
        for prefix, module in model.named_modules()
        for name, division in getattr(module, "divisions", {}).items()
    }


def _entry(live: nn.Parameter, dim: int, division: Division | None) -> StoredParameter:
    shape = list(live.shape)
    if division is not None:
        shape[dim] = division.count
    return StoredParameter(live, tuple(shape), live.requires_grad, dim, division)
