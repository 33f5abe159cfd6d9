"""What crosses between engines and those who use them: msgpack, float32 as its bytes, so that every bit arrives.

POST /rlloop/generate   Ask -> Answer
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from rlloop.errors import UNREADABLE, RlloopError
from rlloop.types import Completion, FinishReason, SamplingParams

CONTENT_TYPE = "application/msgpack"
MOST_PROMPTS = 1 << 14  # of one request: a third of a second of a core, to check


class Ask(msgspec.Struct, forbid_unknown_fields=True):
    """Continue every prompt with weights of one version from `lowest` to `highest` (None: any)."""

    prompts: Annotated[list[list[int]], msgspec.Meta(max_length=MOST_PROMPTS)]
    sampling: list[SamplingParams]  # one each
    lowest: int | None = None
    highest: int | None = None
    holder: str = ""  # who asks, and its term: see Lease
    term: int = 0


class Lease(msgspec.Struct, forbid_unknown_fields=True):
    """Fencing: `holder` drives the engine from now on, in its `term`-th life. Earlier terms are refused."""

    holder: str
    term: int


Array = tuple[tuple[int, ...], str, bytes]  # shape, type, content


class Made(msgspec.Struct, array_like=True):
    """A completion without its prompt, which the asker knows."""

    token_ids: bytes  # int32, little-endian, as all numbers here
    logprobs: bytes  # float32
    raw_logprobs: bytes  # float32
    policy_version: int
    finish_reason: FinishReason
    seed: int
    routed_experts: Array | None = None
    selected: Array | None = None


class Answer(msgspec.Struct):
    completions: list[Made]
    boot: str  # names the engine's process: an answer of an earlier one is none of the present one's


class Progress(msgspec.Struct):
    """How the engine's replica came to its version; times in seconds."""

    version: int
    wire_bytes: int = 0
    fetch_seconds: float = 0.0
    stage_seconds: float = 0.0
    verify_seconds: float = 0.0
    drain_seconds: float = 0.0
    pause_seconds: float = 0.0


class EngineState(msgspec.Struct):
    """What `GET /rlloop/state` says."""

    boot: str
    name: str
    region: str
    status: Literal["ready", "behind", "failed"]
    version: int
    load: int
    fingerprint: dict[str, Any]
    weights: Progress | None = None
    error: str = ""
    paused: bool = False


class BadAnswer(RlloopError):
    """An engine answered what no engine in order answers."""


def pack(completion: Completion) -> Made:
    seed = completion.sampling.seed
    assert seed is not None
    return Made(
        np.asarray(completion.token_ids, "<i4").tobytes(),
        np.asarray(completion.logprobs, "<f4").tobytes(),
        np.asarray(completion.raw_logprobs, "<f4").tobytes(),
        completion.policy_version,
        completion.finish_reason,
        seed,
        pack_array(completion.routed_experts),
        pack_array(completion.selected),
    )


def pack_array(array: np.ndarray | None) -> Array | None:
    return None if array is None else (array.shape, array.dtype.str, np.ascontiguousarray(array).tobytes())


def unpack(ask: Ask, answer: Answer) -> list[Completion]:
    """Raises `BadAnswer` where the answer is not one to `ask`."""
    if len(answer.completions) != len(ask.prompts):
        raise BadAnswer(f"{len(ask.prompts)} prompts were answered by {len(answer.completions)} completions")
    return [
        _unpack(prompt, params, made, ask)
        for prompt, params, made in zip(ask.prompts, ask.sampling, answer.completions, strict=True)
    ]


def _unpack(prompt: list[int], params: SamplingParams, made: Made, ask: Ask) -> Completion:
    lowest = made.policy_version if ask.lowest is None else ask.lowest
    highest = made.policy_version if ask.highest is None else ask.highest
    if not lowest <= made.policy_version <= highest:
        raise BadAnswer(f"asked for version {lowest} to {highest}, answered from {made.policy_version}")
    if params.seed is not None and made.seed != params.seed:
        raise BadAnswer(f"asked with seed {params.seed}, answered with {made.seed}")
    try:
        tokens, logprobs, raw = (
            np.frombuffer(content, kind).astype(np.dtype(kind).newbyteorder("="))
            for content, kind in ((made.token_ids, "<i4"), (made.logprobs, "<f4"), (made.raw_logprobs, "<f4"))
        )
    except ValueError as error:
        raise BadAnswer(f"an array of a completion is damaged: {error}") from None
    least = 0 if made.finish_reason == "abort" else 1  # of a request that ended before its turn, nothing is there
    if not least <= len(tokens) == len(logprobs) == len(raw) <= params.max_tokens:
        raise BadAnswer(f"{len(tokens)} tokens with {len(logprobs)} and {len(raw)} logprobs, of {params.max_tokens}")
    return Completion(
        prompt_ids=prompt,
        token_ids=tokens.tolist(),
        logprobs=logprobs,
        raw_logprobs=raw,
        policy_version=made.policy_version,
        finish_reason=made.finish_reason,
        sampling=params if params.seed is not None else dataclasses.replace(params, seed=made.seed),
        routed_experts=unpack_array(made.routed_experts),
        selected=unpack_array(made.selected),
    )


def unpack_array(packed: Array | None) -> np.ndarray | None:
    """Raises `BadAnswer`."""
    if packed is None:
        return None
    shape, kind, content = packed
    try:
        return np.frombuffer(content, kind).reshape(shape).copy()
    except (ValueError, TypeError) as error:
        raise BadAnswer(f"what a model chose is damaged: {error}") from None


def error_of(body: bytes) -> Mapping[str, Any]:
    """The error in a refusal's body; empty where it is not one of ours."""
    try:
        content = msgspec.json.decode(body)
    except UNREADABLE:
        return {}
    found = content.get("error") if isinstance(content, dict) else None
    return found if isinstance(found, dict) else {}
