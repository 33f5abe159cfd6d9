"""Check of each completion's origin: an engine that served its version, or a resume that sampled it again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from rlloop.audit.history import History, Rollouts
from rlloop.errors import UNREADABLE
from rlloop.runs.folder import REPORT, read_records, read_rollouts, step_of


class Fleet:
    """fleet.jsonl against the completions: each comes from an engine that served its version."""

    name = "fleet"

    def __init__(self, run: History) -> None:
        self.completions = 0
        events = list(read_records(run.path / "fleet.jsonl"))
        self.served = {(event["engine"], event["version"]) for event in events if event["event"] == "serving"}
        self.engines = {engine for engine, _ in self.served}
        if run.config.get("launch") == "ray":  # completions of actors do not name their engine
            self.served |= {(None, version) for _, version in self.served}
        self.count = Counter(event["event"] for event in events)

    def check(self, step: Rollouts) -> list[str]:
        self.completions += len(step.rows)
        return [
            f"{row.uid} is of {row.origin}, which never served {row.policy_version}"
            for row in step.rows
            if (row.origin, row.policy_version) not in self.served
        ]

    def summary(self) -> str:
        events = ", ".join(f"{number} {event}" for event, number in sorted(self.count.items()))
        return f"{self.completions} completions of {len(self.engines)} engines; {events}"


class Orphaned:
    """Completions that a resume set aside were sampled again with the same bits: none was chosen by its luck.

    Those of a step that broke parity, by the report beside them, may be other ones: what was wrong with them is why.
    """

    name = "orphaned"

    def __init__(self, run: History) -> None:
        partial = run.section("rollout.partial")
        self.repeatable, self.compared = run.mode == "require" and not partial.get("prompts"), 0
        self.files: dict[int, list[Path]] = {}
        for file in sorted((run.path / "orphaned").glob("*/rollouts/step_*.jsonl.zst")):
            self.files.setdefault(step_of(file), []).append(file)
        self.broken = {self._reported(report) for report in run.path.glob(f"orphaned/*/{REPORT}")}
        self.replaced = 0

    def _reported(self, report: Path) -> tuple[Path, int]:
        """Folder and step of the completions that a report is about. A kill between setting aside these and the report
        leaves it to the next resume, and so in the next folder."""
        folder, step = report.parent, _step_of(report)
        if folder.name.isdecimal() and all(file.parents[1] != folder for file in self.files.get(step, ())):
            folder = folder.with_name(str(int(folder.name) - 1))
        return folder, step

    def check(self, step: Rollouts) -> list[str]:
        problems, now = [], {row.uid: row for row in step.rows}
        for file in self.files.get(step.step, []) if self.repeatable else []:
            for row in read_rollouts(file):
                again = now.get(row["uid"])
                if again is None or row["engine"] != again.engine:
                    continue  # not sampled again yet, or on another machine
                self.compared += 1
                if any(row[key] != getattr(again, key) for key in ("token_ids", "logprobs", "policy_version")):
                    if (file.parents[1], step.step) in self.broken:
                        self.replaced += 1
                    else:
                        problems.append(f"{row['uid']}, sampled again after a crash, is another completion")
        return problems

    def summary(self) -> str:
        if not self.repeatable:
            return "kept beside; the run does not promise that they are repeated bit for bit"
        other = f", but {self.replaced} of steps that broke parity" if self.replaced else ""
        return f"{self.compared} completions were sampled again, bit for bit{other}"


def _step_of(report: Path) -> int:
    try:
        return json.loads(report.read_text())["step"]
    except (OSError, *UNREADABLE, KeyError, TypeError):
        return -1
