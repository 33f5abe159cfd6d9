"""Conversations: ids that never change, a mask on what the policy wrote, and an outcome for every way they can end."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from rlloop.loop.conversations import Conversations, SingleTurn, player_for
from rlloop.loop.environments import Reply
from rlloop.rewards.episode import episode_reward
from rlloop.runs.folder import read_rollouts, rollout_files
from rlloop.testing import FakeEngine, FakePolicy, FakeScorer, FakeTask, FakeTrainer
from rlloop.trainer.batching import TrainSequence
from rlloop.types import Example, RewardResult, Sample, SamplingParams
from tests.support.loop_run import Run
from tests.support.talks import KNOWN, Countdown, TalkTask, example


def play(task: TalkTask, *examples: Example, max_tokens: int = 6, timeout: float = 60.0):
    conversations = Conversations(task, KNOWN, timeout=timeout)
    sampling = [SamplingParams(max_tokens=max_tokens, seed=index) for index in range(len(examples))]
    played = conversations.play(FakeEngine(FakePolicy()), examples, sampling)
    conversations.close()
    return played


def test_the_conversation_is_kept_as_ids_and_only_the_policys_are_its_own():
    [short, long] = play(TalkTask(), example(1), example(3))
    assert short.completion.turns == ((0, len(short.completion.token_ids)),)
    made = long.completion
    assert made.turns is not None
    assert len(made.turns) == 3
    assert made.prompt_ids == [1, 2, 3]
    for (_, end), (start, _) in zip(made.turns, made.turns[1:], strict=False):
        stopped = made.token_ids[end - 1] == 0
        assert made.token_ids[end:start] == [7, 6 if stopped else 5]
    assert made.turns[0][0] == 0
    assert made.turns[-1][1] == len(made.token_ids)
    assert len(made.written) == len(made.logprobs) == len(made.raw_logprobs)
    assert np.array_equal(made.logprobs, np.full(len(made.written), np.log(1 / 8), np.float32))
    assert made.finish_reason == "stop"
    assert made.longest_turn == max(end - start for start, end in made.turns) < len(made.written)
    assert short.completion.longest_turn == len(short.completion.token_ids)
    assert long.text == " ".join(map(str, made.token_ids))
    episode = dict(long.example.data["episode"])
    conversation = episode.pop("conversation")
    assert episode == {"reward": 2.5, "solved": True, "components": {"steps": 3.0}, "turns": 3}
    assert [tuple(entry["tokens"]) for entry in conversation] == list(made.turns)
    assert [entry.get("read") for entry in conversation] == [
        [end, start] for (_, end), (start, _) in zip(made.turns, made.turns[1:], strict=False)
    ] + [None]
    assert sum(entry["reward"] for entry in conversation) == 2.5
    assert all(entry["components"] == {"steps": 1.0} for entry in conversation)
    assert [len(entry["messages"]) for entry in conversation] == [1, 1, 0]
    start, end = made.turns[1]
    assert conversation[1]["text"] == " ".join(map(str, made.token_ids[start:end]))


def test_each_turn_continues_the_ids_that_were_sampled():
    asked = {0: [], 1: [], 2: []}  # by conversation: prompts

    class Watched(FakeEngine):
        def generate(self, prompts, sampling):
            for ids, params in zip(prompts, sampling, strict=True):
                asked[params.seed].append(list(ids))
            return super().generate(prompts, sampling)

    params = [SamplingParams(max_tokens=4, seed=index) for index in range(3)]
    conversations = Conversations(TalkTask(), KNOWN)
    played = conversations.play(Watched(FakePolicy()), [example(n) for n in (3, 1, 2)], params)
    conversations.close()
    assert [len(prompts) for prompts in asked.values()] == [3, 1, 2]  # one that ended is no longer asked
    for prompts, each in zip(asked.values(), played, strict=True):
        made = each.completion
        assert made.turns is not None
        assert prompts == [made.prompt_ids + made.token_ids[:start] for start, _ in made.turns]


def test_experts_and_selections_are_those_that_each_token_was_first_read_with():
    class Fickle(FakeEngine):
        """Chooses otherwise each time that it reads a token again."""

        asked = 0

        def generate(self, prompts, sampling):
            self.asked += 1
            [made] = super().generate(prompts, sampling)
            read = len(made.prompt_ids) + len(made.token_ids) - 1
            experts = np.full((read, 2, 1), self.asked, np.uint8)
            return [dataclasses.replace(made, routed_experts=experts, selected=np.full((read, 2), self.asked))]

    params = [SamplingParams(max_tokens=4, seed=1)]
    [played] = Conversations(TalkTask(), KNOWN).play(Fickle(FakePolicy()), [example(3)], params)
    made, turns = played.completion, played.completion.turns
    assert made.routed_experts is not None
    assert made.selected is not None
    assert turns is not None
    ends = [3 + end for _, end in turns]  # a turn reads all but the last token before its end
    expected = np.repeat([1, 2, 3], np.diff([0, *(end - 1 for end in ends)]))
    assert made.routed_experts[:, 1, 0].tolist() == made.selected[:, 0].tolist() == expected.tolist()
    assert made.routed_experts.dtype == np.uint8


def test_limits_end_a_conversation_as_cut_off():
    class Short(TalkTask):
        max_turns = 2

    [made] = play(Short(), example(9))
    assert (made.completion.finish_reason, made.example.data["episode"]["turns"]) == ("length", 2)
    assert made.example.data["episode"]["solved"] is False

    class Narrow(TalkTask):
        max_conversation_tokens = 3 + 6 + 2 + 5

    [made] = play(Narrow(), example(9))
    assert made.completion.turns is not None
    assert len(made.completion.prompt_ids) + len(made.completion.token_ids) <= Narrow.max_conversation_tokens


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: 1 / 0, "environment error: ZeroDivisionError: division by zero"),
        (lambda: 0.5, "environment invalid: step returned 0.5; it must return a Reply"),
        (lambda: Reply(), "environment invalid: step returned no messages and was not done"),
        (lambda: Reply(done=True, reward=float("nan")), "environment invalid: step returned a number that is not"),
    ],
)
def test_a_broken_environment_breaks_its_conversation_alone(answer, reason):
    class Moody(Countdown):
        def step(self, message):
            return answer() if self.left == 2 else super().step(message)

    class MoodyTask(TalkTask):
        environment = Moody

    broken, whole = play(MoodyTask(), example(2), example(1))
    assert broken.broken is not None
    assert broken.broken.startswith(reason)
    assert broken.completion.finish_reason == "abort"
    assert whole.broken is None


def test_a_turn_that_was_cut_short_is_not_answered():
    class Interrupted(FakeEngine):
        def generate(self, prompts, sampling):
            made = super().generate(prompts, sampling)
            second = [len(prompt) > 3 for prompt in prompts]
            return [
                dataclasses.replace(each, finish_reason="abort") if late else each
                for each, late in zip(made, second, strict=True)
            ]

    heard = []

    class Heard(Countdown):
        def step(self, message):
            heard.append(message)
            return super().step(message)

    class HeardTask(TalkTask):
        environment = Heard

    sampling = [SamplingParams(max_tokens=6, seed=seed) for seed in (1, 2)]
    conversations = Conversations(HeardTask(), KNOWN)
    cut, whole = conversations.play(Interrupted(FakePolicy()), [example(3), example(1)], sampling)
    conversations.close()
    assert cut.broken == "its completion was cut short: finish_reason is 'abort'"
    assert cut.completion.finish_reason == "abort"
    assert whole.broken is None
    assert len(heard) == 2  # the first turn of each


def test_async_environments_step_together_under_a_time_limit():
    class Slow(Countdown):
        async def step(self, message):  # pyright: ignore[reportIncompatibleMethodOverride]
            await asyncio.sleep(600 if self.left == 2 else 0)
            return super().step(message)

    class SlowTask(TalkTask):
        environment = Slow

    hung, whole = play(SlowTask(), example(2), example(1), timeout=2.0)
    assert hung.broken == "environment timeout: took longer than 2 s"
    assert whole.example.data["episode"]["solved"]


def test_a_task_without_an_environment_plays_single_turns():
    assert isinstance(player_for(FakeTask(), KNOWN, timeout=1, concurrency=1), SingleTurn)
    assert isinstance(player_for(TalkTask(), KNOWN, timeout=1, concurrency=1), Conversations)


def test_only_what_the_policy_wrote_is_predicted():
    [played] = play(TalkTask(), example(3))
    made = played.completion
    sample = Sample("u", played.example, made, "", RewardResult(1.0), group=0, advantage=0.5)
    sequence = TrainSequence.of_sample(sample)
    assert sequence.token_ids == made.prompt_ids + made.token_ids
    predicted = [sequence.token_ids[position] for position in sequence.predict]
    assert len(predicted) == len(made.logprobs) < len(made.token_ids)
    assert predicted == [token for start, end in made.turns or () for token in made.token_ids[start:end]]
    assert np.array_equal(sequence.advantages, np.full(len(predicted), 0.5, np.float32))


def test_in_the_loop_with_the_environments_reward_and_its_failures(tmp_path):
    class Moody(Countdown):
        def step(self, message):
            if self.left == 3:
                raise OSError("no tool")
            return super().step(message)

    class MoodyTask(TalkTask):
        environment = Moody

    def weighed(rewards, groups, lengths, kl):
        asked.append(lengths)
        return list(rewards), [True] * len(rewards)

    asked, policy = [], FakePolicy()
    parts = {"scorer": FakeScorer(episode_reward), "trainer": FakeTrainer(policy), "advantages": weighed}
    run = Run(tmp_path, task=MoodyTask(), policy=policy, **parts)
    assert run() == 4
    run.loop.close()
    rows = [row for row in read_rollouts(rollout_files(tmp_path)[0]) if row["outcome"] == "trained"]
    assert asked[0] == [max(end - start for start, end in row["turns"]) for row in rows]  # max_tokens is a turn's
    for record, file in zip(run.metrics()[1:], rollout_files(tmp_path), strict=True):
        rows = read_rollouts(file)
        assert (record["ledger/sampled"], record["ledger/rejected"]) == (12, 3)  # one of four prompts
        place = f"test_environments.py, line {Moody.step.__code__.co_firstlineno + 2}"
        why = f"rejected: environment error: OSError: no tool ({place})"
        assert {row["outcome"] for row in rows} == {"trained", why}
        assert record["parity/tokens"] == sum(len(row["logprobs"]) for row in rows if row["outcome"] == "trained")
        assert record["parity/tokens_different"] == 0
        assert record["reward/steps"] == record["reward/turns"] == pytest.approx(4 / 3)
        assert record["rollout/turns_mean"] == pytest.approx((2 * 1 + 2 + 1) / 4)
        for row in rows:
            assert sum(end - start for start, end in row["turns"]) == len(row["logprobs"])


def test_a_reward_of_conversations_needs_one():
    with pytest.raises(ValueError, match="was not a conversation"):
        episode_reward("", "", example(1))


class Flaky:
    """Fails the first `failures` times that each key comes, and remembers the keys."""

    idempotent = True

    def __init__(self, failures: int, slow: bool = False) -> None:
        self.failures, self.slow, self.keys = failures, slow, list[str]()

    async def step(self, message: str, key: str) -> Reply:
        self.keys.append(key)
        if self.keys.count(key) <= self.failures:
            if self.slow:
                await asyncio.sleep(600)
            raise ConnectionError("gone")
        return Reply([{"role": "tool", "content": "7"}], reward=1.0, done=len(set(self.keys)) == 2)


@pytest.mark.parametrize("slow", [False, True])
def test_an_idempotent_step_is_tried_again_under_its_key(slow):
    class Task(TalkTask):
        def environment(self, example):
            self.made = Flaky(2, slow)
            return self.made

    def play(retries: int):
        task = Task()
        conversations = Conversations(task, KNOWN, timeout=1.0 if slow else 60.0, retries=retries)
        [played] = conversations.play(FakeEngine(FakePolicy()), [example(3)], [SamplingParams(max_tokens=4, seed=5)])
        conversations.close()
        return played, task.made.keys

    played, keys = play(2)
    first, second = f"{example(3).id}/5/1", f"{example(3).id}/5/2"
    assert keys == [first] * 3 + [second] * 3
    assert (played.broken, played.example.data["episode"]["reward"]) == (None, 2.0)
    played, keys = play(1)
    assert keys == [first] * 2
    assert played.broken is not None
    assert ("took longer" if slow else "ConnectionError: gone") in played.broken
