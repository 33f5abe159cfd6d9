"""A run's records, read so that damage becomes a list of problems and not an error."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import zstandard
from msgspec import Meta
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlloop.config.run import RunConfig
from rlloop.errors import UNREADABLE, RlloopError, RunError
from rlloop.launch.compose import build
from rlloop.parity.certificate import Statement
from rlloop.runs.folder import (
    SIGNATURES,
    RolloutFile,
    is_own_loop,
    read_config,
    rollout_bytes,
    rollout_files,
    step_of,
)
from rlloop.runs.journal import open_journal

Id = Annotated[int, Meta(ge=0, lt=2**31)]
Step = Annotated[int, Meta(ge=0, lt=2**53)]

_CHECKED: dict[str, RunConfig] = {}


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    summary: str  # what was checked, and how much of it
    problems: list[str] = field(default_factory=list)


class Row(msgspec.Struct):
    """One completion as in rollout files: see `rlloop.runs.rollouts.rollout_rows`."""

    uid: str
    example: str
    group: Id
    policy_version: Step
    engine: str
    outcome: str
    reward: float
    solved: bool
    components: dict[str, float]
    advantage: float
    prompt: str
    text: str
    finish_reason: Literal["stop", "length", "abort"]
    sampling: dict[str, Any]
    prompt_ids: list[Id]
    token_ids: list[Id]
    logprobs: list[float | None]
    raw_logprobs: list[float | None] | None = None
    trainer_logprobs: list[float | None] | None = None
    origin: str | None = None
    turns: list[tuple[Id, Id]] | None = None
    versions: list[Step] | None = None
    version_spans: list[tuple[Id, Id]] | None = None
    routed_experts: Any = None
    images: list[dict[str, Any]] | None = None

    @property
    def position(self) -> tuple[int, int, int]:
        """Step, prompt, index in the group, from `uid`. Raises `ValueError` for a uid of another form."""
        step, prompt, index = self.uid.split("/")
        return int(step), int(prompt), int(index)

    @property
    def trained(self) -> bool:
        return self.outcome == "trained"

    @property
    def rejected(self) -> bool:
        return self.outcome.startswith("rejected")

    @property
    def written(self) -> list[int]:
        """Indices in `token_ids` of the policy's own tokens."""
        turns = [(0, len(self.token_ids))] if self.turns is None else self.turns
        return [at for start, end in turns for at in range(start, end)]


_ROW = msgspec.json.Decoder(Row)


class Line(msgspec.Struct):
    """One line of the certificate. Lines written by versions whose chain covered logprobs only have no `rollouts`."""

    step: Step
    version: Step
    tokens: Step
    tokens_different: Step
    engine: str
    trainer: str
    rung: str
    previous: str
    hash: str
    fingerprints: dict[str, str] = {}
    rollouts: str | None = None
    metrics: str | None = None
    config: str | None = None
    reward: str | None = None
    model: str | None = None
    checkpoints: dict[str, str] | None = None
    raw: dict[str, str] | None = None
    versions: dict[str, Step] | None = None
    held_out: bool = False  # of held-out completions that broke the contract


class Signature(msgspec.Struct):
    """One line of signatures.jsonl: a signed statement of the certificate's head at a checkpoint."""

    run: str
    step: Step
    head: str
    checkpoint: str
    signature: str = ""

    @property
    def statement(self) -> Statement:
        return Statement(self.run, self.step, self.head, self.checkpoint)


@dataclass(frozen=True)
class Rollouts:
    """One step's rollout file, with the step's metrics and its line of the certificate."""

    step: int
    name: str
    digest: str
    rows: list[Row]
    record: dict[str, Any] | None  # its metrics
    line: Line | None


class History:
    """One run's records. Reading does not raise for damage; unreadable records are named in `problems`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.torn: dict[str, int] = {}  # bytes after the last line of a journal
        self.written_lines = self._lines("parity.jsonl")
        self.raw_lines = self._objects(self.written_lines, "parity.jsonl")
        self.lines = [line for line in (self._as_line(raw) for raw in self.raw_lines) if line is not None]
        self.by_step = {line.step: line for line in self.lines}
        self.metrics_lines = self._lines("metrics.jsonl")
        self.metrics = [
            record
            for record in self._objects(self.metrics_lines, "metrics.jsonl")
            if self._is_step(record.get("step"), "metrics.jsonl")
        ]
        self.records = {record["step"]: record for record in self.metrics}
        self.files = self._rollout_files()
        self.summary = self._summary()
        self.config: dict[str, Any] = self._try(lambda: read_config(path)) or {}
        self.built = _built(self.config)
        self.last = max(self.by_step, default=0)  # the last certified step, which all other records must reach
        # A running run may have written more while this read: records are compared with the certificate as it is now.
        self.latest = max([self.last, *(_step_in(line) for line in self._lines("parity.jsonl")[-1:])])

    @property
    def is_old(self) -> bool:
        """True if some steps were recorded by a version whose certificate covered logprobs only."""
        return any(line.rollouts is None for line in self.lines if not line.held_out)

    @property
    def is_own(self) -> bool:
        """True for a loop that is not rlloop's, recorded by `rlloop.Run`: its steps and requests are its own."""
        return is_own_loop(self.config)

    @property
    def mode(self) -> Any:
        """`parity.mode`."""
        section = self.config.get("parity")
        return section.get("mode") if isinstance(section, dict) else None

    def section(self, key: str) -> dict[str, Any]:
        """A section of the configuration by its dotted name; empty where it is null, or of an older version."""
        section = self.config
        for name in key.split("."):
            section = section.get(name) or {}
        return section

    @property
    def status(self) -> str | None:
        """The run's end: finished, interrupted, failed, ... None if it is running, was killed, or was resumed."""
        whole = self.summary is not None and self.summary.get("step") == max(self.records, default=0)
        return str(self.summary.get("status")) if whole and self.summary is not None else None

    def rollouts_of(self, step: int) -> Rollouts | str:
        """A step's rollouts; for a damaged file the reason."""
        file = self.files[step]
        try:
            content = rollout_bytes(file)
            rows = [_ROW.decode(line) for line in zstandard.decompress(content).splitlines()]
        except (OSError, zstandard.ZstdError, MemoryError, *UNREADABLE) as error:
            return f"{file.name} is damaged: {error}"
        digest = hashlib.sha256(content).hexdigest()
        return Rollouts(step, file.name, digest, rows, self.records.get(step), self.by_step.get(step))

    def signatures(self, file: Path | None = None) -> list[Signature]:
        """Signatures of the run, or of a witness's `file`. Those of steps that a resume undid are left out."""
        kept: list[Signature] = []
        for line in self._lines(SIGNATURES, file):
            try:
                entry = msgspec.json.decode(line, type=Signature)
            except UNREADABLE as error:
                self.problems.append(f"{file or SIGNATURES} has a damaged line: {error}")
                continue
            if file is None or (self.lines and entry.run == self.lines[0].hash):
                kept = [*(other for other in kept if other.step < entry.step), entry]
        return kept

    def _lines(self, name: str, file: Path | None = None) -> list[bytes]:
        """A journal's lines with their line ends. A torn last line is left out; `torn` has its length."""
        try:
            with open_journal(file or self.path / name) as journal:
                lines = journal.read().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except RunError as error:
            self.problems.append(str(error))
            return []
        except OSError as error:
            self.problems.append(f"{name} cannot be read: {error.strerror}")
            return []
        if lines and not lines[-1].endswith(b"\n"):
            self.torn[name] = len(lines.pop())
        return lines

    def _objects(self, lines: list[bytes], name: str) -> list[dict[str, Any]]:
        objects = []
        for number, line in enumerate(lines, start=1):
            try:
                objects.append(msgspec.json.decode(line, type=dict[str, Any]))
            except UNREADABLE as error:
                self.problems.append(f"{name}, line {number}, is damaged: {error}")
        return objects

    def _as_line(self, raw: dict[str, Any]) -> Line | None:
        try:
            return msgspec.convert(raw, Line)
        except msgspec.ValidationError as error:
            self.problems.append(f"parity.jsonl: the line of step {raw.get('step')!r:.20} is invalid: {error}")
            return None

    def _is_step(self, step: Any, name: str) -> bool:
        good = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53
        if not good:
            self.problems.append(f"{name} has a record of step {step!r:.20}")
        return good

    def _rollout_files(self) -> dict[int, RolloutFile]:
        files: dict[int, RolloutFile] = {}
        for file in self._try(lambda: rollout_files(self.path)) or []:
            try:
                files[step_of(file)] = file
            except ValueError:
                self.problems.append(f"rollouts/{file.name} is not a step's file")
        return files

    def _summary(self) -> dict[str, Any] | None:
        file = self.path / "summary.json"
        if not file.exists():
            return None
        summary = self._try(lambda: json.loads(file.read_text()))
        if summary is not None and not isinstance(summary, dict):
            self.problems.append("summary.json is not an object")
        return summary if isinstance(summary, dict) else None

    def _try(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (RlloopError, OSError, ValueError, RecursionError) as error:
            self.problems.append(str(error) or type(error).__name__)
            return None


def _built(config: dict[str, Any]) -> RunConfig | str:
    """The configuration, checked; or the reason why this version cannot take it."""
    if is_own_loop(config):
        return "the loop is not rlloop's, so its configuration does not say how to repeat it"
    try:
        return _checked(config)
    except (RlloopError, OmegaConfBaseException, ValueError, TypeError, AttributeError, RecursionError) as error:
        return f"this version cannot take config.yaml: {' '.join(str(error).split()) or type(error).__name__}"


def _checked(config: dict[str, Any]) -> RunConfig:
    """Checking a configuration takes most of an audit's time, and many audits are of one: it is checked once."""
    if (key := repr(config)) not in _CHECKED:
        if len(_CHECKED) >= 16:
            _CHECKED.clear()
        _CHECKED[key] = build(cast(DictConfig, OmegaConf.merge(OmegaConf.structured(RunConfig), config)))
    return copy.deepcopy(_CHECKED[key])


def _step_in(line: bytes) -> int:
    try:
        return msgspec.json.decode(line, type=Line).step
    except UNREADABLE:
        return 0
