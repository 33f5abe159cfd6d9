"""The entries of the `algorithm` config group: a loss, the advantage it is made for, and their usual arguments.

Without torch, so that the command line can list and compose them. Every argument stands here with its value, so that
`--cfg job` shows it and `algorithm.loss_args.clip_high=0.3` changes it; where the values come from is in the docstring
of the loss.
"""

from __future__ import annotations

from rlloop.config.algorithm import AlgorithmConfig, CriticConfig

_NO_PENALTY = {"kl_coef": 0.0, "kl": "k3", "entropy_coef": 0.0}
_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
_EPS = {"eps": 1e-6}

PRESETS: dict[str, AlgorithmConfig] = {
    "grpo": AlgorithmConfig(
        loss="grpo", loss_args={**_CLIP, **_NO_PENALTY}, advantage="group_norm", advantage_args={**_EPS}
    ),
    "dr_grpo": AlgorithmConfig(
        loss="dr_grpo",
        loss_args={"max_tokens": "${rollout.max_tokens}", **_CLIP, **_NO_PENALTY},
        advantage="group_mean",
    ),
    "dapo": AlgorithmConfig(
        loss="dapo",
        loss_args={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, **_NO_PENALTY},
        advantage="group_norm",
        advantage_args={**_EPS},
        dynamic_sampling=True,
        max_refills=3,
    ),
    "gspo": AlgorithmConfig(
        loss="gspo",
        loss_args={"clip_low": 3e-4, "clip_high": 4e-4, **_NO_PENALTY},
        advantage="group_norm",
        advantage_args={**_EPS},
    ),
    "cispo": AlgorithmConfig(
        loss="cispo",
        loss_args={"clip_low": 1.0, "clip_high": 4.0, **_NO_PENALTY},
        advantage="group_norm",
        advantage_args={**_EPS},
    ),
    "dro": AlgorithmConfig(
        loss="dro", loss_args={"beta": 0.05, "level": "sequence", **_NO_PENALTY}, advantage="group_mean"
    ),
    "ppo": AlgorithmConfig(
        loss="ppo",
        loss_args={**_CLIP, "dual_clip": None, **_NO_PENALTY},
        advantage="global_norm",
        advantage_args={**_EPS},
    ),
    "ppo_critic": AlgorithmConfig(
        loss="ppo",
        loss_args={**_CLIP, "dual_clip": None, **_NO_PENALTY},
        advantage="raw",
        critic=CriticConfig(lr=1e-5),
    ),
    "reinforce": AlgorithmConfig(loss="reinforce", loss_args={**_NO_PENALTY}, advantage="group_mean"),
    "rloo": AlgorithmConfig(loss="rloo", loss_args={**_NO_PENALTY}, advantage="leave_one_out"),
    "reinforce_pp": AlgorithmConfig(
        loss="reinforce_pp",
        loss_args={**_CLIP, **_NO_PENALTY, "kl": "k2"},
        advantage="global_norm",
        advantage_args={**_EPS},
    ),
    "importance_sampling": AlgorithmConfig(
        loss="importance_sampling", loss_args={**_NO_PENALTY}, advantage="group_norm", advantage_args={**_EPS}
    ),
    "sft": AlgorithmConfig(loss="sft", advantage="raw"),
    "rejection_sampling": AlgorithmConfig(loss="sft", advantage="raw", best_only=True),
    "distillation": AlgorithmConfig(
        loss="distillation", loss_args={"kl_coef": 1.0, "entropy_coef": 0.0}, advantage="raw"
    ),
    "dpo": AlgorithmConfig(
        loss="dpo", loss_args={"kl_coef": 0.1, "variant": "sigmoid", "label_smoothing": 0.0}, advantage="raw"
    ),
    "ipo": AlgorithmConfig(
        loss="dpo", loss_args={"kl_coef": 0.1, "variant": "ipo", "label_smoothing": 0.0}, advantage="raw"
    ),
    "kto": AlgorithmConfig(
        loss="kto", loss_args={"kl_coef": 0.1, "desirable": 1.0, "undesirable": 1.0}, advantage="raw"
    ),
    "reward_model": AlgorithmConfig(loss="bradley_terry", loss_args={"center_coef": 0.0}, advantage="raw"),
}
