"""Samples of a step's prompts, and of held-out ones."""

from __future__ import annotations

import dataclasses

from rlloop.config.run import RunConfig
from rlloop.loop.conversations import Carriage, CarryingPlayer, Played, player_for
from rlloop.loop.step_data import completion_seed, new_sample, training_sampling
from rlloop.parity.asked import Vocabulary
from rlloop.protocols import Engine, Task
from rlloop.types import Sample, SamplingParams, changed


class Sampler:
    """Gets prompts from the task and completions from the engine; the samples have no rewards yet."""

    def __init__(
        self, config: RunConfig, task: Task, engine: Engine, vocabulary: Vocabulary, *, engine_lag: int = 0
    ) -> None:
        """`engine_lag`: versions by which the engine's weights may be older than those asked for."""
        self.config, self.task, self.engine, self.engine_lag = config, task, engine, engine_lag
        self.batches = 0  # of prompts, taken from the task: one a step, or more under dynamic sampling
        scoring = config.scoring
        self._player = player_for(
            task, vocabulary, timeout=scoring.timeout, concurrency=scoring.concurrency, retries=scoring.retries
        )

    def batch(self, step: int, version: int, first: int = 0) -> list[Sample]:
        """The task's next `num_prompts` prompts, numbered from `first`, with `group_size` completions each.

        A sample whose completion does not match its request, including the `version` of the weights, has a `fault`.
        """
        rollout = self.config.rollout
        self.batches += 1
        examples = self.task.train_examples(self.batches, rollout.num_prompts)
        assert len(examples) == rollout.num_prompts, f"the task gave {len(examples)} of {rollout.num_prompts} prompts"
        coordinates = [(first + p, g) for p in range(rollout.num_prompts) for g in range(rollout.group_size)]
        played = self._player.play(
            self.engine,
            [examples[p - first] for p, _ in coordinates],
            [training_sampling(self.config, step, p, g) for p, g in coordinates],
        )
        return [
            self._sample(f"{step}/{p}/{g}", each, p, version) for (p, g), each in zip(coordinates, played, strict=True)
        ]

    def held_out(self, engine: Engine, version: int) -> list[Sample]:
        """`eval.num_draws` completions of held-out prompts, by `engine`: the same prompts and seeds at every call.
        Faults as for `batch`."""
        config = self.config
        examples = self.task.eval_examples(config.eval.num_draws)
        settings = SamplingParams(
            max_tokens=config.rollout.max_tokens,
            min_tokens=config.rollout.min_tokens,
            temperature=config.eval.temperature,
        )
        seeds = (completion_seed(config.seed, "eval", 0, index, 0) for index in range(len(examples)))
        sampling = [changed(settings, seed=seed) for seed in seeds]
        played = self._player.play(engine, examples, sampling)
        return [self._sample(f"eval/{index}", each, index, version) for index, each in enumerate(played)]

    def under_way(self, slice_tokens: int) -> Carriage:
        """Conversations that may go on from one step to another."""
        assert isinstance(self._player, CarryingPlayer), "rlloop.launch.prepare refuses other tasks"
        return self._player.under_way(slice_tokens)

    def _sample(self, uid: str, played: Played, group: int, version: int) -> Sample:
        """A sample, with its fault: also that its weights are not those of `version`."""
        if played.broken and not played.completion.token_ids:  # ended before its first token: of no weights
            completion = dataclasses.replace(played.completion, policy_version=version)
            played = dataclasses.replace(played, completion=completion)
        sampled, fault = played.completion.policy_version, played.fault
        if not max(0, version - self.engine_lag) <= sampled <= version:
            fault = f"its weights are of version {sampled}, and it was asked for of version {version}"
        return changed(new_sample(uid, played, group), fault=fault)

    def close(self) -> None:
        self._player.close()
