"""Environments of other makers as `rlloop.loop.environments.Environment`, each named in `task.environment`.

    task.environment={_target_: rlloop.tasks.tools.class_environment, environment: mine.Game}     TRL's form
    task.environment={_target_: rlloop.tasks.tools.gym_environment, id: mine:Words-v0}            gymnasium, of texts

TRL's form is a class with `reset(**row)` and public methods, which are its tools: the policy calls one by
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and reads what it returns as a message of the role `tool`. A
turn without a call ends the episode. `reward`, an attribute or method, is the episode's; without one, 0.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from rlloop.config.instantiate import locate, needs
from rlloop.errors import ConfigError
from rlloop.loop.environments import Environment, Reply
from rlloop.rollout.fleet.chat_parsing import ToolCall, parse
from rlloop.types import Example

RESERVED = {"reset", "reward", "close"}  # public, and no tools


def class_environment(example: Example, *, environment: str) -> Environment:
    """A new `environment`, a class by its dotted path, reset with the row's fields that its `reset` takes."""
    made = locate(environment, "task.environment.environment")()
    reset = getattr(made, "reset", None)
    if reset is None:
        raise ConfigError(f"task.environment.environment is {environment}, which has no method reset")
    reset(**_taken(reset, example.data))
    return _Tools(made)


class _Tools:
    """Calls the methods that the policy asks for."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self._tools: dict[str, Callable[..., Any]] = {
            name: method
            for name, method in inspect.getmembers(made, callable)
            if not name.startswith("_") and name not in RESERVED
        }

    def step(self, message: str) -> Reply:
        calls = parse(message, tools=True, reasoning=False).calls
        if not calls:
            reward = float(_value(getattr(self._made, "reward", 0.0)))
            return Reply(reward=reward, done=True, solved=reward >= 1.0)
        return Reply(
            [
                {"role": "tool", "name": call.name, "arguments": call.arguments, "content": self._called(call)}
                for call in calls
            ]
        )

    def close(self) -> None:
        if (close := getattr(self._made, "close", None)) is not None:
            close()

    def _called(self, call: ToolCall) -> str:
        """What the tool returns; an error that the policy can learn from is told to it, as TRL does."""
        if call.name not in self._tools:
            return f"error: there is no tool {call.name}; there are {', '.join(self._tools)}"
        try:
            arguments = json.loads(call.arguments)
            inspect.signature(self._tools[call.name]).bind(**arguments)
        except (TypeError, ValueError) as error:
            return f"error: {error}"
        try:
            return str(self._tools[call.name](**arguments))
        except Exception as error:  # of the tool: the policy's to read
            return f"error: {type(error).__name__}: {error}"


def gym_environment(example: Example, *, id: str) -> Environment:
    """A gymnasium environment whose observations and actions are texts, reset with a seed made of the example's id.

    What `reset` observes is the prompt's business: a task whose rows hold it, or whose policy can do without.
    """
    needs("gymnasium", "gym_environment")
    import gymnasium
    from gymnasium.spaces import Text

    made: Any = gymnasium.make(id)
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(made, name), Text):
            raise ConfigError(f"{id} has {name} {space}; a conversation takes spaces of texts (gymnasium.spaces.Text)")
    made.reset(seed=int.from_bytes(example.id.encode()[-4:], "little"))
    return _Gym(made)


class _Gym:
    def __init__(self, made: Any) -> None:
        self._made = made

    def step(self, message: str) -> Reply:
        observation, reward, terminated, truncated, _ = self._made.step(message)
        if terminated or truncated:
            return Reply(reward=float(reward), done=True, solved=float(reward) >= 1.0)
        return Reply([{"role": "user", "content": str(observation)}], reward=float(reward))

    def close(self) -> None:
        self._made.close()


def _taken(function: Callable[..., Any], data: dict[str, Any]) -> dict[str, Any]:
    """The entries of `data` that the function takes by name."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(data)
    return {each.name: data[each.name] for each in parameters if each.name in data}


def _value(given: Any) -> Any:
    return given() if callable(given) else given
