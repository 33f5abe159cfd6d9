"""Ray: importing it, starting or joining a cluster, and handles of its actors. No other module imports Ray."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlloop.errors import ConfigError
from rlloop.launch.ray_pool import EngineDied


def import_ray(address: str | None) -> Any:
    if address is None and "ray" not in sys.modules:
        # A Ray of our own asks for a token, and listens on loopback alone, since its metrics endpoint asks for none:
        # where clusters are disabled Ray binds no other address, on any system. It reads these while it is imported.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util
    except ImportError:
        raise ConfigError("launch=ray needs Ray: pip install 'rlloop[ray]', or use launch=local") from None
    return ray


@contextmanager
def ray_session(ray: Any, address: str | None, cpus: float) -> Iterator[None]:
    """A Ray of our own, shut down at the end; or the cluster at `address`, which runs on."""
    if ray.is_initialized():  # a caller's: it is theirs to shut down
        yield
        return
    try:
        _require_listener(address or "")
        ray.init(
            address=address or "local",  # never one that somebody else happens to have started here
            num_cpus=None if address else max(int(cpus), os.cpu_count() or 1),
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at ray.address={address}: {error}. One that asks for a token needs "
            "RAY_AUTH_MODE=token and its RAY_AUTH_TOKEN in the environment"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raises `ConnectionError` where nobody listens at HOST:PORT: Ray itself would go on trying for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            raise ConnectionError(error) from None


class RayHandle:
    """A worker in a Ray actor: the `Handle` of `rlloop.launch.ray_pool`."""

    def __init__(self, ray: Any, name: str, start: Callable[[], Any]) -> None:
        self.name = name
        self._ray, self._start, self._actor = ray, start, start()

    def reference(self, method: str, *args: Any) -> Any:
        """Starts the call; the result stays in the node's shared memory, to be passed on by reference."""
        return getattr(self._actor, method).remote(*args)

    def call(self, method: str, *args: Any) -> Callable[[], Any]:
        reference = self.reference(method, *args)

        def wait() -> Any:
            try:
                return self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as error:  # the worker's own error, as if raised here
                raise error.cause from None
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.ObjectLostError) as error:
                lines = str(error).strip().splitlines()
                if getattr(error, "actor_init_failed", False):  # only the text of what it raised is left, at the end
                    raise EngineDied(f"{self.name} could not start: {lines[-1].strip()}") from error
                raise EngineDied(lines[0]) from None

        return wait

    def revive(self) -> None:
        self.kill()
        self._actor = self._start()

    def kill(self) -> None:
        self._ray.kill(self._actor)
