"""Check a run's records against each other: do ledger, certificate, rollouts and checkpoints tell one story?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.parity.certificate import bits_digest, find_breaks
from rlloop.records import read_config, read_records, read_rollouts, require_run, rollout_files, step_of


@dataclass(frozen=True)
class Check:
    name: str
    found: str  # what was looked at, and how much of it
    problems: list[str] = field(default_factory=list)


def verify(run: Path, rescored: int = 0) -> Iterator[Check]:
    """Every check in turn; `rescored` completions are computed again (`rlloop.rescore`).

    Raises `RunError` where `run` is no run's folder. Reads only; the run may be going on.
    """
    require_run(run)
    metrics = {record["step"]: record for record in read_records(run / "metrics.jsonl")}
    lines = list(read_records(run / "parity.jsonl"))
    certificate = {line["step"]: line for line in lines}
    yield _check_steps(metrics)
    yield _check_ledger(metrics)
    yield _check_certificate(lines, metrics)
    yield _check_rollouts(run, metrics, certificate)
    yield _check_outcomes(run)
    if (run / "orphaned").exists():
        yield _check_orphaned(run)
    if (run / "fleet.jsonl").exists():
        yield _check_fleet(run)
    yield _check_checkpoints(run)
    if rescored:
        from rlloop.rescore import rescore

        yield Check("re-scored", *rescore(run, rescored))


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
    certified = {line["step"] for line in lines}
    problems += [f"step {step} has no line" for step in metrics if step > 0 and step not in certified]
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


def _check_outcomes(run: Path) -> Check:
    """The ledger, completion by completion: each ends once, and says why where it was not trained."""
    problems, outcomes = [], Counter[str]()
    settings = read_config(run) or {}
    lag = settings.get("fleet", {}).get("max_version_lag", 0)
    stale = lag + settings.get("rollout", {}).get("drift", {}).get("stale_steps", 0)
    for file in rollout_files(run):
        step = step_of(file)
        for row in read_rollouts(file):
            kind, _, why = row["outcome"].partition(": ")
            outcomes[kind] += 1
            if kind not in ("trained", "rejected", "dropped") or bool(why) != (kind != "trained"):
                problems.append(f"{row['uid']} ended as {row['outcome']!r}")
            if not row["uid"].startswith(f"{step}/"):
                problems.append(f"{row['uid']} stands among the completions of step {step}")
            age = step - 1 - row["policy_version"]
            if kind == "trained" and not 0 <= age <= stale:
                problems.append(f"{row['uid']} was trained with weights {age} steps old; the run allows {stale}")
    return Check("outcomes", ", ".join(f"{count} {kind}" for kind, count in outcomes.items()) or "none", problems)


def _check_orphaned(run: Path) -> Check:
    """What a crash undid was sampled again: under the contract, the same bits, so that nothing was chosen by luck."""
    problems, compared = [], 0
    if (read_config(run) or {}).get("parity", {}).get("mode") != "require":
        return Check("orphaned", "kept beside; the mode does not promise that they are repeated bit for bit", [])
    kept = {step_of(file): file for file in rollout_files(run)}
    for file in sorted((run / "orphaned").glob("*/rollouts/step_*.jsonl.zst")):
        if step_of(file) not in kept:
            continue  # the run has not come there again
        now = {row["uid"]: row for row in read_rollouts(kept[step_of(file)])}
        for row in read_rollouts(file):
            again = now.get(row["uid"], {})
            if row["engine"] != again.get("engine"):
                continue  # not sampled again yet, or on another machine
            compared += 1
            if any(row[key] != again.get(key) for key in ("token_ids", "logprobs", "policy_version")):
                problems.append(f"{row['uid']}, sampled again after a crash, is another completion")
    return Check("orphaned", f"{compared} completions were sampled again, bit for bit", problems)


def _check_fleet(run: Path) -> Check:
    """The fleet's own history against the completions: each was made by an engine that served its version."""
    events = list(read_records(run / "fleet.jsonl"))
    served = {(event["engine"], event["version"]) for event in events if event["event"] == "serving"}
    problems, made = [], 0
    for file in rollout_files(run):
        for row in read_rollouts(file):
            made += 1
            if (row.get("origin"), row["policy_version"]) not in served:
                problems.append(f"{row['uid']} is of {row.get('origin')}, which never served {row['policy_version']}")
    count = Counter(event["event"] for event in events)
    found = ", ".join(f"{number} {event}" for event, number in sorted(count.items()))
    return Check("fleet", f"{made} completions of {len({engine for engine, _ in served})} engines; {found}", problems)


def _check_bits(name: str, trained: Sequence[Mapping[str, Any]], line: Mapping[str, Any]) -> list[str]:
    def digest(*keys: str) -> str:
        stored = [next(row[key] for key in keys if key in row) for row in trained]
        numbers = [[-np.inf if value is None else value for value in values] for values in stored]
        return bits_digest([np.array(values, dtype=np.float32) for values in numbers])

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
