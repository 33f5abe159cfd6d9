"""Sinks, which get each record besides the run folder: Weights & Biases, TensorBoard, Prometheus."""

from __future__ import annotations

import importlib.util
import inspect
import math
import netrc
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlloop.errors import ConfigError

if TYPE_CHECKING:
    from rlloop.metrics import Sink


def _require(package: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"sinks.{name} needs the package {package}: pip install 'rlloop[{name}]', or remove the sink")


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


class WandbSink:
    """Weights & Biases. Never prompts for a key.

    A resumed run continues under the same id, which is kept in the run folder. `mode`: online, offline or disabled;
    null: online if there is a key, else offline (`wandb sync RUN_DIR/wandb/offline-run-*` uploads it later).
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
    ) -> None:
        _require("wandb", "wandb")
        if mode not in (None, "online", "offline", "disabled"):
            raise ConfigError(f"sinks.wandb.mode is {mode!r}; it must be null, online, offline or disabled")
        import wandb

        id_file = run_dir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=project,
            name=name or run_dir.name,
            entity=entity,
            tags=tags,
            id=id_file.read_text().strip(),
            resume="allow",
            config=dict(config),
            dir=run_dir,
            mode=mode or ("online" if _has_wandb_key() else "offline"),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = re.sub(r"^https?://", "", os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    try:
        return netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False


class TensorBoardSink:
    """TensorBoard event files in `<run>/tensorboard`, without histograms."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        _require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        self._writer.add_text("config", f"```\n{config}\n```")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in _numbers(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class PrometheusSink:
    """The newest step's numbers as gauges on `http://host:port/metrics`, named `rlloop_parity_k3` and so on.

    Binds to loopback by default. Port 0 picks a free one. Every gauge has the label `run`.
    """

    def __init__(self, run_dir: Path, config: Mapping[str, Any], *, port: int = 9400, host: str = "127.0.0.1") -> None:
        _require("prometheus_client", "prometheus")
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


SINKS = {"wandb": WandbSink, "tensorboard": TensorBoardSink, "prometheus": PrometheusSink}


def check_sinks(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for unknown sinks, unknown options and missing packages, before a run starts."""
    for name, options in config.items():
        if name not in SINKS:
            raise ConfigError(f"sinks.{name} is unknown; there are {', '.join(SINKS)}")
        allowed = list(inspect.signature(SINKS[name]).parameters)[2:]
        for option in options or {}:
            if option not in allowed:
                raise ConfigError(
                    f"sinks.{name}.{option} is unknown; {name} takes {', '.join(allowed) or 'no options'}"
                )
        _require({"prometheus": "prometheus_client"}.get(name, name), name)


def make_sinks(config: Mapping[str, Any], run_dir: Path, run_config: Mapping[str, Any]) -> list[Sink]:
    """The sinks of a run: `config` maps a sink's name to its options."""
    check_sinks(config)
    return [SINKS[name](run_dir, run_config, **(options or {})) for name, options in config.items()]
