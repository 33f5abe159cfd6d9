"""Layers that are computed again in the backward pass instead of keeping their activations, with the same bits.

Of such a layer its input is kept: one residual sum, where the norm that begins the layer can take it made already.
Attention's output and log-sum-exp are kept too where that is asked for: they are a small part of a layer's activations,
and of a long sequence most of its time. A recurrence costs as much a token however long the sequence is, so its output
is made again; so is a vision tower's attention. All that is kept may wait in host memory.

What a layer returns is not read when it is made again: its last product is not made, only what that saves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from rlloop.models.layers import Step
from rlloop.numerics.operators.masked_attention import FORWARDS


class Recompute:
    """`every`: every n-th layer is made again (0: none); `keep_attention`: but for its attention.

    `offload`: what is kept waits in host memory. `alone`: no other rank takes part in the layers.
    """

    def __init__(self, every: int, keep_attention: bool, offload: bool, alone: bool) -> None:
        self._every, self._keep_attention, self._offload, self._alone = every, keep_attention, offload, alone

    def of(self, index: int) -> bool:
        """True if this layer is made again."""
        return self._every > 0 and torch.is_grad_enabled() and index % self._every == 0

    def run(self, index: int, layer: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """`layer(*args, **options)`; the last of `args` is its step."""
        if not self.of(index):
            return layer(*args, **options)
        *inputs, step = args
        steps = chain([step], repeat(replace(step, unread=True)))  # of the first call, and of those that make it again
        kept: dict[str, Any] = {}
        if self._keep_attention:
            kept["context_fn"] = partial(_kept_attention, self._offload)
        # No early stop: it would skip the end of a layer, where ranks may communicate.
        hooks = saved_tensors_hooks(_to_host, _from_host) if self._offload else nullcontext()  # of the layer's input
        with set_checkpoint_early_stop(self._alone), hooks:
            return checkpoint(
                lambda *inputs: layer(*inputs, next(steps), **options), *inputs, use_reentrant=False, **kept
            )

    def decoder_layer(
        self, index: int, layer: Callable[..., Any], delta: Tensor, stream: Tensor | None, step: Step
    ) -> tuple[Tensor, Tensor]:
        """A layer of `decoder`. If it is made again, what is kept is the sum of `delta` and `stream`, not both."""
        if self.of(index):
            step = replace(step, recomputed=True)
        if stream is None or not (self.of(index) and step.ops.norms_sums):
            return self.run(index, layer, delta, stream, step)
        return self.run(index, layer, delta + stream, None, step, summed=True)


def _to_host(x: Tensor) -> tuple[torch.device, Tensor]:
    held = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return x.device, held.copy_(x.detach(), non_blocking=x.is_cuda)  # the stream's later work waits, not the host


def _from_host(held: tuple[torch.device, Tensor]) -> Tensor:
    device, x = held
    return x.to(device, non_blocking=True)


def _kept_attention(offload: bool) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """As `create_selective_checkpoint_contexts`, which has no place for tensors to wait in, and wants a layer that is
    made again to call what it called before."""
    kept: deque[Any] = deque()  # results of a layer's calls, in order
    return _Attention(kept, offload, again=False), _Attention(kept, offload, again=True)


class _Attention(TorchDispatchMode):
    """Puts results of attention by; `again`: gives them in place of making them."""

    def __init__(self, kept: deque[Any], offload: bool, again: bool) -> None:
        super().__init__()
        self._kept, self._again = kept, again
        self._put: Callable[[Tensor], Any] = _to_host if offload else torch.detach
        self._get: Callable[[Any], Tensor] = _from_host if offload else torch.detach

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._again and func in FORWARDS:
            return tuple(map(self._get, self._kept.popleft()))
        made = func(*args, **(kwargs or {}))
        if func in FORWARDS:
            self._kept.append([self._put(each) for each in made])
        return made
