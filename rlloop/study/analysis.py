"""Analysis of runs as an experiment: arms and seeds, the verdict on collapse, dose and outcome. Pure functions.

An arm is all runs whose configurations differ in the seed and the folder only. A dose is the train-inference KL that
a run had.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.config.resume import flatten, with_defaults, without_logins
from rlloop.config.tasks import offline_kind
from rlloop.metrics import held_out_names, outcomes, pass_or_fail
from rlloop.runs.folder import read_config, read_records

NOT_OF_THE_ARM = ("seed", "run.dir")

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A run's configuration and metrics."""

    path: Path
    config: dict[str, Any]  # flat: dotted key -> value
    records: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Run:
        return cls(path, without_logins(flatten(read_config(path))), list(read_records(path / "metrics.jsonl")))

    @classmethod
    def read_all(cls, paths: Iterable[Path]) -> list[Run]:
        """Runs to compare. All get every key, so that older ones have the defaults of newer keys."""
        runs = [cls.read(path) for path in paths]
        keys = {key for run in runs for key in run.config}
        return [cls(run.path, with_defaults(run.config, keys), run.records) for run in runs]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    @property
    def last_step(self) -> int:
        return max((record["step"] for record in self.records), default=0)

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of each record that has a finite value."""
        return [(record["step"], record[name]) for record in self.records if record.get(name) is not None]


@dataclass(frozen=True)
class Arm:
    name: str
    runs: list[Run]


@dataclass(frozen=True)
class HeldOut:
    """The held-out outcome that runs are compared by: its name for people, and the metrics of the trainer's weights and
    of an engine that differs."""

    name: str
    metric: str
    engine_metric: str


PASS = HeldOut("pass@1", "eval/solved", "eval/engine_solved")


def held_out_of(arms: Sequence[Arm]) -> HeldOut:
    """pass@1 where a run's completions pass or fail, else the mean reward; of reward models, the order of pairs."""
    runs = [(run, offline_kind(run.config)) for arm in arms for run in arm.runs]
    if {offline for _, offline in runs} == {"verdicts"}:
        return HeldOut(held_out_names("verdicts")[1], PASS.metric, PASS.engine_metric)
    if any(pass_or_fail(pair for each in run.records for pair in outcomes(each, offline)) for run, offline in runs):
        return PASS
    return HeldOut("reward", "eval/reward", "eval/engine_reward")


def is_offline(arm: Arm) -> bool:
    """True for runs on given completions, whose rewards in training are constants."""
    return offline_kind(arm.runs[0].config) is not None


@dataclass(frozen=True)
class Verdict:
    """The verdict on one run. `step`: of the first evaluation (or gradient) of the collapse; None: no collapse."""

    step: int | None
    reason: str = ""

    @property
    def collapsed(self) -> bool:
        return self.step is not None


@dataclass(frozen=True)
class CollapseRule:
    """Collapse: held-out reward at or below `fraction` of its running best in `evaluations` evaluations in a row, or a
    gradient that is not finite. The rule is part of the configuration, so it is declared before the run."""

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

    def verdict(self, records: Sequence[Record], metric: str = "eval/reward") -> Verdict:
        """Apply the rule to the trainer's weights (`eval/reward`) or to the engine's (`eval/engine_reward`)."""
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
    """The train-inference KL (k3) of a run, from the first step above 0 to the collapse; then it is an outcome."""

    onset: int | None  # the first step with a KL above 0; None: it was 0 in every step
    early: float  # mean of the first `EARLY` steps from the onset
    mean: float  # from the onset to the collapse, or to the end
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
    """Group runs by configuration, in their order. If all differ in the seed only, each is an arm of its own."""
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
    """A multirun's overrides, without the seed: folder `arm=int4,guard=tis,seed=0` -> `int4, guard=tis`."""
    folder = runs[0].path.name
    overrides = [each for each in folder.split(",") if len(runs) == 1 or not each.startswith("seed=")]
    return ", ".join(each.removeprefix("arm=") for each in overrides) or folder


def differences(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """(key, its value in each arm) of every key in which the arms differ. Seeds are compared as a list.

    A key that repeats another, since one section refers to another (`task.data.split` to `data.split`), is left out.
    """
    configs = []
    for arm in arms:
        shown = {key: value for key, value in arm.runs[0].config.items() if key not in NOT_OF_THE_ARM}
        configs.append({**shown, "seed": ", ".join(str(run.seed) for run in arm.runs)})
    keys = sorted({key for config in configs for key in config})
    rows = {key: [str(config.get(key, "-")) for config in configs] for key in keys}
    return [(key, values) for key, values in rows.items() if len(set(values)) > 1 and not repeats(key, rows)]


def departures(arm: Arm, arms: Sequence[Arm]) -> int:
    """The number of keys in which arms differ and this one has no default: fewest in the control."""
    config = arm.runs[0].config
    keys = [key for key, values in differences(arms) if key != "seed"]
    defaults = with_defaults({}, keys)
    return sum(config.get(key, defaults.get(key)) != defaults.get(key) for key in keys)


def repeats(key: str, rows: Mapping[str, Sequence[Any]]) -> bool:
    """True if a key without its first sections exists with the same values: one section refers to another."""
    sections = key.split(".")
    return any(rows.get(".".join(sections[first:])) == rows[key] for first in range(1, len(sections)))


@dataclass(frozen=True)
class Band:
    """A metric of an arm over the n steps that all its seeds have."""

    steps: np.ndarray  # [n]
    mean: np.ndarray  # [n] over seeds
    low: np.ndarray  # [n] smallest over seeds
    high: np.ndarray  # [n] largest over seeds


def band(arm: Arm, metric: str, window: int = 1) -> Band | None:
    """Running mean over `window` records of each seed, then mean and extremes over seeds. None without records."""
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
    """`mean (smallest to largest)` over the seeds that have a value; `-` if none has."""
    values = [value for value in map(of, arm.runs) if value is not None]
    if not values:
        return "-"
    mean, low, high = (form.format(x) for x in (np.mean(values), min(values), max(values)))
    return mean if low == high == mean else f"{mean} ({low} to {high})"


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, with its bootstrap confidence interval."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


RESAMPLES, CONFIDENCE = 10_000, 0.95


def bootstrap(values: Sequence[float]) -> Interval | None:
    """The percentile bootstrap over seeds: quantiles of the means of as many values, drawn again with replacement. None
    for fewer than two values.

    Crude for few: of three values one resample in 27 is the smallest alone, so the interval is their range.
    """
    if len(values) < 2:
        return None
    each = np.asarray(values, np.float64)
    means = np.random.default_rng(0).choice(each, (RESAMPLES, len(each))).mean(1)
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(each.mean()), float(low), float(high), len(each))


def ends(arm: Arm, metric: str) -> dict[int, float]:
    """The last value of a metric, by seed."""
    return {run.seed: series[-1][1] for run in arm.runs if (series := run.series(metric))}


def difference(arm: Arm, control: Arm, metric: str) -> Interval | None:
    """The difference from the control at the end, paired by seed: both began alike."""
    own, others = ends(arm, metric), ends(control, metric)
    return bootstrap([own[seed] - others[seed] for seed in own if seed in others])


def verdict_of(arm: Arm, metric: str = "eval/reward") -> str:
    """The verdicts over the seeds as text; `-` if the metric was never recorded."""
    if not any(run.series(metric) for run in arm.runs):
        return "-"
    verdicts = [CollapseRule.of(run).verdict(run.records, metric) for run in arm.runs]
    steps = [str(verdict.step) for verdict in verdicts if verdict.collapsed]
    if not steps:
        return f"no collapse in {len(verdicts)} of {len(verdicts)} seeds"
    return f"collapse in {len(steps)} of {len(verdicts)} seeds (from step {', '.join(steps)})"
