"""Plots of a study: curves by arm with bands over seeds, and outcome against dose."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rlloop.runs.plots import COLOURS, DASHES, LINTHRESH
from rlloop.study.analysis import Arm, Dose, HeldOut, Run, band, is_offline

Panel = tuple[str, str, str | None]  # title, metric, and the engine's own metric, if there is one: drawn dashed
TRAINING: Panel = ("reward of the training batch", "reward/mean", None)
OFFLINE: Panel = ("loss of the given completions", "loss/total", None)  # whose rewards are constants
PANELS: tuple[Panel, ...] = (
    ("train-inference KL (k3)", "parity/k3", None),
    ("tokens discarded by clipping or masking", "loss/tokens_discarded", None),
    ("entropy, nats", "loss/entropy", None),
    ("gradient norm, before clipping", "loss/grad_norm", None),
)
BANDED = 8  # more arms than this are drawn without bands


def draw_arms(arms: Sequence[Arm], held_out: HeldOut) -> bytes:
    """All panels as a PNG: for each arm a line (mean over seeds) in a band (smallest to largest)."""
    title = f"held-out {held_out.name} (dashed: through the engine)"
    training = OFFLINE if all(is_offline(arm) for arm in arms) else TRAINING
    panels = (training, (title, held_out.metric, held_out.engine_metric), *PANELS)
    longest = max(len(run.records) for arm in arms for run in arm.runs)
    window = max(1, longest // 40)
    figure = new_figure(15, 8.4)
    lines = {}
    for axes, (title, metric, dashed) in zip(figure.subplots(2, 3).flat, panels, strict=True):
        for index, arm in enumerate(arms):
            for name, dash in ((metric, arm_dash(index)), (dashed, ":")):
                curve = band(arm, name, 1 if name and name.startswith("eval/") else window) if name else None
                if curve is None:
                    continue
                colour = COLOURS[index % len(COLOURS)]
                (line,) = axes.plot(curve.steps, curve.mean, dash, color=colour, linewidth=1.6)
                if name == metric:
                    lines.setdefault(arm.name, line)
                if len(arms) <= BANDED and len(arm.runs) > 1:
                    axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel="step")
        finish(axes)
        if metric == "parity/k3":
            axes.set_yscale("symlog", linthresh=LINTHRESH)
            axes.set_ylim(bottom=-LINTHRESH)
        elif metric == "loss/grad_norm" and axes.dataLim.ymax > 0:
            axes.set_yscale("log", nonpositive="clip")
        else:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=min(5, len(lines)), frameon=False)
    return png_of(figure)


def draw_doses(arms: Sequence[Arm], doses: Mapping[Path, Dose], held_out: HeldOut) -> bytes:
    """Last held-out outcome of every run against its dose, as a PNG. `doses`: by the run's path."""
    figure = new_figure(8.5, 5)
    axes = figure.subplots()
    for index, arm in enumerate(arms):
        colour = COLOURS[index % len(COLOURS)]
        for metric, face in ((held_out.engine_metric, "none"), (held_out.metric, colour)):
            points = [(doses[run.path].mean, _last(run, metric)) for run in arm.runs if run.series(metric)]
            if points:
                x, y = zip(*points, strict=True)
                label = arm.name if metric == held_out.metric else None
                marker = "os^Dv"[index // len(COLOURS) % 5]
                axes.scatter(x, y, s=45, marker=marker, facecolors=face, edgecolors=colour, label=label)
    axes.set_xscale("symlog", linthresh=LINTHRESH)
    axes.set_xlim(left=-LINTHRESH)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set(
        xlabel="train-inference KL (k3), mean from its first step to the collapse or the end",
        ylabel=f"held-out {held_out.name} at the end (hollow: through the engine)",
    )
    finish(axes)
    if axes.get_legend_handles_labels()[1]:  # empty if no run was evaluated
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return png_of(figure)


def _last(run: Run, metric: str) -> float:
    return run.series(metric)[-1][1]


def arm_dash(index: int) -> str:
    return DASHES[index // len(COLOURS) % 3]


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def png_of(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, dpi=110, format="png", metadata={"Software": None})
    return file.getvalue()
