"""Front end shared by all engines: checks, numbers and seeds requests; a backend computes them.

A backend is a subclass: rlloop's own scheduler (`engine.Engine`), vLLM in this process (`vllm.engine.VllmEngine`) or
behind HTTP (`vllm.remote_vllm.ServedEngine`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlloop.errors import ConfigError
from rlloop.models.prompt_scores import check_alternatives
from rlloop.parallel.progress import tick
from rlloop.rollout.engine.scheduler import EngineStats
from rlloop.rollout.engine.validation import Limits, adapter_for_each, check_request, drawn_seed, one_for_each
from rlloop.types import Completion, ModelInput, Part, PromptScores, SamplingParams, as_model_input, changed


class EngineFrontEnd(ABC):
    """Continues prompts. One caller at a time: it is not thread-safe."""

    policy_version = 0

    def __init__(self, limits: Limits, seed: int) -> None:
        """`seed`: of the stream that requests without a seed of their own draw theirs from."""
        self.limits = limits
        self._seed = seed
        self._next_id = 0
        self._stats = EngineStats()

    # ---------------------------------------------------------------------------------------------- the backend

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests that were added and whose completions were not handed out yet."""

    @abstractmethod
    def step(self) -> list[tuple[int, Completion]]:
        """Compute one batch of tokens; returns the requests that it finished.

        If it raises, every request in flight is dropped and the engine is ready for new ones.
        """

    @abstractmethod
    def so_far(self, request_id: int, begin: int = 0) -> Part:
        """The tokens of a request in flight, from the `begin`-th on; empty if it waits or has ended."""

    @abstractmethod
    def abort(self, request_id: int) -> Completion | None:
        """End one request now; returns its completion so far, or None if it is not in flight."""

    @abstractmethod
    def abort_all(self) -> list[tuple[int, Completion]]:
        """End every request now; returns each one's completion so far."""

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the bits; the engine's own settings do not, so they are left out."""

    @abstractmethod
    def _accept(
        self, id: int, prompt: ModelInput, sampling: SamplingParams, top_logprobs: int, adapter: str | None
    ) -> None:
        """Queue a request that passed the checks and has a seed."""

    def _check_adapter(self, adapter: str | None) -> None:
        """Raises `ConfigError` for an adapter that is not loaded, or where the engine has none."""
        if adapter is not None:
            raise ConfigError(
                f"adapter {adapter!r} was named, and this engine has none by request: rlloop's own model has, in the "
                "embedded engine and inside vLLM in this process"
            )

    def _check(self, prompt: ModelInput | list[int], sampling: SamplingParams, top_logprobs: int = 0) -> None:
        """Raises `ConfigError` for a request that this engine cannot take."""
        check_alternatives(top_logprobs)
        check_request(prompt, sampling, self.limits)

    @abstractmethod
    def score(self, prompt: ModelInput | list[int], top_logprobs: int = 0) -> PromptScores:
        """Logprobs of a prompt's own tokens, from one forward on the trainer's path; nothing is cached or sampled."""

    @abstractmethod
    def _forget_cached(self) -> None:
        """Drop everything computed with weights of another version. Called with nothing in flight."""

    def _goes_on(self) -> bool:
        """True while `generate` must take further steps."""
        return self.has_work

    def _rest(self) -> None:  # noqa: B027
        """Hook called when `generate` returns or raises, with nothing in flight."""

    # ---------------------------------------------------------------------------------------------- whole batches

    def generate(
        self,
        prompts: Sequence[ModelInput | list[int]],
        sampling: SamplingParams | list[SamplingParams],
        on_progress: Callable[[int, int], None] | None = None,
        adapters: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt, token ids or a `ModelInput`; completions come in the order of the prompts.

        `sampling` is one for all, or a list with one for each; so is `adapters`, names of loaded adapters (None: the
        model's own, or the base). `on_progress(finished, tokens)` is called after each step with the numbers of
        finished completions and of generated tokens so far.
        """
        prompts = list(prompts)
        if self.has_work:
            raise ConfigError("generate was called while requests are in flight; step() until has_work is False")
        each, names = one_for_each(prompts, sampling), adapter_for_each(prompts, adapters)
        for prompt, params, name in zip(prompts, each, names, strict=True):
            self._check(prompt, params)
            self._check_adapter(name)
        done: dict[int, Completion] = {}
        before = self._stats.made_tokens
        try:
            requests = zip(prompts, each, names, strict=True)
            ids = [self._add(prompt, params, adapter=name) for prompt, params, name in requests]
            while self._goes_on():
                done.update(self.step())
                tick()
                if on_progress is not None:
                    on_progress(len(done), self._stats.made_tokens - before)
        finally:
            self.abort_all()  # requests are left only after an exception or an interrupt
            self._rest()
        return [done[id] for id in ids]

    # ---------------------------------------------------------------------------------------------- step by step

    def add_request(
        self,
        prompt: ModelInput | list[int],
        sampling: SamplingParams,
        *,
        top_logprobs: int = 0,
        adapter: str | None = None,
    ) -> int:
        """Queue one prompt; returns the id under which `step` will hand out its completion.

        With `top_logprobs`, the completion has that many `alternatives` a token (of a small vocabulary, all).
        `adapter`: the name of the loaded adapter that computes it, in the version that it has now.
        """
        self._check(prompt, sampling, top_logprobs)
        self._check_adapter(adapter)
        return self._add(prompt, sampling, top_logprobs, adapter)

    def _add(
        self,
        prompt: ModelInput | list[int],
        sampling: SamplingParams,
        top_logprobs: int = 0,
        adapter: str | None = None,
    ) -> int:
        id = self._next_id
        self._next_id += 1
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=drawn_seed(self._seed, id))
        model_input = as_model_input(prompt)
        ids = np.asarray(model_input.token_ids).tolist()  # Python's integers, whatever kind they were
        self._accept(id, changed(model_input, token_ids=ids), sampling, top_logprobs, adapter)
        return id

    @property
    def has_work(self) -> bool:
        return self.in_flight > 0

    # ---------------------------------------------------------------------------------------------- weights and facts

    def set_version(self, version: int) -> None:
        """Declare the model's weights to be those of `version`; drops everything computed with others."""
        if self.has_work:
            raise ConfigError(
                f"set_version({version}) came while {self.in_flight} requests are in flight; a completion has one "
                "version, so finish them or call abort_all() first"
            )
        self.policy_version = version
        self._forget_cached()

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its completion may have together."""
        return self.limits.longest

    def stats(self) -> EngineStats:
        """Counts since the engine was created."""
        return dataclasses.replace(self._stats)

    def _count(self, prompt_ids: list[int], token_ids: list[int], cached: int = 0) -> None:
        """Count a completion, for backends without counts of their own. `cached`: prompt tokens found in the cache."""
        stats = self._stats
        stats.requests += 1
        stats.prompt_tokens += len(prompt_ids)
        stats.made_tokens += len(token_ids)
        stats.cached_tokens += cached
        stats.computed_tokens += len(prompt_ids) + len(token_ids) - 1 - cached
