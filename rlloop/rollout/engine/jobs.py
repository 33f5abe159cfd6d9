"""A call to an engine's service: its prompts, and the state of their requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlloop.inputs import as_model_input
from rlloop.protocols import Listener, SteppedEngine
from rlloop.types import Completion, ModelInput, Part, SamplingParams


@dataclass(eq=False)
class Job:
    """One call of `submit`: its requests are answered together."""

    prompts: Sequence[ModelInput | list[int]]
    sampling: Sequence[SamplingParams]
    lowest: int | None
    highest: int | None
    listener: Listener | None = None
    top: int = 0
    score: int | None = None
    only_score: bool = False
    adapters: Sequence[str | None] = ()  # one each; empty: none is named
    answer: Future[list[Completion]] = field(default_factory=Future)
    scored: int = 0  # prompts
    ids: list[int] = field(default_factory=list)
    index: dict[int, int] = field(default_factory=dict)  # of each id's prompt
    told: dict[int, int] = field(default_factory=dict)  # tokens of each request sent to the listener
    done: dict[int, Completion] = field(default_factory=dict)

    def accepts(self, version: int) -> bool:
        """True for versions from `lowest` to `highest`."""
        return (self.lowest is None or version >= self.lowest) and (self.highest is None or version <= self.highest)

    def without_tokens(self, version: int) -> list[Completion]:
        """An empty completion for each prompt."""
        none, each = np.zeros(0, np.float32), zip(self.prompts, self.sampling, strict=True)
        return [
            Completion(as_model_input(prompt).token_ids, [], none, none, version, "length", params)
            for prompt, params in each
        ]

    def unheard(self, engine: SteppedEngine, request: int, completion: Completion | None) -> Part:
        """A request's tokens that the listener has not received, without a stop token; marks them as received.

        `completion`: the whole, if it has ended.
        """
        told = self.told.get(request, 0)
        if completion is None:
            segment = engine.so_far(request, told)
        else:
            segment = completion.part(told)
            segment = segment[:-1] if completion.finish_reason == "stop" else segment
        self.told[request] = told + len(segment.token_ids)
        return segment

    def arguments(self, index: int) -> dict[str, Any]:
        """The engine's extra arguments for prompt `index`: its adapter, if it names one; engines without adapters have
        no such argument."""
        return {} if not self.adapters or self.adapters[index] is None else {"adapter": self.adapters[index]}


def each_once(jobs: Iterable[Job]) -> Iterable[Job]:
    """The distinct jobs, in order; a job with many requests occurs once."""
    return list({id(job): job for job in jobs}.values())
