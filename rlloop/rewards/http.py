"""A reward served over HTTP: a judge model, a grader, anything that answers JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import httpx
import tenacity

from rlloop.errors import ConfigError
from rlloop.rewards.event_loop import OnThisLoop
from rlloop.types import Example, RewardResult
from rlloop.web.clients import BASIC, async_client, authorization, refuse_login

RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
MAX_ANSWER = 1 << 20  # bytes


def worth_another_try(error: BaseException) -> bool:
    """True for transport errors and statuses that may be gone at the next try."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in RETRIED_STATUS
    return isinstance(error, httpx.TransportError)


def check_address(url: str) -> None:
    """Raises `ConfigError` unless the address begins with http:// or https:// and has no login."""
    refuse_login("reward.url", url, f"set token_env: LOGIN beside url, and {BASIC}")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"reward.url is {url!r}; it must begin with http:// or https://")
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"reward.url is {url!r}, which is no address: {error}") from None


async def post(client: httpx.AsyncClient, url: str, **content: Any) -> httpx.Response:
    """`client.post`, whose transport errors name the server."""
    try:
        return await client.post(url, **content)
    except httpx.TransportError as error:
        raise type(error)(f"{url}: {error}" if str(error) else url) from None


class HttpReward:
    """POSTs `{"prompt", "completion", "example": {"id", "data"}}` and expects `{"reward": number, "solved": bool,
    "components": {name: number}}`, the last two optional.

    Every try of a sample has the same `Idempotency-Key` (SHA-256 of the body), so a server may answer from memory.
    Transport errors and statuses 408, 425, 429 and 5xx are retried with randomised exponential backoff; if all tries
    fail, the sample fails. `token_env` names an environment variable whose value is sent as a bearer token, or as it
    stands where it begins with `Basic `; it is never written to a configuration or a record. Raises ConfigError.
    """

    reproducible = False  # `rlloop verify` does not call it again

    def __init__(
        self, url: str, *, timeout: float = 30.0, retries: int = 3, backoff: float = 0.2, token_env: str | None = None
    ) -> None:
        check_address(url)
        if retries < 0:
            raise ConfigError(f"reward.retries is {retries}; it must be 0 or more")
        headers = authorization("reward.token_env", token_env)
        self.url, self.timeout, self.retries, self.backoff = url, timeout, retries, backoff
        self._client = OnThisLoop(
            lambda: async_client(most=MAX_ANSWER, timeout=timeout, headers=headers, trust_env=True)
        )

    async def __call__(self, prompt: str, completion: str, example: Example) -> RewardResult:
        payload = {"prompt": prompt, "completion": completion, "example": {"id": example.id, "data": example.data}}
        body = json.dumps(payload, sort_keys=True).encode()
        headers = {"content-type": "application/json", "idempotency-key": hashlib.sha256(body).hexdigest()}
        tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(worth_another_try),
            stop=tenacity.stop_after_attempt(self.retries + 1),
            wait=tenacity.wait_random_exponential(multiplier=self.backoff, max=10.0),
            reraise=True,
        )
        answer = await tries(self._post, self._client.get(), body, headers)
        if not isinstance(answer, dict) or not isinstance(answer.get("reward"), int | float):
            raise ValueError(f"{self.url} answered {answer!r}; expected a JSON object with a number under 'reward'")
        reward = float(answer["reward"])
        return RewardResult(reward, bool(answer.get("solved", reward >= 1.0)), answer.get("components") or {})

    async def _post(self, client: httpx.AsyncClient, body: bytes, headers: dict[str, str]) -> Any:
        response = await post(client, self.url, content=body, headers=headers)
        return response.raise_for_status().json()

    async def close(self) -> None:
        client = self._client.pop()
        if client is not None:
            await client.aclose()
