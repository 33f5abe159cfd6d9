"""Experts in memory and in a checkpoint: one tensor of all of them here, a tensor of each there.

model.layers.3.mlp.experts.gate_up_proj  [E, 2F, D]  <->  model.layers.3.mlp.experts.{e}.gate_proj.weight  [F, D]
                                                          model.layers.3.mlp.experts.{e}.up_proj.weight    [F, D]
model.layers.3.mlp.experts.down_proj     [E, D, F]   <->  model.layers.3.mlp.experts.{e}.down_proj.weight  [D, F]
model.layers.3.mixer.experts.up_proj     [E, F, D]   <->  model.layers.3.mixer.experts.{e}.up_proj.weight  [F, D]

A family whose checkpoints have other names than the model in memory says so in `RENAMED`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
GATE_UP, UP, DOWN = ".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj"

# architecture -> what its checkpoints write in place of what, from the first pair on
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "MiniMaxM2ForCausalLM": (
        (".mlp.gate.e_score", ".mlp.e_score"),
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".down_proj.", ".w2."),
        (".up_proj.", ".w3."),
    ),
    "NemotronHForCausalLM": (
        ("model.embed_tokens.", "backbone.embeddings."),
        ("model.norm.", "backbone.norm_f."),
        ("model.", "backbone."),
    ),
    "GptOssForCausalLM": ((".mlp.gate.", ".mlp.router."),),
}
WHOLE = ("GptOssForCausalLM",)  # whose checkpoints hold all experts in one tensor, as memory does


@dataclass(frozen=True)
class Place:
    """Where in a parameter a stored tensor lies: all of it, or rows `begin` to `end` of one expert."""

    parameter: str
    expert: int | None = None
    begin: int = 0
    end: int = 0

    def of(self, parameter: Tensor) -> Tensor:
        return parameter if self.expert is None else parameter[self.expert, self.begin : self.end]


def stored_name(name: str, architecture: str) -> str:
    for ours, theirs in RENAMED.get(architecture, ()):
        name = name.replace(ours, theirs)
    return name


def places(shapes: Mapping[str, tuple[int, ...]], architecture: str) -> Iterator[tuple[str, Place, tuple[int, ...]]]:
    """(stored name, its place, its shape) of everything that parameters of these shapes are stored as."""
    if architecture in WHOLE:
        yield from ((stored_name(name, architecture), Place(name), shape) for name, shape in shapes.items())
        return
    for name, place, shape in _places(shapes):
        yield stored_name(name, architecture), place, shape


def _places(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Place, tuple[int, ...]]]:
    for name, shape in shapes.items():
        if name.endswith((GATE_UP, UP, DOWN)):
            layer, kind = name.rsplit(".", 1)
            count, rows, width = shape
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            size = rows // len(parts)
            for expert in range(count):
                for index, part in enumerate(parts):
                    place = Place(name, expert, index * size, (index + 1) * size)
                    yield f"{layer}.{expert}.{part}.weight", place, (size, width)
        else:
            yield name, Place(name), shape


def stored_shapes(shapes: Mapping[str, tuple[int, ...]], architecture: str) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, _, shape in places(shapes, architecture)}


def stored_state(state: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """A state by parameter name as checkpoints (and engines that read them) name it: views, not copies."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return {name: place.of(state[place.parameter]) for name, place, _ in places(shapes, architecture)}
