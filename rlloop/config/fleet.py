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
    max_version_lag: int = limited(
        0, zero_or_more("on-policy")
    )  # oldest version of a trained sample's weights, in steps
    engines: dict[str, list[str]] = field(default_factory=dict)  # region -> URLs; engines may also join by themselves
    host: str = "127.0.0.1"  # address on which the trainer serves its weights and engines join
    port: int = limited(0, Limit(lambda x: 0 <= x < 65536, "0 (any free one) to 65535"))  # port of that address
    token_file: str | None = None  # file with the token that every request must have; null: $RLLOOP_TOKEN
    certificate: str | None = None  # PEM; the trainer's server speaks TLS
    key: str | None = None  # PEM: the certificate's private key
    ca_file: str | None = None  # PEM: authorities that engines' certificates must come from; null: the system's
    store: str | None = None  # store of the versions: a folder or an fsspec URL; null: weights/ in the run's folder
    signing_key: str | None = None  # Ed25519, in PEM; null: signing_key in the run's folder, created if missing
    anchor_every: int = limited(50, at_least(1))  # versions between whole copies, from which joining engines start
    canary_prompts: int = limited(
        2, zero_or_more("none")
    )  # completions that an engine must reproduce to serve a version
    heartbeat: float = limited(1.0, SECONDS)  # seconds between health checks of an engine
    timeout: float = limited(3.0, SECONDS)  # limit of one check; after three failed ones an engine counts as lost
    patience: float = limited(120.0, SECONDS)  # seconds without any engine after which the run stops
    settle: float = limited(10.0, ZERO_OR_MORE_SECONDS)  # seconds that a new version waits for slower engines
    calls: int = limited(2, at_least(1))  # concurrent calls to one engine
    chunk: int = limited(128, at_least(1))  # limit of prompts in one call
    hedge: float | None = limited(
        None, or_null(SECONDS, "off")
    )  # seconds after which an unanswered call is repeated on another engine

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
        components = urlsplit(url)
        return components.scheme in ("http", "https") and bool(components.hostname) and components.port != 0
    except ValueError:  # a bracket or a port that is none
        return False
