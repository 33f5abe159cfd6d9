"""What layers are made of, and what one forward tells all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from rlloop.models.routing_record import RoutingRecord
from rlloop.numerics.layout import AttentionLayout, RecurrentState
from rlloop.numerics.ops import Ops


class Cache(Protocol):
    """Where an engine keeps what later tokens read, between steps."""

    def write(self, layer: int, **tensors: Tensor) -> tuple[Tensor, ...]:
        """Puts this step's tensors [T, ...] into their slots; returns those whole stores [slots, ...], in order."""
        ...

    def places(self, layer: int, *names: str) -> tuple[Tensor, ...]:
        """Where `write` would put this step's tokens: their slots [T] int64, and the stores of these names."""
        ...

    def carried(self, layer: int, name: str) -> RecurrentState:
        """What a recurrent layer keeps of this step's sequences."""
        ...


@dataclass(frozen=True)
class Step:
    """One forward: what every layer is told besides its input."""

    positions: Tensor  # [T] int64
    rope: tuple[Tensor, Tensor]
    layout: AttentionLayout
    cache: Cache | None
    ops: Ops
    routes: RoutingRecord | None
    selected: dict[int, Tensor] = field(default_factory=dict)  # by layer: what its indexer found, [T, S] int64


class Linear(nn.Module):
    """Holds a weight [N, K] and perhaps a bias [N]; the product is the operations' business.

    `across`: a tensor-parallel engine would share its K inputs among ranks.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = False, across: bool = False) -> None:
        super().__init__()
        self.across = across
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.linear(x, self.weight, self.bias, self.across)


class Weight(nn.Module):
    """A norm's or an embedding's weight under its Hugging Face name."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


class Norm(Weight):
    """A norm whose weight may be stored as what is added to 1."""

    def __init__(self, width: int, centred: bool) -> None:
        super().__init__(width)
        self.centred = centred

    @property
    def scale(self) -> Tensor:
        weight = self.weight
        return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32)) if self.centred else weight


class PlainMlp(nn.Module):
    """Without a gate: `down relu(up x) ** 2`."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, across=True)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return self.down_proj(step.ops.relu_squared(self.up_proj(x, step.ops)), step.ops)


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, across=True)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops = step.ops
        if self.gate_proj.bias is None and ops.fuses:
            return self.down_proj(ops.gated_linear(x, self.gate_proj.weight, self.up_proj.weight), ops)
        return self.down_proj(ops.silu_mul(self.gate_proj(x, ops), self.up_proj(x, ops)), ops)
