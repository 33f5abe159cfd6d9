"""The collapse study on GPUs in one picture, kind by kind: engines of other numerics, and engines of other weights.

    python benchmarks/study_kinds.py [-o docs/collapse/gpu_kinds.curves.png]

Held-out pass@1 of docs/collapse/gpu_evaluations.json: for each arm the mean of its seeds in a band from the least to
the most, over the evaluations that all of them reached. Dense models above, mixtures of experts below.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rlloop.runs.plots import COLOURS
from rlloop.study.analysis import Arm, Run, band
from rlloop.study.plots import arm_dash, finish, new_figure, png_of

FOLDER = Path(__file__).parent.parent / "docs" / "collapse"
EVERY = 10  # steps between evaluations
METRIC = "eval/solved"
SAME_BITS = "other_batches"  # as zero_kld, whose line would be under its own
MODELS = {"dense": "dense", "experts": "16 experts"}
KINDS = {  # what kind of arms -> those, the control first in each
    "engine and trainer with the same weights": (
        "zero_kld", "other_kernels", "router", "fp4_both_sides", "other_batches",
    ),
    "the engine's weights rounded": (
        "zero_kld", "fp8_block", "fp8_channel", "fp8_tensor", "fp8_kernels", "fp8_all", "fp4_both", "fp4",
        "fp4_both_none",
    ),
}  # fmt: skip


def arms_of(evaluations: Path) -> dict[str, dict[str, Arm]]:
    """Arms by model and name."""
    found: dict[str, dict[str, Arm]] = {model: {} for model in MODELS}
    for run in json.loads(evaluations.read_text())["runs"]:
        records = [{"step": EVERY * at, METRIC: value} for at, value in enumerate(run["pass@1"])]
        arm = found[run["model"]].setdefault(run["arm"], Arm(run["arm"], []))
        arm.runs.append(Run(evaluations, {"seed": run["seed"]}, records))
    return found


def draw(arms: dict[str, dict[str, Arm]]) -> bytes:
    figure = new_figure(15, 10)
    panels = figure.subplots(len(MODELS), len(KINDS), sharex=True, sharey=True)
    for row, (model, words) in zip(panels, MODELS.items(), strict=True):
        for axes, (kind, names) in zip(row, KINDS.items(), strict=True):
            for index, name in enumerate(names):
                curve = band(arms[model][name], METRIC) if name in arms[model] else None
                if curve is None:
                    continue
                colour, dash = COLOURS[index % len(COLOURS)], ":" if name == SAME_BITS else arm_dash(index)
                axes.plot(curve.steps, curve.mean, dash, color=colour, linewidth=1.6, label=name)
                axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
            axes.set(title=f"{words}: {kind}", xlabel="step", ylabel="held-out pass@1", ylim=(0, 0.45))
            axes.legend(frameon=False, fontsize="small", ncols=3, loc="upper left")
            finish(axes)
    return png_of(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=FOLDER / "gpu_kinds.curves.png")
    args = parser.parse_args()
    args.output.write_bytes(draw(arms_of(FOLDER / "gpu_evaluations.json")))


if __name__ == "__main__":
    main()
