"""Sinks, which get each record besides the run folder: Weights & Biases, trackio, MLflow, TensorBoard, Prometheus, and
alerts to a webhook (`rlloop.runs.alerts`).

Those that show more than numbers also get histograms, some of the completions, and at the end the certificate.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import netrc
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rlloop.config.resume import LOGIN
from rlloop.errors import ConfigError, did_you_mean
from rlloop.runs.alerts import AlertSink
from rlloop.runs.journal import open_journal

if TYPE_CHECKING:
    from rlloop.metrics import Sink

PACKAGES = {"prometheus": "prometheus_client", "alerts": "httpx"}  # of sinks that are not named like their package
CERTIFICATE = "parity.jsonl"
COLUMNS = ("step", "uid", "reward", "solved", "outcome", "tokens", "prompt", "completion")


def _require(name: str) -> None:
    package = PACKAGES.get(name, name)
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"sinks.{name} needs the package {package}: pip install 'rlloop[{name}]', or remove the sink")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def _histograms(metrics: Mapping[str, Any]) -> dict[str, tuple[list[int], list[float]]]:
    """(n counts, n + 1 edges) of each histogram: the outer bins, which are open, are closed half a decade further."""
    histograms = {name: value for name, value in metrics.items() if isinstance(value, Mapping) and value.get("edges")}
    return {
        name: (value["counts"], [value["edges"][0] * 10**0.5, *value["edges"], value["edges"][-1] * 10**0.5])
        for name, value in histograms.items()
    }


class _WithSamples:
    """Base of sinks that show a step's completions: distributions, and every `every` steps a table of `count` rows."""

    def __init__(self, count: int, every: int) -> None:
        self.count, self.every = count, every
        self.table: list[list[Any]] = []
        self.values: dict[str, list[float]] = {}

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        lengths = [len(row["token_ids"]) for row in rows]
        self.values = {
            "reward/distribution": [row["reward"] for row in rows if math.isfinite(row["reward"])],
            "rollout/length_distribution": [float(length) for length in lengths],
        }
        self.table = []
        if self.count and (step == 1 or step % self.every == 0):
            self.table = [
                [step, row["uid"], row["reward"], row["solved"], row["outcome"], length, row["prompt"], row["text"]]
                for row, length in list(zip(rows, lengths, strict=True))[: self.count]
            ]

    def _taken(self) -> tuple[list[list[Any]], dict[str, list[float]]]:
        """The rows of the table and the distributions of the step whose record comes now; each once."""
        samples = self.table, {name: values for name, values in self.values.items() if values}
        self.table, self.values = [], {}
        return samples

    def _shown(self, library: Any, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """A record with histograms and the table as objects of wandb or trackio."""
        table, values = self._taken()
        drawn = {name: library.Histogram(np_histogram=both) for name, both in _histograms(metrics).items()}
        drawn |= {name: library.Histogram(each) for name, each in values.items()}
        rows = {"completions": library.Table(columns=list(COLUMNS), data=table)} if table else {}
        return {**_numbers(metrics), **drawn, **rows}


@contextmanager
def _certificate(run_dir: Path) -> Iterator[tuple[Path, str] | None]:
    """The whole certificate as one file, also if its records are rotated, and its last hash; None without records."""
    with tempfile.TemporaryDirectory() as place:
        whole, head = Path(place) / CERTIFICATE, b""
        with suppress(FileNotFoundError), open_journal(run_dir / CERTIFICATE) as journal, whole.open("wb") as file:
            for head in journal:
                file.write(head)
        yield (whole, msgspec.json.decode(head)["hash"]) if head else None


def _kept_id(file: Path) -> str:
    """An id that a resumed run finds again."""
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:8])
    return file.read_text().strip()


class WandbSink(_WithSamples):
    """Weights & Biases. Never prompts for a key.

    A resumed run continues under the same id, which is kept in the run folder. `mode`: online, offline or disabled;
    null: online if there is a key, else offline. `completions`: rows of the table that every `completions_every`-th
    step adds.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        project: str = "rlloop",
        name: str | None = None,
        entity: str | None = None,
        tags: list[str] | None = None,
        mode: str | None = None,
        completions: int = 8,
        completions_every: int = 10,
    ) -> None:
        _require("wandb")
        if mode not in (None, "online", "offline", "disabled"):
            raise ConfigError(f"sinks.wandb.mode is {mode!r}; it must be null, online, offline or disabled")
        import wandb

        self._wandb, self._dir = wandb, run_dir
        super().__init__(completions, completions_every)
        mode = mode or ("online" if _has_wandb_key() else "offline")
        self._run = wandb.init(
            project=project,
            name=name or run_dir.name,
            entity=entity,
            tags=tags,
            id=_kept_id(run_dir / "wandb_id"),
            resume="allow",
            config=dict(config),
            dir=run_dir,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off"),
        )
        where = Path(self._run.dir).parent
        self.note = f"wandb: offline, in {where}; `wandb sync {where}` uploads it" if mode == "offline" else ""
        if mode == "online":
            self.note = f"wandb: {self._run.url}"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(self._shown(self._wandb, metrics), step=step)

    def close(self) -> None:
        with _certificate(self._dir) as certificate:
            if certificate is not None:
                self._run.summary["certificate/head"] = certificate[1]
                artifact = self._wandb.Artifact(f"certificate-{self._run.id}", "certificate")
                artifact.add_file(str(certificate[0]))  # wandb copies it at once
                self._run.log_artifact(artifact)
        self._run.finish()


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = re.sub(r"^https?://", "", os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    try:
        return netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


class TrackioSink(_WithSamples):
    """trackio, on this machine unless `space_id` names a Space: `trackio show --project PROJECT` shows it.

    A resumed run continues under the same name, which is the run folder's unless `name` is given.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        project: str = "rlloop",
        name: str | None = None,
        space_id: str | None = None,
        completions: int = 8,
        completions_every: int = 10,
    ) -> None:
        _require("trackio")
        import trackio  # pyright: ignore[reportMissingImports]

        self._trackio, self._dir = trackio, run_dir
        super().__init__(completions, completions_every)
        # its own samples of CPU and GPU are off: the records have rlloop's, by step
        self._run = trackio.init(
            project, name or run_dir.name, space_id=space_id, config=dict(config), resume="allow", embed=False,
            auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        self.note = (
            f"trackio: `trackio show --project {project}` shows it" if space_id is None else f"trackio: {space_id}"
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(self._shown(self._trackio, metrics), step=step)

    def close(self) -> None:
        with _certificate(self._dir) as certificate:
            if certificate is not None:
                self._trackio.save(certificate[0])
            self._run.finish()


class MlflowSink(_WithSamples):
    """MLflow: `uri`, else MLFLOW_TRACKING_URI, else `mlflow.db` and `mlartifacts` in the run's folder.

    A resumed run continues under the same id, which is kept in the run folder. Completions and histograms are
    artifacts, a JSON file for each step that has them.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        experiment: str = "rlloop",
        name: str | None = None,
        uri: str | None = None,
        completions: int = 8,
        completions_every: int = 10,
    ) -> None:
        _require("mlflow")
        import mlflow  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        uri = uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(run_dir / 'mlflow.db').resolve()}"
        self._dir, self._metric = run_dir, Metric
        super().__init__(completions, completions_every)
        self._client = mlflow.MlflowClient(uri)
        existing = self._client.get_experiment_by_name(experiment)
        artifacts = (run_dir / "mlartifacts").resolve().as_uri() if uri.startswith("sqlite") else None
        number = self._client.create_experiment(experiment, artifacts) if existing is None else existing.experiment_id
        kept = run_dir / "mlflow_id"
        if not kept.exists():
            begun = self._client.create_run(number, run_name=name or run_dir.name)
            kept.write_text(begun.info.run_id)
            flat = [Param(key, str(value)[:6000]) for key, value in _flat(config).items()]
            for first in range(0, len(flat), 100):  # as many as a request may have
                self._client.log_batch(begun.info.run_id, params=flat[first : first + 100])
        self._id = kept.read_text().strip()
        self._client.update_run(self._id, status="RUNNING")
        self.note = f"mlflow: experiment {experiment!r}; `mlflow ui --backend-store-uri {LOGIN.sub('', uri)}` shows it"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        now, (table, _) = int(time.time() * 1000), self._taken()
        numbers = [self._metric(name, value, now, step) for name, value in _numbers(metrics).items()]
        self._client.log_batch(self._id, metrics=numbers)
        if table:
            rows = [dict(zip(COLUMNS, row, strict=True)) for row in table]
            self._client.log_dict(self._id, {"rows": rows}, f"completions/step_{step}.json")
            for name, (counts, edges) in _histograms(metrics).items():
                file = f"histograms/{name.replace('/', '_')}/step_{step}.json"
                self._client.log_dict(self._id, {"counts": list(counts), "edges": edges}, file)

    def close(self) -> None:
        with _certificate(self._dir) as certificate:
            if certificate is not None:
                self._client.set_tag(self._id, "certificate.head", certificate[1])
                self._client.log_artifact(self._id, str(certificate[0]))
        self._client.set_terminated(self._id)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


class TensorBoardSink(_WithSamples):
    """TensorBoard event files in `<run>/tensorboard`."""

    def __init__(
        self, run_dir: Path, config: Mapping[str, Any], *, completions: int = 8, completions_every: int = 10
    ) -> None:
        _require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(completions, completions_every)
        self._dir = run_dir
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        self._writer.add_text("config", f"```\n{config}\n```")
        self.note = f"tensorboard: `tensorboard --logdir {run_dir / 'tensorboard'}` shows it"
        self._last = 0

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        table, values = self._taken()
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        for name, each in values.items():
            self._writer.add_histogram(name, np.asarray(each), step)
        for name, (counts, edges) in _histograms(metrics).items():
            middles = [(low + high) / 2 for low, high in pairwise(edges)]
            total = sum(count * middle for count, middle in zip(counts, middles, strict=True))
            squares = sum(count * middle**2 for count, middle in zip(counts, middles, strict=True))
            self._writer.add_histogram_raw(
                name, edges[0], edges[-1], sum(counts), total, squares, edges[1:], counts, step
            )
        if table:
            texts = [f"**{row[1]}** reward {row[2]:g}\n\n```\n{row[6]}\n```\n\n```\n{row[7]}\n```" for row in table]
            self._writer.add_text("completions", "\n\n---\n\n".join(texts), step)
        self._writer.flush()
        self._last = step

    def close(self) -> None:
        with _certificate(self._dir) as certificate:
            if certificate is not None:
                self._writer.add_text("certificate/head", certificate[1], self._last)
        self._writer.close()


class PrometheusSink:
    """The newest step's numbers as gauges on `http://host:port/metrics`, named `rlloop_parity_k3` and so on.

    Binds to loopback by default. Port 0 picks a free one. Every gauge has the label `run`.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], *, port: int = 9400, host: str = "127.0.0.1") -> None:
        _require("prometheus")
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        self._registry, self._gauge, self._run = CollectorRegistry(), Gauge, run_dir.name
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"sinks.prometheus cannot listen on {host}:{port} ({error}); choose another port"
            ) from None
        self.port = self._server.server_port
        self.note = f"prometheus: http://{host}:{self.port}/metrics"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in {**_numbers(metrics), "step": float(step)}.items():
            key = "rlloop_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if key not in self._gauges:
                self._gauges[key] = self._gauge(key, f"rlloop metric {name}", ["run"], registry=self._registry)
            self._gauges[key].labels(self._run).set(value if math.isfinite(value) else math.nan)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


SINKS = {
    "wandb": WandbSink, "trackio": TrackioSink, "mlflow": MlflowSink, "tensorboard": TensorBoardSink,
    "prometheus": PrometheusSink, "alerts": AlertSink,
}  # fmt: skip


def check_sinks(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for unknown sinks, unknown options and missing packages, before a run starts."""
    for name, options in config.items():
        if name not in SINKS:
            raise ConfigError(f"sinks.{name} is unknown; there are {', '.join(SINKS)}{did_you_mean(name, SINKS)}")
        allowed = list(inspect.signature(SINKS[name]).parameters)[2:]
        for option in options or {}:
            if option not in allowed:
                raise ConfigError(
                    f"sinks.{name}.{option} is unknown; {name} takes {', '.join(allowed) or 'no options'}"
                    f"{did_you_mean(option, allowed)}"
                )
        _require(name)
        if name == "alerts":
            AlertSink.check(**(options or {}))
        elif name == "mlflow" and "://" in (uri := str((options or {}).get("uri"))):
            from rlloop.web.clients import refuse_login

            login = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            refuse_login("sinks.mlflow.uri", uri, f"export {login}, or the whole address as MLFLOW_TRACKING_URI")


def make_sinks(config: Mapping[str, Any], run_dir: Path, run_config: Mapping[str, Any]) -> list[Sink]:
    """The sinks of a run: `config` maps a sink's name to its options."""
    check_sinks(config)
    return [SINKS[name](run_dir, run_config, **(options or {})) for name, options in config.items()]
