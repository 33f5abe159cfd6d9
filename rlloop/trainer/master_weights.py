"""fp32 masters and the compute copy that trainer and engine share: one rounding, in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlloop.errors import ModelError
from rlloop.models import Model, read_state


class Masters:
    """The weights that learn, by Hugging Face name; a tied weight stands here once.

    Where the model computes in float32 (or wider), its own parameters are the masters. Where it computes in bfloat16 or
    float16, a master is a float32 tensor of its own, and `publish` rounds it to nearest into the live parameter, in
    place: an engine that reads the same parameter has the new weights, and no second rounding exists to differ from.
    Such masters begin at what the model's folder stores, which may be more exact, while that rounds to what the model
    holds; else (new or changed weights) at what it holds.
    """

    def __init__(self, model: Model) -> None:
        self.tensors: dict[str, nn.Parameter] = {}
        self._rounded: list[tuple[nn.Parameter, nn.Parameter]] = []  # (master, live)
        for name, live in model.named_parameters():
            if live.dtype in (torch.bfloat16, torch.float16):
                self.tensors[name] = nn.Parameter(live.detach().float())
                self._rounded.append((self.tensors[name], live))
            else:
                self.tensors[name] = live
        if self._rounded and model.source_path is not None:
            stored = {name: tensor.to(model.device) for name, tensor in read_state(model.source_path).items()}
            if all(torch.equal(stored[name].to(live.dtype), live) for name, live in model.named_parameters()):
                self.load(stored)

    def zero_grad(self) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None
        for _, live in self._rounded:
            live.grad = None

    def collect(self) -> None:
        """Add the gradients of one micro-batch to the masters', in float32."""
        for master, live in self._rounded:
            if live.grad is not None:
                wide = live.grad.float()
                master.grad = wide if master.grad is None else master.grad.add_(wide)
                live.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the live parameters."""
        for master, live in self._rounded:
            live.copy_(master)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over the values of `state`, which must have exactly these names and shapes."""
        missing, unknown = self.tensors.keys() - state.keys(), state.keys() - self.tensors.keys()
        if missing or unknown:
            raise ModelError(
                f"these weights are of another model: missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        for name, master in self.tensors.items():
            if state[name].shape != master.shape:
                raise ModelError(f"{name} has shape {list(state[name].shape)}; the model's is {list(master.shape)}")
            master.copy_(state[name])
        self.publish()
