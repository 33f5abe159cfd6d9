"""Training of mixture-of-experts models: router replay, comparison of choices, and load balancing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.models import ChoiceCounts, Model, RoutingRecord, ScoreRow
from rlloop.models.experts import Router
from rlloop.parallel.collectives import Ranks


class MoeTraining:
    """The trainer's handling of routers: replay, load balancing, and comparison with an engine's choices.

    - `replay`: forward, backward and recomputation use the experts that the engine recorded, not their own choice.
    - `trainer.balance_coef`: weight of DeepSeek-V3's sequence-wise balance loss (arXiv:2412.19437, equations 17 to 20),
      added to the policy's: the sum over layers and experts of f P, with f the expert's share of the sequence's choices
      times the number of experts, and P its mean share of the scores; averaged over the step's sequences.
    - `trainer.expert_bias_rate`: each step moves an expert's bias by this much, up if its load was below the layer's
      mean, down if above (auxiliary-loss-free balancing, Wang et al. 2024, arXiv:2408.15664).
    """

    def __init__(self, model: Model, config: TrainerConfig) -> None:
        """Raises `ConfigError` for a setting that needs experts, or biases, that the model lacks."""
        self.replay = False
        self.config = config
        self._gates = [module for module in model.modules() if isinstance(module, Router)]
        mixture, self._stage = model.config.mixture, model.stage
        self._mixes = mixture is not None and bool(mixture.layers)
        for key, lacks, there in (
            ("balance_coef", "has no experts to balance", self._mixes),
            ("expert_bias_rate", "ranks no experts with a bias", mixture is not None and mixture.bias),
        ):
            if getattr(config, key) and not there:
                raise ConfigError(f"trainer.{key} is {getattr(config, key)}, and the model {lacks}; set it to 0")
        self._load: Tensor | None = None  # [layers, E] tokens that went to each expert since the last update
        self._penalties: list[Tensor] = []
        self.begin()

    def begin(self) -> None:
        """Start a new comparison of choices."""
        self.counts = ChoiceCounts()

    def forget(self) -> None:
        """Drop loads and penalties of forwards whose gradient was dropped."""
        self._load, self._penalties = None, []

    def watch(self, routes: RoutingRecord, rows: Sequence[ScoreRow]) -> None:
        """Record a forward over these rows: choices compared and, under a gradient, loads and balance losses."""
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
        """The balance loss of the forwards watched since the last call, as a share of a step of `sequences`."""
        penalties, self._penalties = self._penalties, []
        return self.config.balance_coef * torch.stack(penalties).sum() / sequences if penalties else 0.0

    def gather(self, ranks: Ranks) -> None:
        """Add up the comparisons of all ranks along dp, and of all stages of a pipeline. Collective."""
        self.counts = ChoiceCounts.sum(self._stage.gather_objects(ChoiceCounts.sum(ranks.gather_objects(self.counts))))

    @torch.no_grad()
    def update(self, ranks: Ranks, *, refused: bool = False) -> dict[str, float]:
        """Move the biases after an optimizer step that was not `refused`, and return metrics of the loads since the
        last one.

        `experts/load_max` is the largest ratio of an expert's load to its layer's mean, `experts/unused` the fraction
        of experts without a token. Collective along `ranks`, dp.
        """
        if not self._mixes:
            return {}
        rank_loads = ranks.gather_objects(None if self._load is None else self._load.cpu())
        loads = [each for each in rank_loads if each is not None]
        own = torch.stack(loads).sum(0) if loads else None  # of this stage's layers
        loads = [each for each in self._stage.gather_objects(own) if each is not None]
        if not loads:
            return {}
        every, self._load = torch.cat(loads).float(), None
        if self.config.expert_bias_rate and own is not None and not refused:
            load = own.to(self._gates[0].weight.device).float()
            mean = load.mean(-1, keepdim=True)
            for gate, step in zip(self._gates, (mean - load).sign() * self.config.expert_bias_rate, strict=True):
                bias = gate.bias_of_choice
                if bias is not None:
                    bias.add_(step)
        return {
            "experts/load_max": float((every / every.mean(-1, keepdim=True)).max()),
            "experts/unused": float((every == 0).float().mean()),
        }


def sum_of_balance_losses(routes: RoutingRecord, chosen: Tensor, lengths: Tensor) -> Tensor:
    """DeepSeek-V3's balance loss, summed over sequences of `lengths` [S] laid end to end. chosen [T, layers, k]."""
    total = torch.zeros((), device=chosen.device)
    for column, layer in enumerate(routes.places):
        scores = routes.scores[layer]
        experts, top_k = scores.shape[1], chosen.shape[2]
        hits = torch.zeros_like(scores).scatter(1, chosen[:, column], 1.0)
        shares = _sums(hits, lengths) * experts / (top_k * lengths[:, None])
        means = _sums(scores / scores.sum(-1, keepdim=True), lengths) / lengths[:, None]
        total = total + (shares * means).sum()
    return total


def _sums(rows: Tensor, lengths: Tensor) -> Tensor:
    """[T, E] -> [S, E]: each sequence's rows, added in order; on a GPU `index_add` adds them in any."""
    return torch.segment_reduce(rows, "sum", lengths=lengths, axis=0)


def _lengths(rows: Sequence[ScoreRow]) -> list[int]:
    """Number of tokens that a forward reads of each row: those before its last predicted one."""
    return [int(row.predict[-1]) for row in rows]
