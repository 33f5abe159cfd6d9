"""Environments served by OpenEnv.

    task.environment={_target_: rlloop.tasks.openenv_tasks.openenv_environment, url: http://host:8000, action: code}

Each conversation is a separate session over a WebSocket, reset with a seed derived from the example's id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlloop.config.instantiate import needs
from rlloop.errors import ConfigError
from rlloop.loop.environments import Environment, Reply, seed_of
from rlloop.types import Example


def openenv_environment(
    example: Example,
    *,
    url: str,
    action: str = "message",
    observation: str | None = None,
    reset: Sequence[str] = (),
    connect_timeout: float = 30.0,
) -> Environment:
    """A session of the OpenEnv server at `url`, whose actions have the policy's text under `action`.

    `observation`: the field that is told to the policy; None: the whole observation as JSON, without what every
    observation has (done, reward, metadata). `reset`: fields of the row that the server's reset takes beside the seed.
    The first observation is not shown to the policy: rows must contain it, or the task must not need it.
    """
    needs("openenv", "openenv_environment")
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise ConfigError(f"task.environment.url is {url!r}; it must begin with http://, https://, ws:// or wss://")
    if missing := [name for name in reset if name not in example.data]:
        raise ConfigError(f"example {example.id!r} has no field {missing[0]!r}, which task.environment.reset names")
    seed = seed_of(example)
    return _Session(
        url, action, observation, {"seed": seed, **{name: example.data[name] for name in reset}}, connect_timeout
    )


class _Session:
    def __init__(
        self, url: str, action: str, observation: str | None, reset: Mapping[str, Any], connect_timeout: float
    ) -> None:
        self._url, self._action, self._observation, self._reset = url, action, observation, reset
        self._connect_timeout = connect_timeout
        self._client: Any = None

    async def step(self, message: str) -> Reply:
        if self._client is None:
            from openenv.core.generic_client import GenericEnvClient

            client = GenericEnvClient(base_url=self._url, connect_timeout_s=self._connect_timeout)
            await client.connect()
            self._client = client
            await client.reset(**self._reset)
        result = await self._client.step({self._action: message})
        reward = float(result.reward or 0.0)
        if result.done:
            return Reply(reward=reward, done=True, solved=reward >= 1.0)
        return Reply([{"role": "user", "content": self._told(result.observation)}], reward=reward)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _told(self, observed: Mapping[str, Any]) -> str:
        if self._observation is None:
            return json.dumps(
                {key: each for key, each in observed.items() if key not in ("done", "reward", "metadata")}
            )
        if self._observation not in observed:
            raise ConfigError(
                f"{self._url} observes {', '.join(observed)}, and task.environment.observation is {self._observation!r}"
            )
        return str(observed[self._observation])
