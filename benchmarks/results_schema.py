"""The one schema of recorded figures: `benchmarks/results/<name>.json` is a list of what `Figure.record` returns.

    figures = [Figure(name="decode", unit="tokens/s", value=5100.0, peer="transformers", peer_value=3300.0, aim=1.5)]
    report("decode", figures)  # prints a table and writes benchmarks/results/decode.json

Keys: name, gpu, host, versions, commit, command, unit, peer, peer_kind, peer_value, value, ratio, aim, spread,
peer_spread, roofline, date. `gpu` names the device that did the work, a CPU too, and `host` the processor beside it;
`ratio` is better when larger, whatever the unit. Of several rounds, `value` and `peer_value` are medians, and `spread`
and `peer_spread` are [least, most]. `roofline` is the value that the device's memory bandwidth and arithmetic allow.
Records made before a key existed lack it.

A run of a part replaces the records of the same names and kinds of peer, and the others stay, those of peers that it
left out, too. A run of the whole makes its file anew. `results/earlier.json` keeps what either replaced.
"""

from __future__ import annotations

import json
import os
import platform
import re
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
RECORDED: list[dict[str, Any]] = []  # by this process, whose later records complete the earlier ones


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number, beside the same work done by a peer in the same run."""

    name: str  # what was measured, with the shape or setting that tells it from its neighbours
    unit: str  # e.g. tokens/s, ms, GB/s
    value: float
    peer: str | None = None
    peer_kind: str | None = None  # one for all runs, where it is not the peer's words before a comma or a colon
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
            "peer_kind": self.peer_kind,
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

    `part`: these are some of what the script measures, and what was recorded under other names, or beside peers of
    other kinds, stays. None: they are if the script was given one of `PARTS`.
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
    path.parent.mkdir(exist_ok=True)
    made, before = records, json.loads(path.read_text()) if path.exists() else []
    records, replaced = beside(before, made) if part else (made, before)
    path.write_text(json.dumps(records, indent=2) + "\n")
    keep([each for each in replaced if each not in RECORDED and each not in made])
    RECORDED.extend(made)
    print(f"written to {path}", flush=True)
    return path


def beside(
    before: list[dict[str, Any]], made: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(`made` among the records that stay, those that it replaces).

    Replaced are records of the same name that are of the same kind of peer, or without a peer, or of this process.
    """
    names = list(dict.fromkeys(each["name"] for each in made))
    kinds = {(each["name"], kind_of(each)) for each in made} | {(name, None) for name in names}
    same = [each for each in before if each["name"] in names]
    replaced = [each for each in same if (each["name"], kind_of(each)) in kinds or each in RECORDED]
    block = sorted([*made, *(each for each in same if each not in replaced)], key=lambda row: names.index(row["name"]))
    place = before.index(same[0]) if same else len(before)
    return [*before[:place], *block, *(each for each in before[place:] if each["name"] not in names)], replaced


def kind_of(record: dict[str, Any]) -> str | None:
    """What a peer is called in all runs: "vLLM default" of "vLLM default, unseeded" and of "vLLM default: it ended"."""
    return record.get("peer_kind") or (record["peer"] and re.split("[,:]", record["peer"])[0])


def keep(replaced: list[dict[str, Any]]) -> None:
    """Add records to `results/earlier.json`, those that it lacks."""
    path = RESULTS / "earlier.json"
    before = json.loads(path.read_text()) if path.exists() else []
    if more := [each for each in replaced if each not in before]:
        path.write_text(json.dumps([*before, *more], indent=2) + "\n")


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
