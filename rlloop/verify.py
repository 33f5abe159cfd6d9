"""Check a run's records against each other: do ledger, certificate, rollouts and checkpoints tell one story?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.parity.certificate import bits_digest, find_breaks
from rlloop.records import read_records, read_rollouts, require_run, rollout_files, step_of


@dataclass(frozen=True)
class Check:
    name: str
    found: str  # what was looked at, and how much of it
    problems: list[str] = field(default_factory=list)


def verify(run: Path) -> Iterator[Check]:
    """Every check in turn. Raises `RunError` where `run` is no run's folder. Reads only; the run may be going on."""
    require_run(run)
    metrics = {record["step"]: record for record in read_records(run / "metrics.jsonl")}
    certificate = {line["step"]: line for line in read_records(run / "parity.jsonl")}
    yield _check_steps(metrics)
    yield _check_ledger(metrics)
    yield _check_certificate(list(certificate.values()), metrics)
    yield _check_rollouts(run, metrics, certificate)
    yield _check_checkpoints(run)


def _check_steps(metrics: Mapping[int, Mapping[str, Any]]) -> Check:
    last = max(metrics, default=-1)
    problems = [f"step {step} has no record" for step in range(last + 1) if step not in metrics]
    return Check("metrics", f"steps 0 to {last}" if metrics else "no record yet", problems)


def _check_ledger(metrics: Mapping[int, Mapping[str, Any]]) -> Check:
    problems, total = [], Counter[str]()
    for step, record in metrics.items():
        if step == 0:
            continue
        count = {name: record[f"ledger/{name}"] for name in ("sampled", "accepted", "rejected", "dropped", "trained")}
        total.update(count)
        if count["sampled"] != count["accepted"] + count["rejected"]:
            problems.append(f"step {step}: sampled {count['sampled']} is not accepted + rejected")
        if count["accepted"] != count["trained"] + count["dropped"]:
            problems.append(f"step {step}: accepted {count['accepted']} is not trained + dropped")
    return Check("ledger", ", ".join(f"{count} {name}" for name, count in total.items()) or "empty", problems)


def _check_certificate(lines: Sequence[Mapping[str, Any]], metrics: Mapping[int, Mapping[str, Any]]) -> Check:
    problems = find_breaks(lines)
    for line in lines:
        known = metrics.get(line["step"])
        if known is not None and known.get("parity/tokens", 0) != line["tokens"]:
            problems.append(
                f"step {line['step']}: {line['tokens']} tokens certified, {known['parity/tokens']} in its metrics"
            )
        if (line["engine"] == line["trainer"]) != (line["tokens_different"] == 0):
            problems.append(f"step {line['step']}: its digests and its count of different tokens contradict each other")
    tokens, different = (sum(line[key] for line in lines) for key in ("tokens", "tokens_different"))
    return Check("certificate", f"{len(lines)} steps, {different} of {tokens} tokens different", problems)


def _check_rollouts(
    run: Path, metrics: Mapping[int, Mapping[str, Any]], certificate: Mapping[int, Mapping[str, Any]]
) -> Check:
    """Each file against its step's ledger, and the stored logprobs, bit by bit, against the certificate."""
    problems, completions, seen = [], 0, set[str]()
    files = {step_of(file): file for file in rollout_files(run)}
    problems += [f"step {step} has no rollouts" for step in metrics if step > 0 and step not in files]
    for step, file in files.items():
        rows = read_rollouts(file)
        completions += len(rows)
        trained = [row for row in rows if row["outcome"] == "trained"]
        twice = [row["uid"] for row in rows if row["uid"] in seen]
        seen.update(row["uid"] for row in rows)
        problems += [f"{uid} stands twice in the records" for uid in twice]
        record, line = metrics.get(step), certificate.get(step)
        if record is not None and (len(rows), len(trained)) != (record["ledger/sampled"], record["ledger/trained"]):
            problems.append(f"{file.name}: {len(rows)} sampled, {len(trained)} trained; the ledger has other counts")
        if line is not None:
            problems += _check_bits(file.name, trained, line)
    return Check("rollouts", f"{completions} completions of {len(files)} steps", problems)


def _check_bits(name: str, trained: Sequence[Mapping[str, Any]], line: Mapping[str, Any]) -> list[str]:
    def digest(*keys: str) -> str:
        stored = [next(row[key] for key in keys if key in row) for row in trained]
        return bits_digest([np.array(values, dtype=np.float32) for values in stored])

    pairs = {"engine": digest("logprobs"), "trainer": digest("trainer_logprobs", "logprobs")}
    return [
        f"{name}: its logprobs are not those certified ({side})" for side, found in pairs.items() if found != line[side]
    ]


def _check_checkpoints(run: Path) -> Check:
    from rlloop.trainer.checkpoint import CheckpointStore, find_damage

    store = CheckpointStore(run / "checkpoints")
    damage = {step: find_damage(store.root / f"step_{step}") for step in store.steps()}
    problems = [f"step_{step}: {found}" for step, found in damage.items() if found is not None]
    return Check("checkpoints", ", ".join(f"step_{step}" for step in damage) or "none yet", problems)
