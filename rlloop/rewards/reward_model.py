"""A reward model of our own (`algorithm=reward_model`), served by `rlloop serve engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import tenacity

from rlloop.chat import ChatTokenizer
from rlloop.errors import ConfigError
from rlloop.rewards.event_loop import OnThisLoop
from rlloop.rewards.http import MAX_ANSWER, check_address, post, worth_another_try
from rlloop.types import Example, RewardResult
from rlloop.web.clients import async_client, authorization


class RewardModel:
    """The logprob of a verdict token after the completion, by the engine server at `url`.

    The tokens are those that the model was trained on (`--config-name offline/reward_model`): the example's prompt, the
    completion, the end of the turn, the verdict. The policy must have the reward model's tokenizer. Any engine server
    answers, since the reward is `/v1/completions` with `max_tokens` 0.

    An example with images is refused: the server would get their placeholders without the picture.

    Transport errors and statuses 408, 425, 429 and 5xx are tried again. Raises `ConfigError`.
    """

    reproducible = False  # `rlloop verify` does not start the server

    def __init__(
        self,
        url: str,
        model_path: str,
        *,
        model: str = "rlloop",
        verdict: str | None = None,
        solved_at: float | None = None,
        timeout: float = 60.0,
        retries: int = 3,
        token_env: str | None = None,
    ) -> None:
        """`url`: of the server, and `model` its --model-name. `model_path`: its folder, for the tokenizer.

        `verdict`: as `task.verdict` in training. `solved_at`: the reward that counts as solved; None: none does, for
        the reward has no natural zero.
        """
        from rlloop.models.config import read_config  # imports torch

        check_address(url)
        headers = authorization("reward.token_env", token_env)
        self.url, self._model, self._retries, self._solved_at = url.rstrip("/"), model, retries, solved_at
        eos = read_config(Path(model_path)).eos_token_ids
        if not eos:
            raise ConfigError(f"{model_path} has no end-of-sequence token, with which a judged completion ends")
        self.chat = ChatTokenizer(Path(model_path), eos_token_ids=eos)
        self._end = self.chat.closing(eos)
        self._verdict = eos[0] if verdict is None else self.chat.ids(verdict)[0]
        self._client = OnThisLoop(lambda: async_client(headers=headers, most=MAX_ANSWER, timeout=timeout))

    def check_example(self, example: Example) -> None:
        """Raises `ConfigError` for an example with images. A run asks before its first step."""
        if example.model_input is not None and example.model_input.contents:
            raise ConfigError(
                f"example {example.id!r} has images, and RewardModel sends token ids, which would be placeholders "
                "without their picture; use a reward in Python, which sees example.model_input.images"
            )

    async def __call__(self, prompt: str, completion: str, example: Example) -> RewardResult:
        self.check_example(example)
        ids = [*example.prompt_ids, *self.chat.ids(completion), self._end, self._verdict]
        tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(worth_another_try),
            stop=tenacity.stop_after_attempt(self._retries + 1),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=10.0),
            reraise=True,
        )
        answer = await tries(self._scored, self._client.get(), ids)
        reward = answer["choices"][0]["prompt_logprobs"][-1][str(self._verdict)]["logprob"]
        if reward is None:
            raise ValueError(f"{self.url}: the verdict token {self._verdict} is impossible after this completion")
        solved = self._solved_at is not None and reward >= self._solved_at
        return RewardResult(float(reward), solved)

    async def close(self) -> None:
        client = self._client.pop()
        if client is not None:
            await client.aclose()

    async def _scored(self, client: httpx.AsyncClient, ids: list[int]) -> Any:
        body = {"model": self._model, "prompt": ids, "max_tokens": 0, "prompt_logprobs": 0, "temperature": 1.0}
        response = await post(client, f"{self.url}/v1/completions", json=body)
        if response.status_code == httpx.codes.BAD_REQUEST:
            raise ConfigError(f"{self.url} refuses a completion of {len(ids)} tokens: {response.text:.300}")
        return response.raise_for_status().json()
