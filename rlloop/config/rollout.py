"""The section `rollout`: sampling of completions, and the engine. Imports neither torch, ray nor vllm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlloop.config.instantiate import TARGET, names_target
from rlloop.config.layout import LayoutConfig
from rlloop.config.limits import (
    ABOVE_ZERO_TO_ONE,
    TEMPERATURE,
    UNIT,
    Limit,
    at_least,
    check_limits,
    limited,
    one_of,
    require,
    zero_or_more,
)
from rlloop.config.numerics import DriftConfig, RolloutProfile

SAMPLED = Limit(TEMPERATURE.holds, f"{TEMPERATURE.says} (0, greedy, teaches nothing; eval.temperature may be 0)")
TOP_K = Limit(lambda x: 0 <= x < 2**31, "0 (off) or more, below 2**31")


class EngineKind(StrEnum):
    embedded = "embedded"  # rlloop.Engine
    vllm = "vllm"  # vLLM running rlloop's model and sampler: the same bits
    vllm_stock = "vllm_stock"  # vLLM's own model: measured, and corrected


@dataclass
class PartialConfig:
    """Conversations that go on from step to step: docs/agents.md."""

    prompts: int = limited(
        0, zero_or_more("off: a step waits for all of its groups")
    )  # groups in progress beyond num_prompts
    max_version_lag: int = limited(2, at_least(1))  # largest age, in steps, of the oldest token of a trained sample
    overdue: str = limited(
        "wait", one_of("wait", "drop")
    )  # for groups that would become older: wait for them, or drop (reject) them, with the reason
    slice_tokens: int = limited(
        0, zero_or_more("off: turns are sampled whole")
    )  # tokens requested at a time; between slices a step may begin and the weights change

    def __post_init__(self) -> None:
        check_limits("rollout.partial", self)


@dataclass
class RolloutConfig:
    num_prompts: int = limited(32, at_least(1))  # prompts of a step
    group_size: int = limited(16, at_least(1))  # completions of each prompt
    max_tokens: int = limited(256, at_least(1))  # limit of a completion; of a turn in a conversation
    min_tokens: int = 0  # tokens before which no stop token is drawn
    temperature: float = limited(1.0, SAMPLED)  # sampling temperature
    top_p: float = limited(
        1.0, ABOVE_ZERO_TO_ONE
    )  # nucleus sampling: only the likeliest tokens with this total probability
    top_k: int = limited(0, TOP_K)  # only the k likeliest tokens
    min_p: float = limited(0.0, UNIT)  # only tokens at least this likely, relative to the likeliest
    engine: Any = EngineKind.embedded  # embedded; vllm, vllm_stock: docs/vllm.md; one of your own: docs/extending.md
    page_size: int = limited(16, at_least(1))  # tokens of one block of the key-value cache
    max_batch_tokens: int = limited(8192, at_least(1))  # limit of tokens in an engine step
    max_cache_tokens: int | None = None  # None: as many as the batch and the model's context need
    prefix_caching: bool = True  # prompts with a common prefix share cache blocks
    sleep: bool | None = (
        None  # free the cache's memory while the trainer works; null: true for the embedded engine beside it on a GPU
    )
    profile: RolloutProfile = field(default_factory=RolloutProfile)
    partial: PartialConfig = field(default_factory=PartialConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)

    def __post_init__(self) -> None:
        check_limits("rollout", self)
        self.layout.checked("rollout")
        require(
            "rollout.min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens,
            f"from 0 to rollout.max_tokens ({self.max_tokens})",
        )  # fmt: skip
        if self.max_cache_tokens is not None:
            require(
                "rollout.max_cache_tokens", self.max_cache_tokens, self.max_cache_tokens >= self.max_tokens,
                f"at least rollout.max_tokens ({self.max_tokens}), or null for as many as fit",
            )  # fmt: skip
        if not names_target(self.engine, "rollout.engine"):
            require(
                "rollout.engine", self.engine, self.engine in list(EngineKind), f"{', '.join(EngineKind)}, or {TARGET}"
            )
            self.engine = EngineKind(self.engine)

    @property
    def engine_name(self) -> str:
        """The engine's name, for messages."""
        return str(self.engine["_target_"] if isinstance(self.engine, Mapping) else self.engine)
