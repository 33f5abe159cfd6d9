"""Data types of the loop. Imports numpy, but neither torch, ray nor vllm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal

import numpy as np

from rlloop.errors import ConfigError

FinishReason = Literal["stop", "length", "abort"]
WHOLE: tuple[FinishReason, ...] = ("stop", "length")  # reasons after which a completion may be trained


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's too


def is_ids(given: Any) -> bool:
    """True for a flat list of whole numbers. A tensor would truncate other numbers silently."""
    array = np.asarray(given)
    return array.ndim == 1 and (array.dtype.kind in "iu" or not len(array))


@dataclass(frozen=True)
class ContentSpan:
    """Placeholder tokens [start, end) that stand for content other than text, such as an image."""

    start: int
    end: int
    digest: str  # of the content: caches tell equal placeholders apart by it


@dataclass(frozen=True)
class ModelInput:
    """Input of a model: token ids, their positions for the rope, and the content that placeholder tokens stand for.

    A plain `list[int]` is accepted wherever a `ModelInput` is: text at positions 0, 1, 2, ... Tokens that follow an
    input continue from its largest position + 1. Attention masks, cache slots and random numbers go by a token's index.

    Raises `ConfigError` for positions of another length than the tokens, or spans outside of them.

    Example: `ModelInput.from_ids([4, 6, 8])`.
    """

    token_ids: list[int]  # [T]
    positions: np.ndarray | None = None  # [T] or [axes, T] int64; None: 0 to T - 1
    contents: tuple[ContentSpan, ...] = ()  # ascending; none in a text

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        if self.positions is not None:
            positions = np.asarray(self.positions)
            if positions.ndim not in (1, 2) or positions.shape[-1] != count or positions.dtype.kind not in "iu":
                raise ConfigError(
                    f"ModelInput.positions is {positions.dtype} {list(positions.shape)}; "
                    f"it must be whole numbers, [{count}] or [axes, {count}]: one for each token"
                )
            if positions.size and positions.min() < 0:
                raise ConfigError(f"ModelInput.positions has {positions.min()}; positions begin at 0")
            object.__setattr__(self, "positions", positions.astype(np.int64, copy=False))
        ends = [0, *(end for span in self.contents for end in (span.start, span.end)), count]
        if ends != sorted(ends):
            raise ConfigError(
                f"ModelInput.contents is {self.contents!r:.80}; spans must ascend within the {count} tokens"
            )

    @classmethod
    def from_ids(cls, token_ids: Sequence[int]) -> ModelInput:
        """Text, at positions 0, 1, 2, ..."""
        return cls(list(token_ids))

    from_ints = from_ids  # as Tinker's types name it

    def to_ints(self) -> list[int]:
        return self.token_ids

    @property
    def length(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_text(self) -> bool:
        """True for text at positions 0, 1, 2, ..., which token ids alone describe."""
        return self.positions is None and not self.contents

    def positions_at(self, begin: int, end: int) -> np.ndarray:
        """[n] or [axes, n] int64: positions of tokens `begin` to `end`, including tokens that follow the input."""
        if self.positions is None:
            return np.arange(begin, end)
        known, following = self.positions[..., begin:end], np.arange(max(begin, len(self)), end) - len(self)
        following += self.positions.max(initial=-1) + 1
        return np.concatenate([known, np.broadcast_to(following, (*known.shape[:-1], len(following)))], axis=-1)

    def content_key(self, begin: int, end: int) -> bytes:
        """Cache key of tokens `begin` to `end` beside their ids: positions and content digests; b"" for text.

        A cache of keys and values must add the keys of all tokens before.
        """
        if self.is_text:
            return b""
        spans = [(each.start, each.end, each.digest) for each in self.contents if each.start < end and begin < each.end]
        positions = self.positions_at(begin, end)
        if not spans and (positions == np.arange(begin, end)).all():
            return b""
        return repr((positions.tolist(), spans)).encode()


def as_model_input(given: ModelInput | Sequence[int]) -> ModelInput:
    """A list of token ids as a `ModelInput`. Engines and scoring check the ids."""
    return given if isinstance(given, ModelInput) else ModelInput.from_ids(given)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one completion.

    The distribution sampled from: logits without the stop tokens while there are fewer than `min_tokens`, divided by
    `temperature`, cut to `top_k`, then to `top_p` of the rest, then to tokens with at least `min_p` of the top token's
    probability, and renormalised. Ties are broken by the lower token id everywhere.

    Temperature 0 takes the most probable allowed token. Nothing is sampled then, and logprobs are the raw ones (at
    temperature 1, untruncated) whatever `top_p`, `top_k`, `min_p` and `min_tokens` say, in the trainer too.

    Raises `ConfigError` for values outside the ranges below.

    Example: `SamplingParams(max_tokens=64, temperature=0.7, top_p=0.95, seed=1)`.
    """

    max_tokens: int  # at least 1
    min_tokens: int = 0  # end-of-sequence and stop tokens are impossible before this many tokens
    temperature: float = 1.0  # 0 is greedy: the lowest id among the largest logits; else from 1e-6 to 1e6
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 switches it off
    min_p: float = 0.0  # [0, 1]
    seed: int | None = None  # None: the engine picks one; equal seed, weights and prompt give an equal completion
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()  # besides the model's end-of-sequence ids

    def __post_init__(self) -> None:
        for name in ("max_tokens", "min_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not _whole(value) and (value is not None or name != "seed"):
                raise ConfigError(f"SamplingParams.{name} is {value!r}; it must be a whole number")
        for name in ("temperature", "top_p", "min_p"):
            if not isinstance(getattr(self, name), Real):
                raise ConfigError(f"SamplingParams.{name} is {getattr(self, name)!r}; it must be a number")
        stops = tuple(self.stop_token_ids) if isinstance(self.stop_token_ids, Iterable) else (None,)
        if not all(map(_whole, stops)):
            raise ConfigError(f"SamplingParams.stop_token_ids is {self.stop_token_ids!r}; it must be ids of tokens")
        object.__setattr__(self, "stop_token_ids", stops)
        checks = [
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens ({self.max_tokens})"),
            # logits are divided by it in float32, where far smaller ones leave no finite number
            ("temperature", self.temperature == 0.0 or 1e-6 <= self.temperature <= 1e6, "0 (greedy) or 1e-6 to 1e6"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", 0 <= self.top_k < 2**31, "0 (off) or a positive number below 2**31"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "None or from 0 to 2**63 - 1"),
        ]
        for name, good, allowed in checks:
            if not good:
                raise ConfigError(f"SamplingParams.{name} is {getattr(self, name)!r}; it must be {allowed}")

    @property
    def truncates(self) -> bool:
        """True if top-k, top-p or min-p makes some tokens impossible."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def stop_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that end a completion: its stop tokens and, unless `ignore_eos`, the model's end-of-sequence ids."""
    return params.stop_token_ids if params.ignore_eos else (*eos_token_ids, *params.stop_token_ids)


@dataclass(frozen=True)
class Alternatives:
    """The k likeliest tokens in place of each of T tokens, by descending logit, then ascending id.

    Engines return them on request (`Engine.add_request(..., top_logprobs=k)`).
    """

    token_ids: np.ndarray  # [T, k] int64
    logprobs: np.ndarray  # [T, k] float32, of the distribution sampled from; −inf for impossible tokens
    raw_logprobs: np.ndarray  # [T, k] float32, at temperature 1 without truncation

    def __getitem__(self, places: slice) -> Alternatives:
        return Alternatives(self.token_ids[places], self.logprobs[places], self.raw_logprobs[places])

    @classmethod
    def joined(cls, parts: Sequence[Alternatives]) -> Alternatives | None:
        """Concatenated; None for no parts."""
        if not parts:
            return None
        names = ("token_ids", "logprobs", "raw_logprobs")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


@dataclass(frozen=True)
class PromptScores:
    """Logprobs of a prompt's P tokens but the first, each given those before it."""

    logprobs: np.ndarray  # [P - 1] float32, at temperature 1 without truncation: the trainer's `token_logprobs`
    alternatives: Alternatives | None = None  # [P - 1, k], where k > 0 were asked for


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a completion in progress."""

    token_ids: list[int]  # [T]
    logprobs: np.ndarray  # [T] float32
    raw_logprobs: np.ndarray  # [T] float32
    alternatives: Alternatives | None = None

    def __getitem__(self, places: slice) -> Part:
        more = None if self.alternatives is None else self.alternatives[places]
        return Part(self.token_ids[places], self.logprobs[places], self.raw_logprobs[places], more)


NOTHING = Part([], np.zeros(0, np.float32), np.zeros(0, np.float32))


@dataclass(frozen=True)
class Completion:
    """An engine's completion of one prompt, with the logprobs it was sampled with.

    For a greedy completion (temperature 0) `logprobs` and `raw_logprobs` are equal.
    """

    prompt_ids: list[int]
    token_ids: list[int]  # [T], the stop token included; in a conversation also the tokens of others
    logprobs: np.ndarray  # [T] float32, of the distribution sampled from; T counts the policy's tokens alone
    raw_logprobs: np.ndarray  # [T] float32, at temperature 1 without truncation
    policy_version: int  # of the weights that sampled its tokens; the oldest, where `versions` has several
    finish_reason: FinishReason
    sampling: SamplingParams  # as used: its seed is always set
    # Experts chosen for every token read: all of prompt and completion but the last one.
    routed_experts: np.ndarray | None = None  # [tokens, layers, top_k], smallest unsigned type
    turns: tuple[tuple[int, int], ...] | None = None  # [start, end) in token_ids of the policy's turns; None: all
    selected: np.ndarray | None = None  # [tokens, layers] int64: digests of the tokens that sparse attention read
    origin: str | None = None  # region/address of its engine, where there are several
    alternatives: Alternatives | None = None  # [T, k], where they were asked for
    model_input: ModelInput | None = None  # the prompt, where it is more than text; begins with prompt_ids
    versions: tuple[int, ...] | None = None  # of each turn, where the weights changed in between; None: policy_version

    def part(self, begin: int = 0) -> Part:
        """Tokens from the `begin`-th on; for completions of one turn."""
        return Part(self.token_ids, self.logprobs, self.raw_logprobs, self.alternatives)[begin:]

    def stopped_at(self, count: int) -> Completion:
        """A completion of the first `count` tokens that stopped there; for completions of one turn."""
        read = len(self.prompt_ids) + count - 1
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            raw_logprobs=self.raw_logprobs[:count],
            finish_reason="stop",
            routed_experts=None if self.routed_experts is None else self.routed_experts[:read],
            selected=None if self.selected is None else self.selected[:read],
            alternatives=None if self.alternatives is None else self.alternatives[:count],
        )

    @property
    def written(self) -> Sequence[int]:
        """[T] Indices in `token_ids` of the policy's tokens."""
        if self.turns is None:
            return range(len(self.token_ids))
        return [index for start, end in self.turns for index in range(start, end)]

    @property
    def whole(self) -> bool:
        """True if it ended by itself or at max_tokens, so that it is a sample of the policy; others are not trained."""
        return self.finish_reason in WHOLE

    @property
    def token_versions(self) -> np.ndarray:
        """[T] int64: the version of the weights that sampled each of the policy's tokens."""
        if self.turns is None or self.versions is None:
            return np.full(len(self.logprobs), self.policy_version)
        return np.repeat(self.versions, [end - start for start, end in self.turns])

    @property
    def longest_turn(self) -> int:
        """Tokens of the policy's longest turn, which `max_tokens` bounds."""
        return max((end - start for start, end in self.turns or [(0, len(self.token_ids))]), default=0)


@dataclass(frozen=True)
class Recomputed:
    """The trainer's recomputation of completions from their tokens: one array [T] a sample in each field."""

    logprobs: Sequence[np.ndarray]  # float32, of the distribution sampled from
    raw_logprobs: Sequence[np.ndarray] | None = None  # float32, as in `Completion`; None: not computed
    redrawn: Sequence[np.ndarray] | None = None  # int64: the tokens that the seeds draw; −1, None: none drawn
    entropies: Sequence[np.ndarray] | None = None  # float32, of the distributions sampled from; None: not kept


@dataclass(frozen=True)
class RewardResult:
    """A reward with its named components. `solved` counts towards `reward/solved` and pass@1."""

    reward: float
    solved: bool = False
    components: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Example:
    """One problem of a task.

    Example: `Example(id="3-5-7-22", prompt_ids=[4, 6, 8, 23], prompt="3 5 7 -> 22", data={"target": 22, ...})`.
    """

    id: str
    prompt_ids: list[int]
    prompt: str
    data: dict[str, Any]  # whatever the reward needs; JSON values


@dataclass(frozen=True)
class Sample:
    """A completion with its example, reward and advantage, for the trainer and the records."""

    uid: str  # unique in the run: step/prompt index/group index
    example: Example
    completion: Completion
    text: str  # the completion, decoded; in a conversation, everything after the prompt
    result: RewardResult
    group: int  # samples of one prompt in one step share it
    advantage: float = 0.0
    token_advantages: np.ndarray | None = None  # [T] float32, of the policy's tokens, by a critic; None: `advantage`
    broken: str | None = None  # why its conversation did not finish; such a sample is rejected
    fault: str | None = None  # how it differs from the engine's request
