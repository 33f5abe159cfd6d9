"""Mixture-of-experts layers: a router, experts, and perhaps a shared expert that every token goes to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlloop.models.architecture import MixtureConfig, ModelConfig
from rlloop.models.layers import Linear, Mlp, PlainMlp, Step
from rlloop.numerics.routing import Clamped
from rlloop.parallel.context import ParallelContext
from rlloop.parallel.division import evenly

BIAS = "e_score_correction_bias"  # stays float32 whatever the compute type; no gradient trains it


class Router(nn.Module):
    """Hugging Face's `mlp.gate`. `place`: its index among the layers that have experts."""

    def __init__(self, config: MixtureConfig, hidden_size: int, place: int) -> None:
        super().__init__()
        self.config, self.place = config, place
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
    """The weights of all experts, one tensor for each projection, as in transformers."""

    def __init__(self, config: MixtureConfig, hidden_size: int) -> None:
        super().__init__()
        count, size = config.num_experts, config.expert_size
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

    def forward(self, x: Tensor, chosen: Tensor, step: Step) -> Tensor:
        """x [T, D], chosen [T, k] -> [T, k, D]"""
        up = self.gate_up_proj if self.gated else self.up_proj
        if self.clamp is None:
            return step.ops.experts(x, up, self.down_proj, chosen, self.gated)
        clamped = Clamped(self.gate_up_proj_bias, self.down_proj_bias, *self.clamp)
        return step.ops.experts(x, up, self.down_proj, chosen, clamped=clamped)


class Mixture(nn.Module):
    """A router with its experts. `place`: its index among the layers that have experts."""

    def __init__(self, config: ModelConfig, mixture: MixtureConfig, place: int, context: ParallelContext) -> None:
        super().__init__()
        width, size, tp = config.hidden_size, mixture.shared_size, context.tp
        self.experts = Experts(mixture, mixture.latent_size or width)
        self.gate = Router(mixture, width, place)
        self.shared_experts = self.shared_expert = self.shared_expert_gate = None
        self.fc1_latent_proj = self.fc2_latent_proj = None
        if mixture.shared_gate:
            self.shared_expert, self.shared_expert_gate = Mlp(width, size, tp), Linear(width, 1)
        elif size:
            self.shared_experts = Mlp(width, size, tp) if mixture.gated else PlainMlp(width, size, config.mlp_bias, tp)
        if mixture.latent_size is not None:
            inner = mixture.latent_size
            self.fc1_latent_proj = Linear(width, inner, config.mlp_bias, rows=evenly(inner, tp))
            self.fc2_latent_proj = Linear(inner, width, config.mlp_bias, rows=evenly(width, tp))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        weights, chosen = self.gate(x, step)
        shared = self._shared(x, step)
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            return step.ops.combine(self.experts(x, chosen, step), chosen, weights, shared)
        outputs = self.experts(self.fc1_latent_proj.whole(x, step.ops), chosen, step)
        out = self.fc2_latent_proj.whole(step.ops.combine(outputs, chosen, weights), step.ops)
        return out if shared is None else out + shared

    def _shared(self, x: Tensor, step: Step) -> Tensor | None:
        """[T, D] the shared expert's output; None without one."""
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            out = self.shared_expert(x, step)
            return step.ops.sigmoid_mul(self.shared_expert_gate(x, step.ops).expand_as(out), out)
        return None if self.shared_experts is None else self.shared_experts(x, step)
