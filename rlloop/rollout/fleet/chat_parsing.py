"""Parses an assistant's text into reasoning, content and tool calls, by its chat template's markers.

Templates of the Qwen and Hermes families write a call as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
and reasoning as `<think>...</think>`. Nothing is parsed for a template without these markers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
OPENING, CLOSING = "<think>", "</think>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class AssistantText:
    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()


def parse(text: str, *, tools: bool, reasoning: bool, opened: bool = False) -> AssistantText:
    """`tools`, `reasoning`: which parts to look for. `opened`: the prompt ends inside of reasoning.

    A call that is not a JSON object with a name stays in the content unchanged.
    """
    thought = None
    if reasoning and (opened or text.lstrip().startswith(OPENING)):
        before, closed, after = text.lstrip().removeprefix(OPENING).partition(CLOSING)
        thought, text = before.strip(), after.lstrip("\n") if closed else ""
    if not tools:
        return AssistantText(text, thought)
    calls: list[ToolCall] = []

    def taken(match: re.Match[str]) -> str:
        call = _call(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    content = CALL.sub(taken, text)
    return AssistantText(content.strip() if calls else content, thought, tuple(calls))


def _call(written: str) -> ToolCall | None:
    try:
        call: Any = msgspec.json.decode(written)
    except msgspec.DecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return ToolCall(call["name"], arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode())
