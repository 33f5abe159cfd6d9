"""All-gathers between GPUs of one host: the kernels that compute the parts write them into each other's memory.

Engines open them (`open_peers`); forwards without gradients then use them instead of NCCL's gathers where parts are
whole vectors and fit. The bits are the same either way.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlloop.parallel.collectives import Ranks
from rlloop.parallel.division import Division

if TYPE_CHECKING:
    from rlloop.parallel.peers import Buffer

ALIGNED = 8  # numbers: where a rank's columns may begin
MOST_ROWS = 8192  # of a gather; those of more rows go over the network
_opened: WeakKeyDictionary[Ranks, PeerGathers] = WeakKeyDictionary()


class PeerGathers:
    """Gathers of up to `numbers` bfloat16 numbers each. A result is valid until the third gather after it."""

    def __init__(self, ranks: Ranks, device: torch.device, numbers: int, before: PeerGathers | None) -> None:
        """`before`: earlier, smaller gathers, whose memory is kept for recorded graphs that write into it."""
        from rlloop.numerics.kernels.triton import peers
        from rlloop.parallel.peers import PeerMemory

        self.numbers, self._kernels, self._before = numbers, peers, before
        self._memory = memory = PeerMemory(ranks, device, -(-numbers // ALIGNED) * ALIGNED)
        self._meeting = peers.Meeting(memory.flags, memory.round, ranks.rank)

    def begin(self) -> None:
        """Start a forward: results of the one before are no longer read."""
        self._meet()
        self._memory.rewind()

    def gather(self, columns: Tensor, division: Division) -> Tensor:
        """[T, n] own columns -> [T, N]."""
        to = self._buffer(columns, division)
        self._kernels.write(columns, to.places, division.count, meeting=self._meeting)
        return to.whole

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Division) -> Tensor:
        """x [T, K], own rows of weight and bias -> [T, N]."""
        return self._made(x, rows, lambda to: self._kernels.linear_into(x, weight, bias, to.whole, to.places))

    def gated(self, x: Tensor, gate: Tensor, up: Tensor, rows: Division) -> Tensor:
        """`silu_mul` of x [T, K] times own rows of gate and up -> [T, F]."""
        return self._made(x, rows, lambda to: self._kernels.gated_linear_into(x, gate, up, to.whole, to.places))

    def chosen(self, x: Tensor, experts: Tensor, begin: int, end: int) -> Tensor:
        """Rows x [T, k, N] of this rank, which are those of the experts [T, k] from `begin` to `end` - 1 -> all ranks'
        rows."""
        to = self._memory.buffer(experts.numel(), x.shape[-1], 0)
        self._kernels.write_chosen(x, experts, begin, end, to.places)
        self._meet()
        return to.whole.view_as(x)

    def rows(self, dtype: torch.dtype, width: int) -> int:
        """Rows of a gather at most."""
        return self.numbers // width if dtype == torch.bfloat16 and width % ALIGNED == 0 else 0

    def takes(self, x: Tensor, *divisions: Division | None) -> bool:
        """True if x [T, ...] may be gathered, or its products: in each of these divisions."""
        if x.dtype != torch.bfloat16 or x.ndim != 2 or not len(x):
            return False
        return all(
            each is None or (each.aligned(ALIGNED) and len(x) * each.count <= self.numbers) for each in divisions
        )

    def _made(self, x: Tensor, division: Division, make: Callable[[Buffer], None]) -> Tensor:
        make(to := self._buffer(x, division))
        self._meet()
        return to.whole

    def _buffer(self, x: Tensor, division: Division) -> Buffer:
        return self._memory.buffer(len(x), division.count, division.own[0][0])

    def _meet(self) -> None:
        self._kernels.meet(self._meeting)


def open_peers(model: nn.Module, ranks: Ranks, device: torch.device, rows: int) -> None:
    """Let forwards of up to `rows` rows gather by peers. Collective; no effect where GPUs have no peer access."""
    if ranks.size == 1 or device.type != "cuda":
        return
    divisions = (getattr(module, "rows", None) for module in model.modules())
    numbers = min(rows, MOST_ROWS) * max((each.count for each in divisions if isinstance(each, Division)), default=0)
    if (before := _opened.get(ranks)) is not None and before.numbers >= numbers:
        return
    at = ranks.gather_objects((socket.gethostname(), torch.device(device).index or 0))
    others = [index for _, index in at if index != device.index]
    reach = all(torch.cuda.can_device_access_peer(device, other) for other in others)
    if len({host for host, _ in at}) == 1 and len(others) == ranks.size - 1 and all(ranks.gather_objects(reach)):
        _opened[ranks] = PeerGathers(ranks, device, numbers, before)


def peers_of(division: Division | None) -> PeerGathers | None:
    """The gathers of a division's ranks, if they are open and no gradient is needed."""
    return None if division is None else peers_among(division.ranks)


def peers_among(ranks: Ranks) -> PeerGathers | None:
    """As `peers_of`, of all ranks of an axis."""
    return None if torch.is_grad_enabled() else _opened.get(ranks)
