"""The `fleet` group of the configuration: where the engines are. Imports neither torch, ray nor vllm."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from rlloop.errors import ConfigError


class FleetKind(StrEnum):
    node = "node"
    regions = "regions"


@dataclass
class FleetConfig:
    """fleet=node: engines on this machine, as `launch` says. fleet=regions: `rlloop serve engine`, anywhere, over HTTP.

    The token that all of them share is in `token_file`, or in the environment variable RLLOOP_TOKEN.
    """

    kind: FleetKind = FleetKind.node
    max_version_lag: int = 0  # steps by which a trained sample's weights may be older than the newest. 0: on-policy
    engines: dict[str, list[str]] = field(default_factory=dict)  # region -> URLs. Engines may also join by themselves
    host: str = "127.0.0.1"  # where the trainer serves its weights and lets engines join
    port: int = 0  # 0: any free one
    token_file: str | None = None
    certificate: str | None = None  # PEM: the trainer's end speaks TLS
    key: str | None = None
    ca_file: str | None = None  # PEM: whose certificates engines must have; null: the system's authorities
    store: str | None = None  # of the versions: a folder or an fsspec URL; null: weights/ in the run's folder
    signing_key: str | None = None  # Ed25519; null: signing_key in the run's folder, made when it is not there
    anchor_every: int = 50  # versions between whole copies, which engines that join begin from
    canary_prompts: int = 2  # completions that each engine must make right before it serves a version. 0: none
    heartbeat: float = 1.0  # seconds between looks at an engine
    timeout: float = 3.0  # seconds of one look, which is tried three times before an engine counts as lost
    patience: float = 120.0  # seconds without any engine, after which the run stops
    settle: float = 10.0  # seconds that a new version waits for the slower engines
    calls: int = 2  # at a time to one engine
    chunk: int = 128  # prompts of one call, at most
    hedge: float | None = None  # seconds after which an unanswered call is made by another engine as well

    def __post_init__(self) -> None:
        for name in ("heartbeat", "timeout", "patience"):
            _check(name, getattr(self, name), 0 < getattr(self, name) < math.inf, "a positive number of seconds")
        _check("settle", self.settle, 0 <= self.settle < math.inf, "0 or a positive number of seconds")
        _check("hedge", self.hedge, self.hedge is None or self.hedge > 0, "null (off) or a positive number of seconds")
        for name in ("anchor_every", "calls", "chunk"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        _check("max_version_lag", self.max_version_lag, self.max_version_lag >= 0, "0 (on-policy) or more steps")
        _check("canary_prompts", self.canary_prompts, self.canary_prompts >= 0, "0 (none) or more")
        _check("port", self.port, 0 <= self.port < 65536, "0 (any free one) to 65535")
        for region, urls in self.engines.items():
            good = bool(region) and "/" not in region and all(map(is_address, urls))
            _check(f"engines.{region}", urls, good, "a list of http:// or https:// addresses, under a name without /")
        if self.kind is FleetKind.node and (self.max_version_lag or self.engines):
            given = "fleet.engines" if self.engines else f"fleet.max_version_lag={self.max_version_lag}"
            raise ConfigError(
                f"{given} is for engines that run beside the trainer: set fleet=regions, or leave it out. On one node "
                "the engine samples while the trainer waits"
            )


def is_address(url: str) -> bool:
    """Whether somebody could listen there over HTTP."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket or a port that is none
        return False


def _check(key: str, given: object, good: bool, allowed: str) -> None:
    if not good:
        raise ConfigError(f"fleet.{key} is {given!r}; it must be {allowed}")
