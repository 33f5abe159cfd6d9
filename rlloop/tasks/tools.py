"""Other libraries' environments as `rlloop.loop.environments.Environment`, named in `task.environment`.

    task.environment={_target_: rlloop.tasks.tools.class_environment, environment: mine.Game}     TRL's form
    task.environment={_target_: rlloop.tasks.tools.gym_environment, id: mine:Words-v0}            gymnasium, of texts

TRL's form is a class with `reset(**row)` and public methods, which are its tools: the policy calls one by
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and reads what it returns as a message of the role `tool`: a
text, or a picture (a `PIL.Image.Image`, or pixels [H, W, 3] uint8) for a model that reads images. A turn without a call
ends the episode. The attribute or method `reward` gives the episode's reward; without it, 0. The result of `reset` is
appended to the prompt's last message, and the chat template gets the tools' signatures and docstrings. For that a row
is also reset once when its prompt is made, so the result must be a function of the row.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from rlloop.config.instantiate import locate, needs
from rlloop.errors import ConfigError
from rlloop.loop.environments import Environment, Opening, Reply, opens, seed_of
from rlloop.rollout.fleet.chat_parsing import ToolCall, parse
from rlloop.types import Example

RESERVED = {"reset", "reward", "close"}  # public, and no tools


def _class_opening(example: Example, *, environment: str) -> Opening:
    instance, observation = _reset(example, environment)
    tools = _Tools(instance)
    try:
        return Opening(observation, [_schema(name, tool) for name, tool in tools.named.items()])
    finally:
        tools.close()


@opens(_class_opening)
def class_environment(example: Example, *, environment: str) -> Environment:
    """A new `environment`, a class by its dotted path, reset with the row's fields that its `reset` takes."""
    return _Tools(_reset(example, environment)[0])


def _reset(example: Example, environment: str) -> tuple[Any, str | None]:
    """A new environment, and what it observes."""
    instance = locate(environment, "task.environment.environment")()
    reset = getattr(instance, "reset", None)
    if reset is None:
        raise ConfigError(f"task.environment.environment is {environment}, which has no method reset")
    observation = reset(**_taken(reset, example.data))
    return instance, None if observation is None else str(observation)


def _schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a method, as transformers makes it of a docstring in Google's style; without one, its
    signature's names."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        return get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException):
        parameters = inspect.signature(tool).parameters
        needed = [each for each, how in parameters.items() if how.default is inspect.Parameter.empty]
        types = {"type": "object", "properties": {each: {} for each in parameters}, "required": needed}
        description = (inspect.getdoc(tool) or name).partition("\n")[0]
        return {"type": "function", "function": {"name": name, "description": description, "parameters": types}}


class _Tools:
    """Calls the methods that the policy asks for."""

    def __init__(self, environment: Any) -> None:
        self._made = environment
        self.named: dict[str, Callable[..., Any]] = {
            name: method
            for name, method in inspect.getmembers(environment, callable)
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

    def _called(self, call: ToolCall) -> str | list[dict[str, Any]]:
        """Call the tool and return its result as text, or as a picture if it is one: a `PIL.Image.Image`, or pixels
        [H, W, 3] uint8. Errors become text that the policy reads, as in TRL."""
        if call.name not in self.named:
            return f"error: there is no tool {call.name}; there are {', '.join(self.named)}"
        try:
            arguments = json.loads(call.arguments)
            inspect.signature(self.named[call.name]).bind(**arguments)
        except (TypeError, ValueError) as error:
            return f"error: {error}"
        try:
            result = self.named[call.name](**arguments)
            return [{"type": "image", "image": result}] if _is_picture(result) else str(result)
        except Exception as error:  # of the tool: the policy's to read
            return f"error: {type(error).__name__}: {error}"


def _is_picture(result: Any) -> bool:
    if isinstance(result, np.ndarray):
        return result.dtype == np.uint8 and result.ndim == 3
    pillow = sys.modules.get("PIL.Image")  # whoever returns its images has imported it
    return pillow is not None and isinstance(result, pillow.Image)


def _gym_opening(example: Example, *, id: str, opening: bool = True) -> Opening:
    if not opening:
        return Opening()
    environment, observation = _gym_reset(example, id)
    environment.close()
    return Opening(observation)


@opens(_gym_opening)
def gym_environment(example: Example, *, id: str, opening: bool = True) -> Environment:
    """A gymnasium environment whose observations and actions are texts, reset with a seed made of the example's id.

    `opening`: what `reset` observes is appended to the prompt's last message; False for rows that hold it already.
    """
    return _Gym(_gym_reset(example, id)[0])


def _gym_reset(example: Example, id: str) -> tuple[Any, str]:
    needs("gymnasium", "gym_environment")
    import gymnasium
    from gymnasium.spaces import Text

    environment: Any = gymnasium.make(id)
    for name in ("observation_space", "action_space"):
        if not isinstance(space := getattr(environment, name), Text):
            raise ConfigError(f"{id} has {name} {space}; a conversation takes spaces of texts (gymnasium.spaces.Text)")
    observation, _ = environment.reset(seed=seed_of(example))
    return environment, str(observation)


class _Gym:
    def __init__(self, environment: Any) -> None:
        self._made = environment

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


def _value(value: Any) -> Any:
    return value() if callable(value) else value
