"""Completions as rows of a rollout file (`rollouts/step_N.jsonl.zst`), one JSON object each.

Expert choices of a mixture are packed: the smallest integer type that holds them, through zstd and base64:
{"shape": [63, 4, 2], "type": "uint8", "data": "KLUv/SB+..."}
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import zstandard

from rlloop.types import Sample, SamplingParams


def rollout_rows(
    samples: Sequence[Sample],
    outcomes: Sequence[str],
    trainer_logprobs: Sequence[np.ndarray | None],
    engine: str,
    entropies: Sequence[np.ndarray] = (),
) -> list[dict[str, Any]]:
    """Completions as JSON objects.

    `outcomes`: trained, or "rejected: ..." or "dropped: ..." with the reason. `trainer_logprobs` (None: not scored) are
    written only if a bit differs, `raw_logprobs` only if they differ from `logprobs`. `engine`: digest of its
    fingerprint. `entropies`: of the distributions that the tokens were drawn from, for the first samples; written with
    three digits, since people look at them.
    """
    logprobs = [sample.completion.logprobs for sample in samples]
    raw = [sample.completion.raw_logprobs for sample in samples]
    scored = [mine if other is None else other for mine, other in zip(logprobs, trainer_logprobs, strict=True)]
    texts, rows = _floats(logprobs), []
    for sample, outcome, text in zip(samples, outcomes, texts, strict=True):
        completion = sample.completion
        rows.append(
            {
                "uid": sample.uid,
                "example": sample.example.id,
                "group": sample.group,
                "policy_version": completion.policy_version,
                "engine": engine,
                "outcome": outcome,
                "reward": sample.result.reward,
                "solved": sample.result.solved,
                "components": sample.result.components,
                "advantage": sample.advantage,
                "prompt": sample.example.prompt,
                "text": sample.text,
                "finish_reason": completion.finish_reason,
                "sampling": {key: value for key, value in vars(completion.sampling).items() if value != _DEFAULTS[key]},
                "prompt_ids": completion.prompt_ids,
                "token_ids": completion.token_ids,
                **({} if completion.origin is None else {"origin": completion.origin}),
                "logprobs": text,
            }
        )
        if completion.model_input is not None and completion.model_input.images:
            rows[-1]["images"] = [
                {"start": span.start, "end": span.end, "digest": span.digest}
                for span in completion.model_input.contents
            ]
        if sample.fault is not None:
            rows[-1]["fault"] = sample.fault
        if completion.turns is not None:
            rows[-1]["turns"] = completion.turns
            episode = sample.example.data.get("episode")
            if isinstance(episode, Mapping) and "conversation" in episode:  # by turn: text, tokens, reward, messages
                rows[-1]["conversation"] = episode["conversation"]
        if completion.versions is not None:
            rows[-1]["versions"] = completion.versions
        if completion.version_spans is not None:
            rows[-1]["version_spans"] = completion.version_spans
        if sample.token_advantages is not None:
            rows[-1]["token_advantages"] = _floats([sample.token_advantages])[0]
        if completion.routed_experts is not None:
            rows[-1]["routed_experts"] = pack_experts(completion.routed_experts)
    for row, text in zip(rows, _floats(entropies, "%.3g"), strict=False):
        row["entropies"] = text
    for name, arrays in (("raw_logprobs", raw), ("trainer_logprobs", scored)):
        differing = _differing(logprobs, arrays)
        for index, text in zip(differing, _floats([arrays[index] for index in differing]), strict=True):
            rows[index][name] = text
    return rows


_DEFAULTS = {**vars(SamplingParams(max_tokens=1)), "max_tokens": None}


def _differing(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> list[int]:
    """Indices of the float32 arrays that differ in a bit, also in −0 or the bits of a NaN."""
    if not ours:
        return []
    mine, other = (np.concatenate(arrays).astype(np.float32, copy=False).view(np.int32) for arrays in (ours, theirs))
    owner = np.repeat(np.arange(len(ours)), [len(array) for array in ours])
    return np.unique(owner[mine != other]).tolist()


def _floats(arrays: Sequence[np.ndarray], form: str = "%.9g") -> list[msgspec.Raw]:
    """float32 arrays as JSON, with the 9 digits that restore every bit; null is −inf (or NaN, in a broken run)."""
    flat = np.concatenate([np.zeros(0, np.float32), *arrays])
    texts = (",".join([form] * len(flat)) % tuple(flat.tolist())).split(",")
    if not np.isfinite(flat).all():
        texts = ["null" if "n" in text else text for text in texts]
    cuts = np.cumsum([0, *map(len, arrays)]).tolist()
    return [msgspec.Raw(f"[{','.join(texts[start:end])}]".encode()) for start, end in pairwise(cuts)]


def pack_experts(experts: np.ndarray) -> dict[str, Any]:
    """Expert choices [tokens, layers, top_k] of an unsigned type, as JSON values."""
    data = zstandard.compress(np.ascontiguousarray(experts).tobytes(), 3)
    return {"shape": list(experts.shape), "type": experts.dtype.name, "data": base64.b64encode(data).decode()}


def unpack_experts(packed: Mapping[str, Any]) -> np.ndarray:
    """The inverse of `pack_experts`."""
    content = zstandard.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(content, packed["type"]).reshape(packed["shape"])
