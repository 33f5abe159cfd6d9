"""The certificate: one line a step that says which bits were compared, chained by hash to the line before.

    {"step": 12, "version": 11, "tokens": 5632, "tokens_different": 0, "engine": "1f0c...", "trainer": "1f0c...",
     "fingerprints": {"engine": "9a41...", "trainer": "9a41..."}, "rung": "bitwise",
     "rollouts": "c01d...", "metrics": "52e8...", "checkpoints": {"10": "aa3f..."},
     "previous": "77d2...", "hash": "03be..."}

`engine` and `trainer` are digests of all logprob bits of the step, in sample order; at zero KLD they are equal. `rung`
is where the run stands on the ladder of `parity.mode=fallback` (bitwise, replay, correction); the line of a step down
has its `reason`. `rollouts` is the digest of the step's file, `metrics` of what metrics.jsonl got since the last line:
the step's own, and in the first line step 0's too. `checkpoints` stands in the line after one was saved, with the
digest of each that was kept, and, like `config` (of config.yaml) and `reward` (of its source), in the first line that
a process writes; `model`, of the folder that the weights come from, in the run's first. A step that broke the contract
has no metrics.

A line's `hash` covers the rest of it: a line that was changed, added or taken out breaks the chain.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlloop.errors import RunError
from rlloop.runs.folder import Journal, read_records

GENESIS = "0" * 64
# What differs between two runs of the same bits: times stand in the metrics.
CHAINED = ("metrics", "rollouts", "config", "reward", "model", "checkpoints", "previous", "hash")


def bits_digest(logprobs: Sequence[np.ndarray]) -> str:
    """Of float32 arrays, by their bits: −0 is not 0, and a NaN is itself."""
    digest = hashlib.sha256()
    for array in logprobs:
        digest.update(np.ascontiguousarray(array, dtype="<f4").tobytes())
    return digest.hexdigest()


def content_digest(content: Mapping[str, Any]) -> str:
    """Of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def comparison_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line that two runs of the same bits share."""
    return {key: value for key, value in line.items() if key not in CHAINED}


class Certificate:
    """Appends lines to a run's `parity.jsonl`: each is begun when its step was compared and sealed when it is over."""

    def __init__(self, journal: Journal, attest: Callable[[Statement], None] = lambda statement: None) -> None:
        """`attest` signs the head, or brings it to a witness: see `rlloop.parity.witness`."""
        self._journal, self._attest = journal, attest
        self._line: dict[str, Any] = {}
        self._covered = hashlib.sha256()
        self.reload()

    def reload(self) -> None:
        """Go on where the file ends; for when the run folder was rewound. Raises `RunError` for a damaged file."""
        self.previous, self.rung, self.replayed, self._run = GENESIS, "bitwise", False, ""
        for line in read_records(self._journal.path):
            if not isinstance(line.get("hash"), str) or not isinstance(line.get("rung"), str):
                raise RunError(
                    f"{self._journal.path} is damaged: the line of step {line.get('step')} is no certificate's"
                )
            self.previous = line["hash"]
            self._run = self._run or self.previous
            self.step_down(line["rung"])

    def step_down(self, rung: str) -> None:
        self.rung = rung
        self.replayed = self.replayed or rung == "replay"  # from there on, on lower rungs too

    def begin(self, line: Mapping[str, Any]) -> None:
        """The next line, what was noted before in it."""
        self._line = {**line, "rung": self.rung, **self._line}

    def note(self, **facts: Any) -> None:
        """Further facts for the next line."""
        self._line |= facts

    def cover(self, record: bytes) -> None:
        """The next line speaks for what was appended to metrics.jsonl."""
        self._covered.update(record)
        self.note(metrics=self._covered.hexdigest())

    def seal(self) -> None:
        """Write the line that was begun."""
        chained = {**self._line, "previous": self.previous}
        self.previous = content_digest(chained)
        self._run = self._run or self.previous
        self._journal.append({**chained, "hash": self.previous})
        self._line, self._covered = {}, hashlib.sha256()

    def attest(self, step: int, checkpoints: Mapping[str, str]) -> None:
        """Checkpoint `step` is saved: state the head, and let the next line hold the digests of all that are kept."""
        self.note(checkpoints=dict(checkpoints))
        self._attest(Statement(self._run, step, self.previous, checkpoints.get(str(step), "")))


@dataclass(frozen=True)
class Statement:
    """That a run had come so far: what is signed, or told to a witness."""

    run: str  # the hash of its first line
    step: int
    head: str  # the hash of that step's line
    checkpoint: str  # the digest of that step's checkpoint


def find_breaks(lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong with a certificate: changed lines, gaps, steps out of order. Empty when it is whole."""
    problems: list[str] = []
    previous, expected = GENESIS, 1
    for line in lines:
        step = line["step"]
        if step != expected:
            problems.append(f"step {step} stands where step {expected} belongs")
        if line["previous"] != previous:
            problems.append(f"step {step} does not continue the line before it")
        if content_digest({key: value for key, value in line.items() if key != "hash"}) != line["hash"]:
            problems.append(f"step {step} was changed: its hash is of other content")
        previous, expected = line["hash"], step + 1
    return problems
