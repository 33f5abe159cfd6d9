"""Pipeline parallelism: activations sent from a stage to the next, and gradients sent back.

A stage sends its last block's output (still to be added) and the residual stream; in sparse attention also the
selection of past tokens, if the next stage begins with a layer that reuses it. Stages only copy, so every number equals
one rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlloop.models.architecture import ModelConfig
from rlloop.models.checkpoint_names import TOWER
from rlloop.models.layers import Step
from rlloop.parallel.collectives import Ranks
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.cut import share


class Stage:
    """One pipeline rank's layers; all of them without a pipeline."""

    def __init__(self, config: ModelConfig, context: ParallelContext) -> None:
        self._pipe, self._back = context.ranks("pp"), context.ranks("pp_back")
        count, rank = self._pipe.size, self._pipe.rank
        self.layers = range(*share(config.num_layers, count, rank))
        self.first, self.last = rank == 0, rank == count - 1
        self.has_embedding = self.first or (self.last and config.tied)
        indexer = None if config.latent is None else config.latent.indexer
        self._selections = [] if indexer is None else list(indexer.layers)
        self._width, self._selected = config.hidden_size, 0 if indexer is None else indexer.top_k

    @property
    def final(self) -> int:
        """The rank that has logits."""
        return self._pipe.size - 1

    def shared(self, x: Tensor) -> Tensor:
        """Broadcast the last stage's tensor to all stages; x has its shape and type. Collective."""
        return self._pipe.broadcast(x.contiguous(), self.final)

    def all(self, names: Iterable[str], whole: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all stages' tensors by name, in order, on every stage; `whole` makes its own `names`. Collective."""
        if self.whole:
            yield from ((name, whole(name)) for name in names)
            return
        sources: dict[str, int] = {}
        for source, theirs in enumerate(self._pipe.gather_objects(list(names))):
            sources |= {name: source for name in theirs if name not in sources}
        for name in in_order(sources):
            source = sources[name]
            mine = whole(name).contiguous() if source == self._pipe.rank else None
            kind = None if mine is None else (mine.shape, mine.dtype, mine.device.type)  # each rank has its own GPU
            shape, dtype, device = self._pipe.broadcast_object(kind, source)
            mine = torch.empty(shape, dtype=dtype, device=device) if mine is None else mine
            yield name, self._pipe.broadcast(mine, source)

    @property
    def ahead(self) -> int:
        """The number of stages after this one."""
        return self._pipe.size - 1 - self._pipe.rank

    @property
    def whole(self) -> bool:
        """True without a pipeline."""
        return self.first and self.last

    def joined(self, x: Tensor) -> Tensor:
        """All stages' tensors [n], concatenated in layer order. Collective."""
        return x if self.whole else self._pipe.gather(x, 0, self._pipe.gather_objects(len(x)))

    def gather_objects(self, item: Any) -> list[Any]:
        """All stages' items. Collective."""
        return self._pipe.gather_objects(item)

    def swapped(self, of_first: Tensor | None, of_last: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Exchange tensors of one shape between the first and the last stage; unchanged without a pipeline and on
        stages in between."""
        if self.first == self.last:
            return of_first, of_last
        if self.first:
            assert of_first is not None
            self._pipe.post(of_first, self.final)
            return of_first, self._back.receive(torch.empty_like(of_first), self.final)
        assert of_last is not None
        received = self._pipe.receive(torch.empty_like(of_last), 0)  # first: NCCL connects two ranks when both ask
        self._back.post(of_last, 0)
        return received, of_last

    def begin(self, count: int, dtype: torch.dtype, step: Step) -> tuple[Tensor, Tensor]:
        """(delta, stream) [T, D] of the stage before, for `count` tokens."""
        device, source = step.positions.device, self._pipe.rank - 1
        if (reused := self._reused(self.layers[0])) is not None:
            selected = torch.empty(count, self._selected, dtype=torch.int64, device=device)
            step.selected[reused] = self._pipe.receive(selected, source)
        both = torch.empty(2, count, self._width, dtype=dtype, device=device)
        if not torch.is_grad_enabled():
            delta, stream = self._pipe.receive(both, source).unbind()
            return delta, stream
        anchor = torch.zeros((), device=device, requires_grad=True)
        return _Received.apply(anchor, both, self._pipe, self._back)

    def end(self, delta: Tensor, stream: Tensor | None, step: Step) -> Tensor:
        """Send the next stage its input. Returns zeros [T, D] whose gradient is received from the next stage."""
        assert stream is not None, "a stage has a layer"
        if (reused := self._reused(self.layers[-1] + 1)) is not None:
            self._pipe.post(step.selected[reused], self._pipe.rank + 1)
        if torch.is_grad_enabled():
            return _Sent.apply(delta, stream, self._pipe, self._back)
        self._pipe.post(torch.stack((delta, stream)), self._pipe.rank + 1)
        return delta.new_zeros(()).expand(delta.shape)

    def _reused(self, layer: int) -> int | None:
        """The layer of an earlier stage whose selection `layer` reads; None if it reads none or makes its own."""
        if not self._selections or layer in self._selections:
            return None
        return max(at for at in self._selections if at < layer)


def in_order(names: Iterable[str]) -> list[str]:
    """All stages' names, one stage's after another's, in the order that they have without a pipeline: a vision tower's,
    which the first stage has, are last."""
    return sorted(names, key=lambda name: f".{TOWER}" in f".{name}")


class _Received(torch.autograd.Function):
    """Receive activations from the previous stage and send their gradient back; `anchor` puts them in the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, both: Tensor, pipe: Ranks, back: Ranks) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(tensor.clone() for tensor in pipe.receive(both, pipe.rank - 1).unbind())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.back.post(torch.stack(grads), ctx.back.rank - 1)
        return None, None, None, None


class _Sent(torch.autograd.Function):
    """Send activations to the next stage; the backward pass waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, stream: Tensor, pipe: Ranks, back: Ranks) -> Tensor:
        ctx.back, ctx.shape, ctx.dtype, ctx.device = back, delta.shape, delta.dtype, delta.device
        pipe.post(torch.stack((delta, stream)), pipe.rank + 1)
        return delta.new_zeros(()).expand(delta.shape)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        both = torch.empty(2, *ctx.shape, dtype=ctx.dtype, device=ctx.device)
        return *ctx.back.receive(both, ctx.back.rank + 1).unbind(), None, None
