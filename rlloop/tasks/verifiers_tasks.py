"""Environments of the library `verifiers` (v1), unchanged: `task=verifiers task.name=TASKSET`.

The library runs its own loop: a taskset's tasks, a harness's program, tools, rewards. Its training client renders the
first prompt and the text between turns; the policy's tokens keep the ids that the engine sampled. A trace becomes one
sample: the policy's tokens are compared and trained, all others are masked. It must be a chain: each turn's prompt
begins with all tokens of the turn before. Other traces (of a harness that rewrites its history) are rejected, with the
position.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.chat import ChatTokenizer
from rlloop.config.instantiate import needs
from rlloop.errors import ConfigError
from rlloop.loop.conversations import Played, fault
from rlloop.loop.joining import joined, recorded
from rlloop.parity.asked import Vocabulary
from rlloop.protocols import Engine
from rlloop.tasks.episodes import Episodes, EpisodeServer
from rlloop.tasks.epochs import in_epochs
from rlloop.types import Completion, Example, SamplingParams

KEY = "RLLOOP_EPISODES_KEY"  # the environment variable from which verifiers' client reads the address's key
MODEL = "rlloop"
TurnsOf = Callable[[str], Sequence[Completion]]
INFINITE = 1 << 16  # tasks of an endless taskset that make an epoch


class Verifiers:
    """A taskset's tasks as examples; the first `held_out` are for evaluation, the others in an order of the seed."""

    carries = True  # its episodes may continue in later steps

    def __init__(
        self,
        seed: int,
        model_path: str | None,
        *,
        name: str,
        max_tokens: int,
        max_sequence_tokens: int,
        held_out: int = 64,
        solved_at: float = 1.0,
        taskset: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        harness: str = "null",
        renderer: Mapping[str, Any] | None = None,
    ) -> None:
        """`name`: the taskset's id, a package or module that verifiers can import. `taskset`: its other settings.
        `environment`: verifiers' `env` settings, such as {agent: {max_turns: 4}}; agents run the `harness` in the
        subprocess runtime where these do not say otherwise. `renderer`: verifiers' renderer settings, such as
        {name: qwen3}; by default what fits the model's chat template. `solved_at`: the reward that counts as solved.

        Raises `ConfigError` for a missing taskset, and for one that needs a container.
        """
        needs("verifiers", "task=verifiers")
        from pydantic import ValidationError
        from verifiers.v1.utils.loaders import load_environment

        from rlloop.models.config import read_config  # imports torch

        if model_path is None:
            raise ConfigError("model.path must be given: task=verifiers brings no model")
        if held_out < 1:
            raise ConfigError(f"task.held_out is {held_out}; it must be at least 1")
        self.seed, self.path, self.name, self.solved_at = seed, Path(model_path), name, solved_at
        self.max_tokens, self._renderer = max_tokens, dict(renderer) if renderer else None
        config = read_config(self.path)
        self.longest = min(config.max_positions, max_sequence_tokens)
        self.chat = ChatTokenizer(self.path, eos_token_ids=config.eos_token_ids)
        try:
            self.env: Any = load_environment(_env_config(name, taskset, environment, harness))
        except (ValidationError, ImportError, AttributeError, TypeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"task.name={name}: verifiers cannot load it: {text:.600}") from error
        _refuse_containers(self.env)
        tasks = list(islice(self.env.taskset, held_out + INFINITE))
        if len(tasks) < 2:
            raise ConfigError(f"task.name={name} has {len(tasks)} tasks; it takes two: to train on and to evaluate")
        split = min(held_out, len(tasks) // 2)
        self._tasks, self._held_out, self._training = tasks, range(split), range(split, len(tasks))

    def model_folder(self) -> Path:
        return self.path

    def train_examples(self, step: int, count: int) -> list[Example]:
        indices = in_epochs(self.seed, len(self._training), step, count)
        return [self._example(self._training[index]) for index in indices]

    def eval_examples(self, count: int) -> list[Example]:
        return [self._example(self._held_out[index % len(self._held_out)]) for index in range(count)]

    def decode(self, token_ids: list[int]) -> str:
        return self.chat.decode(token_ids)

    def player(self, vocabulary: Vocabulary, *, timeout: float, concurrency: int) -> VerifiersPlayer:
        return VerifiersPlayer(self, vocabulary, timeout=timeout, concurrency=concurrency)

    def task(self, example: Example) -> Any:
        return self._tasks[example.data["task"]]

    def client(self, url: str) -> Any:
        """verifiers' training client, for this run's engine at `url`."""
        from verifiers.v1 import TrainClientConfig

        settings = {"base_url": f"{url}/v1", "api_key_var": KEY, "renderer_model_name": str(self.path)}
        return TrainClientConfig.model_validate(
            {**settings, **({"renderer": self._renderer} if self._renderer else {})}
        )

    def _example(self, index: int) -> Example:
        data = self._tasks[index].data
        prompt = data.prompt if isinstance(data.prompt, str) else "\n".join(_text(each) for each in data.prompt or [])
        return Example(id=f"{self.name}/{data.name or index}", prompt_ids=[], prompt=prompt, data={"task": index})


class VerifiersPlayer:
    """Runs verifiers' episodes, and makes samples of their traces."""

    def __init__(self, task: Verifiers, vocabulary: Vocabulary, *, timeout: float, concurrency: int) -> None:
        """`timeout`: seconds of an episode. `concurrency`: episodes at a time."""
        self.task, self.vocabulary, self.timeout, self.concurrency = task, vocabulary, timeout, concurrency
        self._server: EpisodeServer | None = None
        self._serving: Any = None
        self._batch: Episodes[Any] | None = None  # those of `play`

    def play(self, engine: Engine, examples: Sequence[Example], sampling: Sequence[SamplingParams]) -> list[Played]:
        server = self._started()
        self._batch = self._batch or server.episodes()
        under_way = VerifiersUnderWay(self, self._batch)
        played = [under_way.begin(*each) for each in zip(examples, sampling, strict=True)]
        under_way.advance(engine)
        return [each.played(self.task.decode) for each in played]

    def under_way(self, slice_tokens: int) -> VerifiersUnderWay:
        return VerifiersUnderWay(self, self._started().episodes(slice_tokens))

    def close(self) -> None:
        if self._server is not None:
            self._server.run(self._serving.__aexit__(None, None, None))
            self._server.close()
            self._server = self._batch = None

    def _started(self) -> EpisodeServer:
        if self._server is None:
            self._server = EpisodeServer(MODEL, self.task.longest, self.vocabulary.eos_token_ids)
            os.environ[KEY] = self._server.key
            self._serving = self.task.env.serving()
            self._server.run(self._serving.__aenter__())
        return self._server

    def sample(self, example: Example, params: SamplingParams, played: Any, turns_of: TurnsOf) -> Played:
        """`turns_of`: the engine's turns of a trace."""
        if isinstance(played, BaseException):
            why = "timeout" if isinstance(played, TimeoutError) else type(played).__name__
            return self.broken(example, params, f"verifiers: its episode failed: {why} {played}"[:400])
        traces = [trace for trace in played.traces if trace.agent.trainable]
        if len(traces) != 1:
            why = f"verifiers: its episode has {len(traces)} trainable traces, and a sample is one"
            why += f" ({_failure(played, *traces)})" if not played.ok else ""
            return self.broken(example, params, why[:400])
        [trace] = traces
        turns = turns_of(trace.id)
        if not turns:
            errors = [*trace.errors, *played.errors]
            why = f"{errors[0].type}: {errors[0].message}" if errors else "the harness asked for no turn"
            return self.broken(example, params, f"verifiers: {why}"[:400])
        broken = None if played.ok else _failure(played, trace)
        broken = broken or not_a_chain(turns) or _other_tokens(trace, turns)
        if broken is not None:
            return self.broken(example, params, f"verifiers: trace {trace.id}: {broken}", turns[0])
        first = turns[0]
        wrong = next((problem for turn in turns if (problem := self._fault(turn, params))), None)
        completion = joined(turns, turns[-1].finish_reason)
        components = {name: float(value.value) for name, value in trace.rewards.items() if value is not None}
        components |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
        reward = float(trace.reward)
        verdict = {"reward": reward, "solved": reward >= self.task.solved_at, "components": components}
        episode = {**verdict, "turns": len(turns), "conversation": recorded(completion, self.task.decode)}
        data = {**example.data, "episode": episode, "trace": trace.id}
        example = Example(example.id, first.prompt_ids, example.prompt, data)
        return Played(example, completion, self.task.decode(completion.token_ids), fault=wrong)

    def _fault(self, turn: Completion, params: SamplingParams) -> str | None:
        """verifiers adds stop tokens of its renderer and may ask for fewer tokens; nothing else may differ."""
        for name in ("temperature", "top_p", "top_k", "min_p", "min_tokens", "seed"):
            if (used := getattr(turn.sampling, name)) != getattr(params, name):
                return f"its environment asked for {name}={used!r}, and the run has {name}={getattr(params, name)!r}"
        return fault(turn, turn.prompt_ids, turn.sampling, self.vocabulary)

    def broken(self, example: Example, params: SamplingParams, why: str, turn: Completion | None = None) -> Played:
        """A sample that is rejected; its row shows the first turn, where there is one."""
        nothing = np.zeros(0, np.float32)
        completion = turn or Completion([], [], nothing, nothing, 0, "abort", params)
        return Played(example, completion, self.task.decode(completion.token_ids), broken=why)


class VerifiersUnderWay:
    """Episodes under way: a `rlloop.loop.conversations.Carriage`."""

    version: int | None = None

    def __init__(self, player: VerifiersPlayer, episodes: Episodes[Any]) -> None:
        self.player, self.episodes = player, episodes
        self._room, self._client = asyncio.Semaphore(player.concurrency), player.task.client(episodes.url)

    def begin(self, example: Example, sampling: SamplingParams) -> VerifiersEpisode:
        return VerifiersEpisode(self, example, sampling)

    def advance(self, engine: Engine, enough: Callable[[], bool] = lambda: False) -> None:
        self.episodes.advance(engine, enough)

    def close(self) -> None:
        self.episodes.cancel()

    async def play(self, slot: Any, params: SamplingParams) -> Any:
        from verifiers.v1 import ModelContext, Sampling

        context = ModelContext(client=self._client, model=MODEL, sampling=Sampling.model_validate(_asked(params)))
        async with self._room, self.episodes.limit(self.player.timeout):
            return await self.player.task.env.run_slot(slot, context)


class VerifiersEpisode:
    """One episode: a `rlloop.loop.conversations.Carried`."""

    def __init__(self, under_way: VerifiersUnderWay, example: Example, sampling: SamplingParams) -> None:
        from verifiers.v1.env import RunSlot

        self.example, self.sampling, self.version = example, sampling, under_way.version
        self.broken: str | None = None
        self._under_way, self._player, self._episodes = under_way, under_way.player, under_way.episodes
        self._slot = RunSlot(self._player.task.task(example))
        self._running = self._episodes.begin(under_way.play(self._slot, sampling))

    @property
    def ended(self) -> bool:
        return self._running.done()

    @property
    def made(self) -> list[int]:
        return [version for trace in [*self._slot.traces] for version in self._episodes.versions(trace.id)]

    def drop(self, why: str) -> None:
        self.broken = self.broken or why
        self._running.cancel()

    def played(self, decode: Callable[[list[int]], str]) -> Played:
        if self.broken is not None:
            played = self._player.broken(self.example, self.sampling, self.broken)
        else:
            outcome = self._running.exception() or self._running.result()
            played = self._player.sample(self.example, self.sampling, outcome, self._episodes.turns)
        for trace in self._slot.traces:
            self._episodes.forget(trace.id)
        if self.version is None:
            return played
        if not played.completion.token_ids:  # of no weights
            return dataclasses.replace(
                played, completion=dataclasses.replace(played.completion, policy_version=self.version)
            )
        first, last = self.version, self._under_way.version or 0
        wrong = [
            each
            for each in played.completion.versions or [played.completion.policy_version]
            if not first <= each <= last
        ]
        why = f"its weights are of versions {wrong}, and it was asked for of versions {first} to {last}"
        return dataclasses.replace(played, fault=played.fault or why) if wrong else played


def not_a_chain(turns: Sequence[Completion]) -> str | None:
    """The first turn whose prompt does not begin with all tokens of the turn before, described; None: no such turn."""
    for number, (before, turn) in enumerate(pairwise(turns), 2):
        ids = [*before.prompt_ids, *before.token_ids]
        if turn.prompt_ids[: len(ids)] == ids and len(turn.prompt_ids) > len(ids):
            continue
        at = next((at for at, (a, b) in enumerate(zip(ids, turn.prompt_ids, strict=False)) if a != b), None)
        where = f"token {at} is {turn.prompt_ids[at]} and was {ids[at]}" if at is not None else "it is not longer"
        return f"turn {number} does not go on from the tokens of turn {number - 1}: {where}; no chain of prefixes"
    return None


def _other_tokens(trace: Any, turns: Sequence[Completion]) -> str | None:
    """The trace's own tokens must be the engine's."""
    ids = [*turns[-1].prompt_ids, *turns[-1].token_ids]
    if len(trace.branches) != 1:
        return f"it has {len(trace.branches)} branches, and a sample is one chain of prefixes"
    return None if trace.branches[0].token_ids == ids else "its tokens are not those that the engine read and sampled"


def _failure(episode: Any, *traces: Any) -> str:
    errors = [error for each in (*traces, episode) for error in each.errors]
    return f"{errors[0].type}: {errors[0].message}"[:300] if errors else "it did not complete"


def _asked(params: SamplingParams) -> dict[str, Any]:
    return {
        "max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "top_k": params.top_k, "min_p": params.min_p, "min_tokens": params.min_tokens, "seed": params.seed,
    }  # fmt: skip


def _env_config(
    name: str, taskset: Mapping[str, Any] | None, environment: Mapping[str, Any] | None, harness: str
) -> Any:
    """verifiers' configuration, with `harness` and the subprocess runtime for agents that name none."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, resolve_env_config

    settings: dict[str, Any] = {**(environment or {}), "taskset": {**(taskset or {}), "id": name}}
    roles = agent_config_fields(resolve_env_config(settings))
    own = default_harness_id(name) == name  # the taskset brings its harness
    for role, agent in roles.items():
        role_settings = dict(settings.get(role) or {})
        if agent.harness is None and not own:
            role_settings["harness"] = {"id": harness}
        settings[role] = {"runtime": {"type": "subprocess"}, **role_settings}
    return resolve_env_config(settings)


def _refuse_containers(env: Any) -> None:
    for role, harness in env._harnesses.items():
        runtime = env._agent_specs[role].runtime.type
        if harness.NEEDS_CONTAINER and runtime == "subprocess":
            raise ConfigError(
                f"the harness {harness.config.id!r} of {role} needs a container; set "
                f"task.environment.{role}.runtime.type to docker or podman, or task.harness to null"
            )


def _text(message: Any) -> str:
    content = getattr(message, "content", "")
    return content if isinstance(content, str) else str(content)
