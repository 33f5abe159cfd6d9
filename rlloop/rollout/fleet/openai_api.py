"""OpenAI's `POST /v1/completions`, and the fields it shares with `/v1/chat/completions` (`openai_chat`).

Extensions: each choice has `token_ids`, `raw_logprobs`, `seed` and `policy_version`; a request may have
`min_version` and `policy_version` (exactly this one). vLLM's fields are accepted where they have a meaning here.
A float32 is written with enough digits to restore its bits.

Unsupported fields are refused by name, never dropped. docs/openai.md has a table of all fields.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from rlloop.errors import UNREADABLE, ConfigError, readable
from rlloop.rollout.fleet.generation import LOGPROBS_MODES, BadField, Generation, Piece, Served
from rlloop.types import Alternatives, SamplingParams

MOST_CHOICES = 1 << 16  # of one request
MOST_LOGPROBS = 20  # alternatives a token
MOST_STOPS, LONGEST_STOP = 16, 256  # strings, and characters of one
# Fields accepted only with the values that change nothing.
IDLE: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "suffix": ("",),
    "use_beam_search": (False,),
    "store": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    "priority": (0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
# Fields that never change the answer.
IGNORED = {
    "user", "safety_identifier", "metadata", "prompt_cache_key", "prompt_cache_retention", "service_tier",
    "parallel_tool_calls", "prediction", "spaces_between_special_tokens",
}  # fmt: skip


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class Fields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both kinds of body; unknown keys are refused by name."""

    model: str
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = 1
    best_of: int | None = None
    seed: int | None = None
    stop: str | list[str] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    # vLLM's
    min_tokens: int = 0
    top_k: int = 0
    min_p: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    # Ours
    logprobs_mode: str | None = None  # the server's
    min_version: int | None = None  # of the weights
    policy_version: int | None = None  # exactly this one


class CompletionFields(Fields):
    """Fields of a body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]  # text or ids; one, or a list
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True


class Dialect(Protocol):
    """An HTTP format of requests and answers."""

    def parse(self, body: bytes, served: Served) -> Generation:
        """Raises `ConfigError`."""
        ...

    def whole(self, id: str, ask: Generation, pieces: Sequence[Piece], name: Name) -> dict[str, Any]:
        """The answer, one piece a choice; without its usage."""
        ...

    def chunk(self, id: str, ask: Generation, pieces: Sequence[Piece], name: Name) -> dict[str, Any]:
        """An event of a stream."""
        ...


F = TypeVar("F", bound=Fields)
Name = Callable[[int], str]  # what a token is called


class Completions:
    """`POST /v1/completions`"""

    def parse(self, body: bytes, served: Served) -> Generation:
        request = read(body, CompletionFields)
        prompts = _prompts(request, served)
        score = request.echo or request.prompt_logprobs is not None
        if request.max_tokens == 0 and not score:
            raise BadField("max_tokens", "max_tokens is 0, which scores a prompt: ask for echo or prompt_logprobs, too")
        if request.echo and served.tokenizer is None and not request.return_token_ids:
            raise BadField("echo", "echo is True, and this engine's model has no tokenizer; ask for return_token_ids")
        tokens = 16 if request.max_tokens is None else request.max_tokens
        return generation(request, served, prompts, tokens, request.logprobs, "logprobs", echo=request.echo)

    def whole(self, id: str, ask: Generation, pieces: Sequence[Piece], name: Name) -> dict[str, Any]:
        head = {"id": f"cmpl-{id}", "object": "text_completion", "created": int(time.time()), "model": ask.model}
        return {**head, "choices": [self._choice(ask, piece, name) for piece in pieces]}

    chunk = whole

    def _choice(self, ask: Generation, piece: Piece, name: Name) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None if ask.logprobs is None else self._logprobs(ask, piece, name),
            **ours(piece),
            **of_prompt(ask, piece, name),
        }

    def _logprobs(self, ask: Generation, piece: Piece, name: Name) -> dict[str, Any]:
        """Logprobs of the echoed prompt, if any, then of the completion; the prompt's first token has none."""
        segment, offsets = piece.part, piece.offsets or [0] * len(piece.part.token_ids)
        ids, values = segment.token_ids, exact(segment.raw_logprobs if ask.raw else segment.logprobs)
        top = [_named(row, name) for row in beside(ids, values, segment.alternatives, ask.logprobs or 0, ask.raw)]
        if ask.echo and piece.prompt is not None and piece.prompt.scores is not None:
            before, scores = piece.prompt.token_ids, piece.prompt.scores
            scored = exact(scores.logprobs)
            rows = beside(before[1:], scored, scores.alternatives, ask.logprobs or 0, raw=True)
            top = [None, *(_named(row, name) for row in rows), *top]
            ids, values = [*before, *ids], [None, *scored, *values]
            offsets = [*(piece.prompt.offsets or [0] * len(before)), *offsets]
        return {
            "tokens": [name(id) for id in ids],
            "token_logprobs": values,
            "top_logprobs": top if ask.logprobs else None,
            "text_offset": offsets,
        }


def _named(row: list[tuple[int, float | None]], name: Name) -> dict[str, float | None]:
    named: dict[str, float | None] = {}
    for id, value in row:
        named.setdefault(name(id), value)  # of two tokens with the same text, the likelier
    return named


def _prompts(request: CompletionFields, served: Served) -> list[list[int]]:
    def ids(prompt: Any) -> list[int]:
        if isinstance(prompt, int):
            raise BadField("prompt", "prompt mixes token ids with texts or lists; give one, or a list of the same kind")
        if isinstance(prompt, list):
            return prompt
        if served.tokenizer is None:
            raise BadField("prompt", "the prompt is text, and this engine's model has no tokenizer; send token ids")
        return served.tokenizer.encode(prompt, request.add_special_tokens)

    prompt = request.prompt
    if isinstance(prompt, str) or all(isinstance(each, int) for each in prompt):
        return [ids(prompt)]
    return [ids(each) for each in prompt]


# ------------------------------------------------------------------------------------------------ reading


def read(body: bytes, kind: type[F]) -> F:
    """The fields of a body. Raises `BadField`."""
    return fields_of(decoded(body), kind)


def decoded(body: bytes) -> dict[str, Any]:
    """Raises `BadField`."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except UNREADABLE as error:
        raise BadField(None, f"the body is no JSON object: {error}") from None


def fields_of(content: dict[str, Any], kind: type[F]) -> F:
    """Raises `BadField` for a field that is unknown, of another type, or cannot be honoured."""
    fields = {name: value for name, value in content.items() if value is not None}  # null is a key left out
    for name, idle in IDLE.items():
        if name in fields and (value := fields.pop(name)) not in idle:
            allowed = " or ".join(repr(each) for each in idle)
            raise BadField(
                name, f"{name} is {value!r:.80}: this engine cannot do that; leave it out, or give {allowed}"
            )
    try:
        return msgspec.convert({name: fields[name] for name in fields.keys() - IGNORED}, readable(kind))
    except msgspec.ValidationError as error:
        match = re.search(r"field `([^`]+)`|at `\$\.(\w+)", str(error))
        raise BadField(match and (match[1] or match[2]), str(error)) from None


def generation(
    request: Fields, served: Served, prompts: list[list[int]], max_tokens: int, logprobs: int | None,
    logprobs_field: str, *, prompt_field: str = "prompt", echo: bool = False, **more: Any,
) -> Generation:  # fmt: skip
    """`prompts` without their choices. Of `n` choices with a `seed`, choice i has seed + i. `more`: further fields of
    the `Generation`. Raises `BadField`."""
    _check(request, served)
    if len(prompts) * request.n > MOST_CHOICES:
        asked = f"{len(prompts)} prompts with n={request.n} ask for {len(prompts) * request.n} choices"
        raise BadField("n", f"{asked}; a request may have {MOST_CHOICES}")
    for name, count in ((logprobs_field, logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if count is not None and not 0 <= count <= MOST_LOGPROBS:
            raise BadField(name, f"{name} is {count}; it must be from 0 to {MOST_LOGPROBS}")
    for length in map(len, prompts):
        if length + max_tokens > served.longest:
            text = f"a prompt of {length} tokens with max_tokens={max_tokens} takes {length + max_tokens}"
            text += f"; this engine has room for {served.longest}. Shorten the prompt or lower max_tokens"
            raise BadField(prompt_field, text, "context_length_exceeded")
    try:
        each = [
            SamplingParams(
                max_tokens=max_tokens or 1,
                min_tokens=request.min_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=0 if request.top_k == -1 else request.top_k,
                min_p=request.min_p,
                seed=None if request.seed in (None, -1) else (request.seed + choice) % 2**63,
                ignore_eos=request.ignore_eos,
                stop_token_ids=tuple(request.stop_token_ids),
            )
            for choice in range(request.n)
        ]
    except ConfigError as error:
        text = str(error).removeprefix("SamplingParams.")
        raise BadField(text.partition(" ")[0], text) from None
    mode = served.logprobs_mode if request.logprobs_mode is None else request.logprobs_mode
    exactly, options = request.policy_version, request.stream_options
    fields: dict[str, Any] = {
        "skip_special_tokens": request.skip_special_tokens,
        "names_are_ids": request.return_tokens_as_token_ids,
        **more,
    }
    return Generation(
        model=request.model,
        prompts=[prompt for prompt in prompts for _ in each],
        sampling=each * len(prompts),
        n=request.n,
        lowest=request.min_version if exactly is None else exactly,
        highest=exactly,
        stops=tuple([request.stop] if isinstance(request.stop, str) else request.stop),
        keep_stop=request.include_stop_str_in_output,
        logprobs=logprobs,
        raw=mode == "raw_logprobs",
        prompt_logprobs=request.prompt_logprobs,
        echo=echo,
        only_score=max_tokens == 0,
        return_token_ids=request.return_token_ids,
        stream=request.stream,
        usage_in_stream=options is not None and options.include_usage,
        **fields,
    )


def _check(request: Fields, served: Served) -> None:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop
    lengths = [len(stop) for stop in stops]
    if len(stops) > MOST_STOPS or not all(1 <= length <= LONGEST_STOP for length in lengths):
        allowed = f"at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters"
        raise BadField("stop", f"stop has {len(stops)} strings of {lengths!s:.60} characters; it may have {allowed}")
    if stops and served.tokenizer is None:
        raise BadField(
            "stop", "stop is text, and this engine's model has no tokenizer; stop_token_ids stops at a token"
        )
    if request.logprobs_mode is not None and request.logprobs_mode not in LOGPROBS_MODES:
        raise BadField(
            "logprobs_mode", f"logprobs_mode is {request.logprobs_mode!r}; it must be {' or '.join(LOGPROBS_MODES)}"
        )
    if request.min_version is not None and request.policy_version is not None:
        text = "min_version and policy_version were both given; policy_version alone asks for exactly one"
        raise BadField("min_version", text)
    if not 1 <= request.n <= 1024:
        raise BadField("n", f"n is {request.n}; it must be from 1 to 1024")
    if request.best_of not in (None, request.n):
        raise BadField("best_of", f"best_of is {request.best_of}: this engine cannot choose; leave it out, or give n")
    if request.seed is not None and not -(2**63) <= request.seed < 2**63:
        raise BadField("seed", f"seed is {request.seed}; it must be from -2**63 to 2**63 - 1, and -1 is none")
    if request.stream_options is not None and request.stream_options.continuous_usage_stats:
        raise BadField("stream_options", "stream_options.continuous_usage_stats is True; usage comes at the end")


# ------------------------------------------------------------------------------------------------ writing


def ours(piece: Piece) -> dict[str, Any]:
    """Fields of a choice besides OpenAI's. `finish_reason` is null until the choice has ended."""
    completion = piece.completion
    content: dict[str, Any] = {
        "finish_reason": None if completion is None else completion.finish_reason,
        "stop_reason": piece.stop_reason,
        "token_ids": piece.part.token_ids,
        "raw_logprobs": exact(piece.part.raw_logprobs),
    }
    if completion is not None:
        content |= {"seed": completion.sampling.seed, "policy_version": completion.policy_version}
    return content


def of_prompt(ask: Generation, piece: Piece, name: Name) -> dict[str, Any]:
    """Ids and logprobs of the prompt, as vLLM has them, in a choice's first piece."""
    content: dict[str, Any] = {}
    if (prompt := piece.prompt) is None:
        return content
    if ask.return_token_ids:
        content["prompt_token_ids"] = prompt.token_ids
    if ask.prompt_logprobs is not None and (scores := prompt.scores) is not None:
        ids = prompt.token_ids[1:]
        rows = beside(ids, exact(scores.logprobs), scores.alternatives, ask.prompt_logprobs, raw=True)
        content["prompt_logprobs"] = [
            None,
            *({str(id): {"logprob": value, "decoded_token": name(id)} for id, value in row} for row in rows),
        ]
    return content


def beside(
    ids: Sequence[int], values: Sequence[float | None], likeliest: Alternatives | None, count: int, raw: bool,
) -> list[list[tuple[int, float | None]]]:  # fmt: skip
    """For each token, (id, logprob) of the `count` likeliest possible tokens, and of the token itself if not among
    them."""
    rows: list[list[tuple[int, float | None]]] = [[] for _ in ids]
    if likeliest is not None and count:
        likeliest_logprobs = (likeliest.raw_logprobs if raw else likeliest.logprobs)[:, :count]
        for row, others, logprobs in zip(rows, likeliest.token_ids.tolist(), likeliest_logprobs, strict=True):
            row += [each for each in zip(others, exact(logprobs), strict=False) if each[1] is not None]
    for row, id, value in zip(rows, ids, values, strict=True):
        if id not in [other for other, _ in row]:
            row.append((id, value))
    return rows


def exact(values: np.ndarray) -> list[float | None]:
    """Float32 values as doubles, which JSON writes exactly; None for infinities, which JSON lacks."""
    return [value if np.isfinite(value) else None for value in values.astype(np.float64).tolist()]
