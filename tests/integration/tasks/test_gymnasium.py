"""Text environments of the library gymnasium, unchanged, as conversations. Runs in `make test-environments`."""

from __future__ import annotations

import pytest

from rlloop.errors import ConfigError
from rlloop.loop.conversations import Conversations
from rlloop.loop.environments import seed_of
from rlloop.rewards.episode import episode_reward
from rlloop.tasks.tools import _gym_opening, gym_environment
from rlloop.testing import FakeEngine, FakePolicy
from rlloop.types import Example, SamplingParams
from tests.support.talks import KNOWN, TalkTask

gymnasium = pytest.importorskip("gymnasium")


class Echo(gymnasium.Env):
    """Answers how often it was spoken to; the third time is worth 1 and ends it. A seed draws what it begins with."""

    observation_space = action_space = gymnasium.spaces.Text(4)  # narrower than what a policy writes
    closed = 0

    def __init__(self, breaks: bool = False):
        self.breaks = breaks

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return str(self.np_random.integers(9)), {}

    def step(self, action):
        assert isinstance(action, str)
        if self.breaks:
            raise RuntimeError("out of order")
        self.count += 1
        return str(self.count), 1.0 if self.count == 3 else 0.25, self.count == 3, False, {}

    def close(self):
        Echo.closed += 1


class Numbers(Echo):
    action_space = gymnasium.spaces.Discrete(3)


@pytest.fixture(scope="module", autouse=True)
def registered():
    for name, made in (("Echo-v0", Echo), ("Numbers-v0", Numbers)):
        gymnasium.register(name, entry_point=made)
    gymnasium.register("Broken-v0", entry_point=Echo, kwargs={"breaks": True})
    yield
    for name in ("Echo-v0", "Numbers-v0", "Broken-v0"):
        del gymnasium.registry[name]


def play(*ids: str):
    class Task(TalkTask):
        def environment(self, example: Example):
            return gym_environment(example, id=example.data["id"])

    conversations = Conversations(Task(), KNOWN, timeout=240.0)
    examples = [Example(f"e{index}", [1, 2], "p", {"id": id}) for index, id in enumerate(ids)]
    played = conversations.play(FakeEngine(FakePolicy()), examples, [SamplingParams(max_tokens=3, seed=0) for _ in ids])
    conversations.close()
    return played


def test_an_episode_is_a_conversation_and_a_crash_rejects_its_own():
    Echo.closed = 0
    whole, broken = play("Echo-v0", "Broken-v0")
    turns = whole.example.data["episode"]["conversation"]
    assert [turn["reward"] for turn in turns] == [0.25, 0.25, 1.0]
    assert [turn["messages"] for turn in turns] == [[{"role": "user", "content": text}] for text in "12"] + [[]]
    assert episode_reward("", "", whole.example).reward == 1.5
    assert whole.completion.finish_reason == "stop"
    assert whole.broken is None
    assert "RuntimeError: out of order" in broken.broken
    assert Echo.closed == 2


def test_what_reset_observes_opens_the_prompt():
    seen = [_gym_opening(Example(id, [], "", {}), id="Echo-v0").observation for id in ("e0", "e0", "e1", "e7")]
    assert seen[0] == seen[1]
    assert (
        len({seed_of(Example(f"{part}/{n}2345", [], "", {})) for part in ("train", "eval") for n in range(50)}) == 100
    )
    assert set(seen) <= set("012345678")
    assert _gym_opening(Example("e0", [], "", {}), id="Echo-v0", opening=False).observation is None


def test_spaces_that_are_no_texts_are_refused():
    with pytest.raises(ConfigError, match=r"Numbers-v0 has action_space Discrete\(3\)"):
        gym_environment(Example("e", [], "", {}), id="Numbers-v0")
