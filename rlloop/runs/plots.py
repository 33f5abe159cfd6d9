"""Plots of runs: reward, pass@1 and train-inference KL over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Records = Sequence[Mapping[str, Any]]

# Okabe and Ito's palette, safe for colour blindness; further lines differ by dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
LINTHRESH = 1e-9  # below this the KL axis is linear, so that it includes 0

PANELS = (
    ("reward", ("reward/mean",)),
    ("pass@1", ("eval/solved", "reward/solved")),
    ("train-inference KL (k3)", ("parity/k3",)),
)
LABELS = {"eval/solved": "held-out", "reward/solved": "training batch"}


def draw(runs: Mapping[str, Records], file: Path) -> None:
    """Curves of one or several runs, by name, as a PNG."""
    figure = Figure(figsize=(12, 3.6))  # margins given: a layout engine would take most of the drawing's time
    FigureCanvasAgg(figure)
    margins = {"left": 0.05, "right": 0.99, "bottom": 0.14, "top": 0.91, "wspace": 0.22}
    for axes, (title, names) in zip(figure.subplots(1, len(PANELS), gridspec_kw=margins), PANELS, strict=True):
        for index, (run, records) in enumerate(runs.items()):
            for dash, name in enumerate(names):
                label = " ".join(filter(None, (run if len(runs) > 1 else "", LABELS.get(name, ""))))
                _curve(axes, records, name, label, index, dash)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, fontsize="small")
        if "parity/k3" in names:
            axes.set_yscale("symlog", linthresh=LINTHRESH)
            axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
            top = max((record.get("parity/k3") or 0.0 for records in runs.values() for record in records), default=0.0)
            axes.set_ylim(-LINTHRESH, max(10 * LINTHRESH, 3 * top))
        else:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    figure.savefig(file, dpi=120, metadata={"Software": None})


def _curve(axes: Axes, records: Records, name: str, label: str, index: int, dash: int) -> None:
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    if points:
        steps, ys = zip(*points, strict=True)
        axes.plot(
            steps,
            ys,
            DASHES[dash % len(DASHES)],
            color=COLOURS[index % len(COLOURS)],
            label=label or None,
            marker="o" if len(points) < 30 else None,
            markersize=3,
            linewidth=1.6,
        )
