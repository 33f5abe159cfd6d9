"""Mixture-of-experts training: choices compared and replayed, experts' loads, and what keeps those even."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlloop.config.run import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.models import ChoiceCounts, Model, RoutingRecord, ScoreRow
from rlloop.models.experts import Router


class MoeTraining:
    """What a trainer sees of its model's routers, and does to them.

    - `replay`: forward, backward and recomputation take the experts that the engine recorded, not their own.
    - `trainer.balance_coef`: a loss beside the policy's, DeepSeek-V3's of each sequence (arXiv:2412.19437, equations 17
      to 20): the sum over layers and experts of f P, with f the expert's share of the sequence's choices times the
      number of experts, and P its mean share of the scores; averaged over the step's sequences.
    - `trainer.expert_bias_rate`: what each expert's bias moves by at each step, up where its load was under the mean of
      the layer, down where it was above (auxiliary-loss-free balancing, Wang et al. 2024, arXiv:2408.15664).
    """

    def __init__(self, model: Model, config: TrainerConfig) -> None:
        """Raises `ConfigError` for a setting that the model has nothing for."""
        self.replay = False
        self.config = config
        self._gates = [module for module in model.modules() if isinstance(module, Router)]
        biased = [gate for gate in self._gates if gate.bias_of_choice is not None]
        for key, lacks, there in (
            ("balance_coef", "has no experts to balance", self._gates),
            ("expert_bias_rate", "ranks no experts with a bias", biased),
        ):
            if getattr(config, key) and not there:
                raise ConfigError(f"trainer.{key} is {getattr(config, key)}, and the model {lacks}; set it to 0")
        self._load: Tensor | None = None  # [layers, E] tokens that went to each expert since the last update
        self._penalties: list[Tensor] = []
        self.begin()

    def begin(self) -> None:
        """A new comparison."""
        self.counts = ChoiceCounts()

    def watch(self, routes: RoutingRecord, rows: Sequence[ScoreRow]) -> None:
        """A forward over these rows, each of which read its tokens up to the last predicted one."""
        self.counts.add(routes, [row.routed_experts for row in rows], [row.selected for row in rows], _lengths(rows))
        chosen = routes.chosen()
        if chosen is None or not torch.is_grad_enabled():
            return
        experts = self._gates[0].config.num_experts
        load = torch.stack([layer.flatten().bincount(minlength=experts) for layer in chosen.unbind(1)])
        self._load = load if self._load is None else self._load + load
        if self.config.balance_coef:
            lengths = torch.tensor(_lengths(rows), device=chosen.device)
            self._penalties.append(sum_of_balance_losses(routes, chosen, lengths))

    def penalty(self, sequences: int) -> Tensor | float:
        """The balance loss of the forward just watched, as its part of a step of so many sequences."""
        parts, self._penalties = self._penalties, []
        return self.config.balance_coef * torch.stack(parts).sum() / sequences if parts else 0.0

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """After an optimizer step: move the biases; returns the loads of the step that it closes.

        `experts/load_max` is the largest load of an expert by the mean of its layer, `experts/unused` the fraction of
        experts that no token went to.
        """
        if self._load is None:
            return {}
        load, self._load = self._load.float(), None
        mean = load.mean(-1, keepdim=True)
        if self.config.expert_bias_rate:
            for gate, step in zip(self._gates, (mean - load).sign() * self.config.expert_bias_rate, strict=True):
                bias = gate.bias_of_choice
                if bias is not None:
                    bias.add_(step)
        return {
            "experts/load_max": float((load / mean).max()),
            "experts/unused": float((load == 0).float().mean()),
        }


def sum_of_balance_losses(routes: RoutingRecord, chosen: Tensor, lengths: Tensor) -> Tensor:
    """Summed over sequences of `lengths` [S] laid end to end. chosen [T, layers, k]."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    total = torch.zeros((), device=chosen.device)
    for place, scores in routes.scores.items():
        experts, top_k = scores.shape[1], chosen.shape[2]
        hits = torch.zeros_like(scores).scatter(1, chosen[:, place], 1.0)
        zeros = scores.new_zeros(len(lengths), experts)
        shares = zeros.index_add(0, sequence, hits) * experts / (top_k * lengths[:, None])
        means = zeros.index_add(0, sequence, scores / scores.sum(-1, keepdim=True)) / lengths[:, None]
        total = total + (shares * means).sum()
    return total


def _lengths(rows: Sequence[ScoreRow]) -> list[int]:
    return [int(row.predict[-1]) for row in rows]
