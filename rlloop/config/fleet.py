"""The `fleet` group of the configuration: where the engines are. Imports neither torch, ray nor vllm."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from rlloop.config.limits import (
    SECONDS,
    ZERO_OR_MORE_SECONDS,
    Limit,
    at_least,
    check_limits,
    limited,
    or_null,
    require,
    zero_or_more,
)
from rlloop.errors import ConfigError


class FleetKind(StrEnum):
    node = "node"
    regions = "regions"


@dataclass
class FleetConfig:
    """fleet=node: engines on this machine, as `launch` says. fleet=regions: `rlloop serve engine`, anywhere, over HTTP.

    The token that all of them share is in `token_file`, or in the environment variable RLLOOP_TOKEN.
    """

    kind: FleetKind = FleetKind.node  # chosen as fleet=node or fleet=regions
    max_version_lag: int = limited(0, zero_or_more("on-policy"))  # steps that a trained sample's weights may be old
    engines: dict[str, list[str]] = field(default_factory=dict)  # region -> URLs. Engines may also join by themselves
    host: str = "127.0.0.1"  # where the trainer serves its weights and lets engines join
    port: int = limited(0, Limit(lambda x: 0 <= x < 65536, "0 (any free one) to 65535"))
    token_file: str | None = None  # what every request must bring; null: $RLLOOP_TOKEN
    certificate: str | None = None  # PEM: the trainer's end speaks TLS
    key: str | None = None  # PEM: of that certificate
    ca_file: str | None = None  # PEM: whose certificates engines must have; null: the system's authorities
    store: str | None = None  # of the versions: a folder or an fsspec URL; null: weights/ in the run's folder
    signing_key: str | None = None  # Ed25519; null: signing_key in the run's folder, created when missing
    anchor_every: int = limited(50, at_least(1))  # versions between whole copies, which engines that join begin from
    canary_prompts: int = limited(2, zero_or_more("none"))  # completions an engine must make right to serve a version
    heartbeat: float = limited(1.0, SECONDS)  # between looks at an engine
    timeout: float = limited(3.0, SECONDS)  # of one look, which is tried three times before an engine counts as lost
    patience: float = limited(120.0, SECONDS)  # without any engine, after which the run stops
    settle: float = limited(10.0, ZERO_OR_MORE_SECONDS)  # that a new version waits for the slower engines
    calls: int = limited(2, at_least(1))  # at a time to one engine
    chunk: int = limited(128, at_least(1))  # prompts of one call, at most
    hedge: float | None = limited(None, or_null(SECONDS, "off"))  # age of a call when another engine is asked as well

    def __post_init__(self) -> None:
        check_limits("fleet", self)
        for region, urls in self.engines.items():
            good = bool(region) and "/" not in region and all(map(is_address, urls))
            allowed = "a list of http:// or https:// addresses, under a name without /"
            require(f"fleet.engines.{region}", urls, good, allowed)
        if self.kind is FleetKind.node and (self.max_version_lag or self.engines):
            key = "fleet.engines" if self.engines else f"fleet.max_version_lag={self.max_version_lag}"
            raise ConfigError(
                f"{key} is for engines that run beside the trainer: set fleet=regions, or leave it out. On one node "
                "the engine samples while the trainer waits"
            )


def is_address(url: str) -> bool:
    """True for an http or https URL with a host and a usable port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket or a port that is none
        return False
