"""Layers that are computed again in the backward pass instead of keeping their activations, with the same bits.

Of such a layer its input is kept: one residual sum, where the norm that begins the layer can take it made already.
Attention's output and log-sum-exp are kept too where that is asked for: they are a small part of a layer's activations,
and of a long sequence most of its time. A recurrence costs as much a token however long the sequence is, so its output
is made again; so is a vision tower's attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from rlloop.models.layers import Step
from rlloop.numerics.operators.masked_attention import FORWARDS


class Recompute:
    """`every`: every n-th layer is made again (0: none); `keep_attention`: but for its attention.

    `alone`: no other rank takes part in the layers.
    """

    def __init__(self, every: int, keep_attention: bool, alone: bool) -> None:
        self._every, self._keep_attention, self._alone = every, keep_attention, alone

    def of(self, index: int) -> bool:
        """True if this layer is made again."""
        return self._every > 0 and torch.is_grad_enabled() and index % self._every == 0

    def run(self, index: int, layer: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """`layer(*args, **options)`."""
        if not self.of(index):
            return layer(*args, **options)
        kept: dict[str, Any] = {}
        if self._keep_attention:
            kept["context_fn"] = partial(create_selective_checkpoint_contexts, list(FORWARDS))
        # No early stop: it would skip the end of a layer, where ranks may communicate.
        with set_checkpoint_early_stop(self._alone):
            return checkpoint(layer, *args, use_reentrant=False, **kept, **options)

    def decoder_layer(
        self, index: int, layer: Callable[..., Any], delta: Tensor, stream: Tensor | None, step: Step
    ) -> tuple[Tensor, Tensor]:
        """A layer of `decoder`. If it is made again, what is kept is the sum of `delta` and `stream`, not both."""
        if stream is None or not (self.of(index) and step.ops.norms_sums):
            return self.run(index, layer, delta, stream, step)
        return self.run(index, layer, delta + stream, None, step, summed=True)
