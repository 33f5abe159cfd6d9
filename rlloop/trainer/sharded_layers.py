"""A sharded compute copy: each rank keeps its rows of the layers' parameters, and a layer's are gathered while it
computes (ZeRO-3, Rajbhandari et al., arXiv:1910.02054).

`torch.distributed.fsdp.fully_shard` does this as well. Here parameters stay tensors under their own names, so
gradients, masters and checkpoints are those of a whole compute copy, and replicas need no all-reduce, which would add.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from rlloop.models import Model
from rlloop.trainer.shard import Shard, share_rows


class ShardedLayers:
    """The layers of a model, whose trained parameters have memory only while they are `gathered`.

    Gathers are collective: every rank runs the same layers in the same order, forward and backward. On a GPU the next
    layer is gathered, on a stream beside, while one computes. Parameters outside layers (embedding, head, last norm),
    and frozen ones, stay whole.
    """

    def __init__(self, model: Model, shards: Mapping[str, Shard]) -> None:
        device = model.context.device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._layers: list[_Layer] = []
        self._of: dict[str, _Layer] = {}
        for index, (number, layer) in enumerate(model.model.layers.named_children()):
            own = [shard for name, shard in shards.items() if name.startswith(f"model.layers.{number}.")]
            self._layers.append(_Layer(own, stream, device))
            self._of |= {shard.name: self._layers[-1] for shard in own}
            layer.register_forward_pre_hook(self._before(index))
            layer.register_forward_hook(self._after(index))
        self.free()

    def rows(self, name: str) -> Tensor | None:
        """This rank's rows of a parameter in the compute type, to write into; None: it stays whole."""
        return self._of[name].kept[name] if name in self._of else None

    def free(self) -> None:
        """Free all layers: rows that changed are then gathered anew."""
        for layer in self._layers:
            layer.free()

    def _before(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            backwards = _in_backward()
            self._use(index, index - 1 if backwards else index + 1)
            inputs = [each for each in args if isinstance(each, Tensor) and each.requires_grad]
            if (
                inputs and torch.is_grad_enabled() and not backwards
            ):  # all of a layer's gradients exist before its input's
                register_multi_grad_hook(inputs, lambda _: self._layers[index].free())

        return hook

    def _after(self, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
            if _in_backward():
                return  # recomputed: the backward of these very tensors is next
            self._layers[index].free()
            tensors = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
            if tensors and torch.is_grad_enabled():
                register_multi_grad_hook(tensors, lambda _: self._use(index, index - 1), mode="any")

        return hook

    def _use(self, index: int, following: int) -> None:
        layer = self._layers[index]
        layer.gather()
        layer.wait()
        if layer.overlaps and 0 <= following < len(self._layers):
            self._layers[following].gather()


class _Layer:
    """The sharded parameters of one layer. Parameters stay the same objects; their memory comes and goes."""

    def __init__(self, shards: list[Shard], stream: torch.cuda.Stream | None, device: torch.device) -> None:
        self._shards, self._stream, self._device = shards, stream, device
        self._gathered, self._done = True, None
        self.kept = {}
        for shard in shards:  # masters of the compute type are the rows
            same = shard.flat.dtype == shard.live.dtype and shard.scale == 1.0
            self.kept[shard.name] = shard.master if same else shard.rows.clone()

    @property
    def overlaps(self) -> bool:
        return self._stream is not None

    @torch.no_grad()
    def gather(self) -> None:
        """Begin to fill the parameters from all ranks' rows; `wait` before reading them."""
        if self._gathered:
            return
        self._gathered = True
        for shard in self._shards:  # autograd's saved parameters are these very ones, and have the same values again
            shard.live.data = torch.empty(shard.live.shape, dtype=shard.live.dtype, device=self._device)
        if self._stream is None:
            self._fill()
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._fill()
            self._done = self._stream.record_event()

    def wait(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._done = None

    def free(self) -> None:
        if not self._gathered:
            return
        self.wait()
        self._gathered = False
        for shard in self._shards:
            shard.live.data = shard.live.new_empty(1).expand(shard.live.shape)

    def _fill(self) -> None:
        for shard in self._shards:
            shard.live.data[shard.begin : shard.end] = self.kept[shard.name]
        share_rows((shard, shard.live.data) for shard in self._shards)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
