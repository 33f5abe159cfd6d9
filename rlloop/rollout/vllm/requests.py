"""Requests in vLLM's terms, for vLLM in this process or over HTTP. Imports neither vLLM nor torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from rlloop.errors import ConfigError
from rlloop.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

    from rlloop.models.adapter_slots import LoadedAdapter

LEAST_TEMPERATURE = 0.01  # vLLM raises lower ones to it
RAW = "rlloop_raw_logprobs"  # a request's `extra_args` key: a second column of logprobs, at temperature 1, untruncated
CHOICES = "rlloop_choices"  # another: the name under which a server's request is asked what it chose
RAW_ID = -1  # that column's token id where two columns are asked for, since answers over HTTP are keyed by ids


@dataclass
class Request:
    """A request in flight: collects the tokens and logprobs that vLLM's core sends after each step."""

    id: int
    model_input: ModelInput  # the prompt
    sampling: SamplingParams
    adapter: LoadedAdapter | None = None
    scored: np.ndarray | None = None  # [P - 1] float32: prefill's logprobs of the prompt; None: not requested
    token_ids: list[int] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)  # float32: all columns of a token, then of the next
    cached: int = 0  # of the prompt's tokens

    @cached_property
    def plain(self) -> bool:
        """True if token ids and sampling parameters are all that there is to it."""
        return self.adapter is None and self.scored is None and self.model_input.positions is None

    @property
    def prompt_ids(self) -> list[int]:
        return self.model_input.token_ids

    @property
    def salt(self) -> str | None:
        """The `cache_salt` that keeps blocks of other images, positions or adapters apart; None for a plain text."""
        if self.scored is not None:  # all of it is computed
            return f"scored {self.id}"
        names = [] if self.adapter is None else [self.adapter.key]
        if not self.model_input.is_text:
            names.append(_content_name(self.model_input))
        return " ".join(names) or None

    def take(self, output: EngineCoreOutput) -> None:
        if output.prefill_stats is not None and not self.token_ids:
            self.cached = output.prefill_stats.num_cached_tokens
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs.tobytes()


def _content_name(prompt: ModelInput) -> str:
    """Name of a prompt's positions and images. Texts after the images do not change it, so that a conversation's turns
    share their blocks."""
    count = len(prompt)
    last = max((span.end for span in prompt.contents), default=0)
    positions = None if prompt.positions is None else prompt.positions[..., :last]
    head = ModelInput(prompt.token_ids[:last], positions, prompt.contents)
    if not np.array_equal(head.positions_at(0, count), prompt.positions_at(0, count)):
        last = count
    return blake2b(prompt.content_key(0, last), digest_size=16).hexdigest()


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


def check_top(top_logprobs: int) -> None:
    """Raises `ConfigError` where tokens beside the drawn one are asked for."""
    if top_logprobs:
        raise ConfigError(
            f"{top_logprobs} likeliest tokens were asked for, and an engine around vLLM gives the drawn one's logprob "
            "alone: ask for none (logprobs=0, top_logprobs=0), or serve the embedded engine"
        )


def check_text(prompt: ModelInput | list[int]) -> None:
    """Raises `ConfigError` for a prompt that is more than text."""
    if isinstance(prompt, ModelInput) and not prompt.is_text:
        raise ConfigError(
            "a prompt has images or positions of its own, which neither vLLM's own server nor its own models are "
            "given: set launch=local, with rollout.engine=vllm or embedded, or serve the engine by `rlloop serve "
            "engine`, with --engine vllm or embedded"
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
