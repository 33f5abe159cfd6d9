"""A reward that changed between two parts of a run is noticed, and where."""

import functools
import importlib
import json
import sys

import pytest

from rlloop.errors import RunError
from rlloop.rewards import CodeReward, Weighted
from rlloop.rewards.digest import note_reward, reward_digest, reward_sources
from rlloop.runs.folder import RunFolder


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Writes files of the package `mine` and imports it anew."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").touch()  # a folder without it gives way to any mine.py on the path
    monkeypatch.syspath_prepend(tmp_path)

    def write(**files):
        for name, text in files.items():
            (tmp_path / "mine" / f"{name}.py").write_text(text)
        for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        return importlib.import_module("mine.reward").score

    return write


REWARD = (
    "import json\nfrom mine import table\nfrom .words import WORDS\ndef score(*request): return float(len(WORDS))\n"
)


def test_a_digest_is_of_a_rewards_own_files(project):
    score = project(reward=REWARD, words="WORDS = ['a']", table="import os", other="x = 1")
    assert list(reward_sources(score)) == ["mine", "mine.reward", "mine.table", "mine.words"]
    first = reward_digest(score)
    assert reward_digest(functools.partial(score, 1)) == first
    assert reward_digest(project(other="x = 2")) == first
    assert reward_digest(project(words="WORDS = ['b']")) != first
    assert reward_digest(project(words="WORDS = ['a']")) == first
    assert reward_digest(project(reward=REWARD.replace("float", "- float"))) != first


def test_shipped_rewards_and_parts_have_digests(project):
    project(reward=REWARD, words="WORDS = []", table="")
    assert {"rlloop.rewards.code", "rlloop.rewards.sandbox", "rlloop.rewards.seccomp"} <= reward_sources(
        CodeReward()
    ).keys()
    parts = reward_sources(Weighted({"a": {"_target_": "mine.reward.score"}}))
    assert {"rlloop.rewards.weighted", "mine.reward", "mine.words"} <= parts.keys()


def test_a_change_is_noted_where_it_happened(project, tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        file = folder.path / "reward.json"
        score = project(reward=REWARD, words="WORDS = ['a']", table="")
        assert note_reward(folder, score, 0) is None
        assert note_reward(folder, score, 10) is None
        changed = project(words="WORDS = ['b']")
        said = note_reward(folder, changed, 20)
        assert said == "the reward's source is not what it was up to step 20: mine.words changed (see reward.json)"
        assert said in (folder.path / "run.log").read_text()
        assert [each["after_step"] for each in json.loads(file.read_text())] == [0, 20]
        assert note_reward(folder, changed, 30) is None
        # Back to a checkpoint before the change, with the first reward: of the second one no step is left.
        assert note_reward(folder, project(words="WORDS = ['a']"), 20) is None
        assert [each["after_step"] for each in json.loads(file.read_text())] == [0]
        assert note_reward(folder, project(words="WORDS = ['c']"), 25) is not None
        assert [each["after_step"] for each in json.loads(file.read_text())][-1] == 25
        file.write_text('{"a": 1}')
        with pytest.raises(RunError, match=r"reward\.json is damaged"):
            note_reward(folder, changed, 30)
