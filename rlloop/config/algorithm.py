"""The section `algorithm`: loss, advantage estimator, and related settings. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from rlloop.config.instantiate import TARGET, names_target
from rlloop.config.limits import (
    ABOVE_ZERO_TO_ONE,
    UNIT,
    ZERO_OR_MORE,
    at_least,
    check_limits,
    limited,
    one_of,
    require,
    zero_or_more,
)
from rlloop.errors import ConfigError


class Anchor(StrEnum):
    """The side whose logprobs the policy ratio of a clipped loss divides by; see `rlloop.algorithms.LossBatch`."""

    trainer = "trainer"
    rollout = "rollout"


@dataclass
class CriticConfig:
    """PPO's critic: a second copy of the model with a value head. Not for a pipeline (`trainer.layout.pp`)."""

    lr: float = limited(0.0, zero_or_more("no critic"))  # peak learning rate of the critic's AdamW
    gamma: float = limited(1.0, ABOVE_ZERO_TO_ONE)  # discount per token
    lam: float = limited(0.95, UNIT)  # lambda of generalised advantage estimation (GAE)
    clip: float = limited(0.2, zero_or_more("off"))  # limit of a value's change in a step
    epochs: int = limited(1, at_least(1))  # critic's updates on the batch of a step
    normalize: bool = True  # scale advantages to mean 0 and deviation 1 over the tokens of a step

    def __post_init__(self) -> None:
        check_limits("algorithm.critic", self)


@dataclass
class AlgorithmConfig:
    """Base of the `algorithm` group.

    `loss` and `advantage` are each a name of `rlloop.algorithms`, with its arguments in `loss_args` and
    `advantage_args`; or a function or class of the reader's own, with its arguments beside it:
    `{_target_: package.loss, own_argument: 0.3}`.
    """

    loss: Any = MISSING  # grpo, dapo, ...; or {_target_: package.loss, ...}: docs/extending.md
    advantage: Any = MISSING  # group_norm, group_mean, ...; or {_target_: package.advantage, ...}
    loss_args: dict[str, Any] = field(default_factory=dict)  # arguments of a loss given by name
    advantage_args: dict[str, Any] = field(default_factory=dict)  # arguments of an advantage given by name
    anchor: Anchor = (
        Anchor.trainer
    )  # side whose logprobs are the policy ratio's denominator: trainer or rollout (the engine)
    correction: dict[str, Any] = field(
        default_factory=dict
    )  # name -> arguments; factors of several corrections multiply
    dynamic_sampling: bool = False  # leave out groups whose rewards are all equal
    best_only: bool = False  # train only on the samples with their group's best reward, where rewards differ
    max_refills: int = limited(
        0, zero_or_more("none")
    )  # with dynamic_sampling: further batches of prompts that a step may sample
    reward_kl_coef: float = limited(
        0.0, zero_or_more("off")
    )  # coefficient of KL(policy ‖ reference), subtracted from each reward
    reward_kl: str = limited("k1", one_of("k1", "k2", "k3"))  # estimate of that KL, summed over a completion
    overlong_buffer: int = limited(
        0, zero_or_more("off")
    )  # last tokens of rollout.max_tokens, over which a penalty grows
    overlong_penalty: float = limited(1.0, ZERO_OR_MORE)  # penalty of a turn that uses its whole budget
    critic: CriticConfig = field(default_factory=CriticConfig)

    def __post_init__(self) -> None:
        check_limits("algorithm", self)
        require(
            "algorithm.max_refills", self.max_refills, self.dynamic_sampling or not self.max_refills,
            "0 unless algorithm.dynamic_sampling is true",
        )  # fmt: skip
        require(
            "algorithm.advantage", self.advantage, not self.critic.lr or self.advantage == "raw",
            "raw with a critic (algorithm.critic.lr above 0), whose values make the advantages",
        )  # fmt: skip
        for kind in ("loss", "advantage"):
            key, value, args = f"algorithm.{kind}", getattr(self, kind), f"algorithm.{kind}_args"
            if not names_target(value, key, f"the arguments of a named {kind} stand in {args}"):
                require(key, value, isinstance(value, str), f"the name of one in rlloop.algorithms, or {TARGET}")
            elif getattr(self, f"{kind}_args"):
                raise ConfigError(
                    f"{args} has {', '.join(getattr(self, f'{kind}_args'))}, and belongs to a {kind} by name; the "
                    f"arguments of {value['_target_']} stand beside its _target_, as in {key}.NAME=..."
                )

    @property
    def loss_kl_coef(self) -> float:
        """The loss's own `kl_coef`, which asks for a reference policy; 0: it has none."""
        return (self.loss if isinstance(self.loss, Mapping) else self.loss_args).get("kl_coef") or 0.0
