"""Decides from records alone: a run's folder, a client's results, a store, logs. Nothing of a live process is asked.

samples      each that the undisturbed run has was sampled by one version and trained once, or accounted for
tokens       each token and logprob has the bits of the version that was to sample it, and none of another
certificate  unbroken, and of the same comparisons as the undisturbed run's; `rlloop verify` finds nothing
weights      of every step that is kept, and optimizer states, are byte-equal; so is every version in the store
API          a client's results are those of a session that nothing disturbed
secrets      neither token nor keys stand in any file but their own
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import zstandard
from safetensors.torch import load_file

from rlloop.audit import Extent, verify
from rlloop.errors import SyncError
from rlloop.metrics import is_timing
from rlloop.parity.certificate import comparison_of
from rlloop.runs.folder import read_records, read_rollouts, rollout_files, step_of
from rlloop.sync.live import bits_of
from rlloop.sync.manifest import Head, public_key
from rlloop.sync.replica import Replica
from rlloop.sync.store import FolderStore
from rlloop.sync.target import MemoryTarget

Rows = dict[str, list[tuple[int, dict[str, Any]]]]  # uid -> the step in whose file it stands, and the row


def check(world: Path, alone: Path, rescored: int = 16) -> list[str]:
    """Problems in the records of a disturbed run. `alone`: the folder of the undisturbed run.

    `rescored`: completions that `rlloop verify` draws and scores again.
    """
    run, reference = world / "run", alone / "run"
    parts = {
        "samples": lambda: samples(run, reference),
        "certificate": lambda: certificate(run, reference, rescored),
        "weights": lambda: weights(run, reference),
        "store": lambda: store(run / "weights", reference, (world / "key.pub").read_text()),
        "API": lambda: api(world / "api.jsonl", alone / "api.jsonl"),
        "secrets": lambda: secrets(world, secrets_of(world)),
    }
    return [f"{name}: {problem}" for name, part in parts.items() for problem in _guarded(part)]


def _guarded(part) -> list[str]:
    try:
        return list(part())
    except Exception as error:  # records that cannot be read are no proof
        return [f"cannot be decided: {type(error).__name__}: {error}"]


def rows_of(run: Path) -> Rows:
    found: Rows = {}
    for file in rollout_files(run):
        for row in read_rollouts(file):
            found.setdefault(row["uid"], []).append((step_of(file), row))
    return found


def samples(run: Path, reference: Path) -> Iterator[str]:
    ours, theirs = rows_of(run), rows_of(reference)
    for uid in sorted(theirs.keys() - ours.keys()):
        yield f"{uid} was lost: it is neither trained nor accounted for"
    for uid in sorted(ours.keys() - theirs.keys()):
        yield f"{uid} was never asked for"
    for uid, found in sorted(ours.items()):
        trained = [step for step, row in found if row["outcome"] == "trained"]
        if len(trained) > 1:
            yield f"{uid} was trained {len(trained)} times, in steps {trained}"
        elif len(found) > 1:
            yield f"{uid} stands in {len(found)} places"
        for step, row in found:
            yield from _sample(uid, step, row, theirs[uid][0][1] if uid in theirs else None)
    counts = Counter(row["outcome"].partition(":")[0] for found in ours.values() for _, row in found)
    ledger = Counter[str]()
    for record in read_records(run / "metrics.jsonl"):
        ledger.update({name: record.get(f"ledger/{name}", 0) for name in ("trained", "rejected", "dropped")})
    if +counts != +ledger:
        yield f"the rollouts have {dict(counts)}, the ledger {dict(ledger)}"


def _sample(uid: str, step: int, row: Mapping[str, Any], other: Mapping[str, Any] | None) -> Iterator[str]:
    versions = {row["policy_version"], *row.get("versions", ())}
    if int(uid.partition("/")[0]) != step:
        yield f"{uid} stands in step {step}"
    if versions != {step - 1}:
        yield f"{uid} was sampled by version {sorted(versions)}, and step {step} is of version {step - 1}"
    if row["outcome"] == "trained" and row["finish_reason"] not in ("stop", "length"):
        yield f"{uid} was trained, and ends by {row['finish_reason']}"
    for key in ("token_ids", "logprobs", "raw_logprobs", "trainer_logprobs", "outcome", "reward", "advantage"):
        if other is not None and row.get(key) != other.get(key):
            yield f"{uid} has other {key} than version {step - 1} samples"


def certificate(run: Path, reference: Path, rescored: int) -> Iterator[str]:
    for found in verify(run, Extent(rescored=rescored, run_code=True)):
        yield from (f"verify, {found.name}: {problem}" for problem in found.problems)
    ours, theirs = ([comparison_of(line) for line in read_records(each / "parity.jsonl")] for each in (run, reference))
    if ours != theirs:
        yield "its comparisons are not those of the undisturbed run"
    kept, others = (
        [{key: value for key, value in record.items() if not _of_transport(key)} for record in read_records(file)]
        for file in (run / "metrics.jsonl", reference / "metrics.jsonl")
    )
    for mine, its in zip(kept, others, strict=False):
        if differ := sorted(key for key in mine.keys() | its.keys() if mine.get(key) != its.get(key)):
            yield f"step {its['step']} has other metrics: {', '.join(differ[:5])}"
    if len(kept) != len(others):
        yield f"it has {len(kept)} records of {len(others)}"


def _of_transport(name: str) -> bool:
    return is_timing(name) or name.startswith(("sync/", "fleet/"))


def weights(run: Path, reference: Path) -> Iterator[str]:
    last = max(int(folder.name[5:]) for folder in (reference / "checkpoints").glob("step_*"))
    present = sorted((run / "checkpoints").glob("step_*"))
    if run / "checkpoints" / f"step_{last}" not in present:
        yield f"there is no checkpoint of step {last}, the last"
    for folder in present:
        for name in ("model.safetensors", "optimizer.safetensors"):
            if (folder / name).read_bytes() != (reference / "checkpoints" / folder.name / name).read_bytes():
                yield f"{name} of {folder.name} is not that of the undisturbed run"


def store(folder: Path, reference: Path, key: str) -> Iterator[str]:
    """Every version that the store offers, rebuilt from its blobs as a replica does."""
    blobs = FolderStore(folder)
    content = blobs.latest()
    if content is None:
        yield "it has no version"
        return
    head, target = Head.decode(content), MemoryTarget()
    replica = Replica(blobs, public_key(key), target, threads=1)
    for link in head.chain:
        try:
            replica.advance_to(link.sequence, head=head)
        except SyncError as error:
            yield f"sequence {link.sequence} cannot be had: {error}"
            continue
        checkpoint = reference / "checkpoints" / f"step_{target.version}"
        if not checkpoint.exists():  # version 0 is the model that the run began with
            continue
        expected = load_file(checkpoint / "model.safetensors")
        for name, bits in target.state.items():
            if name not in expected or not bits.same(bits_of(expected[name].to(torch.bfloat16))):
                yield f"{name} of version {target.version} is not the trainer's"
                break


def api(record: Path, reference: Path) -> Iterator[str]:
    ours, theirs = list(read_records(record)), list(read_records(reference))
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=False)):
        if mine != its:
            yield f"result {number} is {mine!s:.120}, undisturbed {its!s:.120}"
    if len(ours) != len(theirs):
        yield f"the client has {len(ours)} results of {len(theirs)}"


def secrets_of(world: Path) -> dict[str, bytes]:
    """By name. A PEM file's own line, since a log would not keep its frame."""
    from tests.support.chaos.fleet import API_KEY, TOKEN

    keys = {name: (world / name).read_bytes().splitlines()[1] for name in ("key", "other_key")}
    return {"the fleet's token": TOKEN.encode(), "the client's key": API_KEY.encode(), **keys}


def secrets(world: Path, known: Mapping[str, bytes]) -> Iterator[str]:
    for file in sorted(path for path in world.rglob("*") if path.is_file()):
        content = file.read_bytes()
        if file.suffix == ".zst":
            content += zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True).read()
        for name, secret in known.items():
            if re.search(re.escape(secret), content) and file != world / name:
                yield f"{name} stands in {file.relative_to(world)}"
