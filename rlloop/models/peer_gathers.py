"""All-gathers between GPUs of one host: the kernels that compute the parts write them into each other's memory.

Engines open them (`open_peers`); forwards without gradients then use them instead of NCCL's gathers where parts are
whole vectors and fit. The bits are the same either way.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlloop.numerics.layout import AttentionLayout
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.division import Division

if TYPE_CHECKING:
    from rlloop.numerics.kernels.triton.meeting import Meeting
    from rlloop.parallel.peers import Buffer

ALIGNED = 8  # numbers: where a rank's columns may begin
MOST_ROWS = 8192  # of a gather; those of more rows go over the network
# Benchmarks set these to False to compare with kernels of one task each.
MEETS_IN_READERS = True  # the kernel that reads a result waits for the other GPUs itself
ATTENTION_WRITES = True  # decode attention writes its results to the other GPUs itself
_opened: WeakKeyDictionary[Ranks, PeerGathers] = WeakKeyDictionary()


class PeerGathers:
    """Gathers of up to `numbers` bfloat16 numbers each. A result is valid until the third gather after it.

    The meeting after a gather is left to the kernel that reads its result where that is asked for (`read_next`) and
    can be; then nothing else may read the result before `product` or `rms_norm` has.
    """

    def __init__(self, ranks: Ranks, device: torch.device, numbers: int, before: PeerGathers | None) -> None:
        """`before`: earlier, smaller gathers, whose memory is kept for recorded graphs that write into it."""
        from rlloop.numerics.kernels.triton import peers
        from rlloop.parallel.peers import PeerMemory

        self.numbers, self._kernels, self._before = numbers, peers, before
        self._memory = memory = PeerMemory(ranks, device, -(-numbers // ALIGNED) * ALIGNED)
        self._first = peers.Meeting(memory.flags, memory.round, ranks.rank, 0)
        self._meetings = 0  # of this forward
        self._owed: Meeting | None = None

    def begin(self) -> None:
        """Start a forward: results of the one before are no longer read."""
        self._kernels.begin(self._first)
        self._meetings, self._owed = 0, None
        self._memory.rewind()

    def settle(self) -> None:
        """Wait for the other GPUs' columns of the last product, if no reader of it has yet."""
        if (owed := self._taken()) is not None:
            self._kernels.meet(owed)

    def gather(self, columns: Tensor, division: Division) -> Tensor:
        """[T, n] own columns -> [T, N]."""
        to = self._buffer(columns, division)
        self._kernels.write(columns, to.places, division.count, meeting=self._meeting())
        return to.whole

    def attended(
        self, q: Tensor, k: Tensor, v: Tensor, layout: AttentionLayout, scale: float, columns: Division
    ) -> Tensor | None:
        """Causal attention of own heads q [T, H, D] -> all ranks' [T, N], to be read by `product`; None where its
        kernel does not write to peers. `columns`: those that ranks have, aligned."""
        if not (ATTENTION_WRITES and self._kernels.decodes(q, v, layout)):
            return None
        to = self._buffer(q, columns)
        self._kernels.attention_into(q, k, v, layout, scale, to.places, columns.count)
        return self._made(to, True)

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Division, read_next: bool = False
    ) -> Tensor:
        """x [T, K], own rows of weight and bias -> [T, N]. `read_next`: by `rms_norm`."""
        owed, to = self._taken(), self._buffer(x, rows)
        self._kernels.linear_into(x, weight, bias, to.whole, to.places, owed)
        return self._made(to, read_next)

    def gated(self, x: Tensor, gate: Tensor, up: Tensor, rows: Division, read_next: bool = False) -> Tensor:
        """`silu_mul` of x [T, K] times own rows of gate and up -> [T, F]. `read_next`: by `product`."""
        to = self._buffer(x, rows)
        self._kernels.gated_linear_into(x, gate, up, to.whole, to.places)
        return self._made(to, read_next)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """`Ops.rms_norm` of the result that is to be read next; None if there is none."""
        if (owed := self._taken()) is None:
            return None
        normed, stream, _ = self._kernels.rms_norm(x, weight, eps, residual, owed)
        return normed, x if residual is None else stream

    def chosen(self, x: Tensor, experts: Tensor, begin: int, end: int) -> Tensor:
        """Rows x [T, k, N] of this rank, which are those of the experts [T, k] from `begin` to `end` - 1 -> all ranks'
        rows."""
        to = self._memory.buffer(experts.numel(), x.shape[-1], 0)
        self._kernels.write_chosen(x, experts, begin, end, to.places)
        self._kernels.meet(self._meeting())
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

    def _made(self, to: Buffer, read_next: bool) -> Tensor:
        self._owed = self._meeting()
        if not (read_next and MEETS_IN_READERS):
            self.settle()
        return to.whole

    def _buffer(self, x: Tensor, division: Division) -> Buffer:
        return self._memory.buffer(len(x), division.count, division.own[0][0])

    def _meeting(self) -> Meeting:
        self._meetings += 1
        return self._first._replace(number=self._meetings)

    def _taken(self) -> Meeting | None:
        owed, self._owed = self._owed, None
        return owed


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
