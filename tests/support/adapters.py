"""Random adapters, as PEFT folders."""

from __future__ import annotations

from pathlib import Path

import torch

from rlloop.models import Model
from rlloop.models.adapter_files import save_adapter
from rlloop.models.adapter_weights import AdapterWeights, choose_targets, fresh_weights


def random_adapter(
    model: Model, seed: int, rank: int = 4, targets: tuple[str, ...] = ("all-linear",), strength: float = 0.5
) -> AdapterWeights:
    """A and B drawn; `strength`: of B, 0 for an adapter that changes nothing."""
    chosen = choose_targets(model.adapter_targets(), targets)
    fresh, generator = fresh_weights(chosen, rank, 2.0 * rank, seed), torch.Generator().manual_seed(seed)
    factors = {
        name: (down, strength * torch.randn(up.shape, generator=generator) / rank)
        for name, (down, up) in fresh.factors.items()
    }
    return AdapterWeights(factors, fresh.scales, fresh.rank, fresh.alpha)


def adapter_folder(folder: Path, model: Model, seed: int, **options) -> Path:
    save_adapter(model, random_adapter(model, seed, **options), folder)
    return folder
