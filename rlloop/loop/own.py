"""A run's folder in Python: reads any run, and records custom loops.

    run = rlloop.Run("runs/mine")
    run.columns("reward/mean", "eval/reward")   # {"step": [...], "reward/mean": [...], ...}

    with rlloop.Run("runs/own", {"lr": 1e-3}) as run:
        for step in range(1, 101):
            ...
            run.samples(step, rows)             # completions, rewards, logprobs
            run.log(step, {"loss/total": loss})

The dashboard, `rlloop compare` and `rlloop verify` read what such a loop records like any other run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import numpy as np

from rlloop.config.run import ParityConfig, ParityMode
from rlloop.errors import ConfigError, ParityError, RunError, did_you_mean
from rlloop.loop.step_data import reward_metrics, rollout_metrics
from rlloop.parity.certificate import Certificate, content_digest
from rlloop.parity.monitor import ParityMonitor
from rlloop.runs.folder import (
    OWN_LOOP,
    RunFolder,
    is_own_loop,
    read_config,
    read_records,
    read_rollouts,
    read_summary,
    require_run,
    rollout_files,
    step_of,
    summarize,
)
from rlloop.runs.rollouts import rollout_rows
from rlloop.types import Completion, Example, Recomputed, RewardResult, Sample, SamplingParams

UNCOMPARED = "dropped: not compared, since its row has no trainer_logprobs"
COLUMNS = (
    "prompt", "text", "reward", "completion", "prompt_ids", "token_ids", "logprobs", "raw_logprobs", "trainer_logprobs",
    "policy_version", "finish_reason", "group", "solved", "components", "advantage", "example",
)  # fmt: skip


class Run:
    """One run's folder. Reading takes no lock, also while another process trains in it; the first write takes it.

    Methods that read raise `RunError` where there is no run, or a damaged one.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Mapping[str, Any] | None = None,
        *,
        parity: str = "observe",
        engine: Mapping[str, Any] | None = None,
        trainer: Mapping[str, Any] | None = None,
    ) -> None:
        """`config`, for a loop of one's own: settings that config.yaml records and `rlloop compare` shows.

        `parity`: `require` makes `samples` raise `ParityError` at the first token whose logprob in the trainer has
        other bits than in the engine; `observe` records it. `engine`, `trainer`: their fingerprints
        (`model.fingerprint()`), which the certificate names.
        """
        if parity not in ("observe", "require"):
            raise ConfigError(f"parity is {parity!r}; it must be observe or require")
        self.path = Path(folder)
        self._given = dict(config or {})
        self._mode = ParityMode(parity)
        self._fingerprints = engine or {}, trainer or engine or {}
        self._folder: RunFolder | None = None
        self._certificate: Certificate  # with the monitor: made when the folder is opened for writing
        self._monitor: ParityMonitor
        self._sampled: tuple[int, dict[str, Any]] | None = None  # a step whose samples are recorded; their metrics
        self._last = -1  # the last step that was logged

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    # -------------------------------------------------------------------------------------------- reading

    @property
    def config(self) -> dict[str, Any]:
        """config.yaml: every key with its value, sections as dictionaries."""
        return read_config(require_run(self.path))

    @property
    def records(self) -> list[dict[str, Any]]:
        """metrics.jsonl: one dictionary a step, with the key `step`."""
        return list(read_records(require_run(self.path) / "metrics.jsonl"))

    def columns(self, *names: str) -> dict[str, list[Any]]:
        """Metrics as lists of equal length, `step` first; None where a step has no value. Without names: all."""
        records = self.records
        known = dict.fromkeys(name for record in records for name in record)
        for name in names:
            if name not in known:
                raise ConfigError(f"{self.path} has no metric {name!r}{did_you_mean(name, known, count=3)}")
        return {name: [record.get(name) for record in records] for name in ("step", *(names or [*known][1:]))}

    @overload
    def samples(self, step: int | None = None) -> list[dict[str, Any]]: ...
    @overload
    def samples(self, step: int, rows: Iterable[Sample | Mapping[str, Any]]) -> dict[str, Any]: ...
    def samples(
        self, step: int | None = None, rows: Iterable[Sample | Mapping[str, Any]] | None = None
    ) -> list[dict[str, Any]] | dict[str, Any]:
        """Without `rows`: a step's completions (the last step's for None), as in `rollouts/`.

        With `rows`: record a step's completions, before `log` of that step. Each is a `Sample`, or a dictionary with
        `reward` and either `completion` (what `Engine.generate` returned) or `prompt` and `text`, and as known:

            prompt_ids, token_ids, logprobs, raw_logprobs    of another engine
            trainer_logprobs    [T] float32 of the trainer's own forward: the row is compared, bit by bit
            group               rows of one prompt share it (default: equal prompts do)
            advantage, solved, components, policy_version, finish_reason, example

        Returns the metrics that follow from them, which `log` records with the step's: `reward/*`, `rollout/*`,
        `ledger/*` and, of rows with `trainer_logprobs`, `parity/*`.

        Raises `ConfigError` for a row that cannot be read, `ParityError` under `parity="require"`.
        """
        if rows is not None and step is not None:
            return self._record_samples(step, rows)
        files = {step_of(file): file for file in rollout_files(require_run(self.path))}
        step = max(files, default=None) if step is None else step
        if step not in files:
            raise RunError(f"{self.path} has no completions" + ("" if step is None else f" of step {step}"))
        return read_rollouts(files[step])

    @property
    def certificate(self) -> list[dict[str, Any]]:
        """parity.jsonl: one line a step (`rlloop.parity.certificate`)."""
        return list(read_records(require_run(self.path) / "parity.jsonl"))

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json; of a run that goes on, what its records come to so far, with the status `running`."""
        return read_summary(require_run(self.path)) or summarize(self.records, "running")

    @property
    def status(self) -> str:
        """finished, interrupted, failed, parity broken; or running, which a killed run stays."""
        return self.summary["status"]

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Step -> folder of each checkpoint that is kept."""
        folders = [path for path in (self.path / "checkpoints").glob("step_*") if path.name[5:].isdigit()]
        return {int(path.name[5:]): path for path in sorted(folders, key=lambda path: int(path.name[5:]))}

    def best_checkpoint(self, metric: str = "eval/reward") -> Path:
        """The checkpoint, of those kept, whose step has the largest `metric`; the newest where none was measured."""
        kept = self.checkpoints
        if not kept:
            raise RunError(f"{self.path} has no checkpoint")
        measured = {
            record["step"]: record[metric]
            for record in self.records
            if record["step"] in kept and record.get(metric) is not None
        }
        return kept[max(measured, key=lambda step: (measured[step], step)) if measured else max(kept)]

    # -------------------------------------------------------------------------------------------- writing

    def log(self, step: int, metrics: Mapping[str, Any] | None = None) -> None:
        """Append a step's metrics, and those of its `samples`, and seal its line of the certificate.

        Steps are whole numbers from 0 on, each larger than the last; 0 is for what was measured before the first
        update. Raises `ConfigError` for a step out of order, and for a metric that contradicts the samples.
        """
        folder, logged = self._open, {name: _number(name, value) for name, value in (metrics or {}).items()}
        sampled, computed = self._sampled or (None, {})
        self._check_step(step, sampled)
        for name, value in computed.items():
            if name in logged and not _agree(logged[name], value):
                raise ConfigError(
                    f"step {step}: {name} is {logged[name]!r}, and the step's samples give {value!r}; leave it out, or "
                    "give it another name"
                )
        record = {"step": step, **dict(sorted({**logged, **computed}.items()))}
        self._certificate.cover(folder.metrics.append(record))
        if sampled is None and step > 0:
            self._monitor.compare(step, step, [], Recomputed([]))  # a line without a comparison
        if sampled is not None or step > 0:
            self._certificate.seal()
        self._last, self._sampled = step, None

    def finish(self, status: str = "finished") -> dict[str, Any]:
        """Write summary.json and curve.png, and release the folder. Returns the summary."""
        from rlloop.runs.plots import draw  # matplotlib takes a second to import

        folder, records = self._open, self.records
        summary = summarize(records, status)
        if records:
            draw({self.path.name: records}, self.path / "curve.png")
        folder.write_json("summary.json", summary)
        folder.__exit__()
        self._folder = None
        return summary

    def rewind(self, step: int) -> None:
        """Continue after `step`, of a checkpoint of one's own: later records are set aside, in orphaned/."""
        self._open.rewind(step)
        self._certificate.reload()
        self._last, self._sampled = step, None

    def __enter__(self) -> Self:
        _ = self._open
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._folder is not None:
            self._folder.log(f"stopped: {type(error).__name__}: {error}")
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        ended = "parity broken" if isinstance(error, ParityError) else "interrupted" if interrupted else "failed"
        self.finish("finished" if error is None else ended)

    @property
    def _open(self) -> RunFolder:
        """The folder, locked for writing."""
        if self._folder is None:
            if (self.path / "config.yaml").is_file() and not is_own_loop(read_config(self.path)):
                raise RunError(
                    f"{self.path} is a run of `rlloop train`, which records its steps itself; choose another folder"
                )
            self._folder = RunFolder(self.path)
            digest = self._folder.adopt({**OWN_LOOP, "seed": 0, **self._given, "parity": {"mode": self._mode.value}})
            self._folder.confirm()
            self._certificate = Certificate(self._folder.parity)
            self._certificate.note(config=digest)
            self._monitor = ParityMonitor(ParityConfig(mode=self._mode), self._certificate, *self._fingerprints)
            self._folder.note_fingerprints({content_digest(each): each for each in self._fingerprints})
            self._last = max((record["step"] for record in self.records), default=-1)
        return self._folder

    def _check_step(self, step: int, sampled: int | None) -> None:
        if not isinstance(step, int) or step <= self._last:
            raise ConfigError(
                f"step is {step!r}, after step {self._last} of {self.path}; it must be a larger whole number. To "
                f"record a step again, `rewind` to the one before it"
            )
        if sampled is not None and sampled != step:
            raise ConfigError(f"step {step} is logged after samples of step {sampled}; log that one first")

    def _record_samples(self, step: int, rows: Iterable[Sample | Mapping[str, Any]]) -> dict[str, Any]:
        folder = self._open
        self._check_step(step, None if self._sampled is None else self._sampled[0])
        if self._sampled is not None:
            raise ConfigError(f"the samples of step {step} are recorded already; give all of a step's at once")
        samples, trainers = _read_rows(step, rows)
        compared = [(sample, scored) for sample, scored in zip(samples, trainers, strict=True) if scored is not None]
        rest = [sample for sample, scored in zip(samples, trainers, strict=True) if scored is None]
        version = max(sample.completion.policy_version for sample in samples)
        ours, theirs = [sample for sample, _ in compared], [scored for _, scored in compared]
        comparison = self._monitor.compare(step, version, ours, Recomputed(theirs))
        outcomes = ["trained"] * len(ours) + [UNCOMPARED] * len(rest)
        scored = [*theirs, *[None] * len(rest)]
        written = rollout_rows([*ours, *rest], outcomes, scored, self._monitor.fingerprints["engine"])
        self._certificate.note(rollouts=folder.write_rollouts(step, written))
        if (objection := self._monitor.objection(comparison)) is not None:
            self._certificate.seal()
            raise ParityError(f"step {step}: {objection}")
        rollout = rollout_metrics(samples, version)
        metrics = {name: value for name, value in rollout.items() if name != "rollout/version_lag"}
        metrics |= reward_metrics(samples) | comparison.metrics | {
            "ledger/sampled": len(samples), "ledger/accepted": len(samples), "ledger/rejected": 0,
            "ledger/dropped": len(rest), "ledger/trained": len(ours),
        }  # fmt: skip
        self._sampled = step, metrics
        return dict(metrics)


def _number(name: str, value: Any) -> Any:
    """A metric as JSON: numbers of numpy and torch as Python's."""
    if hasattr(value, "item"):
        try:
            return value.item()
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{name} is {value!r:.60}; a metric must be one number") from error
    return value


def _agree(logged: Any, value: Any) -> bool:
    try:
        return math.isclose(logged, value, rel_tol=1e-6, abs_tol=1e-9)
    except TypeError:
        return logged == value


def _floats(values: Any) -> np.ndarray:
    """Logprobs of a list, an array or a tensor as [T] float32."""
    values = values.detach().cpu() if hasattr(values, "detach") else values
    return np.asarray(values, np.float32).reshape(-1)


def _read_rows(
    step: int, rows: Iterable[Sample | Mapping[str, Any]]
) -> tuple[list[Sample], Sequence[np.ndarray | None]]:
    """The samples of a step, and the trainer's logprobs [T] of each; None where its row has none."""
    samples: list[Sample] = []
    trainers: list[np.ndarray | None] = []
    groups: dict[Any, int] = {}
    counts: dict[int, int] = {}
    for index, row in enumerate(rows):
        where = f"step {step}, row {index}"
        if isinstance(row, Sample):
            samples.append(row)
            trainers.append(None)
            continue
        _check_row(where, row)
        completion = row["completion"] if "completion" in row else _foreign_completion(where, row)
        prompt = str(row.get("prompt", ""))
        group = row.get("group")
        if group is None:
            group = groups.setdefault((prompt, tuple(completion.prompt_ids)), len(groups))
        position = counts[group] = counts.get(group, -1) + 1
        reward = row["reward"]
        if not isinstance(reward, RewardResult):
            reward = RewardResult(
                float(reward), bool(row.get("solved", float(reward) >= 1.0)), dict(row.get("components", {}))
            )
        if not math.isfinite(reward.reward):
            raise ConfigError(f"{where}: its reward is {reward.reward}; it must be finite")
        trainer = row.get("trainer_logprobs")
        scored = None if trainer is None else _floats(trainer)
        if scored is not None and len(scored) != len(completion.logprobs):
            raise ConfigError(
                f"{where}: {len(scored)} trainer_logprobs for {len(completion.logprobs)} logprobs; give one for each "
                "token of the completion"
            )
        example = Example(str(row.get("example", group)), list(completion.prompt_ids), prompt, {})
        uid, advantage = f"{step}/{group}/{position}", float(row.get("advantage", 0.0))
        samples.append(Sample(uid, example, completion, str(row.get("text", "")), reward, int(group), advantage))
        trainers.append(scored)
    if not samples:
        raise ConfigError(f"step {step} has no rows; give one for each completion")
    return samples, trainers


def _check_row(where: str, row: Mapping[str, Any]) -> None:
    for name in row:
        if name not in COLUMNS:
            hint = did_you_mean(str(name), COLUMNS) or f"; it may have {', '.join(COLUMNS)}"
            raise ConfigError(f"{where}: {name!r} is not a column{hint}")
    if "reward" not in row:
        raise ConfigError(f"{where} has no reward; give a number")
    if "completion" not in row and "text" not in row:
        raise ConfigError(f"{where} has neither `completion` nor `text`; give what was sampled")
    if "completion" in row and not isinstance(row["completion"], Completion):
        raise ConfigError(
            f"{where}: completion is {row['completion']!r:.60}; it must be an rlloop.Completion, as Engine.generate "
            "returns. Give a text as `text`"
        )


def _foreign_completion(where: str, row: Mapping[str, Any]) -> Completion:
    """A completion of another engine, from a row's columns."""
    token_ids, logprobs = list(row.get("token_ids", ())), _floats(row.get("logprobs", ()))
    if len(logprobs) != len(token_ids):
        raise ConfigError(f"{where}: {len(logprobs)} logprobs for {len(token_ids)} token_ids; give one for each")
    return Completion(
        prompt_ids=list(row.get("prompt_ids", ())),
        token_ids=token_ids,
        logprobs=logprobs,
        raw_logprobs=_floats(row["raw_logprobs"]) if "raw_logprobs" in row else logprobs,
        policy_version=int(row.get("policy_version", 0)),
        finish_reason=row.get("finish_reason", "stop"),
        sampling=SamplingParams(max_tokens=max(1, len(token_ids))),
    )
