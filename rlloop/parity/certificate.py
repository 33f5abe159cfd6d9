"""The certificate: one line a step that says which bits were compared, chained by hash to the line before.

    {"step": 12, "version": 11, "tokens": 5632, "tokens_different": 0, "engine": "1f0c...", "trainer": "1f0c...",
     "fingerprints": {"engine": "9a41...", "trainer": "9a41..."}, "rung": "bitwise",
     "previous": "77d2...", "hash": "03be..."}

`engine` and `trainer` are digests of all logprob bits of the step, in sample order; at zero KLD they are equal. `rung`
is where the run stands on the ladder of `parity.mode=fallback` (bitwise, replay, correction); the line of a step down
has its `reason`. A line's `hash` covers the rest of it: a line that was changed, added or taken out breaks the chain.

    "certain": 12, "raw_different": 0, "raw": {"engine": "c5d0...", "trainer": "c5d0..."},
    "redrawn": 5632, "redrawn_different": 0, "faults": 0

Tokens of probability 1; raw logprobs, as above; tokens drawn again, and those that were others; completions that are
not what was asked for, trained or not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlloop.records import Journal, read_records

GENESIS = "0" * 64


def bits_digest(logprobs: Sequence[np.ndarray]) -> str:
    """Of float32 arrays, by their bits: −0 is not 0, and a NaN is itself."""
    digest = hashlib.sha256()
    for array in logprobs:
        digest.update(np.ascontiguousarray(array, dtype="<f4").tobytes())
    return digest.hexdigest()


def content_digest(content: Mapping[str, Any]) -> str:
    """Of JSON values, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Certificate:
    """Appends lines to a run's `parity.jsonl`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.reload()

    def reload(self) -> None:
        """Go on where the file ends; for when the run folder was rewound."""
        self.previous, self.rung, self.replayed = GENESIS, "bitwise", False
        for line in read_records(self._journal.path):
            self.previous = line["hash"]
            self.step_down(line["rung"])

    def step_down(self, rung: str) -> None:
        self.rung = rung
        self.replayed = self.replayed or rung == "replay"  # from there on, on lower rungs too

    def append(self, line: Mapping[str, Any]) -> None:
        chained = {**line, "rung": self.rung, "previous": self.previous}
        self.previous = content_digest(chained)
        self._journal.append({**chained, "hash": self.previous})


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
