"""The parameter store: names, tensors and shapes of a model's parameters, which of them train, and tied names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlloop.models.checkpoint_names import EMBEDDING, HEAD, stored_state
from rlloop.models.transformer import Model


@dataclass(frozen=True, eq=False)
class StoredParameter:
    """One parameter of a model, as this rank holds it."""

    live: nn.Parameter  # what operations read: the compute copy
    shape: tuple[int, ...]  # of the whole parameter; today `live` is the whole
    trains: bool  # whether a gradient moves it
    scale: float = 1.0  # the live value is its master times this, rounded


class ParameterStore:
    """The parameters of `model` by name. A tied weight has one entry, and its other name stands in `aliases`.

    Of a model with an adapter they are the adapter's: its base is frozen, and known by its digest.

    A parameter trains if it requires a gradient: `parameter.requires_grad_(False)` freezes it. A store refers to the
    model's tensors; after a parameter is replaced or frozen, construct another.

    Example: `ParameterStore(model).snapshot()` copies all weights.
    """

    def __init__(self, model: Model) -> None:
        adapter = model.adapter
        named = model.named_parameters() if adapter is None else adapter.named_parameters().items()
        self.entries: dict[str, StoredParameter] = {
            name: StoredParameter(
                live, tuple(live.shape), live.requires_grad, 1.0 if adapter is None else adapter.scale_of(name)
            )
            for name, live in named
        }
        self.aliases: dict[str, str] = {HEAD: EMBEDDING} if model.lm_head is None and adapter is None else {}
        self._architecture = model.config.architecture if adapter is None else None

    def tensors(self) -> dict[str, Tensor]:
        """The live parameters, detached: writing into them changes the model."""
        return {name: entry.live.detach() for name, entry in self.entries.items()}

    def as_stored(self) -> dict[str, Tensor]:
        """The live parameters as checkpoints name them: experts one by one, as views into the tensor that holds all of
        them; tied weights under each of their names."""
        live = self.tensors()
        if self._architecture is None:
            return live
        return {**stored_state(live, self._architecture), **{alias: live[name] for alias, name in self.aliases.items()}}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self.entries.items()}

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of all values."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    @torch.no_grad()
    def copy_from(self, state: Mapping[str, Tensor]) -> None:
        """Write values into the live parameters, in place."""
        for name, entry in self.entries.items():
            entry.live.copy_(state[name])
