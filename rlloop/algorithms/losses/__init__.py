"""Losses by name: pure functions of a `LossBatch`, one a file."""

from rlloop.algorithms.losses.bradley_terry import bradley_terry
from rlloop.algorithms.losses.cispo import cispo
from rlloop.algorithms.losses.dapo import dapo
from rlloop.algorithms.losses.distillation import distillation
from rlloop.algorithms.losses.dpo import dpo
from rlloop.algorithms.losses.dr_grpo import dr_grpo
from rlloop.algorithms.losses.dro import dro
from rlloop.algorithms.losses.grpo import grpo
from rlloop.algorithms.losses.gspo import gspo
from rlloop.algorithms.losses.importance_sampling import importance_sampling
from rlloop.algorithms.losses.kto import kto
from rlloop.algorithms.losses.ppo import ppo
from rlloop.algorithms.losses.reinforce import reinforce
from rlloop.algorithms.losses.reinforce_pp import reinforce_pp
from rlloop.algorithms.losses.rloo import rloo
from rlloop.algorithms.losses.sft import sft

LOSSES = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "dro": dro,
    "ppo": ppo,
    "reinforce": reinforce,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "importance_sampling": importance_sampling,
    "sft": sft,
    "distillation": distillation,
    "dpo": dpo,
    "kto": kto,
    "bradley_terry": bradley_terry,
}

__all__ = [
    "LOSSES",
    "bradley_terry",
    "cispo",
    "dapo",
    "distillation",
    "dpo",
    "dr_grpo",
    "dro",
    "grpo",
    "gspo",
    "importance_sampling",
    "kto",
    "ppo",
    "reinforce",
    "reinforce_pp",
    "rloo",
    "sft",
]
