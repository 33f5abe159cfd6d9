"""Sums of micro-batches' gradients in an order independent of the number of ranks.

A round is one micro-batch on each data-parallel rank; round t has micro-batches t R up to (t + 1) R of R ranks. During
the backward, each parameter's gradient (small ones together) is sent as bits, in its own type, to the ranks that own
its rows; they widen it to float32 and add it to a binary tree over the micro-batches' index (`TreeSum`). So at most
log2(n) + 1 float32 shards and a few layers' gradients are in memory, and one rank computes the same sums as many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rlloop.models import Model
from rlloop.models.checkpoint_names import EMBEDDING, HEAD
from rlloop.models.experts import Experts
from rlloop.numerics.tree import TreeSum
from rlloop.parallel.collectives import BUCKET, buckets
from rlloop.trainer.shard import Shard

IN_FLIGHT = 1 << 30  # bytes of gradients in flight on a GPU, above which the backward waits for the network; also of
# all ranks' that are gathered at a time


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
        self._sends = self._together()
        overlaps = context.device.type == "cuda" and self._ranks.size > 1
        self._stream = torch.cuda.Stream(context.device) if overlaps else None
        self._in_flight: deque[tuple[Any, Tensor]] = deque()
        self.clear()

    def clear(self) -> None:
        """Drop all micro-batches so far."""
        self._land()
        self._trees = {use: TreeSum() for use in self._uses}
        self._present: set[str] = set()

    def collect(self, leaves: int, work: Callable[[], None] | None, *, idle: bool = False) -> None:
        """Add a round of `leaves` micro-batches, those of the first ranks. `work` does the forward and backward of this
        rank's, or the backward alone; None on a rank that has none, or, `idle`, what it does meanwhile. Collective
        along dp."""
        self._leaves, self._turn, self._idle = leaves, 0, idle or work is None
        self._waiting: dict[str, Tensor | None] = {}
        # If experts are shared, ranks without a micro-batch go through the layers too, but have no
        # gradients to send on the way, so no rank waits for them.
        self._holds = bool(self._experts) and leaves < self._ranks.size and not self._in_step
        if work is None and self._experts:
            self._run(lambda: self._model.without_tokens().backward())
        if work is not None:
            self._run(work)
        self._send(missing=True)

    def totals(self) -> dict[str, Tensor | None]:
        """The gradient's rows that this rank owns, by name, float32 or wider; None for a parameter that no micro-batch
        reached. Ends the sums. Collective along dp."""
        reached = [use in self._present for use in self._uses]
        self._land()
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
        """Keep a tied weight's two gradients, as embedding and as head, apart during forwards."""
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
            # A thread of autograd's own would take turns with this one for Python's lock (a third more time on a GPU).
            with self.apart(), torch.autograd.set_multithreading_enabled(False):
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

    def _together(self) -> list[list[str]]:
        """The uses whose gradients are sent at once, in order of sending: the same on all ranks along dp."""
        shards = [self._rows(use) for use in self._uses]
        kinds = [(rows.live.dtype, use in self._complete) for use, rows in zip(self._uses, shards, strict=True)]
        # Leaves of experts are sent separately: ranks along dp may hold different numbers of experts.
        sizes = [rows.live.nbytes if rows.leaves == 1 else BUCKET for rows in shards]
        return [[self._uses[index] for index in each] for each in buckets(sizes, kinds)]

    def _send(self, *, missing: bool = False) -> None:
        """Send what has arrived, in the order of `_sends`, which all ranks keep; `missing`: also what has not."""
        while self._turn < len(self._sends):
            uses = self._sends[self._turn]
            if not missing and not all(map(self._waiting.__contains__, uses)):  # hundreds of uses: no Python for each
                return
            self._turn += 1
            gradients = [self._taken(use) for use in uses]
            if self._stream is None:
                self._add(uses, gradients)
            else:
                self._add_beside(self._stream, uses, gradients)

    def _taken(self, use: str) -> Tensor | None:
        """A gradient that waits to be sent; zeros where a micro-batch has none, None where there is no micro-batch."""
        gradient, rows = self._waiting.pop(use, None), self._rows(use)
        if gradient is None and (not self._idle or rows.leaves > 1):
            return rows.live.new_zeros(rows.live.shape if rows.leaves == 1 else (rows.leaves, *rows.live.shape))
        return gradient

    def _rows(self, use: str) -> Shard:
        return self._parameters[use if use in self._parameters else EMBEDDING]

    def _add(self, uses: Sequence[str], sent: Sequence[Tensor | None]) -> None:
        """Give a micro-batch's gradients to their owners, and add those of this rank's rows to their trees. All of them
        are None on a rank without a micro-batch."""
        shards = [self._rows(use) for use in uses]
        if shards[0].leaves > 1:
            self._add_leaves(self._trees[uses[0]], shards[0], sent[0])
            return
        gradients = [each for each in sent if each is not None]
        kind = shards[0].live.dtype
        if self._contexts.size > 1 and uses[0] not in self._complete:
            kind = torch.promote_types(kind, torch.float32)
            if gradients:
                gradients = self._of_all_tokens(gradients, kind)
        if self._ranks.size == 1:
            for use, gradient in zip(uses, gradients, strict=True):  # a single rank has every micro-batch
                self._trees[use].push(gradient)
            return
        count, rank = self._shards.size, self._shards.rank
        widths = [rows.live[:1].numel() for rows in shards]
        of_rank = [[rows.sizes[r] * width for rows, width in zip(shards, widths, strict=True)] for r in range(count)]
        mine, leaves = (
            sum(of_rank[rank]),
            [min(max(self._leaves - r * count, 0), count) for r in range(self._replicas.size)],
        )
        here = leaves[self._replicas.rank]
        sends = [sum(each) if gradients else 0 for each in of_rank]
        if len(gradients) == 1:
            flat = gradients[0].reshape(-1)
        elif gradients:
            cut = [each.reshape(-1).split([n[i] for n in of_rank]) for i, each in enumerate(gradients)]
            flat = torch.cat([piece for pieces in zip(*cut, strict=True) for piece in pieces])
        else:
            flat = shards[0].live.new_empty(0, dtype=kind)
        received = self._shards.exchange(flat, sends, [mine] * here + [0] * (count - here))
        received = self._replicas.gather(received, 0, [number * mine for number in leaves])
        for leaf in received.view(self._leaves, mine):
            for use, rows, piece in zip(uses, shards, leaf.split(of_rank[rank]), strict=True):
                self._trees[use].push(piece.view(rows.sizes[rank], *rows.live.shape[1:]), borrowed=True)

    def _of_all_tokens(self, gradients: Sequence[Tensor], kind: torch.dtype) -> list[Tensor]:
        """The sums of all context-parallel ranks' gradients, each of its own tokens. Gathered in pieces: all those of a
        vocabulary may not fit on a GPU."""
        flat = (
            gradients[0].reshape(1, -1)
            if len(gradients) == 1
            else torch.cat([each.reshape(-1) for each in gradients])[None]
        )
        total, piece = flat.new_empty(flat.shape[1], dtype=kind), IN_FLIGHT // (self._contexts.size * flat.itemsize)
        for columns, sums in zip(flat.split(piece, 1), total.split(piece), strict=True):
            first, *others = self._contexts.gather(columns)
            sums.copy_(first)
            for other in others:
                sums += other
        if len(gradients) == 1:
            return [total.view(gradients[0].shape)]
        pieces = total.split([each.numel() for each in gradients])
        return [piece.clone().view(each.shape) for piece, each in zip(pieces, gradients, strict=True)]

    def _add_leaves(self, tree: TreeSum, rows: Shard, gradients: Tensor | None) -> None:
        """`_add` of experts' gradients [leaves, ...]: those of the micro-batches of a whole expert group."""
        assert gradients is not None, "ranks without a micro-batch work for those of others"
        mine, count = rows.sizes[rows.ranks.rank], rows.leaves
        leaves = torch.cat([chunk.flatten(0, 1) for chunk in gradients.split(list(rows.sizes), 1)])
        leaves = rows.ranks.exchange(leaves, [count * size for size in rows.sizes], [count * mine] * rows.ranks.size)
        leaves = self._replicas.gather(leaves).unflatten(0, (-1, mine))  # in order of replica, expert group, rank in it
        for leaf in leaves[: self._leaves]:
            tree.push(leaf, borrowed=True)

    def _land(self) -> None:
        """Wait, on the device, for gradients in flight. The next round begins without that: its forward hides the end
        of this one's exchange."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._in_flight.clear()

    def _add_beside(self, stream: torch.cuda.Stream, uses: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """`_add` on a stream beside the backward's, which waits for older ones while more than `IN_FLIGHT` bytes are in
        flight; never for the latest, since a vocabulary's gradient alone may be larger."""
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._add(uses, gradients)
            done = stream.record_event()
        self._in_flight += [(done, gradient) for gradient in gradients if gradient is not None]
        while len(self._in_flight) > 1 and sum(tensor.nbytes for _, tensor in self._in_flight) > IN_FLIGHT:
            event, _ = self._in_flight.popleft()
            current.wait_event(event)
