"""Prompts of random tokens for a model with random weights, which is made once and cached."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.cache import made_once
from rlloop.errors import ConfigError
from rlloop.parity.certificate import content_digest
from rlloop.types import Example


def even_tokens(prompt: str, completion: str, example: Example) -> float:
    """The share of even ids among the completion's tokens, the one that ends it included."""
    ids = [int(word) for word in completion.split()]
    return sum(1 - token % 2 for token in ids) / max(1, len(ids))


class RandomModel:
    """Prompts by seed and step. The text of tokens is their ids."""

    def __init__(
        self,
        seed: int,
        model_path: str | None = None,
        *,
        config: Mapping[str, Any],
        dtype: str = "bfloat16",
        prompt_tokens: int = 128,
    ) -> None:
        """`config`: the content of a config.json; `dtype`: of the stored weights; `prompt_tokens`: of each prompt."""
        self._config, self._dtype, self._length = dict(config), dtype, prompt_tokens
        self._seed, self._given = seed, None if model_path is None else Path(model_path)
        positions = self._config.get("max_position_embeddings", prompt_tokens + 1)
        if not 1 <= prompt_tokens < positions:
            raise ConfigError(
                f"task.prompt_tokens is {prompt_tokens}; it must be from 1 to below the model's positions ({positions})"
            )

    def model_folder(self) -> Path:
        if self._given is not None:
            return self._given
        digest = content_digest({"config": self._config, "dtype": self._dtype})
        return made_once(f"random-{digest[:16]}", self._make)

    def _make(self, folder: Path) -> None:
        from rlloop.models import new_model, save_model  # imports torch

        save_model(new_model(self._config, 0, dtype=self._dtype), folder)

    def model_config(self) -> Mapping[str, Any]:
        return self._config

    def train_examples(self, step: int, count: int) -> list[Example]:
        return self._examples((self._seed, step), f"{step}", count)

    def eval_examples(self, count: int) -> list[Example]:
        return self._examples((self._seed, 0), "eval", count)

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))

    def _examples(self, seed: tuple[int, int], name: str, count: int) -> list[Example]:
        ids = np.random.default_rng(seed).integers(0, self._config["vocab_size"], (count, self._length)).tolist()
        return [Example(f"{name}/{index}", prompt, self.decode(prompt), {}) for index, prompt in enumerate(ids)]
