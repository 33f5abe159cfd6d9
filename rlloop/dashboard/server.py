"""The dashboard's routes: pages, data, live events and Prometheus. They must be served behind a token."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
import zstandard
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rlloop import __version__
from rlloop.dashboard import panels
from rlloop.dashboard.live import Dashboard, to_json
from rlloop.dashboard.notes import write_notes
from rlloop.dashboard.rollouts import KINDS, ORDERS
from rlloop.dashboard.runs import Run
from rlloop.dashboard.tokens import explain, find_tokenizer, load_tokenizer
from rlloop.errors import UNREADABLE, ConfigError, RunError
from rlloop.metrics import held_out_names, number_of
from rlloop.runs.images import ImageStore
from rlloop.study.analysis import repeats
from rlloop.web.requests import body_of, parsed, whole_number

STATIC = Path(__file__).parent / "static"


def _runs(dashboard: Dashboard, ids: Sequence[str]) -> list[Run]:
    """Runs by id, also those that are new since the last search. Raises `HTTPException`."""
    if any(dashboard.runs.get(id) is None for id in ids):
        dashboard.runs.find()
    runs = []
    for id in ids:
        run = dashboard.runs.get(id)
        if run is None:
            raise HTTPException(404, f"there is no run {id!r} here")
        runs.append(run)
    return runs


def _run(dashboard: Dashboard, request: Request, key: str = "run") -> Run:
    return _runs(dashboard, [request.query_params.get(key, "")])[0]


def _reply(content: Any) -> Response:
    return Response(to_json(content), media_type="application/json")


def _number(request: Request, key: str, default: int | None = None) -> int:
    return whole_number(request.query_params.get(key), key, default)


def _choice(request: Request, key: str, allowed: Any) -> str | None:
    text = request.query_params.get(key)
    if text is not None and text not in allowed:
        raise HTTPException(400, f"{key} is {text!r}; it must be one of {', '.join(allowed)}")
    return text


# ------------------------------------------------------------------------------------------------ pages and data


def make_app(dashboard: Dashboard) -> Starlette:
    """The application, without authentication: serve it behind `rlloop.web.server.Guard`."""

    def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    def runs(request: Request) -> Response:
        overviews = [run.overview() for run in dashboard.runs.find()]
        return _reply(
            {
                "version": __version__,
                "root": str(dashboard.runs.root),
                "note": dashboard.note,
                "api": None if dashboard.api is None else dashboard.api.url,
                "runs": overviews,
            }
        )

    def layout(request: Request) -> Response:
        names: set[str] = set()
        chosen = _runs(dashboard, request.query_params.getlist("run"))
        for run in chosen:
            with run.metrics() as metrics:
                names |= metrics.names - (panels.CONSTANT if run.offline() else set())
        if not any(run.passes() for run in chosen):
            names -= panels.PASSES
        kinds = {run.offline() for run in chosen}
        return _reply(panels.present(names, held_out_names(kinds.pop() if len(kinds) == 1 else None)))

    def totals(request: Request) -> Response:
        run = _run(dashboard, request)
        return _reply({**run.overview(), **run.totals()})

    def series(request: Request) -> Response:
        """float64 columns, little-endian, one after the other: step, then each `name`; rows from `after` on."""
        names = ["step", *request.query_params.getlist("name")]
        with _run(dashboard, request).metrics() as metrics:
            generation = metrics.tail.generation
            same = request.query_params.get("generation") == str(generation)
            start = min(_number(request, "after", 0), len(metrics)) if same else 0
            columns = [metrics.column(name, start) for name in names]
        headers = {"x-generation": str(generation), "x-start": str(start), "x-columns": str(len(names))}
        body = np.concatenate(columns).astype("<f8").tobytes()
        return Response(body, headers=headers, media_type="application/octet-stream")

    def series_csv(request: Request) -> Response:
        names = request.query_params.getlist("name")
        file = io.StringIO()
        writer = csv.writer(file)
        writer.writerow(["run", "step", *names])
        for run in _runs(dashboard, request.query_params.getlist("run")):
            with run.metrics() as metrics:
                columns = [metrics.column(name) for name in ("step", *names)]
            for step, *values in zip(*columns, strict=True):
                if not all(math.isnan(value) for value in values):
                    texts = ["" if math.isnan(v) else "not finite" if math.isinf(v) else repr(float(v)) for v in values]
                    writer.writerow([run.id, int(step), *texts])
        return _attachment(file.getvalue(), request, request.query_params.get("title") or " ".join(names))

    def record(request: Request) -> Response:
        run, step = _run(dashboard, request), _number(request, "step")
        with run.metrics() as metrics:
            content, steps = metrics.record(step), metrics.column("step")
        line = next((line for line in reversed(run.certificate()) if line["step"] == step), None)
        bounds = {"first": steps[0], "last": steps[-1]} if len(steps) else None
        return _reply({"record": content, "certificate": line, "bounds": bounds})

    def certificate(request: Request) -> Response:
        run = _run(dashboard, request)
        lines, last = run.certificate(), _number(request, "last", 0)
        return _reply(
            {
                "steps": len(lines),
                "tokens": sum(line["tokens"] for line in lines),
                "different": sum(line["tokens_different"] for line in lines),
                "breaks": run.breaks(),
                "rungs": _rungs(lines),
                "lines": lines[-last:] if last else [],
                "fingerprints": run.read_json("fingerprints.json") or {},
                "report": run.read_json("parity_report.json"),
                "problems": run.problems,
            }
        )

    def config(request: Request) -> Response:
        """The configuration of one run, or of two (`other`): rows of key, values, and true for the first key that
        differs where one repeats another."""
        chosen = [_run(dashboard, request)]
        if "other" in request.query_params:
            chosen.append(_run(dashboard, request, "other"))
        configs, problems = [], []
        for run in chosen:
            try:
                configs.append(run.config())
            except (OSError, yaml.YAMLError) as error:
                configs.append({})
                problems.append(f"{run.id}: config.yaml cannot be read: {error}")
        keys = list(dict.fromkeys(key for each in configs for key in each))
        values = {key: [_plain(each[key]) if key in each else None for each in configs] for key in keys}
        rows = [
            {"key": key, "values": each, "differ": any(v != each[0] for v in each) and not repeats(key, values)}
            for key, each in values.items()
        ]
        return _reply({"runs": [run.id for run in chosen], "rows": rows, "problems": problems})

    def rollouts(request: Request) -> Response:
        run = _run(dashboard, request)
        index = dashboard.index(run)
        query = request.query_params
        if "step" not in query:  # a step's own file is read at once
            index.keep_up()
        files = index.progress()["files"]  # before the page, which may then have more of them, but not fewer
        order = _choice(request, "order", ORDERS)
        solved = _choice(request, "solved", ("yes", "no"))
        completions = index.page(
            step=_number(request, "step") if "step" in query else None,
            order=order,
            kind=_choice(request, "kind", KINDS),
            solved=None if solved is None else solved == "yes",
            group=_number(request, "group") if "group" in query else None,
            search=query.get("search", "")[:200],
            offset=max(0, _number(request, "offset", 0)),
            limit=min(max(1, _number(request, "limit", 100)), 10_000),
        )
        if query.get("format") == "csv":
            file = io.StringIO()
            writer = csv.DictWriter(file, list(completions["rows"][0]) if completions["rows"] else ["step"])
            writer.writeheader()
            writer.writerows(completions["rows"])
            step = query.get("step")
            return _attachment(file.getvalue(), request, "rollouts" if step is None else f"rollouts step {step}")
        return _reply({**completions, "index": {**index.progress(), "files": files}})

    def rollout(request: Request) -> Response:
        run, step, line = _run(dashboard, request), _number(request, "step"), _number(request, "line")
        try:
            row = dashboard.index(run).row(step, line)
        except (zstandard.ZstdError, *UNREADABLE) as error:
            raise HTTPException(422, f"the rollouts of step {step} are damaged: {error}") from error
        if row is None:
            raise HTTPException(404, f"step {step} of {run.id} has no completion {line}")
        try:
            file = find_tokenizer(run.path, run.config())
        except (OSError, yaml.YAMLError):
            file = find_tokenizer(run.path, {})
        return _reply(explain(row, None if file is None else load_tokenizer(file)))

    def image(request: Request) -> Response:
        """The picture of an image of a prompt, by its digest: a PNG."""
        run = _run(dashboard, request)
        try:
            file = ImageStore(run.path).picture(request.query_params.get("digest", ""))
        except RunError as error:
            raise HTTPException(400, str(error)) from error
        if file is None:
            raise HTTPException(404, f"{run.id} has kept no picture of this digest")
        return FileResponse(file, media_type="image/png", headers={"Cache-Control": "max-age=86400, immutable"})

    async def notes(request: Request) -> Response:
        """Replace the note and tags of a run."""
        run = await run_in_threadpool(_run, dashboard, request)
        content = parsed(await body_of(request), dict[str, Any])
        return _reply(await run_in_threadpool(write_notes, run.path, content))

    def training_api(request: Request) -> Response:
        if dashboard.api is None:
            raise HTTPException(404, "this dashboard shows no training API; start it with --api URL")
        return _reply(dashboard.api.status())

    def log(request: Request) -> Response:
        return _reply({"lines": _run(dashboard, request).log()})

    async def events(request: Request) -> Response:
        return StreamingResponse(dashboard.events(), media_type="text/event-stream")

    def prometheus(request: Request) -> Response:
        return Response(_gauges(dashboard.runs.find()), media_type="text/plain; version=0.0.4; charset=utf-8")

    def failed(request: Request, error: Exception) -> Response:
        status, message = (error.status_code, error.detail) if isinstance(error, HTTPException) else (400, str(error))
        return Response(to_json({"error": message}), status, media_type="application/json")

    routes: list[tuple[str, Callable[[Request], Any]]] = [
        ("/", page), ("/api/runs", runs), ("/api/panels", layout), ("/api/totals", totals), ("/api/series", series),
        ("/api/series.csv", series_csv), ("/api/record", record), ("/api/certificate", certificate),
        ("/api/config", config), ("/api/rollouts", rollouts), ("/api/rollout", rollout), ("/api/log", log),
        ("/api/image", image),
        ("/api/events", events), ("/api/training", training_api), ("/metrics", prometheus),
    ]  # fmt: skip
    return Starlette(
        routes=[
            *(Route(path, handler) for path, handler in routes),
            Route("/api/notes", notes, methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        exception_handlers={HTTPException: failed, ConfigError: failed, RunError: failed},
    )


def _attachment(text: str, request: Request, title: str) -> Response:
    """A CSV file, named by its runs and what it holds: `countdown-seed=1_reward.csv`."""
    ids = request.query_params.getlist("run")
    runs = "-".join(re.sub(r".*/", "", id) for id in ids) if len(ids) < 3 else f"{len(ids)}-runs"
    runs, title = re.sub(r"[^\w=.+,-]+", "-", runs.strip("."), flags=re.ASCII), re.sub(r"\W+", "-", title.lower())
    name = f"{runs}_{title.strip('-')}"[:120].encode("ascii", "ignore").decode()
    return Response(text, media_type="text/csv", headers={"content-disposition": f'attachment; filename="{name}.csv"'})


def _plain(value: Any) -> str:
    """A configuration's value as in an override."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _rungs(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Changes of the run's rung on the ladder, each with its step."""
    changes: list[dict[str, Any]] = []
    for line in lines:
        rung = line.get("rung", "bitwise")
        if not changes or changes[-1]["rung"] != rung:
            changes.append({"step": line["step"], "rung": rung})
    return changes


def _gauges(runs: list[Run]) -> bytes:
    """The newest numbers of every run in Prometheus' text format, named as by the sink (rlloop.runs.sinks)."""
    from prometheus_client import CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}

    def put(run: Run, name: str, about: str, value: float) -> None:
        if name not in gauges:
            gauges[name] = Gauge(name, about, ["run"], registry=registry)
        gauges[name].labels(run.id).set(value)

    for run in runs:
        overview, record = run.overview(), run.last_record()[0]
        put(run, "rlloop_live", "1 while the run writes records", float(overview["status"] == "live"))
        put(run, "rlloop_last_record_timestamp_seconds", "when the run last wrote", overview["changed"])
        for name, value in record.items():
            if (number := math.nan if value is None else number_of(value)) is not None:
                key = "rlloop_" + "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
                put(run, key, f"rlloop metric {name}", number)
    return generate_latest(registry)
