"""`rlloop compare`: outcomes, verdicts on collapse, and differences of configuration, side by side."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlloop.errors import ConfigError
from rlloop.metrics import OBJECTIVE
from rlloop.runs.console import clock
from rlloop.runs.folder import require_run, summarize
from rlloop.study.analysis import (
    CONFIDENCE,
    PASS,
    RESAMPLES,
    Arm,
    CollapseRule,
    Dose,
    HeldOut,
    Interval,
    Run,
    arms_of,
    bootstrap,
    departures,
    difference,
    differences,
    dose,
    ends,
    held_out_of,
    is_offline,
    last_part,
    over_seeds,
    verdict_of,
)

Rows = list[tuple[str, list[str]]]  # (label, a cell for each arm)
SIDE_BY_SIDE = 4  # more arms than this become rows of the page's tables
LABEL, CELL = 28, 22  # widths of a printed table's columns, in characters

STYLE = (
    "body{font:15px system-ui;margin:2em auto;max-width:100em;padding:0 1em}table{border-collapse:collapse}"
    "td,th{text-align:left;padding:.25em 1.2em .25em 0;border-bottom:1px solid #ddd;vertical-align:top}"
    "img{max-width:100%}.wide{overflow-x:auto}"
)


def compare(paths: Sequence[Path], output: Path | None = None) -> None:
    """Print the tables, and write `output`: a PNG of the curves, or an HTML page with its pictures and data.

    Each path is a run's folder or a multirun's. Raises `ConfigError` or `RunError`.
    """
    if output is not None and output.suffix not in (".png", ".html"):
        raise ConfigError(f"-o is {str(output)!r}; it must end in .html or .png")
    if output is not None:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"-o is {str(output)!r}; its folder cannot be created: {error.strerror}") from None
    runs = Run.read_all(run for path in paths for run in _runs_in(path))
    if len(runs) < 2:
        raise ConfigError(f"{', '.join(map(str, paths))} is one run; name another run to compare it with")
    arms = arms_of(runs)
    doses = {run.path: dose(run, CollapseRule.of(run).verdict(run.records)) for run in runs}
    if len(paths) == 1:  # a multirun's folders are sorted by name; the control, without a mismatch, goes first
        arms = sorted(
            arms, key=lambda arm: (any(doses[run.path].largest > 0 for run in arm.runs), departures(arm, arms))
        )
    names, held_out = [arm.name for arm in arms], held_out_of(arms)
    outcomes, configuration = _outcomes(arms, doses, held_out), differences(arms)
    console = Console()
    for title, rows in (("outcomes", outcomes), ("configuration", configuration)):
        if rows:
            abreast = max(1, (console.width - LABEL) // CELL)
            for first in range(0, len(names), abreast):
                some = slice(first, first + abreast)
                labels = max(CELL, console.width - len(names[some]) * CELL - 4)  # 4: their frame
                console.print(_table(title, names[some], [(label, cells[some]) for label, cells in rows], labels))
        else:
            console.print(f"{title}: no key differs")
    for run in runs:
        if (steps := run.config.get("trainer.num_steps")) and run.last_step < steps:
            said = f"{run.path}: {run.last_step} of {steps} steps; what stands for its end is its last step so far"
            console.print(said, highlight=False, soft_wrap=True)
    rules = "; or, in some runs: ".join(dict.fromkeys(str(CollapseRule.of(run)) for run in runs))
    if _judged(arms, doses):
        console.print(f"Collapse, as declared before the runs: {rules}", highlight=False, soft_wrap=True)
    for file in [] if output is None else _write(output, arms, doses, held_out, outcomes, configuration, rules):
        console.print(f"written: {file}", highlight=False, soft_wrap=True)


def _runs_in(path: Path) -> list[Path]:
    """The run at `path`, or the runs of a multirun under it."""
    inside = sorted(file.parent for file in path.glob("*/config.yaml"))
    return inside if inside and not (path / "config.yaml").is_file() else [require_run(path)]


def _outcomes(arms: Sequence[Arm], doses: Mapping[Path, Dose], held_out: HeldOut) -> Rows:
    summaries = {run.path: summarize(run.records, "") for arm in arms for run in arm.runs}
    name, metric = held_out.name, held_out.metric

    def curve(arm: Arm, column: str, best: bool = True) -> str:
        series = [[value for _, value in run.series(column)] for run in arm.runs if run.series(column)]
        if not series:
            return "-"
        first, last, most = (sum(map(of, series)) / len(series) for of in (lambda s: s[0], lambda s: s[-1], max))
        return f"{first:.3f} -> {last:.3f}" + (f" (best {most:.3f})" if best else "")

    def each(of: Any, form: str = "{:.3f}") -> list[str]:
        return [over_seeds(arm, of, form) for arm in arms]

    def total(arm: Arm, of: Any) -> int:
        return sum(of(summaries[run.path]) for run in arm.runs)

    rows: Rows = [
        ("verdict, trainer's weights", [verdict_of(arm) for arm in arms]),
        ("verdict, through the engine", [verdict_of(arm, "eval/engine_reward") for arm in arms]),
        ("seeds", [", ".join(str(run.seed) for run in arm.runs) for arm in arms]),
        ("steps", each(lambda run: summaries[run.path]["step"], "{:.0f}")),
        (f"{name}, held-out", [curve(arm, metric) for arm in arms]),
        (f"{name} at the end, by seed", [_by_seed(ends(arm, metric)) for arm in arms]),
        (f"{name} at the end, 95% interval", [_text(bootstrap([*ends(arm, metric).values()])) for arm in arms]),
        (f"its difference from {arms[0].name}", ["-", *(_text(difference(arm, arms[0], metric)) for arm in arms[1:])]),
        *([("reward, held-out", [curve(arm, "eval/reward") for arm in arms])] if held_out == PASS else []),
        (f"{name}, held-out, through the engine", [curve(arm, held_out.engine_metric) for arm in arms]),
        ("reward, training", ["-" if is_offline(arm) else curve(arm, "reward/mean") for arm in arms]),
        *(
            (f"{label}, training", [curve(arm, column, best=False) if is_offline(arm) else "-" for arm in arms])
            for column, label in OBJECTIVE.items()
        ),
        ("largest train-inference KL (k3)", each(lambda run: abs(summaries[run.path]["parity"]["k3_max"]), "{:.3g}")),
        ("KL as applied: its first 20 steps", each(lambda run: doses[run.path].early, "{:.3g}")),
        ("KL as applied: until collapse or end", each(lambda run: doses[run.path].mean, "{:.3g}")),
        (
            "tokens that differ",
            [
                f"{total(arm, lambda s: s['parity']['tokens_different']):,} of "
                f"{total(arm, lambda s: s['parity']['tokens']):,}"
                for arm in arms
            ],
        ),
        ("tokens discarded, last tenth", each(lambda run: last_part(run, "loss/tokens_discarded"))),
        ("entropy, last tenth", each(lambda run: last_part(run, "loss/entropy"))),
        ("gradient norm, last tenth", each(lambda run: last_part(run, "loss/grad_norm"))),
        (
            "completions trained",
            [
                f"{total(arm, lambda s: s['ledger']['trained']):,} of {total(arm, lambda s: s['ledger']['sampled']):,}"
                for arm in arms
            ],
        ),
        ("time in steps, all seeds", [clock(total(arm, lambda s: s["seconds"])) for arm in arms]),
    ]
    if not _judged(arms, doses):
        rows = [row for row in rows if not row[0].startswith(("verdict", "KL as applied"))]
    return [row for row in rows if set(row[1]) != {"-"}]


def _by_seed(values: Mapping[int, float]) -> str:
    return ", ".join(f"{seed}: {value:.3f}" for seed, value in values.items()) or "-"


def _text(interval: Interval | None) -> str:
    return "-" if interval is None else str(interval)


def _judged(arms: Sequence[Arm], doses: Mapping[Path, Dose]) -> bool:
    """True if a verdict on collapse says something: some run had a mismatch, or collapsed without one."""
    runs = [run for arm in arms for run in arm.runs]
    return any(doses[run.path].largest > 0 or CollapseRule.of(run).verdict(run.records).collapsed for run in runs)


def _table(title: str, names: Sequence[str], rows: Rows, most: int) -> Table:
    """A table to print. `most`: characters of a line of labels."""
    labels = [" ".join(_in_lines(word, most) for word in label.split()) for label, _ in rows]
    longest = max(len(line) for label in labels for line in label.splitlines())
    table = Table(title=title, title_justify="left")
    table.add_column("", overflow="fold", width=min(longest, most))
    for name in names:
        table.add_column(name, overflow="fold")
    for label, (_, cells) in zip(labels, rows, strict=True):
        table.add_row(label, *cells)
    return table


def _in_lines(key: str, most: int) -> str:
    """A key in lines of at most `most` characters, each of which but the last ends with a dot."""
    lines = [""]
    for part in re.findall(r"[^.]*\.|[^.]+", key):
        if lines[-1] and len(lines[-1]) + len(part) > most:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ files


def _write(
    output: Path,
    arms: Sequence[Arm],
    doses: Mapping[Path, Dose],
    held_out: HeldOut,
    outcomes: Rows,
    configuration: Rows,
    rules: str,
) -> list[Path]:
    from rlloop.study.plots import draw_arms, draw_doses  # matplotlib takes a second to import

    curves = draw_arms(arms, held_out)
    if output.suffix == ".png":
        return _save({output: curves})
    dosed = [run for arm in arms for run in arm.runs if doses[run.path].largest > 0 and run.series(held_out.metric)]
    response = draw_doses(arms, doses, held_out) if dosed else None
    names, machines = [arm.name for arm in arms], _machines(arms)
    data = {
        "rule": rules,
        "intervals": {
            "confidence": CONFIDENCE,
            "method": f"percentile bootstrap over seeds, {RESAMPLES} resamples by numpy's default_rng(0)",
            "control": names[0],
        },
        "arms": {
            name: {
                "runs": [{"path": str(run.path), "seed": run.seed, "dose": vars(doses[run.path])} for run in arm.runs],
                "end": {
                    "by seed": ends(arm, held_out.metric),
                    held_out.name: _interval(bootstrap([*ends(arm, held_out.metric).values()])),
                    "difference": _interval(difference(arm, arms[0], held_out.metric)) if index else None,
                },
                "outcomes": {label: cells[index] for label, cells in outcomes},
                "configuration": {label: cells[index] for label, cells in configuration},
            }
            for index, (name, arm) in enumerate(zip(names, arms, strict=True))
        },
        "machines": machines,
    }
    files = {
        output: _page(names, outcomes, configuration, rules, machines, curves, response).encode(),
        output.with_suffix(".curves.png"): curves,
        **({} if response is None else {output.with_suffix(".dose.png"): response}),
        output.with_suffix(".json"): (json.dumps(data, indent=1) + "\n").encode(),
    }
    return _save(files)


def _interval(interval: Interval | None) -> dict[str, Any] | None:
    return None if interval is None else vars(interval)


def _save(files: Mapping[Path, bytes]) -> list[Path]:
    for file, content in files.items():
        try:
            file.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}; give -o another name") from None
    return list(files)


def _machines(arms: Sequence[Arm]) -> list[str]:
    """Hardware and versions in the runs' fingerprints, each once."""
    files = (run.path / "fingerprints.json" for arm in arms for run in arm.runs)
    fingerprints = [each for file in files if file.exists() for each in json.loads(file.read_text()).values()]
    facts = [
        [each.get("device"), each.get("instruction_set"), *map(" ".join, each.get("versions", {}).items())]
        for each in fingerprints
    ]
    return list(filter(None, dict.fromkeys(" ".join(filter(None, some)) for some in facts)))


def _page(
    names: Sequence[str],
    outcomes: Rows,
    configuration: Rows,
    rules: str,
    machines: Sequence[str],
    curves: bytes,
    response: bytes | None,
) -> str:
    def table(rows: Rows) -> str:
        if len(names) > SIDE_BY_SIDE:
            headings = [label for label, _ in rows]
            body = [(name, [cells[index] for _, cells in rows]) for index, name in enumerate(names)]
        else:
            headings, body = names, rows
        head = "".join(f"<th>{html.escape(text)}</th>" for text in ("", *headings))
        lines = (
            f"<tr><th>{html.escape(label)}</th>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
            for label, cells in body
        )
        return f"<div class=wide><table><tr>{head}</tr>{''.join(lines)}</table></div>"

    def picture(alt: str, png: bytes) -> str:
        return f"<img alt='{alt}' src='data:image/png;base64,{base64.b64encode(png).decode()}'>"

    verdicts = [row for row in outcomes if row[0].startswith("verdict")]
    rest = [row for row in outcomes if not row[0].startswith("verdict")]
    sections = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>rlloop compare</title>",
        f"<style>{STYLE}</style><h1>{len(names)} arms compared</h1>",
        f"<h2>Verdict</h2><p>Collapse was declared before the runs: {html.escape(rules)}.</p>{table(verdicts)}"
        if verdicts
        else "<p>Engine and trainer agreed in every bit of every run, and none collapsed.</p>",
        "<h2>Curves</h2><p>Lines are means over seeds, bands their smallest and largest. Step-wise metrics are running "
        "means over a fortieth of the run.</p>",
        picture("training, held-out, KL, tokens discarded, entropy and gradient norm by step and arm", curves),
        "<h2>Dose and response</h2><p>One point a run. The dose is the KL (k3) between engine and trainer, averaged "
        "from the first step in which it is not 0 to the collapse, or to the end where there is none.</p>"
        + picture("held-out outcome against KL", response)
        if response is not None
        else "",
        "<h2>Outcomes</h2><p>Means over seeds, with the smallest and the largest. In brackets: 95% intervals by a "
        f"bootstrap over seeds ({RESAMPLES:,} resamples). Differences are paired by seed. With three seeds an "
        f"interval is crude: it is their range.</p>{table(rest)}",
        "<h2>Configuration: the keys that differ, and no other does</h2>",
        table(configuration) if configuration else "<p>None.</p>",
        f"<p>{html.escape('; '.join(machines))}</p>" if machines else "",
    ]
    return "\n".join(filter(None, sections)) + "\n"
