"""The one schema of recorded figures: `benchmarks/results/<name>.json` is a list of what `Figure.record` returns.

    figures = [Figure(name="decode", unit="tokens/s", value=5100.0, peer="transformers", peer_value=3300.0, aim=1.5)]
    report("decode", figures)  # prints a table and writes benchmarks/results/decode.json

Keys: name, gpu, host, versions, commit, command, unit, peer, peer_value, value, ratio, aim, spread, peer_spread,
roofline, date. `gpu` names the device that did the work, a CPU too, and `host` the processor beside it; `ratio` is
better when larger, whatever the unit. Of several rounds, `value` and `peer_value` are medians, and `spread` and
`peer_spread` are [least, most]. `roofline` is the value that the device's memory bandwidth and arithmetic allow.
Records made before a key existed lack it.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Self

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
# Arguments of a run that measures a part of its table.
PARTS = ("--only", "--models", "--lrs", "--cells", "--seconds", "--shape", "--rows", "--layers")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number, beside the same work done by a peer in the same run."""

    name: str  # what was measured, with the shape or setting that tells it from its neighbours
    unit: str  # e.g. tokens/s, ms, GB/s
    value: float
    peer: str | None = None
    peer_value: float | None = None
    aim: float | None = None  # the ratio to reach
    lower_is_better: bool = False
    spread: tuple[float, float] | None = None  # least and most of the rounds of which `value` is the median
    peer_spread: tuple[float, float] | None = None
    roofline: float | None = None  # what the device allows

    @classmethod
    def of_rounds(
        cls, name: str, unit: str, rounds: Sequence[float], peer: str | None = None,
        peer_rounds: Sequence[float] | None = None, **more: Any,
    ) -> Self:  # fmt: skip
        """The medians of rounds, beside their least and most."""
        value, spread = _summary(rounds)
        peer_value, peer_spread = _summary(peer_rounds) if peer_rounds else (None, None)
        return cls(
            name=name, unit=unit, value=value, spread=spread, peer=peer, peer_value=peer_value, peer_spread=peer_spread,
            **more,
        )  # fmt: skip

    @property
    def ratio(self) -> float | None:
        if self.peer_value is None:
            return None
        return self.peer_value / self.value if self.lower_is_better else self.value / self.peer_value

    def record(self, *, device: str, versions: dict[str, str], commit: str, command: str) -> dict[str, Any]:
        return {
            "name": self.name,
            "gpu": device,
            "host": host_name(),
            "versions": versions,
            "commit": commit,
            "command": command,
            "unit": self.unit,
            "peer": self.peer,
            "peer_value": _rounded(self.peer_value),
            "value": _rounded(self.value),
            "ratio": _rounded(self.ratio),
            "aim": self.aim,
            "spread": _both_rounded(self.spread),
            "peer_spread": _both_rounded(self.peer_spread),
            "roofline": _rounded(self.roofline),
            "date": datetime.now(UTC).date().isoformat(),
        }


def report(
    name: str, figures: list[Figure], *, packages: tuple[str, ...] = (), device: str | None = None,
    part: bool | None = None, write: bool = True,
) -> Path | None:  # fmt: skip
    """Print the figures and `write` them to `results/<name>.json`; `packages` are the peers whose versions matter.

    `part`: these are some of what the script measures, and what was recorded under other names stays. None: they are
    if the script was given one of `PARTS`.
    """
    if figures:
        print(table(figures), flush=True)
    if not (write and figures):
        return None
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    script = Path(sys.argv[0]).resolve()
    command = ["python", str(script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name), *sys.argv[1:]]
    records = [
        figure.record(
            device=device or device_name(),
            versions=versions(*packages),
            commit=commit.stdout.strip(),
            command=shlex.join(command),
        )
        for figure in figures
    ]
    path = RESULTS / f"{name}.json"
    if part is None:
        part = any(argument.startswith(PARTS) for argument in sys.argv)
    if path.exists() and part:
        records = beside(json.loads(path.read_text()), records)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(records, indent=2) + "\n")
    print(f"written to {path}", flush=True)
    return path


def beside(before: list[dict[str, Any]], made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`made` in place of the records of the same names, and the others as they were."""
    names = {each["name"] for each in made}
    place = next((at for at, each in enumerate(before) if each["name"] in names), len(before))
    return [*before[:place], *made, *(each for each in before[place:] if each["name"] not in names)]


def table(figures: list[Figure]) -> str:
    """The figures as a table of plain text."""
    rows = [("what", "value", "peer", "its value", "ratio", "aim", "roofline")]
    for figure in figures:
        rows.append(
            (
                figure.name,
                f"{_show(figure.value, figure.spread)} {figure.unit}",
                figure.peer or "",
                _show(figure.peer_value, figure.peer_spread),
                _show(figure.ratio),
                _show(figure.aim),
                _show(figure.roofline),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def versions(*packages: str) -> dict[str, str]:
    """Python's version, those of torch, numpy and numba, and of `packages`."""
    names = dict.fromkeys(("torch", "numpy", "numba", *packages))
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}


def need_gpus(count: int = 1, instead: str = "") -> None:
    """End the script, before it starts anything, where PyTorch finds fewer GPUs; `instead` says what runs there."""
    import torch

    if (there := torch.cuda.device_count()) < count:
        needs = f"{Path(sys.argv[0]).name} needs {count} GPU{'s' * (count > 1)}"
        raise SystemExit("; ".join(filter(None, [needs, f"PyTorch {torch.__version__} finds {there}", instead])))


def device_name() -> str:
    """The GPU if there is one; else the processor and the number of threads that torch uses."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU {_processor()}, {torch.get_num_threads()} threads"


def host_name() -> str:
    """The processor, and how many CPUs this process may use: engines prepare their steps there."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {count} CPUs"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _summary(rounds: Sequence[float]) -> tuple[float, tuple[float, float]]:
    return statistics.median(rounds), (min(rounds), max(rounds))


def _rounded(value: float | None) -> float | None:
    """Five digits; counts are whole."""
    return value if value is None or isinstance(value, int) else float(f"{value:.5g}")


def _both_rounded(values: tuple[float, float] | None) -> list[float | None] | None:
    return None if values is None else [_rounded(value) for value in values]


def _show(value: float | None, spread: tuple[float, float] | None = None) -> str:
    if value is None:
        return ""
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return shown if spread is None else f"{shown} ({_show(spread[0])} to {_show(spread[1])})"
