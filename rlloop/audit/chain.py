"""Checks of records against the certificate: its chain, config.yaml, metrics, checkpoints, summary, signature, witness.

A record is one line of metrics.jsonl, a line one of parity.jsonl (the certificate); each has a step.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from rlloop.audit.history import Check, History, Signature
from rlloop.errors import UNREADABLE
from rlloop.parity.certificate import content_digest, find_breaks
from rlloop.parity.witness import is_signed
from rlloop.runs.folder import SIGNATURES, as_json_file, summarize
from rlloop.trainer.checkpoint import MANIFEST, CheckpointStore, find_damage, manifest_digest, manifest_of

LEDGER = ("sampled", "accepted", "rejected", "dropped", "trained")
STATUSES = ("finished", "interrupted", "failed", "parity broken")


def check_metrics(run: History) -> Check:
    """One record for each step, in order, with the bytes that the certificate covers."""
    problems = [*run.problems]
    steps = [record["step"] for record in run.metrics]
    last = max(steps, default=-1)
    certified = [step for step, line in run.by_step.items() if line.metrics is not None]
    due = certified if run.is_own else range(max(last, run.last) + 1)
    problems += [f"step {step} has no record" for step in due if step not in run.records]
    problems += [f"step {step} has {count} records" for step, count in Counter(steps).items() if count > 1]
    if steps != sorted(steps):
        problems.append("the records are not in the order of their steps")
    raw: dict[int, bytes] = {}
    for line in run.metrics_lines:
        try:
            raw.setdefault(msgspec.json.decode(line)["step"], line)
        except (KeyError, TypeError, *UNREADABLE):
            continue  # which `run.problems` has
    before = -1
    for step, line in sorted(run.by_step.items()):
        covered = b"".join(text for at, text in raw.items() if before < at <= step)  # with records without a line
        before = step
        if line.metrics is not None and line.metrics != hashlib.sha256(covered).hexdigest():
            problems.append(f"step {step}: its record is not the one that the certificate covers")
        if line.metrics is None and line.rollouts is not None and step < run.last:
            problems.append(f"step {step}: its line covers no record, though the run went on")
    if run.status is not None:
        problems += [f"{name} ends in {count} bytes that are no line" for name, count in run.torn.items()]
    return Check("metrics", f"steps 0 to {last}" if steps else "no record yet", problems)


def check_ledger(run: History) -> Check:
    """The counts of completions in each record add up: sampled, accepted, rejected, dropped, trained."""
    problems, total = [], Counter[str]()
    for step, record in run.records.items():
        if step == 0 or (run.is_own and "ledger/sampled" not in record):
            continue
        counts = {name: record.get(f"ledger/{name}", -1) for name in LEDGER}
        if not all(isinstance(number, int) and number >= 0 for number in counts.values()):
            problems.append(f"step {step} has no counts of its completions")
            continue
        total.update(counts)
        sampled, accepted, rejected, dropped, trained = counts.values()
        if sampled != accepted + rejected:
            problems.append(f"step {step}: sampled {sampled} is not accepted + rejected")
        if accepted != trained + dropped:
            problems.append(f"step {step}: accepted {accepted} is not trained + dropped")
    return Check("ledger", ", ".join(f"{counts} {name}" for name, counts in total.items()) or "empty", problems)


def check_certificate(run: History) -> Check:
    """The certificate's hash chain, and its lines against records, config.yaml and fingerprints.json."""
    problems = find_breaks([raw for raw in run.raw_lines if raw.get("step") in run.by_step], gaps=run.is_own)
    written = [msgspec.json.encode(raw) + b"\n" for raw in run.raw_lines]
    if b"".join(written) != b"".join(run.written_lines):
        problems.append("parity.jsonl is not as it was written")
    problems += [
        f"step {step} has no line" for step in run.records if step not in run.by_step and _needs_line(run, step)
    ]
    for line in run.lines:
        known = run.records.get(line.step)
        if known is not None and known.get("parity/tokens", 0) != line.tokens:
            problems.append(
                f"step {line.step}: {line.tokens} tokens certified, {known.get('parity/tokens')} in its metrics"
            )
        if (line.engine == line.trainer) != (line.tokens_different == 0):
            problems.append(f"step {line.step}: its digests and its count of different tokens contradict each other")
    problems += _config_problems(run) + _mode_problems(run) + _fingerprint_problems(run)
    tokens, different = (sum(getattr(line, name) for line in run.lines) for name in ("tokens", "tokens_different"))
    old = sum(line.rollouts is None and not line.held_out for line in run.lines)
    note = f"; {old} of an older format, whose records no digest covers" if old else ""
    return Check("certificate", f"{len(run.lines)} steps, {different} of {tokens} tokens different{note}", problems)


def _needs_line(run: History, step: int) -> bool:
    """True for every step with a record but the one that a running run may be in."""
    return step > 0 and (run.status is not None or not step == run.latest + 1 == max(run.records))


def _config_problems(run: History) -> list[str]:
    """config.yaml has the digest in the certificate."""
    digests = [line.config for line in run.lines if line.config is not None]
    if not digests:
        return ["no line covers config.yaml"] if run.lines and not run.is_old else []
    file = run.path / "config.yaml"
    if file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digests[-1]:
        return []
    return ["config.yaml is not the one that the certificate covers"]


def _mode_problems(run: History) -> list[str]:
    """Under `parity.mode=require`, no step comes after one whose bits differ."""
    if run.mode != "require":
        return []
    broken = [line.step for line in run.lines if line.tokens_different and line.metrics is not None]
    return [f"step {step} went on with bits that differ, under parity.mode=require" for step in broken]


def _fingerprint_problems(run: History) -> list[str]:
    """fingerprints.json has the fingerprint of every digest in the lines."""
    file = run.path / "fingerprints.json"
    named = {digest for line in run.lines for digest in line.fingerprints.values()}
    try:
        known = json.loads(file.read_text()) if file.exists() else {}
        problems = [
            f"fingerprints.json: {key:.12} is of other content" for key in known if content_digest(known[key]) != key
        ]
        if known and file.read_text() != json.dumps(known, indent=1, sort_keys=True):
            problems.append("fingerprints.json is not as it was written")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return [f"fingerprints.json cannot be read: {error}"]
    return problems + [f"fingerprints.json lacks {digest:.12}" for digest in sorted(named - known.keys())]


# ------------------------------------------------------------------------------------------------ summary, checkpoints


def check_summary(run: History) -> Check:
    """summary.json has the values that the records give."""
    last, built = max(run.records, default=0), run.built
    steps = None if isinstance(built, str) else built.trainer.num_steps
    if run.summary is None:
        at_end = steps is not None and last >= steps and (run.path / "checkpoints" / f"step_{last}").is_dir()
        problem = "summary.json is missing, though the last step is saved; the same command writes it again"
        return Check("summary", "none: the run goes on, or was killed", [problem] if at_end else [])
    status, step = run.summary.get("status"), run.summary.get("step")
    problems = [] if status in STATUSES else [f"summary.json has the status {status!r:.40}"]
    if not isinstance(step, int) or not 0 <= step <= last:
        return Check(
            "summary", "", [*problems, f"summary.json is of step {step!r:.20}, the records end at step {last}"]
        )
    expected = summarize([record for record in run.metrics if record["step"] <= step], str(status))
    if "eval/reward" not in run.summary:  # written before summaries had it
        del expected["eval/reward"]
    if not run.is_old and (run.path / "summary.json").read_bytes() != as_json_file(expected):
        problems.append("summary.json is not what the records come to")
    if run.status == "finished" and steps is not None and step < steps:
        problems.append(f"summary.json says finished, at step {step} of {steps}")
    return Check("summary", f"{status} at step {step}" + ("" if step == last else ", and went on"), problems)


def check_checkpoints(run: History) -> Check:
    """The expected checkpoints are there and undamaged, and each names the certificate's line of its step."""
    store = CheckpointStore(run.path / "checkpoints")
    present = store.steps()
    if run.is_own:
        return Check("checkpoints", f"not checked: {len(present)} that the loop saved itself" if present else "none")
    covered = next((line.checkpoints for line in reversed(run.lines) if line.checkpoints is not None), None)
    problems = [f"step_{step} is missing" for step in sorted(_expected(run, present, covered or {}) - set(present))]
    for step in present:
        folder = store.root / f"step_{step}"
        problem = find_damage(folder) or _file_problem(folder)
        if problem is None and covered is not None and str(step) in covered:
            problem = (
                None if manifest_digest(folder) == covered[str(step)] else "is not the one that the certificate covers"
            )
        both = problem, _head_problem(run, step, folder)
        problems += [f"step_{step}: {each}" for each in both if each is not None]
    return Check("checkpoints", ", ".join(f"step_{step}" for step in present) or "none yet", problems)


def _expected(run: History, present: list[int], covered: dict[str, str]) -> set[int]:
    """Steps whose checkpoints must be there: the last `checkpoint.keep` of those that the certificate names and, after
    an orderly end, of the last step."""
    steps = {int(step) for step in covered if step.isdigit()}
    newest = max(steps, default=0)
    steps |= {step for step in present if step > newest}
    if run.status in ("finished", "interrupted") and run.last and not run.is_old:
        steps.add(run.last)
    keep = len(steps) if isinstance(run.built, str) else run.built.checkpoint.keep
    return set(sorted(steps)[-keep:])


def _file_problem(folder: Path) -> str | None:
    """A file that is not one of the checkpoint's, or a manifest that is not as it was written."""
    sealed = {MANIFEST, *json.loads((folder / MANIFEST).read_text())["files"]}
    others = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - sealed
    if others:
        return f"{min(others)} is none of its files"
    as_written = manifest_of(folder, int(folder.name.removeprefix("step_"))) == (folder / MANIFEST).read_text()
    return None if as_written else f"{MANIFEST} is not as it was written"


def _head_problem(run: History, step: int, folder: Path) -> str | None:
    """The certificate's line of a step must have the hash that the checkpoint continued from."""
    try:
        head = json.loads((folder / "loop.json").read_text())["certificate"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "loop.json is not readable"
    line = run.by_step.get(step)
    if line is None:
        return "the certificate ends before it"
    return None if line.hash == head else "the certificate is not the one that it continued"


# ------------------------------------------------------------------------------------------------ signature, witness


def check_signature(run: History, key: Ed25519PublicKey | None) -> Check:
    """signatures.jsonl against the chain, and with `key` each signature."""
    entries = run.signatures()
    asked = not isinstance(run.built, str) and run.built.certificate.key is not None
    if key is None:
        summary = f"{len(entries)} heads are signed; --public-key checks them"
        return Check("signature", summary, [] if entries or not run.last else [f"{SIGNATURES} is missing"])
    forged = [each for each in entries if not is_signed(each.statement, each.signature, key)]
    problems = [f"the head of step {each.step} is not signed by this key" for each in forged]
    if not entries:
        problems.append("no head is signed" + ("" if asked else ": the run had no certificate.key"))
    return Check(
        "signature", f"{len(entries)} heads are signed", problems + _statement_problems(run, entries, "signed")
    )


def check_witness(run: History, file: Path) -> Check:
    """A witness's file against the chain."""
    entries = run.signatures(file)
    problems = [] if entries else ["the witness knows nothing of this run"]
    return Check("witness", f"{len(entries)} heads are known", problems + _statement_problems(run, entries, "known"))


def _statement_problems(run: History, entries: list[Signature], how: str) -> list[str]:
    """Statements that contradict the chain, and a checkpoint newer than all of them. `how`: "signed" or "known"."""
    covered = {key: digest for line in run.lines for key, digest in (line.checkpoints or {}).items()}
    problems = []
    for each in entries:
        line = run.by_step.get(each.step)
        if line is None:
            problems.append(f"the certificate ends before step {each.step}, whose head is {how}")
        elif line.hash != each.head or each.run != run.lines[0].hash:
            problems.append(f"step {each.step}: its line is not the one whose head is {how}")
        here = manifest_digest(run.path / "checkpoints" / f"step_{each.step}") or covered.get(str(each.step))
        if here is not None and here != each.checkpoint:
            problems.append(f"step_{each.step} is not the checkpoint that is {how}")
    saved = CheckpointStore(run.path / "checkpoints").steps()
    if saved and entries and saved[-1] > entries[-1].step:
        problems.append(f"step_{saved[-1]} is not among what is {how}, which ends at step {entries[-1].step}")
    return problems
