"""Mixture-of-experts layers: a router, the experts it chooses from, and perhaps one that every token goes to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlloop.models.parts import Mlp, Step
from rlloop.models.shape import MixtureConfig, ModelConfig

BIAS = "e_score_correction_bias"  # float32 whatever the model is cast to, and moved by no gradient


class Router(nn.Module):
    """Hugging Face's `mlp.gate`."""

    def __init__(self, config: MixtureConfig, hidden_size: int, place: int) -> None:
        super().__init__()
        self.config, self.place = config, place
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        bias = nn.Parameter(torch.empty(config.num_experts), requires_grad=False) if config.bias else None
        self.register_parameter(BIAS, bias)

    @property
    def bias_of_choice(self) -> Tensor | None:
        """[E] what each expert's score is raised by when experts are ranked, not when they are weighed."""
        return getattr(self, BIAS)

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """x [T, D] -> (weights [T, k] float32, experts [T, k] int64)."""
        exact = self.config.exact_gate or step.ops.profile.router_logits == "float32"
        logits = step.ops.router_logits(x, self.weight, exact)
        given = None if step.routes is None else step.routes.given(self.place)
        weights, chosen, scores = step.ops.route(logits, self.bias_of_choice, self.config.routing, given)
        if step.routes is not None:
            step.routes.record(self.place, chosen, scores)
        return weights if exact else weights.to(x.dtype).float(), chosen


class Experts(nn.Module):
    """All experts' weights, each kind in one tensor, as transformers holds them in memory."""

    def __init__(self, config: MixtureConfig, hidden_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * config.expert_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, hidden_size, config.expert_size))


class Mixture(nn.Module):
    """`place` counts the layers that have experts."""

    def __init__(self, config: ModelConfig, mixture: MixtureConfig, place: int) -> None:
        super().__init__()
        self.experts = Experts(mixture, config.hidden_size)
        self.gate = Router(mixture, config.hidden_size, place)
        self.shared_experts = Mlp(config.hidden_size, mixture.shared_size) if mixture.shared_size else None

    def forward(self, x: Tensor, step: Step) -> Tensor:
        weights, chosen = self.gate(x, step)
        made = step.ops.experts(x, self.experts.gate_up_proj, self.experts.down_proj, chosen)
        shared = None if self.shared_experts is None else self.shared_experts(x, step)
        return step.ops.combine(made, chosen, weights, shared)
