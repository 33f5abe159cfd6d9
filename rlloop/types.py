"""Data types of the loop. Imports numpy, but neither torch, ray nor vllm."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

import numpy as np

from rlloop.errors import ConfigError
from rlloop.inputs import ContentSpan as ContentSpan
from rlloop.inputs import Image as Image
from rlloop.inputs import ModelInput as ModelInput
from rlloop.inputs import as_model_input as as_model_input

FinishReason = Literal["stop", "length", "abort"]
WHOLE: tuple[FinishReason, ...] = ("stop", "length")  # reasons after which a completion may be trained


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's too


def is_ids(value: Any) -> bool:
    """True for a flat list of whole numbers. A tensor would truncate other numbers silently."""
    array = np.asarray(value)
    return array.ndim == 1 and (array.dtype.kind in "iu" or not len(array))


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


Record = TypeVar("Record")


def changed(record: Record, **values: Any) -> Record:
    """`dataclasses.replace` in a tenth of its time, for loops over samples: nothing is checked again."""
    twin = object.__new__(type(record))
    vars(twin).update(vars(record), **values)
    return twin


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

    def __getitem__(self, positions: slice) -> Alternatives:
        return Alternatives(self.token_ids[positions], self.logprobs[positions], self.raw_logprobs[positions])

    @classmethod
    def joined(cls, chunks: Sequence[Alternatives]) -> Alternatives | None:
        """Concatenated; None for no chunks."""
        if not chunks:
            return None
        names = ("token_ids", "logprobs", "raw_logprobs")
        return cls(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in names))


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

    def __getitem__(self, positions: slice) -> Part:
        more = None if self.alternatives is None else self.alternatives[positions]
        return Part(self.token_ids[positions], self.logprobs[positions], self.raw_logprobs[positions], more)


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
    origin: str | None = None  # region/address of its engine, if there are several
    alternatives: Alternatives | None = None  # [T, k], where they were asked for
    # The prompt, where it is more than text; where an environment replied with pictures, the last turn's. Begins with
    # prompt_ids, and goes on as token_ids do.
    model_input: ModelInput | None = None
    versions: tuple[int, ...] | None = None  # of each turn, where the weights changed in between; None: policy_version
    # [start, end) in token_ids that each of `versions` sampled, where they changed within a turn; None: the turns.
    version_spans: tuple[tuple[int, int], ...] | None = None

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
        """True if it ended at a stop token or at max_tokens, so that it is a sample of the policy; others are not
        trained."""
        return self.finish_reason in WHOLE

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(start, end, version): the weights that sampled the policy's tokens [start, end) of `token_ids`."""
        spans = self.version_spans or self.turns or ((0, len(self.token_ids)),)
        versions = self.versions or (self.policy_version,) * len(spans)
        return [(start, end, version) for (start, end), version in zip(spans, versions, strict=True)]

    @property
    def token_versions(self) -> np.ndarray:
        """[T] int64: the version of the weights that sampled each of the policy's tokens."""
        if self.versions is None:
            return np.full(len(self.logprobs), self.policy_version)
        return np.concatenate([np.full(end - start, version) for start, end, version in self.runs])

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
    data: dict[str, Any]  # data for the reward; JSON values
    model_input: ModelInput | None = None  # the prompt with its images; its tokens are prompt_ids. None: text

    @property
    def asked(self) -> ModelInput | list[int]:
        """The engine's input: the `ModelInput` if there is one, else the token ids."""
        return self.prompt_ids if self.model_input is None else self.model_input

    def asked_with(self, token_ids: list[int], placeholders: Collection[int] = ()) -> ModelInput | list[int]:
        """The engine's input for a conversation whose tokens, prompt included, are `token_ids`.

        `placeholders`: ids that an engine refuses in a prompt; the input says that those after it were not given.
        """
        first, more = self.model_input, token_ids[len(self.prompt_ids) :]
        if first is None and {*placeholders}.isdisjoint(more):
            return token_ids
        return as_model_input(self.asked).followed_by(more)


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
    broken: str | None = None  # reason why its conversation did not finish; such a sample is rejected
    fault: str | None = None  # its difference from the engine's request
