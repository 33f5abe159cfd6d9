"""Resuming: compares a configuration, key by key, with the one that the run began with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from rlloop.config.fleet import FleetConfig
from rlloop.config.run import AlgorithmConfig, RunConfig
from rlloop.errors import RunError

# Keys of places, durations and intervals that affect no weight or record: a resumed run may change them.
RESUMABLE = (
    "run.dir",
    "launch",
    "ray.",
    "trainer.layout.",
    "trainer.shard",
    "trainer.offload",
    "rollout.layout.",
    "rollout.sleep",
    "trainer.num_steps",
    "certificate.",
    "checkpoint.every",
    "checkpoint.keep",
    "eval.every",
    "profile",
    "scoring.",
    "sinks.",
    *(f"fleet.{name}" for name in ("engines.", *vars(FleetConfig())) if name != "max_version_lag"),
)
LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")  # user:password@ of an address
ADDRESSES = ("url", "sinks.alerts.webhook", "sinks.mlflow.uri", "certificate.witness", "fleet.store")  # had logins once
# Keys that affect the engine's work but not its bits, as long as parity is enforced.
RESUMABLE_UNDER_CONTRACT = tuple(
    f"rollout.{key}" for key in ("page_size", "max_batch_tokens", "max_cache_tokens", "prefix_caching")
)


def refuse_other_run(path: Path, recorded: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raises `RunError` where `config` would not continue the run in `path`, whose configuration is `recorded`.

    A key that did not exist yet when the run began has its default, which is what earlier versions did.
    """
    new = without_logins(flatten(config))
    old = without_logins(with_defaults(flatten(recorded), new))
    allowed = RESUMABLE + (RESUMABLE_UNDER_CONTRACT if new.get("parity.mode") == "require" else ())
    if new.get("trainer.schedule") != "constant":
        allowed = tuple(key for key in allowed if key != "trainer.num_steps")  # the schedule ends at the last step
    differ = [
        key
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and not key.endswith(".token_env")  # where a login or token is
        and not any(key == free.rstrip(".") or (free.endswith(".") and key.startswith(free)) for free in allowed)
    ]
    if differ:
        listed = "\n".join(f"  {key}: the run has {old.get(key)!r}, now it is {new.get(key)!r}" for key in differ)
        raise RunError(
            f"{path} holds a run with another configuration:\n{listed}\n"
            "Give the run's own values to resume it, or start a new run in another folder (run.dir)"
        )


def without_logins(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat configuration, whose addresses have lost what stands before an `@`."""
    return {
        key: LOGIN.sub("", value) if isinstance(value, str) and key.endswith(ADDRESSES) else value
        for key, value in config.items()
    }


def with_defaults(config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """A flat configuration, with the defaults of those of `keys` that it does not have."""
    defaults = _defaults()
    return {**{key: defaults[key] for key in keys if key in defaults}, **config}


def _defaults() -> dict[str, Any]:
    run, algorithm = (
        cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(kind), enum_to_str=True))
        for kind in (RunConfig, AlgorithmConfig)
    )
    return flatten(run | {"algorithm": algorithm})


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
