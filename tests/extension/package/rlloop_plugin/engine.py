"""An engine: made over the trainer's model, called with prompts, and told when the weights have changed."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import rlloop
from rlloop.types import Completion, SamplingParams


class OneByOne:
    """Makes completions one after the other, the last prompt first. `offset` is added to each logprob it reports."""

    def __init__(self, model: Any, *, report: str, offset: float = 0.0, **settings: Any) -> None:
        self._engine = rlloop.Engine(model, **settings)
        self._model, self._report, self._offset = model, Path(report), offset
        self._versions: list[int] = []
        self._completions = 0

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    def set_version(self, version: int) -> None:
        self._engine.set_version(version)
        self._versions.append(version)

    def generate(self, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams]) -> list[Completion]:
        each = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        completions = [
            self._complete(prompt, params) for prompt, params in reversed([*zip(prompts, each, strict=True)])
        ]
        return completions[::-1]

    def fingerprint(self) -> dict[str, Any]:
        """The model's: it promises the trainer's bits, and `parity.mode=require` holds it to that."""
        return self._model.fingerprint()

    def close(self) -> None:
        self._report.write_text(json.dumps({"versions": self._versions, "completions": self._completions}))

    def _complete(self, prompt: list[int], params: SamplingParams) -> Completion:
        [completion] = self._engine.generate([prompt], params)
        completion.logprobs[:] = completion.logprobs + np.float32(self._offset)
        self._completions += 1
        return completion


def unfinished(model: Any, **settings: Any) -> object:
    """No engine at all."""
    return object()
