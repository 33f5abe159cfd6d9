"""A run's folder, which can be read during the run, and holds a single history across resumes.

    config.yaml                      resolved
    metrics.jsonl                    one object a step; step 0 is the evaluation before the first update
    parity.jsonl                     the certificate (rlloop.parity.certificate)
    rollouts/step_00000012.jsonl.zst every completion of a step, one JSON object each
    rotated/, rollouts/*.zip         older parts of these, in long runs (rlloop.runs.journal)
    checkpoints/step_12/             complete or absent (rlloop.trainer.checkpoint)
    fingerprints.json                digest -> everything that decides the bits of an engine or trainer
    signatures.jsonl                 with certificate.key: the certificate's head, signed (rlloop.parity.witness)
    reward.json                      digests of the reward's source, and the steps after which it changed
    summary.json                     written at the end
    curve.png                        drawn at the end
    run.log                          events, with times
    orphaned/1/...                   records that the first resume set aside: steps past its checkpoint

Records are only appended, and flushed line by line, so a killed process leaves at most one torn last line.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml
import zstandard

from rlloop.config.resume import refuse_other_run
from rlloop.errors import UNREADABLE, RunError, did_you_mean
from rlloop.runs.find import runs_below
from rlloop.runs.journal import (
    ROTATED,
    Journal,
    PackedFile,
    compress,
    content_of,
    decoded,
    last_of,
    open_journal,
    pack,
    packed_files,
    segments,
    split_records,
    unpack,
)

REPORT = "parity_report.json"
SIGNATURES = "signatures.jsonl"
OWN_LOOP = {"loop": "own"}  # in config.yaml: the run is not of `rlloop train` (rlloop.loop.own)
SEGMENT = 16 << 20  # bytes after which a journal is rotated, at a checkpoint
PACKED = 1000  # steps whose rollouts become one file, likewise
DEPTH = 3  # in which a new run may not hide other runs: RECIPE/TIME/JOB of a sweep
JOURNALS = ("metrics.jsonl", "parity.jsonl", SIGNATURES)  # at most one line for each step
ROLLOUTS = re.compile(r"step_(\d{8,18})\.jsonl\.zst")

RolloutFile = Path | PackedFile


class RunFolder:
    """One run's folder, locked by one process: on `.lock`, and on the folder itself in case that file is deleted."""

    def __init__(self, path: Path) -> None:
        """Open `path`, or create it. Raises `RunError` if another process has it, or it cannot be written."""
        self.path = path
        self._locks: list[int] = []
        try:
            if (path / "config.json").exists():
                raise RunError(f"{path} is a model's folder (it has a config.json); choose another folder")
            if not (path / "config.yaml").exists() and (other := next(runs_below(path, DEPTH, links=False), None)):
                raise RunError(f"{path} holds other runs, such as {other}; choose a folder of this run's own")
            self._is_new = not path.exists() or not any(path.iterdir())
            path.mkdir(parents=True, exist_ok=True)
            for target, flags in ((path, os.O_RDONLY), (path / ".lock", os.O_RDWR | os.O_CREAT)):
                self._locks.append(os.open(target, flags, 0o666))
                fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.__exit__()
            raise RunError(f"another process is running in {path}; wait for it, or choose another folder") from None
        except OSError as error:
            self.__exit__()
            raise RunError(f"cannot write a run into {path}: {error.strerror}; choose another folder") from None
        self.metrics = Journal(path / "metrics.jsonl")
        self.parity = Journal(path / "parity.jsonl")
        self.fleet = Journal(path / "fleet.jsonl")
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"
        self._adopted: bytes | None = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        while self._locks:
            os.close(self._locks.pop())

    def discard(self) -> bool:
        """Delete the folder of a run that was refused: one that this process made, and that has no records. Returns
        False, and leaves it, for any other."""
        begun = any((self.path / name).exists() for name in (*JOURNALS, ROTATED, "weights", "rollouts", "checkpoints"))
        if not self._is_new or begun:
            return False
        shutil.rmtree(self.path)
        return True

    def check_held(self) -> None:
        """Raises `RunError` if the folder was moved, or replaced by another, which another process may have locked."""
        held = os.fstat(self._locks[0])
        try:
            here = self.path.stat()
        except OSError:
            here = None
        if here is None or (here.st_dev, here.st_ino) != (held.st_dev, held.st_ino):
            raise RunError(f"{self.path} is not the folder that this process writes any more: it was moved or replaced")

    def adopt(self, config: Mapping[str, Any]) -> str:
        """Take the configuration of a new run, or check that it is compatible with this folder's run.

        Returns the digest of config.yaml, which is written at once for a new run, and by `confirm` for a resumed one,
        so that it is always the one that the certificate covers. Raises `RunError` naming every key whose change would
        make it another run. A run that failed before it recorded or published anything may be replaced.
        """
        file, metrics = self.path / "config.yaml", self.metrics.path
        begun = (metrics.exists() and metrics.stat().st_size) or any(
            (self.path / name).exists() for name in ("weights", ROTATED)
        )
        content = yaml.safe_dump(dict(config), sort_keys=False).encode()
        self._adopted = content
        if file.exists() and begun:
            refuse_other_run(self.path, read_config(self.path), config)
        else:
            self.confirm()
        return hashlib.sha256(content).hexdigest()

    def confirm(self) -> None:
        """Write the adopted configuration, now that the run goes on with it."""
        if self._adopted is not None:
            write_whole(self.path / "config.yaml", self._adopted)
            self._adopted = None

    def is_finished(self, num_steps: int) -> bool:
        """True if the run has ended, after `num_steps` steps or more."""
        summary = read_summary(self.path)
        step = summary.get("step") if summary is not None and summary.get("status") == "finished" else None
        return isinstance(step, int) and step >= num_steps

    def rewind(self, step: int | None) -> int:
        """Move every record past `step` (None: every record) to orphaned/. Returns the number of metrics records moved.

        May be killed at any point: records are copied before they are cut. Raises `RunError` for damaged records and
        for files that are not the run's.
        """
        keep = -1 if step is None else step
        self._loosen(keep)
        files = sorted(each for each in self.rollouts.glob("*") if each.suffix != ".zip")
        steps = {file: step_of(file) for file in files if file.suffix != ".tmp"}  # before anything is moved
        rounds = [int(each.name) for each in (self.path / "orphaned").glob("*") if each.name.isdecimal()]
        aside = self.path / "orphaned" / str(1 + max(rounds, default=0))
        moved = 0
        for name in JOURNALS:
            file = self.path / name
            later = [segment for segment in segments(file) if last_of(segment) > keep]
            if not file.exists() and not later:
                continue
            content = b"".join(map(content_of, later)) + (file.read_bytes() if file.exists() else b"")
            kept, rest = split_records(file, content, keep)
            if rest:
                aside.mkdir(parents=True, exist_ok=True)
                write_whole(aside / name, rest)
                moved += rest.count(b"\n") if name == "metrics.jsonl" else 0
            if later:
                write_whole(file, kept)
            elif rest:
                os.truncate(file, len(kept))
            for segment in later:
                segment.unlink()
        self.metrics.reopen()
        self.parity.reopen()
        for file in files:
            if file not in steps:
                file.unlink()
            elif steps[file] > keep:
                (aside / "rollouts").mkdir(parents=True, exist_ok=True)
                file.rename(aside / "rollouts" / file.name)
        for name in ("summary.json", "curve.png", REPORT):
            if (self.path / name).exists() and (moved or name == REPORT):  # a report is of a step without a record
                aside.mkdir(parents=True, exist_ok=True)
                (self.path / name).rename(aside / name)
        return moved

    def _loosen(self, keep: int) -> None:
        """Take apart archives with steps past `keep`, and end what a kill interrupted: a rotation, a packing."""
        archives = sorted(self.rollouts.glob("step_*.zip"), key=last_of)
        for archive in archives:
            if last_of(archive) > keep:
                unpack(archive)
        for archive in [each for each in archives if last_of(each) <= keep][-1:]:
            for file in packed_files(archive):
                (self.rollouts / file.name).unlink(missing_ok=True)
        for plain in (self.path / ROTATED).glob("*.jsonl"):
            compress(plain)

    def rotate(self, step: int) -> None:
        """After checkpoint `step`: journals that have grown begin anew, and many steps' rollouts become one file."""
        for journal in (self.metrics, self.parity, self.fleet):
            if journal.path.exists() and journal.path.stat().st_size >= SEGMENT:
                journal.rotate(step)
        loose = sorted(file for file in self.rollouts.glob("step_*") if ROLLOUTS.fullmatch(file.name))
        loose = [file for file in loose if step_of(file) <= step]
        if len(loose) >= PACKED:
            pack(loose, self.rollouts / f"step_{step:08d}.zip")

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> str:
        """Write a step's completions, compressed. Returns the file's digest."""
        self.check_held()
        self.rollouts.mkdir(exist_ok=True)
        content = zstandard.compress(b"\n".join(map(msgspec.json.encode, rows)) + b"\n", 1)
        write_whole(self.rollouts / f"step_{step:08d}.jsonl.zst", content, durable=False)
        return hashlib.sha256(content).hexdigest()

    def note_fingerprints(self, by_digest: Mapping[str, Mapping[str, Any]]) -> None:
        """Record fingerprints by their digests. A new one in an old run is logged, since its bits may differ."""
        file = self.path / "fingerprints.json"
        known = decoded(file.read_bytes(), file, dict[str, dict[str, Any]]) if file.exists() else {}
        new = {digest: fingerprint for digest, fingerprint in by_digest.items() if digest not in known}
        if new:
            write_whole(file, json.dumps({**known, **new}, indent=1, sort_keys=True).encode())
        if new and known:
            self.log(f"the numerics are not those that the run began with: see {', '.join(new)} in {file.name}")

    def write_json(self, name: str, content: Mapping[str, Any]) -> Path:
        write_whole(self.path / name, as_json_file(content))
        return self.path / name

    def log(self, text: str) -> None:
        with (self.path / "run.log").open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")


def as_json_file(content: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def write_whole(file: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace a file's content atomically. `durable`: it also survives a crash of the machine."""
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("wb") as handle:
        handle.write(content)
        if durable:
            handle.flush()
            os.fsync(handle.fileno())
    temporary.replace(file)


# ------------------------------------------------------------------------------------------------ reading


def require_run(path: Path) -> Path:
    """Returns `path`. Raises `RunError` if it is not a run's folder."""
    if not path.is_dir():
        hint = did_you_mean(path.name, (file.parent.name for file in path.parent.glob("*/config.yaml")))
        raise RunError(f"there is no run {path}: " + ("it is a file" if path.exists() else f"no such folder{hint}"))
    if not (path / "config.yaml").is_file():
        inside = sorted(file.parent for file in path.glob("*/config.yaml"))
        hint = f"; it holds the runs {', '.join(run.name for run in inside)}" if inside else ""
        raise RunError(f"{path} is not a run's folder: it has no config.yaml{hint}")
    return path


def read_records(file: Path) -> Iterator[dict[str, Any]]:
    """The objects of a journal that may be growing, rotated parts first; a torn last line is left out. Raises
    `RunError`."""
    try:
        journal = open_journal(file)
    except FileNotFoundError:
        return
    with journal as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            yield decoded(line, f"{file}, line {number},", dict[str, Any])


def rollout_bytes(file: RolloutFile) -> bytes:
    """Content of a step's file, also where it was packed, or unpacked by a resume, since it was listed."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        if (now := rollout_file(file.parents[1], step_of(file))) is None:
            raise
        return now.read_bytes()


def read_rollouts(file: RolloutFile) -> list[dict[str, Any]]:
    try:  # all at once: a streaming decoder would silently accept a file that is cut short
        return [msgspec.json.decode(line) for line in zstandard.decompress(rollout_bytes(file)).splitlines()]
    except (zstandard.ZstdError, *UNREADABLE) as error:
        raise RunError(f"{file} is damaged: {error}") from error


def rollout_files(path: Path) -> list[RolloutFile]:
    """Files of each step's rollouts, in order. Raises `RunError` for a damaged archive."""
    folder, files = path / "rollouts", dict[str, RolloutFile]()

    def add_loose() -> None:
        files.update({file.name: file for file in folder.glob("step_*.zst") if ROLLOUTS.fullmatch(file.name)})

    add_loose()
    for archive in folder.glob("step_*.zip"):  # which may be packed at this moment
        files |= {file.name: file for file in packed_files(archive)}
    add_loose()  # or unpacked
    return [files[name] for name in sorted(files)]


def rollout_file(path: Path, step: int) -> RolloutFile | None:
    """The file of one step's rollouts, if there is one."""
    file = path / "rollouts" / f"step_{step:08d}.jsonl.zst"
    if file.exists():
        return file
    archives = [each for each in (path / "rollouts").glob("step_*.zip") if last_of(each) >= step]
    within = packed_files(min(archives, key=last_of)) if archives else []
    packed = next((each for each in within if each.name == file.name), None)
    return file if packed is None and file.exists() else packed  # a resume may have unpacked it at this moment


def step_of(file: RolloutFile) -> int:
    """The step in a rollout file's name. Raises `RunError`."""
    if (match := ROLLOUTS.fullmatch(file.name)) is None:
        raise RunError(f"{file} is not one of the run's files; move it elsewhere")
    return int(match[1])


YAML = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast, and not in every build


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.load((path / "config.yaml").read_text(), YAML)
    except (yaml.YAMLError, *UNREADABLE):
        config = None
    if not isinstance(config, dict):
        raise RunError(f"{path / 'config.yaml'} is not a run's configuration, or is damaged")
    return config


def is_own_loop(config: Mapping[str, Any]) -> bool:
    """True for the configuration of a run that `rlloop.Run` recorded, of a loop that is not rlloop's."""
    return config.get("loop") == OWN_LOOP["loop"]


def read_summary(path: Path) -> dict[str, Any] | None:
    file = path / "summary.json"
    remedy = "delete it: it is written again when the run ends"
    return decoded(file.read_bytes(), file, dict[str, Any], remedy) if file.exists() else None


def summarize(metrics: Sequence[Mapping[str, Any]], status: str) -> dict[str, Any]:
    """Content of `summary.json`, from the records alone, so that a resumed run's is the same as an unbroken one's."""

    def series(name: str) -> list[float]:
        return [record[name] for record in metrics if record.get(name) is not None]

    def course(name: str) -> dict[str, float]:
        values = series(name)
        return {"first": values[0], "last": values[-1], "best": max(values)} if values else {}

    k3 = series("parity/k3")
    tokens = series("parity/tokens")
    different = [
        record["parity/tokens_different"] * record["parity/tokens"] for record in metrics if "parity/tokens" in record
    ]
    return {
        "status": status,
        "step": metrics[-1]["step"] if metrics else 0,
        "eval/solved": course("eval/solved"),
        "eval/reward": course("eval/reward"),
        "reward/mean": course("reward/mean"),
        "parity": {
            "tokens": int(sum(tokens)),
            "tokens_different": round(sum(different)),
            "k3_max": max(k3, key=abs, default=0.0),
        },
        "ledger": {
            name: int(sum(series(f"ledger/{name}")))
            for name in ("sampled", "accepted", "rejected", "dropped", "trained")
        },
        "seconds": sum(series("time/step")),
    }
