"""Requests in vLLM's terms, for vLLM in this process or over HTTP. Imports neither vLLM nor torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlloop.errors import ConfigError
from rlloop.types import ModelInput, SamplingParams

LEAST_TEMPERATURE = 0.01  # vLLM raises lower ones to it
RAW = "rlloop_raw_logprobs"  # a request's `extra_args` key: a second column of logprobs, at temperature 1, untruncated
CHOICES = "rlloop_choices"  # another: the name under which a server's request is asked what it chose
RAW_ID = -1  # that column's token id where two columns are asked for, since answers over HTTP are keyed by ids


def check_sampling(sampling: SamplingParams, stock: bool) -> None:
    """Raises `ConfigError` for parameters that vLLM would change, or that its own model must not be asked for."""
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        raise ConfigError(
            f"temperature is {sampling.temperature}; vLLM takes 0 (greedy) or at least {LEAST_TEMPERATURE}"
        )
    if stock and sampling.truncates:
        raise ConfigError(
            "top_k, top_p or min_p with vllm_stock: which tokens are left is decided by vLLM's own logits, and one "
            "at the edge is impossible for the trainer; leave them off, or use the engine vllm"
        )


def check_supported(prompt: ModelInput | list[int], top_logprobs: int) -> None:
    """Raises `ConfigError` where tokens beside the drawn one are asked for, or the prompt is more than text."""
    if top_logprobs:
        raise ConfigError(
            f"{top_logprobs} likeliest tokens were asked for, and an engine around vLLM gives the drawn one's logprob "
            "alone: ask for none (logprobs=0, top_logprobs=0), or serve the embedded engine"
        )
    if isinstance(prompt, ModelInput) and not prompt.is_text:
        raise ConfigError(
            "a prompt has positions or contents of its own, which engines around vLLM do not take; set "
            "rollout.engine=embedded"
        )


def vllm_params(
    sampling: SamplingParams, stop_ids: tuple[int, ...], *, raw: bool, columns: int, name: str | None = None
) -> dict[str, Any]:
    """Arguments of vLLM's own `SamplingParams`. `stop_ids`: all that end it. `columns`: of logprobs, but the first.
    `name`: under which its choices are kept once it has ended."""
    more: dict[str, Any] = {RAW: True} if raw else {}
    if name is not None:
        more[CHOICES] = name
    return {
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "ignore_eos": True,  # what ends it is all in the stop tokens
        "stop_token_ids": list(stop_ids),
        "logprobs": columns,
        "extra_args": more or None,
        "detokenize": False,
    }


def raw_of_stock(sampling: SamplingParams, logprobs: np.ndarray) -> np.ndarray:
    """Raw logprobs from vLLM's one column: NaN where they differ from the logprobs sampled with."""
    raw = logprobs.copy()
    if sampling.temperature not in (0, 1) or sampling.min_tokens:
        raw[:] = np.nan
    return raw
