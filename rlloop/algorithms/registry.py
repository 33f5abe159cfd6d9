"""Losses, estimators and corrections by name or by `_target_`, with their arguments checked before any work starts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import mul
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlloop.algorithms.advantages import ADVANTAGES, GROUP_RELATIVE
from rlloop.algorithms.batch import Loss, LossBatch, LossOutput, entropy_term, marks_of
from rlloop.algorithms.corrections import CORRECTIONS, WEIGHING, Correction, corrected, measured, possible
from rlloop.algorithms.losses import LOSSES
from rlloop.algorithms.shaping import best_of_groups, groups_with_signal, overlong_penalty
from rlloop.config.algorithm import AlgorithmConfig, Anchor
from rlloop.config.instantiate import accepts, resolve
from rlloop.errors import ConfigError, did_you_mean

StepAdvantages = Callable[
    [Sequence[float], Sequence[int], Sequence[int], Sequence[float] | None], tuple[list[float], list[bool]]
]

# The range of an argument by its name, in every function that takes it; its type comes from the annotation.
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "clip_low": (lambda x: 0 <= x <= 1, "from 0 to 1"),
    "clip_high": (lambda x: x >= 0, "0 or more"),
    "dual_clip": (lambda x: x is None or x > 1, "above 1, or null for none"),
    "kl_coef": (lambda x: 0 <= x < math.inf, "0 or more"),
    "entropy_coef": (lambda x: 0 <= x < math.inf, "0 or more"),
    "max_tokens": (lambda x: x >= 1, "1 or more"),
    "beta": (lambda x: 0 <= x < math.inf, "0 or more"),
    "label_smoothing": (lambda x: 0 <= x < 0.5, "from 0 to below 0.5"),
    "desirable": (lambda x: 0 <= x < math.inf, "0 or more"),
    "undesirable": (lambda x: 0 <= x < math.inf, "0 or more"),
    "center_coef": (lambda x: 0 <= x < math.inf, "0 or more"),
    "eps": (lambda x: 0 <= x < math.inf, "0 or more"),
    "cap": (lambda x: x > 0, "above 0"),
    "low": (lambda x: x >= 0, "0 or more"),
    "high": (lambda x: x > 0, "above 0"),
}


def get_loss(name: str, **args: Any) -> Loss:
    """A loss by its name, with arguments other than its defaults: `get_loss("dapo", clip_high=0.3)`.

    Raises `ConfigError` for an unknown name, and for an argument that it does not have or that is out of range.
    """
    loss = _get("loss", LOSSES, name, args)
    vars(loss).update(marks_of(loss))
    return entropy_term(loss) if args.get("entropy_coef") else loss


def get_advantage(name: str, **args: Any) -> Callable[[ArrayLike, ArrayLike], NDArray[np.float64]]:
    """An estimator by its name: `get_advantage("group_norm", eps=1e-4)(rewards, groups)`, [n] and [n] to [n].

    Raises `ConfigError` for an unknown name, and for an argument that it does not have or that is out of range.
    """
    return _get("advantage", ADVANTAGES, name, args)


def get_correction(corrections: Mapping[str, Mapping[str, Any] | None]) -> Correction:
    """Corrections as one, their factors multiplied: `get_correction({"tis": {"cap": 3.0}, "veto": {}})`.

    One of your own has a name of your choice and a `_target_` among its arguments: a function from a `LossBatch` to
    `Weights`. Whether it weighs tokens by the ratio, as only one should, is then yours to know.
    """
    if not corrections:
        raise ConfigError(f"no correction is named; there are {', '.join(CORRECTIONS)}")
    for name, args in corrections.items():
        if not isinstance(args, Mapping | None):
            raise ConfigError(
                f"correction {name} is {args!r}; it must be a mapping of its arguments, as {{{name}: {{}}}}"
            )
    functions = [
        resolve(args, f"algorithm.correction.{name}", ("batch",))
        if args and "_target_" in args
        else _get("correction", CORRECTIONS, name, dict(args or {}))
        for name, args in corrections.items()
    ]
    weighing = [name for name in corrections if name in WEIGHING]
    if len(weighing) > 1:
        raise ConfigError(
            f"corrections {' and '.join(weighing)} both weigh tokens by the ratio, which counts it twice; keep one of "
            "them (mask and veto combine with any)"
        )
    return lambda batch: reduce(mul, [function(batch) for function in functions])


def loss_for(algorithm: AlgorithmConfig) -> Loss:
    """The configured loss with its correction, and with the `is/*` statistics where the ratio is known."""
    if isinstance(algorithm.loss, Mapping):
        loss = _checked(resolve(algorithm.loss, "algorithm.loss", ("batch",)), algorithm.loss)
    else:
        loss = get_loss(algorithm.loss, **algorithm.loss_args)
    marks = marks_of(loss)
    if "whole_step" in marks and algorithm.correction:
        raise ConfigError(
            f"algorithm.correction weighs tokens, and loss {algorithm.loss} compares whole sequences; drop it (of "
            "parity.mode=fallback it is a part: set parity.mode=require or observe)"
        )
    if algorithm.correction:
        correction = get_correction(algorithm.correction)
        if algorithm.anchor is Anchor.rollout:
            raise ConfigError(
                "a correction weighs the trainer's logprobs against the engine's; with algorithm.anchor=rollout both "
                "are the engine's, and it would do nothing. Set algorithm.anchor=trainer, or drop the correction"
            )
        weighing = [name for name in algorithm.correction if name in WEIGHING]
        if algorithm.loss == "importance_sampling" and weighing:
            raise ConfigError(
                f"loss importance_sampling already weighs by the ratio that correction {weighing[0]} would multiply "
                "again; use mask or veto with it, or another loss"
            )
        loss = corrected(loss, correction)
    else:
        loss = possible(loss)
    loss = measured(loss) if algorithm.anchor is Anchor.trainer else loss
    vars(loss).update(marks)
    return loss


def advantages_for(algorithm: AlgorithmConfig, max_tokens: int, group_size: int) -> StepAdvantages:
    """The configured function from rewards to advantages, `(rewards, groups, lengths, kl) -> (advantages, keep)`, [n].

    `lengths` are tokens of each one's longest turn, `max_tokens` a turn's budget (`rollout.max_tokens`); `kl` is its
    divergence from the reference in nats, for `reward_kl_coef`. Samples with keep False are not trained on: dynamic
    sampling found no signal in their group. Advantages are estimated over all samples.
    """
    if isinstance(algorithm.advantage, Mapping):
        estimator = resolve(algorithm.advantage, "algorithm.advantage", ("rewards", "groups"))
    else:
        estimator = get_advantage(algorithm.advantage, **algorithm.advantage_args)
    if group_size == 1 and algorithm.advantage in GROUP_RELATIVE:
        raise ConfigError(
            f"rollout.group_size is 1, but advantage {algorithm.advantage} compares samples of one prompt with each "
            "other; set rollout.group_size to 2 or more, or algorithm.advantage to global_norm or raw"
        )
    if group_size == 1 and algorithm.dynamic_sampling:
        raise ConfigError(
            "rollout.group_size is 1, and algorithm.dynamic_sampling drops groups whose rewards are all equal, so "
            "nothing would be left; set rollout.group_size to 2 or more, or algorithm.dynamic_sampling to false"
        )
    if algorithm.overlong_buffer:
        overlong_penalty([], max_tokens=max_tokens, buffer=algorithm.overlong_buffer)

    def estimate(
        rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int], kl: Sequence[float] | None = None
    ) -> tuple[list[float], list[bool]]:
        shaped = np.asarray(rewards, dtype=np.float64)
        keep = groups_with_signal(shaped, groups) if algorithm.dynamic_sampling else np.ones(len(shaped), dtype=bool)
        if algorithm.best_only:
            keep &= best_of_groups(shaped, groups)
        if algorithm.overlong_buffer:
            penalty = overlong_penalty(lengths, max_tokens=max_tokens, buffer=algorithm.overlong_buffer)
            shaped = shaped + algorithm.overlong_penalty * penalty
        if kl is not None:
            shaped = shaped - algorithm.reward_kl_coef * np.asarray(kl)
        advantages = np.asarray(estimator(shaped, groups), dtype=np.float64)
        if advantages.shape != shaped.shape or not np.isfinite(advantages).all():
            raise ConfigError(
                f"algorithm.advantage returned {advantages!r:.80} for {len(shaped)} rewards; it must be an array of as "
                "many finite numbers"
            )
        return advantages.tolist(), keep.tolist()

    return estimate


def _checked(loss: Loss, config: Mapping[str, Any]) -> Loss:
    """The loss of one's own, with its marks, held to what a loss returns."""

    def checked(batch: LossBatch, /) -> LossOutput:
        output = loss(batch)
        if not isinstance(output, LossOutput):
            raise ConfigError(
                f"{config['_target_']} returned a {type(output).__name__}; a loss returns a LossOutput(loss, metrics)"
            )
        return output

    vars(checked).update(marks_of(loss))
    return entropy_term(checked) if config.get("entropy_coef") else checked


def _get(kind: str, registry: Mapping[str, Callable[..., Any]], name: str, args: dict[str, Any]) -> Any:
    if name not in registry:
        dotted = f". A dotted path is the value of algorithm.{kind}._target_"
        hint = dotted if "." in name else did_you_mean(name, registry)
        raise ConfigError(f"there is no {kind} {name!r}; there are {', '.join(registry)}{hint}")
    function = registry[name]
    parameters = {n: p for n, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}
    hints = get_type_hints(function)
    for key, value in args.items():
        if key not in parameters:
            has = (", ".join(parameters) or "none") + did_you_mean(key, parameters)
            raise ConfigError(f"{kind} {name} has no argument {key!r}; it has {has}")
        _check(f"{kind} {name}: {key}", key, value, hints[key])
    values = {n: p.default for n, p in parameters.items()} | args
    if {"low", "high"} <= values.keys() and values["low"] >= values["high"]:
        raise ConfigError(f"{kind} {name}: low ({values['low']}) must be below high ({values['high']})")
    return partial(function, **args)


def _check(where: str, key: str, value: Any, hint: Any) -> None:
    if get_origin(hint) is Literal:
        good, allowed = accepts(hint, value), f"one of {', '.join(get_args(hint))}"
    else:
        in_range, allowed = _RANGES[key]
        good = accepts(hint, value) and in_range(value)
        allowed = f"a whole number, {allowed}" if hint is int else f"a number {allowed}"
    if not good:
        raise ConfigError(f"{where} is {value!r}; it must be {allowed}")
