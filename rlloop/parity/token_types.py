"""Comparison of the engine's prefill with the trainer over a prompt with images, by type of token.

Trained tokens of a completion are text, so the engine's reading of images is compared on the prompt: the logprob of
each of its tokens but the first, by type. A token is an image's if it, or the token before it, from which it is
predicted, is part of one: no policy is trained to predict a placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlloop.inputs import ModelInput
from rlloop.parity.monitor import TokenDifference
from rlloop.types import Sample

TYPES = ("text", "image")


@dataclass(frozen=True)
class PromptComparison:
    metrics: dict[str, float]
    difference: str | None  # how many tokens differ, and which is the first; None: all bits are equal
    first: TokenDifference | None = None  # its `index` is that of the prompt's token


def of_image(prompt: ModelInput, count: int) -> np.ndarray:
    """[count] bool: of tokens 1 to `count`, which begin with the prompt's, those that are or follow an image's."""
    at = np.arange(count)  # of the token before each
    chosen = np.zeros(count, bool)
    for span in prompt.contents:
        chosen |= (span.start - 1 <= at) & (at < span.end)
    return chosen


def compare_prompt(
    prompt: ModelInput, engine: np.ndarray, trainer: np.ndarray, uid: str = ""
) -> PromptComparison:  # fmt: skip
    """`engine` and `trainer`: [P - 1] float32. `uid`: of the sample whose prompt it is.

    k3 as in `parity.monitor`, over the tokens of a type.
    """
    count = len(prompt) - 1
    pictured = of_image(prompt, count)
    different, metrics = engine.view(np.int32) != trainer.view(np.int32), dict[str, float]()
    with np.errstate(all="ignore"):
        d = trainer.astype(np.float64) - engine
        k3 = np.expm1(d) - d
    for name, chosen in zip(TYPES, (~pictured, pictured), strict=True):
        if chosen.any():
            metrics[f"parity/k3_{name}"] = float(k3[chosen].mean())
    metrics["parity/prompt_tokens"] = count
    metrics["parity/prompt_tokens_different"] = float(different.mean()) if count else 0.0
    if not different.any():
        return PromptComparison(metrics, None)
    first = int(different.argmax())
    kind, at = TYPES[int(pictured[first])], first + 1
    bits = [f"0x{each.view(np.uint32)[first]:08x}" for each in (engine, trainer)]
    token = TokenDifference(
        uid, at, at, prompt.token_ids[at], float(engine[first]), bits[0], float(trainer[first]), bits[1], raw=True
    )
    return PromptComparison(
        metrics,
        f"{int(different.sum())} of {count} tokens of a prompt with images have other logprobs in the engine's "
        f"prefill than in the trainer, {int((different & pictured).sum())} of them of an image. First: "
        f"token {at}, of type {kind}: engine {engine[first]:.9g}, trainer {trainer[first]:.9g}",
        token,
    )


def compare_first_prompt(engine: Any, trainer: Any, samples: Sequence[Sample]) -> PromptComparison | None:
    """Compares the first sample with images in its prompt; None without one, or where a side cannot be asked."""
    prefill: Callable[..., Any] | None = getattr(engine, "prefill_logprobs", None)
    score: Callable[..., Any] | None = getattr(trainer, "prompt_logprobs", None)
    if prefill is None or score is None:
        return None
    for sample in samples:
        prompt = sample.completion.model_input
        if prompt is not None and prompt.images:
            sampled = prefill([prompt])
            return None if sampled is None else compare_prompt(prompt, sampled[0], score(prompt), sample.uid)
    return None
