"""Admission of engines to a run's pool: the canary that they must reproduce, and objections to their numerics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlloop.config.run import ParityMode, RunConfig
from rlloop.parity.monitor import fingerprint_differences
from rlloop.protocols import Task
from rlloop.rollout.fleet.wire import EngineState
from rlloop.types import ModelInput, SamplingParams

CANARY_TOKENS = 8


def canary_requests(config: RunConfig, task: Task) -> tuple[list[ModelInput | list[int]], list[SamplingParams]]:
    """`fleet.canary_prompts` of the task's held-out prompts with their pictures, to be continued by a few tokens
    each."""
    rollout = config.rollout
    prompts = [example.asked for example in task.eval_examples(max(1, config.fleet.canary_prompts))]
    prompts = prompts[: config.fleet.canary_prompts]
    sampling = [
        SamplingParams(
            max_tokens=min(CANARY_TOKENS, rollout.max_tokens),
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            seed=index,
            ignore_eos=True,
        )
        for index in range(len(prompts))
    ]
    return prompts, sampling


def numerics_objection(trainer: Mapping[str, Any], mode: ParityMode, state: EngineState) -> str | None:
    """The reason for which `parity.mode=require` refuses an engine whose arithmetic is not the trainer's; None: it may
    serve."""
    if mode is not ParityMode.require:
        return None
    theirs, ours = (json.loads(json.dumps(each)) for each in (state.fingerprint, trainer))  # as they cross the wire
    differ = fingerprint_differences(theirs, ours)
    if not differ:
        return None
    listed = ", ".join(f"{key}: engine {mine!r}, trainer {its!r}" for key, (mine, its) in differ.items())
    return f"its numerics are not the trainer's, which parity.mode=require asks for ({listed})"
