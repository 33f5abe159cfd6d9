"""Building blocks of layers, and `Step`: the metadata of one forward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rlloop.models.peer_gathers import PeerGathers, peers_among, peers_of
from rlloop.models.routing_record import RoutingRecord
from rlloop.models.tensor_parallel import cut_linear
from rlloop.numerics.layout import AttentionLayout, RecurrentState
from rlloop.numerics.ops import Ops
from rlloop.numerics.packed import is_packed
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.division import Division, gathered, in_tiles


class Cache(Protocol):
    """An engine's store of keys, values and recurrent states between steps."""

    def write(self, layer: int, **tensors: Tensor) -> tuple[Tensor, ...]:
        """Write this step's tensors [T, ...] into their slots; returns the whole stores [slots, ...], in order."""
        ...

    def places(self, layer: int, *names: str) -> tuple[Tensor, ...]:
        """The slots [T] int64 that `write` would use for this step's tokens, and the stores of these names."""
        ...

    def carried(self, layer: int, name: str) -> RecurrentState:
        """A recurrent layer's states of this step's sequences."""
        ...


@dataclass(frozen=True)
class Step:
    """The metadata of one forward that every layer gets beside its input."""

    positions: Tensor  # [T] int64, for the rope
    rope: tuple[Tensor, Tensor]  # cos and sin, [positions, rope / 2]
    layout: AttentionLayout
    cache: Cache | None
    ops: Ops
    routes: RoutingRecord | None
    context: ParallelContext
    _: KW_ONLY
    recomputed: bool = False  # the layer is made again in the backward pass
    unread: bool = False  # this is that: nothing reads what the layer returns, only what it saves for its gradient
    even: bool = False  # all ranks have the same number of tokens, so the host need not exchange sizes
    selected: dict[int, Tensor] = field(default_factory=dict)  # by layer: a selection that others read, [T, S] int64
    read: Tensor | None = None  # [R] int64: the tokens whose results are read, in the last layer, if not all are

    @property
    def inner(self) -> Step:
        """The step of what the layer itself reads."""
        return replace(self, unread=False) if self.unread else self

    def of_slots(self, slots: Tensor) -> Step:
        """The same step for other rows, whose adapters are in these slots."""
        assert self.ops.adapters is not None
        return replace(self, ops=self.ops.with_adapters(self.ops.adapters.of_rows(slots)))


Divisions = dict[str, tuple[int, Division]]  # by name of a module's parameter: the dimension that is cut, and how


class Linear(nn.Module):
    """A weight [N, K] and perhaps a bias [N], multiplied by `Ops.linear`.

    `across`: usual tensor parallelism would split its K inputs over ranks, so `profile.tp_segments` applies.
    `rows`: of the N outputs, those that each rank makes; None: this rank makes all.
    """

    def __init__(
        self, inputs: int, outputs: int, bias: bool = False, across: bool = False, rows: Division | None = None
    ) -> None:
        super().__init__()
        self.across, self.rows = across, rows
        held = outputs if rows is None else rows.size
        self.weight = nn.Parameter(torch.empty(held, inputs))
        self.bias = nn.Parameter(torch.empty(held)) if bias else None

    @property
    def divisions(self) -> Divisions:
        return {} if self.rows is None else {"weight": (0, self.rows), "bias": (0, self.rows)}

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [T, K], whole on every rank -> this rank's outputs [T, n]."""
        if self.rows is None or not torch.is_grad_enabled():
            return ops.linear(x, self.weight, self.bias, self.across)
        return cut_linear(ops, x, self.weight, self.bias, self.rows, self.across, None)

    def whole(
        self, x: Tensor, ops: Ops, columns: Division | None = None, then_norm: bool = False, unread: bool = False
    ) -> Tensor:
        """All outputs [T, N], on every rank. `columns`: those of x that each rank has; None: x is whole.

        `then_norm`: nothing reads them before `normed` or `PeerGathers.settle`; `unread`: nothing does
        (`Ops.unread_linear`).
        """
        if self.rows is None:
            return (ops.unread_linear if unread else ops.linear)(x, self.weight, self.bias, self.across)
        if torch.is_grad_enabled():
            own = cut_linear(ops, x, self.weight, self.bias, self.rows, self.across, columns, unread)
            return gathered(own, self.rows, unread=unread)
        if (peers := self.peers(x, ops, columns)) is not None:
            x = x if columns is None else peers.gather(x, columns)
            plain = type(ops) is Ops and ops.norms_sums  # subclasses depart
            return peers.product(x, self.weight, self.bias, self.rows, then_norm and plain)
        return gathered(ops.linear(gathered(x, columns), self.weight, self.bias, self.across), self.rows)

    def peers(self, x: Tensor, ops: Ops, columns: Division | None = None) -> PeerGathers | None:
        """The `PeerGathers` that make `whole`'s outputs, if any do."""
        peers = peers_of(self.rows)
        plain = ops.adapted(self.weight) is None and not is_packed(self.weight)
        return peers if plain and peers is not None and ops.fuses and peers.takes(x, columns, self.rows) else None


class Weight(nn.Module):
    """A norm's or an embedding's weight under its Hugging Face name."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


class Norm(Weight):
    """A norm's weight; `centred`: stored as the difference from 1."""

    def __init__(self, width: int, centred: bool) -> None:
        super().__init__(width)
        self.centred = centred

    @property
    def scale(self) -> Tensor:
        weight = self.weight
        return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32)) if self.centred else weight


def normed(x: Tensor, norm: Norm, eps: float, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
    """`Ops.rms_norm`, also of what `Linear.whole` made for it alone."""
    peers = peers_among(step.context.tp)
    made = None if peers is None else peers.rms_norm(x, norm.scale, eps, residual)
    return made or step.ops.rms_norm(x, norm.scale, eps, residual)


def saved_as_made(made: Tensor, make: Callable[..., Tensor], *of: Tensor, step: Step) -> AbstractContextManager[Any]:
    """Selective recomputation of one activation: within the context, operations on a GPU that would save `made`, which
    is `make(*of)`, for their gradient save `of` instead, and it is recomputed in the backward pass.

    It saves memory where `of` is saved anyway, as gate and up of a gated MLP are by their product's own gradient; that
    of `PlainMlp` does not read `of`. Nothing is done in a layer that is recomputed as a whole.
    """
    if not (made.is_cuda and torch.is_grad_enabled()) or step.recomputed:
        return nullcontext()
    return made_again(made, make, *of)


def made_again(made: Tensor, make: Callable[..., Tensor], *of: Tensor) -> AbstractContextManager[Any]:
    """`saved_as_made`, on any device and in any layer."""

    def place(x: Tensor) -> tuple[Any, ...]:
        return x.data_ptr(), x.dtype, x.shape, x.stride()

    held, at = [each.detach() for each in of], place(made)

    def pack(saved: Tensor) -> Tensor | None:
        return None if place(saved) == at else saved

    def unpack(saved: Tensor | None) -> Tensor:
        with torch.no_grad():
            return make(*held) if saved is None else saved

    return saved_tensors_hooks(pack, unpack)


class PlainMlp(nn.Module):
    """An MLP without a gate: `down relu(up x) ** 2`."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool, tp: Ranks) -> None:
        super().__init__()
        self.inner = in_tiles(intermediate_size, tp)
        self.up_proj = Linear(hidden_size, intermediate_size, bias, rows=self.inner)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, across=True, rows=in_tiles(hidden_size, tp))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        inner = step.ops.relu_squared(self.up_proj(x, step.ops))
        return self.down_proj.whole(inner, step.ops, self.inner, unread=step.unread)


class Mlp(nn.Module):
    """A gated MLP (SwiGLU): `down (silu(gate x) * up x)`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, tp: Ranks, bias: bool = False, then_norm: bool = False
    ) -> None:
        """`then_norm`: see `Linear.whole`."""
        super().__init__()
        self.then_norm = then_norm
        self.inner = in_tiles(intermediate_size, tp)
        self.gate_proj = Linear(hidden_size, intermediate_size, bias, rows=self.inner)
        self.up_proj = Linear(hidden_size, intermediate_size, bias, rows=self.inner)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, across=True, rows=in_tiles(hidden_size, tp))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        ops = step.ops
        gate, up = self.gate_proj, self.up_proj
        if gate.bias is None and ops.fuses:
            peers = peers_of(self.inner)
            both = gate.weight, up.weight
            plain = not (is_packed(*both) or any(map(ops.adapted, both)))
            if plain and self.inner is not None and peers is not None and peers.takes(x, self.inner):
                whole = peers.gated(x, gate.weight, up.weight, self.inner, self.down_proj.peers(x, ops) is peers)
                return self.down_proj.whole(whole, ops, then_norm=self.then_norm)
            gated = ops.gated_linear(x, gate.weight, up.weight)
            return self.down_proj.whole(gated, ops, self.inner, self.then_norm, step.unread)
        alone = self.inner is None and gate.bias is None and torch.is_grad_enabled() and type(ops) is Ops
        both = ops.products(x, gate.weight, up.weight) if alone else None
        gates, ups = both or (gate(x, ops), up(x, ops))
        if alone and not step.recomputed and (made := ops.gated_down(gates, ups, self.down_proj.weight)) is not None:
            return made
        gated = ops.silu_mul(gates, ups)
        with saved_as_made(gated, ops.silu_mul, gates, ups, step=step):
            return self.down_proj.whole(gated, ops, self.inner, self.then_norm, step.unread)
