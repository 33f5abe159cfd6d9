"""Two runs side by side: what came out, and in which keys their configurations differ."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rlloop.console import clock, short
from rlloop.errors import ConfigError
from rlloop.records import flatten, read_config, read_records, require_run, summarize

Rows = list[tuple[str, str, str]]


def compare(run_a: Path, run_b: Path, output: Path | None = None) -> None:
    """Prints the tables; writes a PNG of the curves, or an HTML page of both, where `output` asks for one."""
    runs = [require_run(run_a), require_run(run_b)]
    if output is not None and output.suffix not in (".png", ".html"):
        raise ConfigError(f"-o is {str(output)!r}; it must end in .html or .png")
    records = [list(read_records(run / "metrics.jsonl")) for run in runs]
    outcomes = _outcomes(*(summarize(record, "") for record in records))
    differences = _differences(*(flatten(read_config(run)) for run in runs))
    console = Console()
    for title, rows in (("outcomes", outcomes), ("configuration", differences or [("no key differs", "", "")])):
        table = Table(title=title, title_justify="left")
        for heading in ("", str(run_a), str(run_b)):
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    if output is None:
        return
    from rlloop.plots import draw

    picture = output.with_suffix(".png")
    draw(dict(zip(map(str, runs), records, strict=True)), picture)
    if output.suffix == ".html":
        output.write_text(_page(runs, outcomes, differences, picture.read_bytes()))
        picture.unlink()
    console.print(f"written: {output}", highlight=False, soft_wrap=True)


def _outcomes(a: dict[str, Any], b: dict[str, Any]) -> Rows:
    def curve(summary: dict[str, Any], name: str) -> str:
        found = summary[name]
        return "{first:.3f} -> {last:.3f} (best {best:.3f})".format(**found) if found else "-"

    def row(label: str, of: Any) -> tuple[str, str, str]:
        return (label, of(a), of(b))

    return [
        row("steps", lambda s: str(s["step"])),
        row("pass@1, held-out", lambda s: curve(s, "eval/solved")),
        row("reward", lambda s: curve(s, "reward/mean")),
        row("largest train-inference KL (k3)", lambda s: short(s["parity"]["k3_max"])),
        row("tokens that differ", lambda s: f"{s['parity']['tokens_different']:,} of {s['parity']['tokens']:,}"),
        row("completions trained", lambda s: f"{s['ledger']['trained']:,} of {s['ledger']['sampled']:,}"),
        row("time in steps", lambda s: clock(s["seconds"])),
    ]


def _differences(a: dict[str, Any], b: dict[str, Any]) -> Rows:
    keys = sorted(a.keys() | b.keys())
    return [
        (key, str(a.get(key, "-")), str(b.get(key, "-")))
        for key in keys
        if a.get(key) != b.get(key) and key != "run.dir"
    ]


def _page(runs: list[Path], outcomes: Rows, differences: Rows, picture: bytes) -> str:
    def table(rows: Rows) -> str:
        head = "".join(f"<th>{html.escape(text)}</th>" for text in ("", *map(str, runs)))
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        return f"<table><tr>{head}</tr>{body}</table>"

    data = base64.b64encode(picture).decode()
    return (
        "<!doctype html><meta charset=utf-8><title>rlloop compare</title>"
        "<style>body{font:15px system-ui;margin:2em auto;max-width:75em}td,th{text-align:left;padding:.2em 1em .2em 0}"
        "img{max-width:100%}</style>"
        f"<h1>Two runs</h1>{table(outcomes)}<img alt='reward, pass@1 and train-inference KL by step' "
        f"src='data:image/png;base64,{data}'><h2>Configuration: the keys that differ</h2>"
        f"{table(differences) if differences else '<p>None.</p>'}\n"
    )
