"""OpenAI's `POST /v1/completions`, as far as an engine that samples by token can honour it.

What is ours beside it: each choice has `token_ids`, `raw_logprobs`, `seed` and `policy_version`; a request may have
`min_version`, `policy_version` (exactly this one), `min_tokens`, `top_k`, `min_p`, `ignore_eos`, `stop_token_ids` (the
`extra_body` of OpenAI's clients). A float32 is written with the digits that bring back its bits.

What cannot be honoured is refused, never dropped: text stops, penalties, `echo`, `suffix`, `logit_bias`, `best_of`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from rlloop.errors import UNREADABLE, ConfigError
from rlloop.types import Completion, SamplingParams

MOST_CHOICES = 1 << 16  # of one request
FINISH = {"stop": "stop", "length": "length", "abort": "content_filter"}  # the nearest name that clients know


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body; unknown keys are refused by name."""

    model: str
    prompt: str | list[str | int | list[int]]  # text or ids; one, or a list
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Ours
    min_version: int | None = None  # of the weights
    policy_version: int | None = None  # exactly this one
    min_tokens: int = 0
    top_k: int = 0
    min_p: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    # Known, and refused unless they change nothing
    stop: str | list[str] | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None


def parse(body: bytes, tokenizer: Tokenizer | None) -> tuple[CompletionRequest, list[list[int]], list[SamplingParams]]:
    """The request, and one prompt with its parameters a choice. Raises `ConfigError`.

    Of `n` choices with a `seed`, choice i has seed + i.
    """
    try:
        content = msgspec.json.decode(body, type=dict[str, Any])
        given = {name: value for name, value in content.items() if value is not None}  # null is a key left out
        request = msgspec.convert(given, CompletionRequest)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    except UNREADABLE as error:
        raise ConfigError(f"the body is not JSON: {error}") from None
    _refuse(request)
    if request.min_version is not None and request.policy_version is not None:
        raise ConfigError("min_version and policy_version were both given; policy_version alone asks for exactly one")
    prompts = _prompts(request.prompt, tokenizer)
    if len(prompts) * request.n > MOST_CHOICES:
        raise ConfigError(
            f"{len(prompts)} prompts with n={request.n} ask for {len(prompts) * request.n} choices; a request may have "
            f"{MOST_CHOICES}"
        )
    each = [
        SamplingParams(
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=None if request.seed is None else request.seed + choice,
            ignore_eos=request.ignore_eos,
            stop_token_ids=tuple(request.stop_token_ids),
        )
        for choice in range(request.n)
    ]
    return request, [prompt for prompt in prompts for _ in each], each * len(prompts)


def _refuse(request: CompletionRequest) -> None:
    idle = {"stop": (None, []), "echo": (False,), "suffix": (None, ""), "logit_bias": (None, {})}
    idle |= {"presence_penalty": (0,), "frequency_penalty": (0,), "best_of": (None, request.n)}
    for name, harmless in idle.items():
        if (given := getattr(request, name)) not in harmless:
            hint = "; stop_token_ids stops at a token" if name == "stop" else ""
            raise ConfigError(f"{name} is {given!r}: this engine cannot do that, so leave it out{hint}")
    if not 1 <= request.n <= 1024:
        raise ConfigError(f"n is {request.n}; it must be from 1 to 1024")
    if request.logprobs is not None and request.logprobs not in (0, 1):
        raise ConfigError(f"logprobs is {request.logprobs}; it must be 0 or 1: the token that was drawn, alone")


def _prompts(prompt: str | list[str | int | list[int]], tokenizer: Tokenizer | None) -> list[list[int]]:
    if isinstance(prompt, str) or all(isinstance(each, int) for each in prompt):
        return [_ids(prompt, tokenizer)]
    return [_ids(each, tokenizer) for each in prompt]


def _ids(prompt: Any, tokenizer: Tokenizer | None) -> list[int]:
    if isinstance(prompt, int):
        raise ConfigError("prompt mixes token ids with texts or lists; give one, or a list of the same kind")
    if isinstance(prompt, list):
        return prompt
    if tokenizer is None:
        raise ConfigError("the prompt is text, and this engine's model has no tokenizer; send token ids")
    return tokenizer.encode(prompt)


def respond(
    id: str, request: CompletionRequest, completions: Sequence[Completion], tokenizer: Tokenizer | None
) -> bytes:
    content = {
        **_head(id, request),
        "choices": [_choice(index, request, made, tokenizer) for index, made in enumerate(completions)],
        "usage": _usage(completions, request.n),
    }
    return msgspec.json.encode(content)


def respond_in_events(
    id: str, request: CompletionRequest, completions: Sequence[Completion], tokenizer: Tokenizer | None
) -> Iterator[bytes]:
    """As server-sent events: one for each choice, whole, since a choice is known when it is finished."""
    head = _head(id, request)
    for index, made in enumerate(completions):
        yield _event({**head, "choices": [_choice(index, request, made, tokenizer)]})
    if request.stream_options is not None and request.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(completions, request.n)})
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _head(id: str, request: CompletionRequest) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": int(time.time()), "model": request.model}


def _usage(completions: Sequence[Completion], n: int) -> dict[str, int]:
    prompt = sum(len(made.prompt_ids) for made in completions[::n])
    made = sum(len(made.token_ids) for made in completions)
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _choice(index: int, request: CompletionRequest, made: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    logprobs = None
    written = made.token_ids[:-1] if made.finish_reason == "stop" else made.token_ids  # without what ended it
    if request.logprobs is not None:
        tokens = [f"token_id:{id}" if tokenizer is None else tokenizer.decode([id]) for id in made.token_ids]
        values = _exact(made.logprobs)
        logprobs = {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": [{token: value} for token, value in zip(tokens, values, strict=True)]
            if request.logprobs
            else None,
            "text_offset": np.cumsum([0, *map(len, tokens)])[:-1].tolist(),
        }
    return {
        "index": index,
        "text": "" if tokenizer is None else tokenizer.decode(written),
        "finish_reason": FINISH[made.finish_reason],
        "logprobs": logprobs,
        "token_ids": made.token_ids,
        "raw_logprobs": _exact(made.raw_logprobs),
        "seed": made.sampling.seed,
        "policy_version": made.policy_version,
    }


def _exact(values: np.ndarray) -> list[float | None]:
    """A float32 as a double is itself, and JSON writes doubles so that they come back. JSON has no infinities."""
    return [value if np.isfinite(value) else None for value in values.astype(np.float64).tolist()]
