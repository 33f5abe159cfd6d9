"""Batches of samples: of which weights they are."""

import dataclasses

import numpy as np

from rlloop.config.run import AlgorithmConfig, RolloutConfig, RunConfig
from rlloop.loop.sampler import Sampler
from rlloop.testing import fake_parts
from rlloop.types import Completion


def test_an_episode_without_a_token_is_of_the_weights_that_it_was_asked_of(tmp_path, monkeypatch):
    config = RunConfig(
        algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm"),
        rollout=RolloutConfig(num_prompts=2, group_size=2, max_tokens=4),
    )
    parts = fake_parts(tmp_path)
    parts.engine.set_version(3)
    sampler = Sampler(config, parts.task, parts.engine, parts.vocabulary)
    play = sampler._player.play

    def first_broken(engine, examples, sampling):
        first, *others = play(engine, examples, sampling)
        nothing = np.zeros(0, np.float32)
        empty = Completion([], [], nothing, nothing, 0, "abort", sampling[0])
        return [dataclasses.replace(first, completion=empty, broken="its harness died"), *others]

    monkeypatch.setattr(sampler._player, "play", first_broken)
    samples = sampler.batch(4, 3)
    assert {sample.completion.policy_version for sample in samples} == {3}
    assert [sample.fault for sample in samples] == [None] * len(samples)
    stale = sampler.batch(4, 5)
    assert stale[0].fault is None
    assert all("weights are of version 3" in (sample.fault or "") for sample in stale[1:])
