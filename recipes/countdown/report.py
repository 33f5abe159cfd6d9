"""`python -m rlloop.recipes.countdown.report RUN_DIR`: a countdown run beside what it has to beat.

Trains the supervised-only arm (cached), then writes `countdown.png` and `countdown.json` into the run's folder and
prints the table: random valid expressions, the warm start, the same demonstrations learned on, and RL.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from rlloop.config.instantiate import resolve
from rlloop.errors import RlloopError, RunError
from rlloop.runs.folder import read_config, read_records, require_run
from rlloop.runs.plots import COLOURS, LINTHRESH, beneath, legend

from .data import random_baseline
from .task import Countdown

RL, SUPERVISED, WARM, RANDOM = COLOURS[0], COLOURS[1], COLOURS[2], COLOURS[6]


@dataclass(frozen=True)
class Report:
    """Held-out pass@1 of each arm at temperature 1, and what the run's parity records say."""

    rl: list[tuple[int, float]]  # (step, pass@1); step 0 is the model it started from
    draws: int  # held-out completions behind each point
    random: float  # exact
    supervised: list[tuple[int, float]] | None  # None: the run started from a model of the user's
    demonstrations: int
    tokens: int  # compared, over all steps
    tokens_different: int
    k3_max: float

    @property
    def supervised_best(self) -> float | None:
        return max(score for _, score in self.supervised) if self.supervised else None


def make_report(run: Path, records: Sequence[Mapping[str, Any]]) -> Report:
    """Everything but the supervised arm is read from the run's records."""
    config = read_config(require_run(run))
    task = resolve({"seed": config["seed"], "model_path": config["model"]["path"], **config["task"]}, "task")
    if not isinstance(task, Countdown):
        raise RunError(f"{run} is a run of {config['task']['_target_']}; this report is for runs of countdown")
    evaluated = [(record["step"], record["eval/solved"]) for record in records if "eval/solved" in record]
    if not evaluated:
        raise RunError(f"{run} has no evaluation yet; let it run (the first comes before the first step)")
    supervised = None
    if task.model_path is None:
        from .warmstart import supervised_only  # imports torch

        supervised = supervised_only(task).points
    compared = [record for record in records if "parity/tokens" in record]
    return Report(
        rl=evaluated,
        draws=config["eval"]["num_draws"],
        random=random_baseline(task.largest_number, task.largest_target),
        supervised=supervised,
        demonstrations=task.warm_start.demonstrations,
        tokens=sum(record["parity/tokens"] for record in compared),
        tokens_different=round(sum(record["parity/tokens_different"] * record["parity/tokens"] for record in compared)),
        k3_max=max((abs(record["parity/k3"]) for record in compared), default=0.0),
    )


def table(report: Report) -> Table:
    """Each arm's pass@1, with the standard error of its draws."""

    def with_error(score: float) -> str:
        return f"{score:.3f} ± {math.sqrt(score * (1 - score) / report.draws):.3f}"

    grid = Table(title=f"countdown: held-out pass@1 of {report.draws:,} draws, temperature 1", title_justify="left")
    grid.add_column("arm")
    grid.add_column("pass@1", justify="right")
    grid.add_column("learned from")
    demonstrations = f"{report.demonstrations:,} demonstrations"
    grid.add_row("random valid expression", f"{report.random:.3f} exact", "")
    grid.add_row("start" if report.supervised is None else "warm start", with_error(report.rl[0][1]), demonstrations)
    if report.supervised is not None and report.supervised_best is not None:
        grid.add_row("supervised only, its best", with_error(report.supervised_best), demonstrations + ", learned on")
    grid.add_row(f"RL, step {report.rl[-1][0]}", with_error(report.rl[-1][1]), "the same, and the verifier")
    grid.caption = (
        f"{report.tokens:,} trained tokens compared, {report.tokens_different:,} differ in any bit\n"
        f"largest KL (k3) of a step: {report.k3_max:g}"
    )
    grid.caption_justify = "left"
    return grid


def draw(report: Report, records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Reward, KL and pass@1 over the steps, as a PNG."""
    figure = Figure(figsize=(13, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    reward, parity, solved = figure.subplots(1, 3)
    steps = [record for record in records if "reward/mean" in record]
    beneath(reward, [(record["step"], record["reward/mean"]) for record in steps], RL, "training, running mean")
    reward.set_ylim(bottom=0)
    reward.set_title("training reward")
    _draw_parity(parity, [(record["step"], record["parity/k3"]) for record in steps if "parity/k3" in record], report)
    _draw_solved(solved, report, [(record["step"], record["reward/solved"]) for record in steps])
    for axes in (reward, parity, solved):
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130, metadata={"Software": None})


def _draw_parity(axes: Axes, points: Sequence[tuple[int, float]], report: Report) -> None:
    axes.plot([step for step, _ in points], [k3 for _, k3 in points], color=RL, linewidth=2.5)
    axes.set_yscale("symlog", linthresh=LINTHRESH)
    axes.set_ylim(-LINTHRESH, max(1e-2, 3 * report.k3_max))
    axes.set_title("train-inference KL (k3)")
    if report.tokens and report.tokens_different == 0:
        axes.annotate(
            f"exactly 0 in every step\n0 of {report.tokens:,} tokens differ in a bit",
            (0.5, 0.2), xycoords="axes fraction", ha="center",
        )  # fmt: skip


def _draw_solved(axes: Axes, report: Report, training: Sequence[tuple[int, float]]) -> None:
    beneath(axes, training, RL, "training, running mean")
    steps, scores = zip(*report.rl, strict=True)
    error = [math.sqrt(score * (1 - score) / report.draws) for score in scores]
    low, high = ([score + sign * e for score, e in zip(scores, error, strict=True)] for sign in (-1, 1))
    axes.fill_between(steps, low, high, color=RL, alpha=0.15, linewidth=0)
    axes.plot(steps, scores, color=RL, marker="o", markersize=3, label="RL, held out")
    if report.supervised_best is not None:
        axes.axhline(report.supervised_best, color=SUPERVISED, linestyle="--", label="supervised only, its best")
        axes.axhline(scores[0], color=WARM, linestyle="-.", label="warm start")
    axes.axhline(report.random, color=RANDOM, linestyle=":", label="random valid expression")
    axes.set_ylim(bottom=0)
    axes.set_title("pass@1")
    legend(axes)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rlloop.recipes.countdown.report", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run's folder")
    run: Path = parser.parse_args(argv).run
    try:
        records = list(read_records(require_run(run) / "metrics.jsonl"))
        report = make_report(run, records)
    except RlloopError as error:
        print(f"report: {error}", file=sys.stderr)
        return error.exit_code
    draw(report, records, run / "countdown.png")
    content = {**vars(report), "supervised_best": report.supervised_best}
    (run / "countdown.json").write_text(json.dumps(content, indent=1) + "\n")
    console = Console()
    console.print(table(report))
    console.print(f"{run / 'countdown.png'}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
