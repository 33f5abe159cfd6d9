"""Mixture-of-experts layers: a router, experts, and optionally a shared expert for every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlloop.models.architecture import MixtureConfig, ModelConfig
from rlloop.models.expert_exchange import Tokens, exchange_experts, same_tokens, written_experts
from rlloop.models.layers import Divisions, Linear, Mlp, PlainMlp, Step
from rlloop.numerics.routing import Clamped
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.differentiable import gathered, own_part
from rlloop.parallel.division import evenly, in_tiles

BIAS = "e_score_correction_bias"  # stays float32 whatever the compute type; no gradient trains it


class Router(nn.Module):
    """Hugging Face's `mlp.gate`. `index`: its index among the layers that have experts."""

    def __init__(self, config: MixtureConfig, hidden_size: int, index: int) -> None:
        super().__init__()
        self.config, self.place = config, index
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.router_bias else None
        bias = nn.Parameter(torch.empty(config.num_experts), requires_grad=False) if config.bias else None
        self.register_parameter(BIAS, bias)

    @property
    def bias_of_choice(self) -> Tensor | None:
        """[E] added to the experts' scores to rank them, but not to weight their outputs."""
        return getattr(self, BIAS)

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """x [T, D] -> (weights [T, k] float32, experts [T, k] int64)."""
        exact = self.config.exact_gate or step.ops.profile.router_logits == "float32"
        logits = step.ops.router_logits(x, self.weight, exact, self.bias)
        replayed = None if step.routes is None else step.routes.replayed(self.place)
        weights, chosen, scores = step.ops.route(logits, self.bias_of_choice, self.config.routing, replayed)
        if step.routes is not None:
            step.routes.record(self.place, chosen, scores)
        return weights if exact else weights.to(x.dtype).to(weights.dtype), chosen


class Experts(nn.Module):
    """The weights of a layer's experts, one tensor for each projection, as in transformers.

    Over the ranks of `ep` each holds a share of the `count` experts.

    Where the ranks of `ep` compute several micro-batches (leaves) at a time, a backward pass makes a gradient for each.
    `taker(name, gradients [leaves, ...])` gets them, of one parameter after the other, an adapter's of these experts
    among them; without one their sum is added to the parameter's `grad`.
    """

    def __init__(self, config: MixtureConfig, hidden_size: int, context: ParallelContext) -> None:
        super().__init__()
        self.division = evenly(config.num_experts, context.ranks("ep"))
        self.leaves = 1 if self.division is None else context.layout.expert_leaves
        self.taker: Callable[[str, Tensor], None] | None = None
        self._arrived: dict[str, dict[int, Tensor]] = {}
        self.count = config.num_experts
        count = self.count if self.division is None else self.division.size
        size = config.expert_size
        self.gated, self.clamp = config.gated, config.clamp
        if config.clamp is not None:
            self.gate_up_proj = nn.Parameter(torch.empty(count, hidden_size, 2 * size))
            self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * size))
            self.down_proj = nn.Parameter(torch.empty(count, size, hidden_size))
            self.down_proj_bias = nn.Parameter(torch.empty(count, hidden_size))
            return
        if config.gated:
            self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden_size))
        else:
            self.up_proj = nn.Parameter(torch.empty(count, size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, size))

    @property
    def divisions(self) -> Divisions:
        return {} if self.division is None else {name: (0, self.division) for name, _ in self.named_parameters()}

    def forward(self, x: Tensor, chosen: Tensor, step: Step, every: Tokens | None = None) -> Tensor:
        """x [T, D], chosen [T, k] -> [T, k, D]; `every` as for `exchange_experts`."""
        if self.division is None:
            return self.computed(x, chosen, dict(self.named_parameters()), step)
        return exchange_experts(self, x, chosen, step, every)

    def take_gradient(self, name: str, leaf: int, gradient: Tensor, parameter: Tensor) -> None:
        """Keep the gradient of one leaf until all have come. The backward pass of `forward` calls it."""
        arrived = self._arrived.setdefault(name, {})
        arrived[leaf] = gradient.view(parameter.shape)
        if len(arrived) < self.leaves:
            return
        gradients = torch.stack([arrived[at] for at in range(self.leaves)])
        del self._arrived[name]
        if self.taker is not None:
            self.taker(name, gradients)
            return
        total = gradients.sum(0)
        parameter.grad = total if parameter.grad is None else parameter.grad + total

    def computed(self, x: Tensor, chosen: Tensor, weights: Mapping[str, Tensor], step: Step) -> Tensor:
        """`forward` of this rank's own experts, `chosen` counted from the first of them."""
        if self.division is not None and self.division.size == 0:
            adapted = [factors for weight in weights.values() if (factors := step.ops.adapted(weight))]
            terms = [factor for factors, _ in adapted for factor in (factors.down, factors.up)]
            trained = [each for each in (*weights.values(), *terms) if each.requires_grad]
            return _OfNone.apply(x, chosen.shape[1], *trained)
        up, down = weights["gate_up_proj" if self.gated else "up_proj"], weights["down_proj"]
        if self.clamp is None:
            return step.ops.experts(x, up, down, chosen, self.gated)
        clamped = Clamped(weights["gate_up_proj_bias"], weights["down_proj_bias"], *self.clamp)
        return step.ops.experts(x, up, down, chosen, clamped=clamped)


class _OfNone(torch.autograd.Function):
    """Outputs [R, k, D] of a rank without experts: undefined, for no row is theirs. Its weights, of no elements, get
    their gradients all the same, for what waits for those of every parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, top_k: int, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return x.new_empty(len(x), top_k, x.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        assert not len(x), "rows are sent to experts alone"
        return x.new_zeros(x.shape), None, *(each.new_zeros(each.shape) for each in weights)


class Mixture(nn.Module):
    """A router with its experts. `index`: its index among the layers that have experts."""

    def __init__(self, config: ModelConfig, mixture: MixtureConfig, index: int, context: ParallelContext) -> None:
        super().__init__()
        width, size, tp = config.hidden_size, mixture.shared_size, context.tp
        self.experts = Experts(mixture, mixture.latent_size or width, context)
        self.gate = Router(mixture, width, index)
        self.shared_experts = self.shared_expert = self.shared_expert_gate = None
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if mixture.shared_gate:
            self.shared_expert, self.shared_expert_gate = Mlp(width, size, tp), Linear(width, 1)
        elif size:
            self.shared_experts = Mlp(width, size, tp) if mixture.gated else PlainMlp(width, size, config.mlp_bias, tp)
        if mixture.latent_size is not None:
            inner = mixture.latent_size
            self.fc1_latent_proj = Linear(width, inner, config.mlp_bias, rows=in_tiles(inner, tp))
            self.fc2_latent_proj = Linear(inner, width, config.mlp_bias, rows=in_tiles(width, tp))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        weights, chosen = self.gate(x, step)
        shared = self._shared(x, step)
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            return self._combined(x, chosen, weights, shared, step)
        latent = self._combined(self.fc1_latent_proj.whole(x, step.ops), chosen, weights, None, step.inner)
        out = self.fc2_latent_proj.whole(latent, step.ops, unread=step.unread)
        return out if shared is None else out + shared

    def _combined(self, x: Tensor, chosen: Tensor, weights: Tensor, shared: Tensor | None, step: Step) -> Tensor:
        """[T, D]: the experts' weighted sum. Ranks with the same tokens compute a share of them each."""
        alike = same_tokens(step.context)
        combine = step.ops.unread_combine if step.unread else step.ops.combine
        if alike.size == 1:
            return combine(self.experts(x, chosen, step), chosen, weights, shared)
        if (written := written_experts(self.experts, x, chosen, step)) is not None:
            parts = [
                step.ops.combine(outputs, chosen[at], weights[at], None if shared is None else shared[at])
                for at, outputs in written
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        count = len(x)
        each = -(-count // alike.size)
        if step.even and each * alike.size > count:
            x, chosen, weights = (pad(of, (0, 0, 0, each * alike.size - count)) for of in (x, chosen, weights))
            shared = None if shared is None else pad(shared, (0, 0, 0, each * alike.size - count))
        sizes = [max(0, min(each, len(x) - rank * each)) for rank in range(alike.size)]
        every = Tokens(x, chosen) if alike.size == step.context.ranks("ep").size else None
        if (slots := step.ops.row_slots(x[:count])) is not None:
            slots = pad(slots, (0, len(x) - count))
            every = every and every._replace(slots=slots)
            step = step.of_slots(own_part(slots, alike, sizes))
        x, chosen, weights = (own_part(of, alike, sizes) for of in (x, chosen, weights))
        shared = None if shared is None else own_part(shared, alike, sizes)
        out = combine(self.experts(x, chosen, step, every), chosen, weights, shared)
        return out.new_empty(count, out.shape[1]) if step.unread else gathered(out, alike, sizes)[:count]

    def without_tokens(self, x: Tensor, step: Step) -> Tensor:
        """Take part in the expert exchange with no tokens: x [0, D] -> [0, D], of the experts' own width."""
        if self.experts.division is None:
            return x
        chosen = torch.empty(0, self.gate.config.routing.top_k, dtype=torch.int64, device=x.device)
        return self.experts(x, chosen, step).sum(1)

    def _shared(self, x: Tensor, step: Step) -> Tensor | None:
        """[T, D] the shared expert's output; None without one."""
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = self.shared_expert(x, step.inner)
            return step.ops.sigmoid_mul(self.shared_expert_gate(x, step.ops).expand_as(out), out)
        return None if self.shared_experts is None else self.shared_experts(x, step)
