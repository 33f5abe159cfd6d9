"""Runs as an experiment: arms and seeds, the verdict by the declared rule, dose and outcome. Pure functions of records.

An arm is all runs whose configurations are equal but for the seed and the folder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.config.resume import flatten, with_defaults
from rlloop.runs.folder import read_config, read_records

NOT_OF_THE_ARM = ("seed", "run.dir")

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    path: Path
    config: dict[str, Any]  # flat
    records: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Run:
        return cls(path, flatten(read_config(path)), list(read_records(path / "metrics.jsonl")))

    @classmethod
    def read_all(cls, paths: Iterable[Path]) -> list[Run]:
        """Runs to lay side by side. A key that some of them are older than is in all."""
        runs = [cls.read(path) for path in paths]
        keys = {key for run in runs for key in run.config}
        return [cls(run.path, with_defaults(run.config, keys), run.records) for run in runs]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of each record that has a finite one."""
        return [(record["step"], record[name]) for record in self.records if record.get(name) is not None]


@dataclass(frozen=True)
class Arm:
    name: str
    runs: list[Run]


@dataclass(frozen=True)
class Verdict:
    """`step` is that of the first evaluation (or gradient) of the collapse; None: there is no collapse."""

    step: int | None
    reason: str = ""

    @property
    def collapsed(self) -> bool:
        return self.step is not None


@dataclass(frozen=True)
class CollapseRule:
    """Held-out reward at or below `fraction` of its running best in `evaluations` evaluations in a row, or a gradient
    that is not finite. Declared in the configuration, so before the run."""

    fraction: float = 0.5
    evaluations: int = 3

    @classmethod
    def of(cls, run: Run) -> CollapseRule:
        default = cls()
        return cls(
            run.config.get("eval.collapse_fraction", default.fraction),
            run.config.get("eval.collapse_evals", default.evaluations),
        )

    def __str__(self) -> str:
        return (
            f"held-out reward at or below {self.fraction:g} of its running best in {self.evaluations} evaluations in a "
            "row, or a gradient that is not finite"
        )

    def judge(self, records: Sequence[Record], metric: str = "eval/reward") -> Verdict:
        """By `metric`: of the trainer's own weights, or `eval/engine_reward` of the engine's."""
        best, low = 0.0, list[int]()
        for record in records:
            if record.get("trainer/refused", 0) > 0:
                return Verdict(record["step"], "gradient not finite")
            value = record.get(metric)
            if value is None:
                continue
            best = max(best, value)
            low = [*low, record["step"]] if best > 0 and value <= self.fraction * best else []
            if len(low) == self.evaluations:
                return Verdict(low[0], f"{metric} at most {self.fraction:g} of its best, {best:.3g}")
        return Verdict(None)


@dataclass(frozen=True)
class Dose:
    """Train-inference KL (k3) as it was applied. Steps before the first one above 0 are not counted, nor those after a
    collapse, whose KL is an outcome."""

    onset: int | None  # the first step with a KL above 0; None: it was 0 in every step
    early: float  # mean of the first `EARLY` steps since
    mean: float
    largest: float  # of the whole run


EARLY = 20


def dose(run: Run, verdict: Verdict) -> Dose:
    k3 = run.series("parity/k3")
    onset = next((step for step, value in k3 if value > 0), None)
    largest = max((value for _, value in k3), default=0.0)
    if onset is None:
        return Dose(None, 0.0, 0.0, largest)
    since = [value for step, value in k3 if step >= onset]
    until = [value for step, value in k3 if step >= onset and (verdict.step is None or step < verdict.step)]
    return Dose(onset, float(np.mean(since[:EARLY])), float(np.mean(until or since[:1])), largest)


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Group by configuration, in the order of the runs. Runs that differ in nothing but the seed are an arm each where
    there is no other arm."""
    by_config: dict[str, list[Run]] = {}
    for run in runs:
        arm = {key: value for key, value in run.config.items() if key not in NOT_OF_THE_ARM}
        by_config.setdefault(json.dumps(arm, sort_keys=True, default=str), []).append(run)
    groups = list(by_config.values()) if len(by_config) > 1 else [[run] for run in runs]
    names = [_name(group) for group in groups]
    if len(set(names)) < len(names):
        names = [str(group[0].path) for group in groups]
    return [Arm(name, group) for name, group in zip(names, groups, strict=True)]


def _name(runs: Sequence[Run]) -> str:
    """What a multirun named its folders by, the seed left out: `arm=int4,guard=tis,seed=0` -> `int4, guard=tis`."""
    folder = runs[0].path.name
    parts = [part for part in folder.split(",") if len(runs) == 1 or not part.startswith("seed=")]
    return ", ".join(part.removeprefix("arm=") for part in parts) or folder


def differences(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """(key, its value in each arm) of every key in which the arms differ; seeds are compared as the list they are.

    What is there twice, since one section refers to another (`task.data.split` to `data.split`), is named once.
    """
    configs = []
    for arm in arms:
        shown = {key: value for key, value in arm.runs[0].config.items() if key not in NOT_OF_THE_ARM}
        configs.append({**shown, "seed": ", ".join(str(run.seed) for run in arm.runs)})
    keys = sorted({key for config in configs for key in config})
    rows = {key: [str(config.get(key, "-")) for config in configs] for key in keys}
    return [(key, values) for key, values in rows.items() if len(set(values)) > 1 and not repeats(key, rows)]


def repeats(key: str, rows: Mapping[str, Sequence[Any]]) -> bool:
    """Whether a key without its first sections is there too, with the same values: one section refers to another."""
    parts = key.split(".")
    return any(rows.get(".".join(parts[first:])) == rows[key] for first in range(1, len(parts)))


@dataclass(frozen=True)
class Band:
    """A metric of an arm over the steps that all its seeds have."""

    steps: np.ndarray  # [n]
    mean: np.ndarray  # [n]
    low: np.ndarray  # [n] the smallest over seeds
    high: np.ndarray  # [n]


def band(arm: Arm, metric: str, window: int = 1) -> Band | None:
    """Each seed's running mean over `window` records, then mean and extremes over seeds. None without such records."""
    curves = [dict(_smooth(run.series(metric), window)) for run in arm.runs]
    steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    if not steps:
        return None
    values = np.array([[curve[step] for step in steps] for curve in curves])
    return Band(np.array(steps), values.mean(0), values.min(0), values.max(0))


def _smooth(series: Sequence[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    values = np.array([value for _, value in series])
    return [
        (step, float(values[max(0, index - window + 1) : index + 1].mean())) for index, (step, _) in enumerate(series)
    ]


def last_part(run: Run, metric: str) -> float | None:
    """Mean of the last tenth of a metric's records."""
    values = [value for _, value in run.series(metric)]
    return float(np.mean(values[-max(1, len(values) // 10) :])) if values else None


def over_seeds(arm: Arm, of: Callable[[Run], float | None], form: str = "{:.3f}") -> str:
    """`mean (smallest to largest)` of the seeds that have a value; `-` where none has."""
    values = [value for value in map(of, arm.runs) if value is not None]
    if not values:
        return "-"
    mean, low, high = (form.format(x) for x in (np.mean(values), min(values), max(values)))
    return mean if low == high == mean else f"{mean} ({low} to {high})"


def verdict_of(arm: Arm, metric: str = "eval/reward") -> str:
    """In words, over the seeds; `-` where the metric was never recorded."""
    if not any(run.series(metric) for run in arm.runs):
        return "-"
    found = [CollapseRule.of(run).judge(run.records, metric) for run in arm.runs]
    steps = [str(verdict.step) for verdict in found if verdict.collapsed]
    if not steps:
        return f"no collapse in {len(found)} of {len(found)} seeds"
    return f"collapse in {len(steps)} of {len(found)} seeds (from step {', '.join(steps)})"
