"""Console output of a run: a live panel on a terminal, plain lines elsewhere, a summary at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from errno import EPIPE
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlloop.metrics import OBJECTIVE, held_out_names, outcomes, pass_or_fail

PLAIN_EVERY = 2.0  # seconds between plain lines, except for evaluations
LIVE_EVERY = 0.1  # seconds between updates of the panel


class Output(Console):
    """The console of a run, for which closed output, as by `| head`, is an error to record: rich's own exits."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError(EPIPE, "the output was closed")


class Progress:
    """Shows a loop's progress. Use as a context manager, which restores the terminal."""

    def __init__(self, console: Console, title: str, num_steps: int, start: int, offline: str | None = None) -> None:
        """`offline`: of a run on given completions, their kind (`rlloop.config.tasks.offline_kind`)."""
        self.console, self.title, self.num_steps, self.offline = console, title, num_steps, offline
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._first, self._began = start, time.monotonic()
        self._shown = 0.0
        self._tokens = self._different = 0
        self._sampled = self._rejected = 0
        self._drawn = self._undrawn = 0  # held-out completions, and those of them that were rejected
        self._held_out: list[tuple[float, float]] = []  # (pass@1, reward) of each evaluation
        self._outcomes: list[tuple[float, float]] = []  # (mean reward, fraction solved) of every step and evaluation

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Count the records of a resumed run."""
        for record in records:
            self._count(record)

    def _count(self, metrics: Mapping[str, Any]) -> None:
        if "eval/solved" in metrics:
            self._held_out.append((metrics["eval/solved"], metrics.get("eval/reward", metrics["eval/solved"])))
        self._outcomes += outcomes(metrics, self.offline)
        self._sampled += metrics.get("ledger/sampled", 0)
        self._rejected += metrics.get("ledger/rejected", 0)
        self._undrawn += metrics.get("eval/rejected", 0)
        self._drawn += metrics.get("eval/draws", 0) + metrics.get("eval/rejected", 0)
        tokens = metrics.get("parity/tokens", 0)
        self._tokens += tokens
        self._different += round(tokens * metrics.get("parity/tokens_different", 0.0))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._count(metrics)
        now = time.monotonic()
        urgent = "eval/solved" in metrics or step == self.num_steps
        if not urgent and now - self._shown < (PLAIN_EVERY if self._live is None else LIVE_EVERY):
            return
        self._shown = now
        outcome, work = self._outcome(metrics), self._work(step, metrics)
        if self._live is None:
            self.note("  ".join(filter(None, [f"step {step}/{self.num_steps}", outcome, work])))
        else:
            head = Text(f"{self.title}  step {step}/{self.num_steps}", style="bold")
            bar = Padding(ProgressBar(total=self.num_steps, completed=step), 0)  # the bar alone does not end its line
            self._live.update(Group(head, bar, Text(outcome), Text(work)), refresh=True)

    def _outcome(self, metrics: Mapping[str, Any]) -> str:
        facts, passes = [], pass_or_fail(self._outcomes, self.offline)
        reward, solves = held_out_names(self.offline)
        if self.offline:
            facts = [f"{label} {metrics[name]:.3f}" for name, label in OBJECTIVE.items() if name in metrics]
        elif "reward/mean" in metrics:
            facts.append(f"reward {metrics['reward/mean']:.3f}")
            facts += [f"pass@1 {metrics['reward/solved']:.3f}"] if passes else []
        solved, rewards = ([each[index] for each in self._held_out] for index in (0, 1))
        if rewards != solved or (solved and not passes):  # a reward that is more than solved or not
            facts.append(f"held-out {reward} {_course(rewards)}")
        if solved and passes:
            facts.append(f"held-out {f'{solves} ' if rewards != solved else ''}{_course(solved)}")
        counts = (self._rejected, self._sampled, ""), (self._undrawn, self._drawn, "held-out ")
        if rejected := [f"{count:,} of {total:,} {kind}rejected" for count, total, kind in counts if count]:
            facts.append(f"{', '.join(rejected)}, see run.log")  # the numbers before are of the others
        return "  ".join(facts)

    def _work(self, step: int, metrics: Mapping[str, Any]) -> str:
        facts = []
        if "parity/k3" in metrics:
            facts.append(f"KL {short(metrics['parity/k3'])} ({self._different:,} of {self._tokens:,} tokens differ)")
        speed = f"perf/{'trainer' if self.offline else 'rollout'}_tokens_per_s"
        if speed in metrics:
            facts.append(f"{metrics[speed]:,.0f} tokens/s")
        if self._first < step < self.num_steps:
            left = (time.monotonic() - self._began) / (step - self._first) * (self.num_steps - step)
            facts.append(f"eta {clock(left)}")
        return "  ".join(facts)


def _course(values: Sequence[float]) -> str:
    return f"{values[0]:.3f}" + (f" -> {values[-1]:.3f}" if len(values) > 1 else "")


def print_summary(
    console: Console,
    folder: Path,
    summary: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]] = (),
    offline: str | None = None,
) -> None:
    """One screen: results, train-inference KL, and the paths of the records. `offline`: as of `Progress`."""

    def series(name: str) -> list[float]:
        return [record[name] for record in records if record.get(name) is not None]

    title = f"{folder}: {summary['status']} at step {summary['step']}"
    console.print(title, highlight=False, markup=False, soft_wrap=True)  # a table would break it
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    means = [summary[name].get("best") for name in (["eval/reward"] if offline else ["eval/reward", "reward/mean"])]
    best, solved = [mean for mean in means if mean is not None], summary["eval/solved"].get("best")
    passes = means[0] is None or solved is None or pass_or_fail([(max(best), solved)], offline)
    graded = not passes or summary["eval/reward"] != summary["eval/solved"]  # else it is pass@1 again
    reward, solves = held_out_names(offline)
    courses = {
        "eval/solved": (f"{solves}, held-out", passes),
        "eval/reward": (f"{reward}, held-out", graded),
        "reward/mean": ("reward, training", not offline),
    }
    for name, (label, shown) in courses.items():
        if summary[name] and shown:
            table.add_row(label, "{first:.3f} -> {last:.3f} (best {best:.3f})".format(**summary[name]))
    for name, label in OBJECTIVE.items() if offline else ():
        if values := series(name):
            table.add_row(f"{label}, training", f"{values[0]:.3f} -> {values[-1]:.3f}")
    parity, ledger = summary["parity"], summary["ledger"]
    table.add_row("train-inference KL", f"at most {short(parity['k3_max'])} in any step")
    table.add_row("tokens that differ", f"{parity['tokens_different']:,} of {parity['tokens']:,}")
    counts = {name: count for name, count in ledger.items() if count}
    if offline:
        counts = {name: count for name, count in counts.items() if name not in ("sampled", "accepted")}
    table.add_row("completions", ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    if undrawn := int(sum(series("eval/rejected"))):
        drawn = undrawn + int(sum(series("eval/draws")))
        table.add_row("held-out completions", f"{drawn:,} sampled, {undrawn:,} rejected, see run.log")
    table.add_row("time in steps", clock(summary["seconds"]))
    console.print(table)
    for name in ("curve.png", "metrics.jsonl", "parity.jsonl", "rollouts"):  # below the table, which would break them
        console.print(str(folder / name), highlight=False, markup=False, soft_wrap=True)


def short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
