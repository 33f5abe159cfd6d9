"""Advantages, losses and importance corrections: pure functions, each named after its paper.

    from rlloop.algorithms import get_advantage, get_loss
    advantages = get_advantage("group_norm")(rewards, groups)
    output = get_loss("dapo", clip_high=0.3)(batch)
    output.loss.backward()

Names load on first use, so that importing this package (and `presets`, the config group) imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlloop.algorithms.advantages import (
        batch_norm,
        global_norm,
        group_mean,
        group_norm,
        leave_one_out,
        raw,
    )
    from rlloop.algorithms.batch import Loss, LossBatch, LossOutput, entropy_term, whole_step
    from rlloop.algorithms.corrections import (
        Weights,
        clip,
        corrected,
        icepop,
        mask,
        measured,
        mis,
        ratio_metrics,
        tis,
        veto,
    )
    from rlloop.algorithms.kl import kl_estimate, sequence_kl
    from rlloop.algorithms.losses import (
        bradley_terry,
        cispo,
        dapo,
        distillation,
        dpo,
        dr_grpo,
        dro,
        grpo,
        gspo,
        importance_sampling,
        kto,
        ppo,
        reinforce,
        reinforce_pp,
        rloo,
        sft,
    )
    from rlloop.algorithms.registry import advantages_for, get_advantage, get_correction, get_loss, loss_for
    from rlloop.algorithms.shaping import best_of_groups, groups_with_signal, overlong_penalty
    from rlloop.algorithms.terms import PolicyTerm, clipped_surrogate, finish, sequence_mean, sequence_sum, token_mean

__all__ = [
    "Loss",
    "LossBatch",
    "LossOutput",
    "PolicyTerm",
    "Weights",
    "advantages_for",
    "batch_norm",
    "best_of_groups",
    "bradley_terry",
    "cispo",
    "clip",
    "clipped_surrogate",
    "corrected",
    "dapo",
    "distillation",
    "dpo",
    "dr_grpo",
    "dro",
    "entropy_term",
    "finish",
    "get_advantage",
    "get_correction",
    "get_loss",
    "global_norm",
    "group_mean",
    "group_norm",
    "groups_with_signal",
    "grpo",
    "gspo",
    "icepop",
    "importance_sampling",
    "kl_estimate",
    "kto",
    "leave_one_out",
    "loss_for",
    "mask",
    "measured",
    "mis",
    "overlong_penalty",
    "ppo",
    "ratio_metrics",
    "raw",
    "reinforce",
    "reinforce_pp",
    "rloo",
    "sequence_kl",
    "sequence_mean",
    "sequence_sum",
    "sft",
    "tis",
    "token_mean",
    "veto",
    "whole_step",
]

_HOMES = ("advantages", "batch", "corrections", "kl", "losses", "registry", "shaping", "terms")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
