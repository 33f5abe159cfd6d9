"""The parameter store: names, tensors and shapes of a model's parameters, which of them train, and tied names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rlloop.models import fp8
from rlloop.models.checkpoint_names import EMBEDDING, HEAD, stored_state
from rlloop.models.stored_parameter import entries_of
from rlloop.models.transformer import Model


class ParameterStore:
    """The parameters of `model` by name, as this rank holds them. A tied weight has one entry; its other name is in
    `aliases`.

    For a model with an adapter they are the adapter's; the base is frozen, and identified by its digest.

    A parameter trains if it requires a gradient: `parameter.requires_grad_(False)` freezes it. A store refers to the
    model's tensors; after a parameter is replaced or frozen, construct another.

    Example: `ParameterStore(model).snapshot()` copies all weights.
    """

    def __init__(self, model: Model) -> None:
        adapter = model.adapter
        self.entries = entries_of(model) if adapter is None else adapter.entries()
        self.aliases: dict[str, str] = {HEAD: EMBEDDING} if model.config.tied and EMBEDDING in self.entries else {}
        self._stage = model.stage
        self._architecture = model.config.architecture if adapter is None else None

    def tensors(self) -> dict[str, Tensor]:
        """The live parameters, detached: writing into them changes the model."""
        return {name: entry.live.detach() for name, entry in self.entries.items()}

    def as_stored(self) -> dict[str, Tensor]:
        """The live parameters, as `stored`; tied weights under each of their names."""
        live = self.tensors()
        return {**self.stored(live), **{alias: live[of] for alias, of in self.aliases.items()}}

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Some parameters as checkpoints name them: experts one by one, as views into the tensor that holds all of
        them; weights in 8 bits as codes and scales."""
        if self._architecture is None:
            return dict(tensors)
        named = stored_state(tensors, self._architecture)
        return {key: x for name, tensor in named.items() for key, x in fp8.as_stored(name, tensor).items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all values."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def wholes(self) -> Iterator[tuple[str, Tensor]]:
        """Each whole parameter of the model, one at a time. Collective."""
        yield from self.from_all_stages(lambda name: self.entries[name].whole())

    def wholes_as_stored(self) -> Iterator[tuple[str, Tensor]]:
        """`as_stored` of each whole parameter of the model, one parameter at a time. Collective."""
        for name, whole in self.wholes():
            yield from self.stored({name: whole}).items()
            yield from ((alias, whole) for alias, of in self.aliases.items() if of == name)

    def from_all_stages(self, whole: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """`whole(name)` of every parameter of the model, made where a stage of the pipeline has it. Collective."""
        yield from self._stage.all(self.entries, whole)

    @torch.no_grad()
    def copy_from(self, state: Mapping[str, Tensor]) -> None:
        """Write values into the live parameters, in place. `state` has what this rank holds, as `snapshot` does."""
        for name, entry in self.entries.items():
            entry.live.copy_(state[name])

    @torch.no_grad()
    def copy_wholes(self, wholes: Iterable[tuple[str, Tensor]]) -> None:
        """Write this rank's parts of whole parameters into the live ones, in place, as they come; other stages' are
        left out."""
        for name, whole in wholes:
            if name in self.entries or self._stage.whole:
                entry = self.entries[name]
                entry.live.copy_(entry.part(whole))
