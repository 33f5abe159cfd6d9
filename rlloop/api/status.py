"""GET /status, for dashboards, and GET /metrics, for Prometheus."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from rlloop.api.core import Core
from rlloop.api.keys import Client
from rlloop.api.models import Trained
from rlloop.api.sessions import Session, Sessions

Handler = Callable[[Request, Client, bytes], Awaitable[Response]]


class Status:
    def __init__(self, core: Core, sessions: Sessions) -> None:
        self.core, self.sessions = core, sessions
        self.handlers: dict[str, Handler] = {"/status": self._status, "/metrics": self._metrics}
        self._secret = _secret(core.settings.folder / "metrics_key")

    async def _status(self, request: Request, client: Client, body: bytes) -> Response:
        return JSONResponse(self.described(client))

    async def _metrics(self, request: Request, client: Client, body: bytes) -> Response:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Numbers(self, client))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def called(self, name: str, reader: Client) -> str:
        """A client's name, for an operator and itself; for others an id, the same after a restart, that does not give
        the name away."""
        if reader.operator or reader.name == name:
            return name
        return hashlib.blake2b(name.encode(), key=self._secret, digest_size=6).hexdigest()

    def described(self, client: Client) -> dict[str, Any]:
        """A client's own sessions; those of all clients for an operator."""
        seen = [session for session in self.sessions if client.operator or session.card.client == client.name]
        service = self.core.service.status()
        models = service.get("models", {})
        futures, held = self.core.futures.load(client.name)
        return {
            "model": self.core.settings.model_name,
            "sessions": [self._session(session, models) for session in seen],
            "futures": {"in_flight": self.core.futures.pending, "kept": len(self.core.futures)},
            "own": {"in_flight": futures, "bytes": held},
            "refused": self.core.refused,
            "commits": self.core.committer.commits,
            "service": {name: value for name, value in service.items() if name != "models"},
        }

    def _session(self, session: Session, models: dict[str, Any]) -> dict[str, Any]:
        return {
            "session_id": session.id,
            "client": session.card.client,
            "name": session.card.display_name,
            "created": session.card.created,
            "idle_seconds": time.monotonic() - session.seen,
            "samplers": len(session.sampling),
            "models": [self._model(model, models.get(model.model_id, {})) for model in session.models.values()],
        }

    @staticmethod
    def _model(model: Trained, counts: dict[str, Any]) -> dict[str, Any]:
        return {
            "model_id": model.model_id,
            "updates": model.updates,
            "queued": model.queued,
            "log_bytes": model.log.nbytes,
            "failed": model.failed,
            "tokens_checked": model.checked,
            "tokens_different": model.different,
            **counts,
        }


def _secret(file: Path) -> bytes:
    """The folder's key of clients' ids in metrics, made at first use."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        file.write_bytes(secrets.token_bytes(32))
    return file.read_bytes()


class _Numbers(Collector):
    def __init__(self, status: Status, reader: Client) -> None:
        self._status, self._reader = status, reader

    def collect(self) -> Iterator[Metric]:
        core, sessions = self._status.core, list(self._status.sessions)
        models = [model for session in sessions for model in session.models.values()]
        gauges = {
            "sessions": ("sessions that have not ended", len(sessions)),
            "models": ("models that train", len(models)),
            "futures_in_flight": ("requests that are not done", core.futures.pending),
            "futures_kept": ("requests whose futures are known, done or not", len(core.futures)),
            "commands_queued": ("commands on disk that wait for their turn", sum(each.queued for each in models)),
            "log_bytes": ("bytes in the newest segments of models' logs", sum(each.log.nbytes for each in models)),
        }
        counters = {
            "log_commits": ("writes of a log, each with a sync", core.committer.commits),
            "refused": ("requests that were answered with 429", core.refused),
        }
        for name, (words, value) in gauges.items():
            yield GaugeMetricFamily(f"rlloop_api_{name}", words, value=value)
        for name, (words, value) in counters.items():
            yield CounterMetricFamily(f"rlloop_api_{name}", words, value=value)
        for name, words in (("checked", "tokens compared with what was sampled"), ("different", "those that differed")):
            family = CounterMetricFamily(f"rlloop_api_parity_tokens_{name}", words, labels=["client"])
            for client in sorted({each.client for each in models}):
                label = self._status.called(client, self._reader)
                family.add_metric([label], sum(getattr(each, name) for each in models if each.client == client))
            yield family
