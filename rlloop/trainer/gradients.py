"""Gradients of micro-batches, summed in an order that no number of ranks changes.

A round is one micro-batch on each data-parallel rank; round t has micro-batches t R up to (t + 1) R of R ranks. While
the backward goes through the layers, each parameter's gradient is sent as bits, in its own type, to the ranks that own
its rows; they widen it to float32 and add it to a binary tree over the micro-batches' index (`TreeSum`). So at most
log2(n) + 1 float32 shards and a few layers' gradients lie in memory, and one rank makes the same sums as many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlloop.models import Model
from rlloop.models.checkpoint_names import EMBEDDING, HEAD
from rlloop.models.experts import Experts
from rlloop.numerics.tree import TreeSum
from rlloop.trainer.shard import Shard

IN_FLIGHT = 1 << 30  # bytes of gradients that may be on their way on a GPU before the backward waits for the network


class GradientSum:
    """The sums of one optimizer step: `collect` each round, then `totals`.

    A parameter without a gradient in a micro-batch counts as zero there. A tied weight's two uses are two trees.
    """

    def __init__(self, model: Model, parameters: Mapping[str, Shard], *, in_step: bool = False) -> None:
        """`in_step`: ranks without a micro-batch go through all layers as well (`idle`)."""
        self._in_step = in_step
        self._model, self._parameters = model, parameters
        context = model.context
        self._shards, self._replicas = context.ranks("dp_shard"), context.ranks("dp_replicate")
        self._experts = {
            name: module for name, module in model.named_modules() if isinstance(module, Experts) and module.leaves > 1
        }
        self._ranks, self._contexts = context.ranks("dp"), context.ranks("cp")
        self._complete = {  # whose gradients are of all context-parallel ranks' tokens already
            f"{name}.{own}{of_adapter}"
            for name, module in model.named_modules()
            if isinstance(module, Experts) and module.division is not None
            for own, _ in module.named_parameters()
            for of_adapter in ("", ".lora_A.weight", ".lora_B.weight")
        }
        uses = list(parameters)[::-1]  # about the order in which a backward reaches them
        self._stage, self._ties = model.stage, model.config.tied and EMBEDDING in parameters
        if self._ties and not self._stage.first:
            uses.remove(EMBEDDING)  # it is looked up by the first stage of a pipeline
        self._uses = [HEAD, *uses] if self._ties and self._stage.last else uses
        overlaps = context.device.type == "cuda" and self._ranks.size > 1
        self._stream = torch.cuda.Stream(context.device) if overlaps else None
        self._in_flight: deque[tuple[Any, Tensor]] = deque()
        self.clear()

    def clear(self) -> None:
        """Forget all micro-batches so far."""
        self._trees = {use: TreeSum() for use in self._uses}
        self._present: set[str] = set()

    def collect(self, leaves: int, work: Callable[[], None] | None, *, idle: bool = False) -> None:
        """Add a round of `leaves` micro-batches, those of the first ranks. `work` does the forward and backward of this
        rank's, or the backward alone; None on a rank that has none, or, `idle`, what it does meanwhile. Collective
        along dp."""
        self._leaves, self._turn, self._idle = leaves, 0, idle or work is None
        self._waiting: dict[str, Tensor | None] = {}
        # Where ranks work for others' tokens, those without a micro-batch go through the layers too, but have no
        # gradients to send on the way: nobody waits for them then.
        self._holds = bool(self._experts) and leaves < self._ranks.size and not self._in_step
        if work is None and self._experts:
            self._run(lambda: self._model.without_tokens().backward())
        if work is not None:
            self._run(work)
        self._send(missing=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._model.context.device).wait_stream(self._stream)
            self._in_flight.clear()

    def totals(self) -> dict[str, Tensor | None]:
        """By name the gradient's rows that this rank owns, float32 or wider; None for a parameter that no micro-batch
        reached. Ends the sums. Collective along dp."""
        reached = [use in self._present for use in self._uses]
        flags = torch.tensor(reached, dtype=torch.bool, device=self._model.context.device)
        reached = self._ranks.gather(flags).view(self._ranks.size, len(flags)).any(0).tolist()
        sums = {use: self._trees[use].total() if one else None for use, one in zip(self._uses, reached, strict=True)}
        if self._ties:
            looked_up, head = self._stage.swapped(sums.pop(EMBEDDING, None), sums.pop(HEAD, None))
            sums[EMBEDDING] = looked_up if head is None else head if looked_up is None else looked_up + head
        self.clear()
        return sums

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Forwards whose tied weight has two gradients: as the embedding, and as the head."""
        before = self._model.take_head_gradient
        if HEAD in self._uses and HEAD not in self._parameters:
            self._model.take_head_gradient = lambda gradient: self._arrived(HEAD, gradient)
        try:
            yield
        finally:
            self._model.take_head_gradient = before

    def _run(self, work: Callable[[], None]) -> None:
        def hook(use: str) -> Callable[[nn.Parameter], None]:
            def take(parameter: nn.Parameter) -> None:
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None:
                    self._arrived(use, gradient)

            return take

        hooks = [rows.live.register_post_accumulate_grad_hook(hook(name)) for name, rows in self._parameters.items()]
        for name, experts in self._experts.items():
            experts.taker = lambda own, gradients, name=name: self._arrived(f"{name}.{own}", gradients)
        try:
            with self.apart():
                work()
        finally:
            for experts in self._experts.values():
                experts.taker = None
            for each in hooks:
                each.remove()

    def _arrived(self, use: str, gradient: Tensor) -> None:
        if self._idle and self._rows(use).leaves == 1:
            self._waiting[use] = None  # of no micro-batch
        else:
            self._present.add(use)
            self._waiting[use] = gradient
        if not self._holds:
            self._send()

    def _send(self, *, missing: bool = False) -> None:
        """Send what has arrived, in the order of `_uses`, which all ranks keep; `missing`: also what has not."""
        while self._turn < len(self._uses):
            use = self._uses[self._turn]
            if use not in self._waiting and not missing:
                return
            gradient = self._waiting.pop(use, None)
            if gradient is None and (not self._idle or self._rows(use).leaves > 1):
                live, leaves = self._rows(use).live, self._rows(use).leaves
                gradient = live.new_zeros(live.shape if leaves == 1 else (leaves, *live.shape))
            self._turn += 1
            if self._stream is None:
                self._add(use, gradient)
            else:
                self._add_beside(self._stream, use, gradient)

    def _rows(self, use: str) -> Shard:
        return self._parameters[use if use in self._parameters else EMBEDDING]

    def _add(self, use: str, gradient: Tensor | None) -> None:
        """Give a micro-batch's gradient to its owners, and add those of this rank's rows to their tree."""
        tree, rows = self._trees[use], self._rows(use)
        if rows.leaves > 1:
            self._add_leaves(tree, rows, gradient)
            return
        if gradient is not None and self._contexts.size > 1 and use not in self._complete:
            parts = self._contexts.gather(gradient[None])  # of each rank's tokens
            gradient = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
            for part in parts[1:]:
                gradient = gradient + part
        if self._ranks.size == 1:
            assert gradient is not None, "a single rank has every micro-batch"
            tree.push(gradient)
            return
        count, mine = self._shards.size, rows.sizes[self._shards.rank]
        leaves = [min(max(self._leaves - replica * count, 0), count) for replica in range(self._replicas.size)]
        here = leaves[self._replicas.rank]
        sends = list(rows.sizes) if gradient is not None else [0] * count
        if gradient is None:
            gradient = rows.live.new_empty((0, *rows.live.shape[1:]))
        parts = self._shards.exchange(gradient, sends, [mine] * here + [0] * (count - here))
        parts = self._replicas.gather(parts, 0, [number * mine for number in leaves])
        for part in parts.unflatten(0, (self._leaves, mine)):
            tree.push(part, borrowed=True)

    def _add_leaves(self, tree: TreeSum, rows: Shard, gradients: Tensor | None) -> None:
        """`_add` of experts' gradients [leaves, ...]: those of the micro-batches of a whole expert group."""
        assert gradients is not None, "ranks without a micro-batch work for those of others"
        mine, count = rows.sizes[rows.ranks.rank], rows.leaves
        parts = torch.cat([part.flatten(0, 1) for part in gradients.split(list(rows.sizes), 1)])
        parts = rows.ranks.exchange(parts, [count * size for size in rows.sizes], [count * mine] * rows.ranks.size)
        parts = self._replicas.gather(parts).unflatten(0, (-1, mine))  # in order of replica, expert group, rank in it
        for part in parts[: self._leaves]:
            tree.push(part, borrowed=True)

    def _add_beside(self, stream: torch.cuda.Stream, use: str, gradient: Tensor | None) -> None:
        """`_add` on a stream beside the backward's, which waits for it once `IN_FLIGHT` bytes are on their way."""
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._add(use, gradient)
            done = stream.record_event()
        if gradient is None:
            return
        self._in_flight.append((done, gradient))
        while sum(tensor.nbytes for _, tensor in self._in_flight) > IN_FLIGHT:
            event, _ = self._in_flight.popleft()
            current.wait_event(event)
