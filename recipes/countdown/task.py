"""The countdown task: prompts by seed, held-out problems, and the model to start from. Imports no torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tokenizers import Tokenizer

from rlloop.errors import ConfigError
from rlloop.types import Example

from .data import Problem, held_out_problems, prompt_text, shuffled, training_problems
from .tokenizer import EOS, UNKNOWN, make_tokenizer

Section = TypeVar("Section")


@dataclass
class ModelShape:
    """The recipe's own model: a small Qwen3 with tied embeddings, or with experts a Qwen3-MoE."""

    hidden_size: int = 64
    intermediate_size: int = 128  # of the whole layer, or of one expert
    num_layers: int = 3
    num_heads: int = 4
    num_experts: int = 0  # of each layer; 0: one MLP for all tokens
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"task.model.experts_per_token is {self.experts_per_token}; it must be from 1 to "
                f"task.model.num_experts ({self.num_experts})"
            )


@dataclass
class Supervision:
    """Supervised learning on demonstrations: the warm start, and the supervised-only arm that goes on from there."""

    demonstrations: int = 4000
    seed: int = 0  # of the demonstrations, the initial weights and the order; the run's seed does not enter
    batch_size: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.0
    eval_every: int = 100  # steps
    eval_draws: int = 1000  # held-out completions at temperature 1
    stop_at: float = 0.16  # the warm start ends at the first evaluation whose pass@1 reaches this
    max_steps: int = 2000  # of the warm start, whatever it reached
    supervised_steps: int = 2500  # of the supervised-only arm, the warm start's included
    device: str = "cpu"
    dtype: str = "float32"  # compute type; master weights are float32

    def __post_init__(self) -> None:
        for name in ("demonstrations", "batch_size", "eval_every", "eval_draws", "max_steps", "supervised_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"task.warm_start.{name} is {getattr(self, name)}; it must be at least 1")
        if self.batch_size > self.demonstrations:
            raise ConfigError(
                f"task.warm_start.batch_size is {self.batch_size}; it must be at most task.warm_start.demonstrations "
                f"({self.demonstrations})"
            )


class Countdown:
    """Three numbers and a target. Without a `model_path` the model is the recipe's own, warm-started and cached.

    A prompt is `7 3 5 -> 22`; the warm-started model answers with a worked trace, `7 + 3 = 10 , 10 ...`. A model of the
    user's is prompted through its own tokenizer, or through the recipe's where its folder has none.
    """

    def __init__(
        self,
        seed: int,
        model_path: str | None = None,
        *,
        largest_number: int = 12,
        largest_target: int = 99,
        model: Mapping[str, Any] | None = None,
        warm_start: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("largest_number", largest_number), ("largest_target", largest_target)):
            if not 4 <= value <= 999:
                raise ConfigError(f"task.{name} is {value}; it must be from 4 to 999")
        self.seed = seed
        self.model_path = Path(model_path) if model_path is not None else None
        self.largest_number, self.largest_target = largest_number, largest_target
        self.model = _section(ModelShape, model, "task.model")
        self.warm_start = _section(Supervision, warm_start, "task.warm_start")

    def model_folder(self) -> Path:
        if self.model_path is not None:
            return self.model_path
        from .warmstart import warm_start_folder  # imports torch

        return warm_start_folder(self)

    def model_config(self) -> Mapping[str, Any]:
        from .warmstart import model_config  # imports torch

        return model_config(self)

    def train_examples(self, step: int, count: int) -> list[Example]:
        """`count` training problems, different ones where there are so many: a function of (seed, step)."""
        problems = self._training
        rng = np.random.default_rng((self.seed, step))
        chosen = rng.choice(len(problems), count, replace=count > len(problems))
        return [self._example(problems[index], shuffled(problems[index].numbers, rng)) for index in chosen]

    def eval_examples(self, count: int) -> list[Example]:
        """The first `count` held-out problems in a fixed order, over and over; no seed enters."""
        return [self._held_out[index % len(self._held_out)] for index in range(count)]

    def decode(self, token_ids: list[int]) -> str:
        """The completion as the reward reads it. Only a closing end-of-sequence token is left out."""
        kept = token_ids[:-1] if token_ids and token_ids[-1] in self._eos else token_ids
        if self._is_own_tokenizer:  # a larger vocabulary's ids are no words of it; they must not vanish
            return " ".join(self.tokenizer.id_to_token(token) or UNKNOWN for token in kept)
        return self.tokenizer.decode(kept, skip_special_tokens=False)

    @functools.cached_property
    def _is_own_tokenizer(self) -> bool:
        return self.model_path is None or not (self.model_path / "tokenizer.json").is_file()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        if self.model_path is not None and not self._is_own_tokenizer:
            return Tokenizer.from_file(str(self.model_path / "tokenizer.json"))
        tokenizer = make_tokenizer(self.largest_number, self.largest_target)
        if self.model_path is not None:
            have = json.loads((self.model_path / "config.json").read_text()).get("vocab_size", 0)
            if have < tokenizer.get_vocab_size():
                raise ConfigError(
                    f"model.path {str(self.model_path)!r} has no tokenizer.json, and its vocabulary of {have} is too "
                    f"small for the recipe's own tokenizer ({tokenizer.get_vocab_size()}); save a tokenizer in it, or "
                    "make task.largest_number and task.largest_target smaller"
                )
        return tokenizer

    @functools.cached_property
    def _eos(self) -> frozenset[int]:
        if self.model_path is not None:
            from rlloop.models.config import read_config  # imports torch

            return frozenset(read_config(self.model_path).eos_token_ids)
        return frozenset(self.tokenizer.encode(EOS).ids)

    @functools.cached_property
    def _training(self) -> list[Problem]:
        return training_problems(self.largest_number, self.largest_target)

    @functools.cached_property
    def _held_out(self) -> list[Example]:
        return [
            self._example(problem, shuffled(problem.numbers, np.random.default_rng(problem.digest)))
            for problem in held_out_problems(self.largest_number, self.largest_target)
        ]

    def _example(self, problem: Problem, numbers: list[int]) -> Example:
        prompt = prompt_text(numbers, problem.target)
        return Example(
            id=problem.id,
            prompt_ids=self.tokenizer.encode(prompt, add_special_tokens=False).ids,
            prompt=prompt,
            data={"numbers": numbers, "target": problem.target},
        )


def _section(kind: type[Section], values: Mapping[str, Any] | None, key: str) -> Section:
    """`values` of the configuration's `key` over the defaults of `kind`, with names and types checked."""
    try:
        section = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), dict(values or {})))
    except OmegaConfBaseException as error:
        names = ", ".join(kind.__dataclass_fields__)  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(f"{key}: {str(error).splitlines()[0]}; its keys are {names}") from None
    assert isinstance(section, kind)
    return section
