"""Plots of runs over steps: reward and pass@1 (held-out over training), or the loss; and train-inference KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlloop.metrics import held_out_names, outcomes, pass_or_fail

Records = Sequence[Mapping[str, Any]]

# Okabe and Ito's palette, safe for colour blindness; further lines differ by dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
LINTHRESH = 1e-9  # below this the KL axis is linear, so that it includes 0

# Title, held-out metric, and that of every step: drawn pale, with its running mean.
PANELS = (
    ("reward", "eval/reward", "reward/mean"),
    ("pass@1", "eval/solved", "reward/solved"),
    ("train-inference KL (k3)", "parity/k3", None),
)


def _offline_panels(offline: str) -> list[tuple[str, str | None, str | None]]:
    """Of a run on given completions, which has losses in place of rewards."""
    accuracy, held_out = "loss/reward_accuracy", (held_out_names(offline)[1], "eval/solved")
    if offline == "verdicts":
        panels = [(*held_out, accuracy)]
    else:
        panels = [("preference accuracy", None, accuracy), (*held_out, None)]
    return [("loss", None, "loss/total"), *panels, PANELS[-1]]


def draw(runs: Mapping[str, Records], file: Path, offline: str | None = None) -> None:
    """Curves of one or several runs, by name, as a PNG. `offline`: the kind of given completions, if theirs are."""
    passes = any(pass_or_fail(pair for record in records for pair in outcomes(record)) for records in runs.values())
    panels = [panel for panel in PANELS if passes or panel[0] != "pass@1"]
    if offline:
        recorded = {name for records in runs.values() for record in records for name in record}
        panels = [panel for panel in _offline_panels(offline) if not recorded.isdisjoint(panel[1:])] or [PANELS[-1]]
    width = max(12, 4 * len(panels))
    figure = Figure(figsize=(width, 3.6))  # margins given: a layout engine would take most of the drawing's time
    FigureCanvasAgg(figure)
    margins = {"left": 0.05, "right": 0.99, "bottom": 0.14, "top": 0.91, "wspace": 0.22}
    row = figure.subplots(1, len(panels), squeeze=False, gridspec_kw=margins)[0]
    for axes, (title, main, training) in zip(row, panels, strict=True):
        for index, (run, records) in enumerate(runs.items()):
            name = run if len(runs) > 1 else ""
            colour = COLOURS[index % len(COLOURS)]
            if training is not None:
                label = " ".join(filter(None, (name, "training, running mean")))
                beneath(axes, _points(records, training), colour, label)
            if main is not None and (points := _points(records, main)):
                label = " ".join(filter(None, (name, "held-out" if main.startswith("eval/") else "")))
                style = {"marker": "o" if len(points) < 30 else None, "markersize": 3, "linewidth": 1.6}
                axes.plot(*zip(*points, strict=True), DASHES[index % len(DASHES)], color=colour, label=label, **style)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if main == "parity/k3":
            axes.set_yscale("symlog", linthresh=LINTHRESH)
            axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
            top = max((record.get("parity/k3") or 0.0 for records in runs.values() for record in records), default=0.0)
            axes.set_ylim(-LINTHRESH, max(10 * LINTHRESH, 3 * top))
        else:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        legend(axes)
    figure.savefig(file, dpi=120, metadata={"Software": None})


def legend(axes: Axes) -> None:
    """A legend over whatever is drawn, with room above the lines, so that it covers none."""
    labels = axes.get_legend_handles_labels()[1]
    if not labels:
        return
    rows = -(-len(labels) // 2)
    low, high = axes.get_ylim()
    if axes.get_yscale() == "linear":
        axes.set_ylim(low, high + (high - low) * (0.03 + 0.075 * rows))
    axes.legend(frameon=False, fontsize="small", loc="upper left", ncols=2, borderaxespad=0.2, columnspacing=1.2)


def _points(records: Records, name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if record.get(name) is not None]


def beneath(axes: Axes, points: Sequence[tuple[int, float]], colour: str, label: str) -> None:
    """Numbers of every step, and their mean over a thirtieth of them."""
    if not points:
        return
    steps, ys = zip(*points, strict=True)
    window = max(1, len(ys) // 30)
    means = [sum(values) / len(values) for values in (ys[max(0, at - window + 1) : at + 1] for at in range(len(ys)))]
    axes.plot(steps, ys, color=colour, alpha=0.2, linewidth=0.8)
    axes.plot(steps, means, color=colour, alpha=0.6, linewidth=1.2, label=label)
