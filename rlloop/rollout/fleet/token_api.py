"""`POST /inference/v1/generate`: token ids in and out, as vLLM has it and verifiers' training client asks for it.

    {"token_ids": [3, 1, 4], "sampling_params": {"max_tokens": 8, "seed": 1, "logprobs": 1}}
    {"request_id": ..., "choices": [{"token_ids": [...], "finish_reason": "stop", "logprobs": {"content": [...]}}]}

No text is made or read, so a conversation's next prompt can be the very ids of its last turns. `sampling_params` are
vLLM's, which have the names of `openai_api`'s fields; choices have the extras of that module, and for mixtures of
experts `routed_experts`: {"data": base64, "shape": [tokens, layers, top_k], "start": first token, "dtype": ...}.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlloop.rollout.fleet.generation import BadField, Generation, Piece, Served
from rlloop.rollout.fleet.openai_api import Fields, Name, beside, decoded, exact, fields_of, generation, of_prompt, ours

# vLLM's fields for unsupported kinds of requests, with the values that request nothing.
IDLE: dict[str, tuple[Any, ...]] = {"features": ({},), "content_parts": ([],), "kv_transfer_params": ({},)}
# Fields without effect on tokens. A salt separates caches, which only changes timing.
IGNORED = {"cache_salt", "detokenize", "output_kind"}


class TokenFields(Fields):
    """Fields of a body of `/inference/v1/generate`, its `sampling_params` among them."""

    token_ids: list[int]
    request_id: str = ""
    logprobs: int | None = None
    routed_experts_prompt_start: int = 0


class Tokens:
    """`POST /inference/v1/generate`"""

    def parse(self, body: bytes, served: Served) -> Generation:
        content = decoded(body)
        sampling = content.pop("sampling_params", None)
        if not isinstance(sampling, dict):
            raise BadField(
                "sampling_params", f"sampling_params is {sampling!r:.40}; it must be an object, {{}} at least"
            )
        if twice := sorted(content.keys() & sampling.keys()):
            raise BadField(twice[0], f"{twice[0]} stands beside sampling_params and in it; give it once")
        for name, idle in IDLE.items():
            if content.pop(name, None) not in (None, *idle):
                raise BadField(name, f"{name} is given, and this engine takes token ids alone; leave it out")
        flat = {
            "model": served.model,
            **sampling,
            **{name: value for name, value in content.items() if value is not None},
        }
        request = fields_of({name: value for name, value in flat.items() if name not in IGNORED}, TokenFields)
        room = max(1, served.longest - len(request.token_ids))
        tokens = room if request.max_tokens is None else request.max_tokens
        if tokens == 0:
            raise BadField("max_tokens", "max_tokens is 0; it must be at least 1 (/v1/completions scores prompts)")
        start = request.routed_experts_prompt_start
        if not 0 <= start < max(1, len(request.token_ids)):
            text = f"it must be from 0 to {len(request.token_ids) - 1}, a token of the prompt"
            raise BadField("routed_experts_prompt_start", f"routed_experts_prompt_start is {start}; {text}")
        return generation(
            request, served, [request.token_ids], tokens, request.logprobs, "logprobs", prompt_field="token_ids",
            request_id=request.request_id or secrets.token_hex(16), experts_from=start, names_are_ids=True,
        )  # fmt: skip

    def whole(self, id: str, ask: Generation, pieces: Sequence[Piece], name: Name) -> dict[str, Any]:
        before = of_prompt(ask, pieces[0], name) if pieces and pieces[0].index == 0 else {}  # all have the same
        return {"request_id": ask.request_id, "choices": [_choice(ask, piece, name) for piece in pieces], **before}

    chunk = whole


def _choice(ask: Generation, piece: Piece, name: Name) -> dict[str, Any]:
    content = {"index": piece.index, **ours(piece), "logprobs": None}
    segment, completion = piece.part, piece.completion
    if ask.logprobs is not None:
        values = exact(segment.raw_logprobs if ask.raw else segment.logprobs)
        rows = beside(segment.token_ids, values, segment.alternatives, ask.logprobs, ask.raw)
        content["logprobs"] = {
            "content": [
                {**_named(id, value, name), "top_logprobs": [_named(*each, name) for each in row[: ask.logprobs]]}
                for id, value, row in zip(segment.token_ids, values, rows, strict=True)
            ]
        }
    if completion is not None and completion.routed_experts is not None:
        content["routed_experts"] = _experts(completion.routed_experts, ask.experts_from or 0)
    return content


def _named(id: int, value: float | None, name: Name) -> dict[str, Any]:
    return {"token": name(id), "logprob": value, "bytes": None}


def _experts(chosen: np.ndarray, start: int) -> dict[str, Any]:
    """`chosen` is [tokens, layers, top_k]; `data` comes first, where clients expect it."""
    rows = np.ascontiguousarray(chosen[start:])
    data = base64.b64encode(rows.tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "start": start, "dtype": rows.dtype.name}
