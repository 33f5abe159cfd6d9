"""Other makers' environments as conversations."""

from __future__ import annotations

import pytest

from rlloop.errors import ConfigError
from rlloop.loop.environments import opening_of
from rlloop.recipes.custom.task import environment_factory
from rlloop.tasks.tools import class_environment
from rlloop.types import Example

HERE = "tests.unit.tasks.test_tools"


class Sums:
    """As TRL has it: `reset` takes a row's fields, public methods are tools, `reward` is the episode's."""

    def reset(self, target: int) -> None:
        self.target, self.total = target, 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def fail(self) -> None:
        raise RuntimeError("out of order")

    def reward(self) -> float:
        return float(self.total == self.target)

    def _hidden(self) -> str:
        return "secret"


class Riddle(Sums):
    def reset(self, target: int) -> str:
        super().reset(target)
        return f" Reach {target}."

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: what is added
        """
        return super().add(number)


class Unset:
    pass


def made():
    example = Example("one", [1], "", {"target": 5, "other": "ignored"})
    return class_environment(example, environment=f"{HERE}.Sums")


def call(name: str, arguments: str) -> str:
    return f'so <tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def told(reply) -> list[str]:
    return [message["content"] for message in reply.messages]


def test_tools_are_called_until_a_turn_has_none():
    environment = made()
    assert told(environment.step(call("add", '{"number": 2}') + call("add", '{"number": 3}'))) == ["2", "5"]
    end = environment.step("it is 5")
    assert (end.done, end.reward, end.solved) == (True, 1.0, True)
    assert made().step("I give up").reward == 0.0


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("multiply", "{}", "error: there is no tool multiply; there are add, fail"),
        ("_hidden", "{}", "error: there is no tool _hidden"),
        ("reset", '{"target": 0}', "error: there is no tool reset"),
        ("add", "{}", "error: missing a required argument: 'number'"),
        ("add", "[1]", "error: "),
        ("fail", "{}", "error: RuntimeError: out of order"),
    ],
)
def test_what_a_policy_does_wrong_it_is_told(name, arguments, says):
    environment = made()
    [answer] = told(environment.step(call(name, arguments)))
    assert answer.startswith(says)
    assert environment.step("done").reward == 0.0


def test_what_reset_returns_and_the_tools_open_the_prompt():
    factory = environment_factory({"_target_": "rlloop.tasks.tools.class_environment", "environment": f"{HERE}.Riddle"})
    opening = opening_of(factory)
    assert opening is not None
    opened = opening(Example("one", [1], "", {"target": 5}))
    assert opened.observation == " Reach 5."
    add, fail = (tool["function"] for tool in opened.tools)
    assert add["parameters"]["properties"] == {"number": {"type": "integer", "description": "what is added"}}
    assert (add["description"], fail["name"]) == ("Add to the total.", "fail")  # which has no docstring
    assert opening_of(lambda example: None) is None


def test_a_class_that_cannot_be_reset_is_refused():
    with pytest.raises(ConfigError, match="has no method reset"):
        class_environment(Example("one", [1], "", {}), environment=f"{HERE}.Unset")
