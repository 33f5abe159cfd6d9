"""Float32 master weights, rounded in place into the compute copy that trainer and engine share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rlloop.errors import ModelError
from rlloop.models import Model, read_state
from rlloop.models.parameters import ParameterStore


class MasterWeights:
    """The weights that train, by Hugging Face name; a tied weight once, frozen ones left out.

    Where the model computes in float32 or float64, its own parameters are the masters. Where it computes in bfloat16 or
    float16, a master is a separate float32 tensor, and `publish` rounds it to nearest into the live parameter, in
    place: an engine that reads the same parameter has the new weights, and there is no second rounding that could
    differ. Such masters start from the stored weights of the model's folder, which may be more exact, if these round to
    the live ones; otherwise (new or changed weights) from the live ones.
    """

    def __init__(self, model: Model) -> None:
        self.parameters = ParameterStore(model)
        self._context = model.context
        self.tensors: dict[str, nn.Parameter] = {}
        self._rounded: list[tuple[nn.Parameter, nn.Parameter]] = []  # (master, live)
        for name, entry in self.parameters.entries.items():
            if not entry.trains:
                continue
            if entry.live.dtype in (torch.bfloat16, torch.float16):
                self.tensors[name] = nn.Parameter(entry.live.detach().float())
                self._rounded.append((self.tensors[name], entry.live))
            else:
                self.tensors[name] = entry.live
        if self._rounded and model.source_path is not None:
            stored = {name: tensor.to(self._context.device) for name, tensor in read_state(model.source_path).items()}
            live = self.parameters.tensors()
            if all(torch.equal(stored[name].to(tensor.dtype), tensor) for name, tensor in live.items()):
                self.load(stored)

    def state(self) -> dict[str, Tensor]:
        """All weights by name: masters, and the live values of frozen parameters."""
        return {**self.parameters.tensors(), **{name: master.detach() for name, master in self.tensors.items()}}

    def zero_grad(self) -> None:
        for tensor in self.tensors.values():
            tensor.grad = None
        for _, live in self._rounded:
            live.grad = None

    def collect(self) -> None:
        """Add one micro-batch's gradients to the masters' in float32, and clear them."""
        for master, live in self._rounded:
            if live.grad is not None:
                wide = live.grad.float()
                master.grad = wide if master.grad is None else master.grad.add_(wide)
                live.grad = None

    def gradient_norm(self) -> Tensor:
        """L2 norm of the gradient of all masters."""
        return get_total_norm([tensor.grad for tensor in self.tensors.values() if tensor.grad is not None])

    def clip_gradient(self, limit: float, norm: Tensor) -> None:
        """Scale a gradient of norm `norm` down to `limit`."""
        clip_grads_with_norm_(self.tensors.values(), limit, norm)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the live parameters."""
        for master, live in self._rounded:
            live.copy_(master)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the values of `state`. Raises `ModelError` unless names and shapes are exactly the model's."""
        shapes = self.parameters.shapes()
        missing, unknown = shapes.keys() - state.keys(), state.keys() - shapes.keys()
        if missing or unknown:
            raise ModelError(
                f"these weights are of another model: missing {sorted(missing)}, unknown {sorted(unknown)}"
            )
        for name, shape in shapes.items():
            if state[name].shape != shape:
                raise ModelError(f"{name} has shape {list(state[name].shape)}; the model's is {list(shape)}")
            self.tensors.get(name, self.parameters.entries[name].live).copy_(state[name])
        self.publish()
