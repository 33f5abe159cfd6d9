from __future__ import annotations

import sys

import pytest

from rlloop.errors import ConfigError
from rlloop.rewards import resolve_reward
from rlloop.types import Example, RewardResult

EXAMPLE = Example(id="p", prompt_ids=[], prompt="", data={})


def plain(prompt, completion, example):
    return float(len(completion))


def scaled(prompt, completion, example, *, scale, offset=0.0):
    return scale * len(completion) + offset


def too_few(prompt, completion):
    return 0.0


class Scaled:
    def __init__(self, scale: float, offset: float = 0.0) -> None:
        self.scale, self.offset = scale, offset

    def __call__(self, prompt, completion, example):
        return RewardResult(self.scale * len(completion) + self.offset)


class NotCallable:
    pass


number = 3


def test_a_function_as_it_is():
    assert resolve_reward({"_target_": f"{__name__}.plain"}) is plain


def test_a_function_is_bound_and_a_class_is_made():
    bound = resolve_reward({"_target_": f"{__name__}.scaled", "scale": 2.0})
    made = resolve_reward({"_target_": f"{__name__}.Scaled", "scale": 2.0, "offset": 1.0})
    assert bound("", "abc", EXAMPLE) == 6.0
    assert made("", "abc", EXAMPLE) == RewardResult(7.0)


def test_the_shipped_one():
    reward = resolve_reward({"_target_": "rlloop.rewards.countdown.countdown_reward", "format_credit": 0.5})
    assert reward("", "1 + 1", Example("p", [], "", {"numbers": [1, 1], "target": 3})).reward == 0.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"reward\._target_ is None; it must be a dotted path"),
        ({"_target_": 3}, r"reward\._target_ is 3"),
        ({"_target_": "verify"}, "'verify'; it must be a dotted path"),
        ({"_target_": "rlloop..verify"}, "must be a dotted path"),
        ({"_target_": "no_such_package.reward"}, "there is no module 'no_such_package'"),
        ({"_target_": "rlloop.rewards.nothing.reward"}, "rlloop.rewards has no 'nothing'"),
        ({"_target_": "rlloop.rewards.countdown.verfy"}, "has no 'verfy' .did you mean verify"),
        ({"_target_": f"{__name__}.number"}, "is a int, not a function or class"),
        ({"_target_": f"{__name__}.scaled"}, "missing a required argument: 'scale'"),
        ({"_target_": f"{__name__}.scaled", "scal": 1}, r"reward\.scal is no argument .* allowed are scale, offset"),
        ({"_target_": f"{__name__}.scaled", "scale": 1, "example": 1}, r"reward\.example is no argument"),
        ({"_target_": f"{__name__}.plain", "scale": 1}, "allowed are none"),
        ({"_target_": f"{__name__}.too_few"}, "too many positional arguments"),
        ({"_target_": f"{__name__}.Scaled"}, "missing a required argument: 'scale'"),
        ({"_target_": f"{__name__}.Scaled", "size": 1}, r"reward\.size is no argument .* allowed are scale, offset"),
        ({"_target_": f"{__name__}.NotCallable"}, "makes objects that cannot be called"),
    ],
)
def test_a_mistake_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        resolve_reward(config)


def test_a_module_that_does_not_import_says_why(tmp_path, monkeypatch):
    (tmp_path / "half_a_reward.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="importing half_a_reward failed: No module named 'not_installed_anywhere'"):
        resolve_reward({"_target_": "half_a_reward.reward"})
    assert "half_a_reward" not in sys.modules
