"""Experts in memory and in a checkpoint: one tensor of all of them here, a tensor of each there.

model.layers.3.mlp.experts.gate_up_proj  [E, 2F, D]  <->  model.layers.3.mlp.experts.{e}.gate_proj.weight  [F, D]
                                                          model.layers.3.mlp.experts.{e}.up_proj.weight    [F, D]
model.layers.3.mlp.experts.down_proj     [E, D, F]   <->  model.layers.3.mlp.experts.{e}.down_proj.weight  [D, F]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


@dataclass(frozen=True)
class Place:
    """Where in a parameter a stored tensor lies: all of it, or rows `begin` to `end` of one expert."""

    parameter: str
    expert: int | None = None
    begin: int = 0
    end: int = 0

    def of(self, parameter: Tensor) -> Tensor:
        return parameter if self.expert is None else parameter[self.expert, self.begin : self.end]


def places(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Place, tuple[int, ...]]]:
    """(stored name, its place, its shape) of everything that parameters of these shapes are stored as."""
    for name, shape in shapes.items():
        if name.endswith((GATE_UP, DOWN)):
            layer, kind = name.rsplit(".", 1)
            count, rows, width = shape
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            size = rows // len(parts)
            for expert in range(count):
                for index, part in enumerate(parts):
                    place = Place(name, expert, index * size, (index + 1) * size)
                    yield f"{layer}.{expert}.{part}.weight", place, (size, width)
        else:
            yield name, Place(name), shape


def stored_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, _, shape in places(shapes)}


def stored_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state by parameter name as checkpoints (and engines that read them) name it: views, not copies."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return {name: place.of(state[place.parameter]) for name, place, _ in places(shapes)}
