"""Partial rollouts: a step begins when enough groups of conversations are complete; the others continue in later steps.

Step k trains `num_prompts` complete groups, while `prompts` more are in progress. Before the update, engines finish
their current turns, or slices of `slice_tokens`, so each of these is of one version; tools keep running while the
trainer learns, and further turns are of version k. Engine and trainer are compared by token, each under its version.

The samples of a step depend on the tools' durations, so a run cannot be repeated bit for bit. A prompt's uid, seeds and
tokens under given weights still depend only on its batch and its index in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rlloop.config.run import RunConfig
from rlloop.loop.conversations import Carriage, Carried
from rlloop.loop.sampler import Sampler
from rlloop.loop.schedule import History, InStep, Pipelined, Schedule, decode_array, encode_array, ended
from rlloop.loop.step_data import new_sample, training_sampling
from rlloop.protocols import WeightSync
from rlloop.types import Recomputed, Sample

FILE = "partial.msgpack"


@dataclass(eq=False)
class _Group:
    batch: int  # of the task's prompts, from 1
    prompt: int  # in its batch
    talks: list[Carried] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # once it is whole

    @property
    def whole(self) -> bool:
        return all(talk.ended for talk in self.talks)

    @property
    def version(self) -> int:
        """The oldest version that sampled one of its tokens; before the first token, the version at its beginning."""
        versions = [sample.completion.policy_version for sample in self.samples]
        versions += [version for talk in self.talks for version in talk.made]
        return min(versions) if versions else min(talk.version or 0 for talk in self.talks)


class _State(msgspec.Struct):
    """The schedule in a checkpoint."""

    taken: int  # prompts of the task
    again: list[tuple[int, int]]  # batch and prompt of groups that were not whole
    whole: list[tuple[int, int, list[Sample]]]


def schedule_of(config: RunConfig, history: History | None) -> Schedule:
    """The schedule that `config` asks for. `history`: needed where samples may be of past versions."""
    if config.rollout.partial.prompts:
        assert history is not None
        return Partial(config, history)
    if config.fleet.max_version_lag:
        assert history is not None
        return Pipelined(config.fleet.max_version_lag, history, config.trainer.num_steps)
    return InStep()


def measured(measure: Callable[[], Mapping[str, float]], schedule: Schedule) -> dict[str, float]:
    """Metrics of the parts, and of the schedule if it has any."""
    return {**measure(), **(schedule.take_metrics() if isinstance(schedule, Partial) else {})}


class Partial:
    """The schedule of `rollout.partial`.

    Groups that would be more than `max_version_lag` versions behind in the next step are waited for, or then dropped
    with that reason (`overdue`). A checkpoint has the complete groups; the others restart from their first turns when
    the run is resumed, since environments cannot be saved.
    """

    def __init__(self, config: RunConfig, history: History) -> None:
        """`history` keeps the last `rollout.partial.max_version_lag` versions."""
        self.config, self.settings = config, config.rollout.partial
        self._history = history
        self._groups: list[_Group] = []  # in the order in which they began
        self._again: list[tuple[int, int]] = []  # to begin before new prompts
        self._taken = self._version = 0
        self._under_way: Carriage | None = None
        self._metrics: dict[str, float] = {}

    def publish(self, sync: WeightSync, version: int) -> Mapping[str, Any]:
        self._history.remember(version)
        self._version = version
        return ended(sync.publish(version))

    def samples(self, sampler: Sampler, step: int, version: int, first: int = 0) -> list[Sample]:
        assert first == 0, "the configuration refuses refills"
        if self._under_way is None:
            self._under_way = sampler.under_way(self.settings.slice_tokens)
        self._under_way.version = version
        count, lag, groups = self.config.rollout.num_prompts, self.settings.max_version_lag, self._groups
        dropped = [group for group in groups if version - group.version > lag]
        for group in dropped:
            groups.remove(group)
            why = f"its weights are {version - group.version} steps old, and rollout.partial.max_version_lag is {lag}"
            self._finish(group, sampler, why)
        left = (self.config.trainer.num_steps - step + 1) * count  # that are still to be trained
        self._begin(sampler, self._under_way, min(count + self.settings.prompts, left) - len(groups))

        def enough() -> bool:
            late = self.settings.overdue == "wait" and any(
                not group.whole and version - group.version >= lag for group in groups
            )
            return not late and sum(group.whole for group in groups) >= count

        self._under_way.advance(sampler.engine, enough)
        whole = [group for group in groups if group.whole]
        for group in whole:
            self._finish(group, sampler)
        chosen = sorted(whole, key=lambda group: group.version)[:count]
        self._groups = [group for group in groups if group not in chosen]
        self._metrics = {
            "rollout/groups_carried": len(self._groups),
            "rollout/groups_dropped": len(dropped),
            "rollout/version_lag_max": max(version - group.version for group in chosen),
        }
        ended = sorted(dropped + chosen, key=lambda group: (group.batch, group.prompt))
        return [dataclasses.replace(each, group=index) for index, group in enumerate(ended) for each in group.samples]

    def recompute(self, samples: Sequence[Sample]) -> tuple[int, Recomputed] | None:
        if all(sample.completion.policy_version == self._version for sample in samples):
            return None
        return self._version, self._history.recompute(samples)

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the last step."""
        return self._metrics

    def settle(self) -> None:
        """No turn is being sampled between steps; tools may run."""

    def save(self, folder: Path) -> None:
        self._history.save(folder)
        # Episodes may have ended since the cut: their samples are made at the next one.
        unfinished = [(group.batch, group.prompt) for group in self._groups if not group.samples]
        whole = [(group.batch, group.prompt, group.samples) for group in self._groups if group.samples]
        state = _State(self._taken, unfinished + self._again, whole)
        (folder / FILE).write_bytes(msgspec.msgpack.encode(state, enc_hook=encode_array))

    def restore(self, folder: Path) -> None:
        self._history.restore(folder)
        state = msgspec.msgpack.decode((folder / FILE).read_bytes(), type=_State, dec_hook=decode_array)
        self._taken, self._again = state.taken, state.again
        self._groups = [_Group(batch, prompt, samples=samples) for batch, prompt, samples in state.whole]

    def close(self) -> None:
        if self._under_way is not None:
            self._under_way.close()

    def _begin(self, sampler: Sampler, under_way: Carriage, count: int) -> None:
        """Begin `count` groups: those that a stop interrupted, then the task's next prompts."""
        size = self.config.rollout.num_prompts
        begun, self._again = self._again[: max(0, count)], self._again[max(0, count) :]
        while len(begun) < count:
            begun.append((self._taken // size + 1, self._taken % size))
            self._taken += 1
        sampler.batches = -(-self._taken // size)
        examples = {batch: sampler.task.train_examples(batch, size) for batch, _ in begun}
        for batch, prompt in begun:
            talks = [
                under_way.begin(examples[batch][prompt], training_sampling(self.config, batch, prompt, index))
                for index in range(self.config.rollout.group_size)
            ]
            self._groups.append(_Group(batch, prompt, talks))

    def _finish(self, group: _Group, sampler: Sampler, why: str | None = None) -> None:
        """Make the samples of a group; with `why`, end its conversations and reject them all."""
        if why is not None:
            for talk in group.talks:
                talk.drop(why)
        for index, talk in enumerate(group.talks):
            played = talk.played(sampler.task.decode)
            sample = new_sample(f"{group.batch}/{group.prompt}/{index}", played, group=0)
            group.samples.append(dataclasses.replace(sample, fault=played.fault))
        group.talks = []
        if why is not None:
            group.samples = [dataclasses.replace(each, broken=each.broken or why) for each in group.samples]
