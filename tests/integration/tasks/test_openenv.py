"""An OpenEnv server, unchanged, over WebSockets on loopback: sessions, seeds, rewards and their end."""

from __future__ import annotations

from typing import Any

import pytest

from rlloop.errors import ConfigError
from rlloop.loop.conversations import Conversations
from rlloop.rewards.episode import episode_reward
from rlloop.tasks.openenv_tasks import openenv_environment
from rlloop.testing import FakeEngine, FakePolicy
from rlloop.types import Example, SamplingParams
from tests.support.openenv_server import counting_server
from tests.support.talks import KNOWN, TalkTask
from tests.support.waiting import until

pytest.importorskip("openenv")
pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


@pytest.fixture(scope="module")
def server():
    with counting_server() as served:
        yield served


def play(url: str, count: int = 4, max_turns: int = 4, **more: Any):
    class Task(TalkTask):
        def environment(self, example: Example):
            return openenv_environment(example, url=url, **{"observation": "text", **more})

    task = Task()
    task.max_turns = max_turns
    conversations = Conversations(task, KNOWN, timeout=240.0)
    examples = [Example(f"e{index}", [1, 2], "p", {"level": index}) for index in range(count)]
    sampling = [SamplingParams(max_tokens=3, seed=index) for index in range(count)]
    played = conversations.play(FakeEngine(FakePolicy()), examples, sampling)
    conversations.close()
    return played


def test_sessions_run_side_by_side_to_their_end(server):
    url, environment = server
    for each in play(url):
        assert each.broken is None
        turns = each.example.data["episode"]["conversation"]
        assert [turn["reward"] for turn in turns] == [0.25, 0.25, 1.0]
        assert [turn["messages"] for turn in turns] == [
            [{"role": "user", "content": "6"}], [{"role": "user", "content": "5"}], [],
        ]  # fmt: skip
        assert episode_reward("", "", each.example).reward == 1.5
        assert each.completion.finish_reason == "stop"
    until(lambda: environment.open == 0)  # each session was closed, and with it its environment
    [cut] = play(url, count=1, max_turns=2)
    assert cut.completion.finish_reason == "length"
    until(lambda: environment.open == 0)  # also one that the turns ended


def test_what_goes_wrong_rejects_its_own_conversation(server):
    url, _ = server
    [played] = play(url, count=1, action="no_such_field")
    assert played.broken is not None
    assert "environment error" in played.broken
    [played] = play("http://127.0.0.1:9", count=1, connect_timeout=0.5)
    assert played.broken is not None
    with pytest.raises(ConfigError, match=r"task.environment.url is 'localhost'"):
        openenv_environment(Example("e", [], "", {}), url="localhost")
    with pytest.raises(ConfigError, match=r"no field 'level'"):
        openenv_environment(Example("e", [], "", {}), url=url, reset=["level"])
