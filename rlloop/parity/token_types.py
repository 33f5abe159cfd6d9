"""Comparison of the engine's prefill with the trainer over a prompt with images, by type of token.

Trained tokens of a completion are text, so the engine's reading of images is compared on the prompt: the logprob of
each of its tokens but the first, by whether the token before it, from which it is predicted, is text or part of an
image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlloop.inputs import ModelInput

TYPES = ("text", "image")


@dataclass(frozen=True)
class PromptComparison:
    metrics: dict[str, float]
    difference: str | None  # the first token that differs; None: all bits are equal


def after_image(prompt: ModelInput, count: int) -> np.ndarray:
    """[count] bool: of tokens 1 to `count`, which begin with the prompt's, those predicted from a part of an image."""
    at = np.arange(count)
    chosen = np.zeros(count, bool)
    for span in prompt.contents:
        chosen |= (span.start <= at) & (at < span.end)
    return chosen


def compare_prompt(prompt: ModelInput, engine: np.ndarray, trainer: np.ndarray) -> PromptComparison:
    """`engine` and `trainer`: [P - 1] float32. k3 as in `parity.monitor`, over the tokens of a type."""
    count = len(prompt) - 1
    of_image = after_image(prompt, count)
    different, metrics = engine.view(np.int32) != trainer.view(np.int32), dict[str, float]()
    with np.errstate(all="ignore"):
        d = trainer.astype(np.float64) - engine
        k3 = np.expm1(d) - d
    for name, chosen in zip(TYPES, (~of_image, of_image), strict=True):
        if chosen.any():
            metrics[f"parity/k3_{name}"] = float(k3[chosen].mean())
    metrics["parity/prompt_tokens"] = count
    metrics["parity/prompt_tokens_different"] = float(different.mean()) if count else 0.0
    if not different.any():
        return PromptComparison(metrics, None)
    first = int(different.argmax())
    kind = TYPES[int(of_image[first])]
    return PromptComparison(
        metrics,
        f"{int(different.sum())} of {count} tokens of a prompt with images have other logprobs in the engine's "
        f"prefill than in the trainer, {int((different & of_image).sum())} of them predicted from an image. First: "
        f"token {first + 1}, predicted from {kind}: engine {engine[first]:.9g}, trainer {trainer[first]:.9g}",
    )


def compare_first_prompt(engine: Any, trainer: Any, prompts: list[ModelInput]) -> PromptComparison | None:
    """Of the first prompt that has images; None where none has, or an engine or trainer cannot be asked."""
    prefill: Callable[..., Any] | None = getattr(engine, "prefill_logprobs", None)
    score: Callable[..., Any] | None = getattr(trainer, "prompt_logprobs", None)
    prompt = next((each for each in prompts if each.images), None)
    if prefill is None or score is None or prompt is None:
        return None
    sampled = prefill([prompt])
    return None if sampled is None else compare_prompt(prompt, sampled[0], score(prompt))
