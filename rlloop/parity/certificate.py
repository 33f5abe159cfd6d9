"""The certificate: for each step a line with digests of the bits that were compared, chained by hash to the last line.

    {"step": 12, "version": 11, "tokens": 5632, "tokens_different": 0, "engine": "1f0c...", "trainer": "1f0c...",
     "fingerprints": {"engine": "9a41...", "trainer": "9a41..."}, "rung": "bitwise",
     "rollouts": "c01d...", "metrics": "52e8...", "checkpoints": {"10": "aa3f..."},
     "previous": "77d2...", "hash": "03be..."}

`engine` and `trainer` are digests of all logprob bits of the step, in sample order; at zero KLD they are equal. `rung`
is the run's rung on the ladder of `parity.mode=fallback` (bitwise, replay, correction); the line of a step down has its
`reason`. Digests of records:

    rollouts     the step's rollout file
    metrics      the lines of metrics.jsonl since the last line: the step's own and, in the first line, step 0's
    checkpoints  each checkpoint that is kept: in the line after one was saved, and in the first that a process writes
    config       config.yaml; in the first line that a process writes
    reward       the reward's source; likewise
    model        the folder that the weights come from; in the run's first line

`layout` has the degrees of parallelism above 1, of trainer and engines, in the first line that was made under them.
`versions`, under `rollout.partial`, counts tokens by the version that sampled them, where that is not always `version`.

A step that broke the contract has no `metrics`; its `ranks` are those of several on which an operation or a weight was
found to differ. `held_out` is true where its held-out completions broke it, which the
line is then of. Such a line may be of step 0. A line's `hash` covers the rest of it, so that changing, adding or
removing a line breaks the chain.
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
# Keys that differ between two runs with the same bits, since metrics contain times and ranks may be any number.
CHAINED = ("metrics", "rollouts", "config", "reward", "model", "checkpoints", "layout", "ranks", "previous", "hash")


def bits_digest(logprobs: Sequence[np.ndarray]) -> str:
    """sha256 of float32 arrays' bits, so that −0 differs from 0, and a NaN equals itself."""
    digest = hashlib.sha256()
    for array in logprobs:
        digest.update(np.ascontiguousarray(array, dtype="<f4").tobytes())
    return digest.hexdigest()


def content_digest(content: Mapping[str, Any]) -> str:
    """sha256 of JSON values, independent of the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def comparison_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line that two runs with the same bits share."""
    return {key: value for key, value in line.items() if key not in CHAINED}


class Certificate:
    """Appends lines to a run's `parity.jsonl`. A line begins when its step is compared and is sealed at its end."""

    def __init__(self, journal: Journal, attest: Callable[[Statement], None] = lambda statement: None) -> None:
        """`attest` signs the head or sends it to a witness: see `rlloop.parity.witness`."""
        self._journal, self._attest = journal, attest
        self._line: dict[str, Any] = {}
        self._covered = hashlib.sha256()
        self.reload()

    def reload(self) -> None:
        """Continue from the file's end, after the run folder was rewound. Raises `RunError` for a damaged file."""
        self.previous, self.rung, self.replayed, self._run = GENESIS, "bitwise", False, ""
        self._layout: Mapping[str, Any] = {}
        for line in read_records(self._journal.path):
            if not isinstance(line.get("hash"), str) or not isinstance(line.get("rung"), str):
                raise RunError(
                    f"{self._journal.path} is damaged: the line of step {line.get('step')} has no hash or no rung"
                )
            self.previous = line["hash"]
            self._layout = line.get("layout", self._layout)
            self._run = self._run or self.previous
            self.step_down(line["rung"])

    def step_down(self, rung: str) -> None:
        """Set the rung. Once on `replay`, routing is replayed on lower rungs too."""
        self.rung = rung
        self.replayed = self.replayed or rung == "replay"

    def begin(self, line: Mapping[str, Any]) -> None:
        """Start the next line, with the facts noted so far; again, in place of the last comparison."""
        self._line = {**line, "rung": self.rung, **self._line, **line}

    def note(self, **facts: Any) -> None:
        """Add facts to the next line."""
        self._line |= facts

    def note_layout(self, layout: Mapping[str, Any]) -> None:
        """Let the next line have the layout over ranks, where it is not the last line's."""
        if layout != self._layout:
            self.note(layout=layout)
            self._layout = layout

    def cover(self, record: bytes) -> None:
        """Let the next line cover a record that was appended to metrics.jsonl."""
        self._covered.update(record)
        self.note(metrics=self._covered.hexdigest())

    def seal(self) -> None:
        """Write the line."""
        chained = {**self._line, "previous": self.previous}
        self.previous = content_digest(chained)
        self._run = self._run or self.previous
        self._journal.append({**chained, "hash": self.previous})
        self._line, self._covered = {}, hashlib.sha256()

    def attest(self, step: int, checkpoints: Mapping[str, str]) -> None:
        """After checkpoint `step` was saved: attest the head, and let the next line cover all kept checkpoints.

        `checkpoints`: step -> manifest's digest.
        """
        self.note(checkpoints=dict(checkpoints))
        self._attest(Statement(self._run, step, self.previous, checkpoints.get(str(step), "")))


@dataclass(frozen=True)
class Statement:
    """The certificate's head at a checkpoint, as it is signed or sent to a witness."""

    run: str  # the hash of its first line
    step: int
    head: str  # the hash of that step's line
    checkpoint: str  # the digest of that step's checkpoint


def find_breaks(lines: Iterable[Mapping[str, Any]], *, gaps: bool = False) -> list[str]:
    """Changed lines, gaps and steps out of order in a certificate. Empty if the chain is intact.

    `gaps`: a loop of one's own may begin at any step and leave some out.
    """
    problems: list[str] = []
    previous, expected = GENESIS, 0 if gaps else 1
    for line in lines:
        step = line["step"]
        if step == 0 and previous == GENESIS:  # an evaluation that broke the contract before the first step
            expected = 0
        if step < expected if gaps else step != expected:
            problems.append(f"step {step} stands where step {expected} belongs")
        if line["previous"] != previous:
            problems.append(f"step {step} does not continue the line before it")
        if content_digest({key: value for key, value in line.items() if key != "hash"}) != line["hash"]:
            problems.append(f"step {step} was changed: its hash is of other content")
        previous, expected = line["hash"], step + 1
    return problems
