import json

import pytest

from rlloop.rollout.fleet.chat_parsing import ToolCall, parse

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'


def test_reasoning_and_calls_leave_the_content():
    parsed = parse(f"<think>\nhm\n</think>\n\nI add.\n{CALL}\n{CALL}", tools=True, reasoning=True)
    assert parsed.reasoning == "hm"
    assert parsed.content == "I add."
    assert parsed.calls == (ToolCall("add", '{"a":1,"b":[2]}'),) * 2
    assert json.loads(parsed.calls[0].arguments) == {"a": 1, "b": [2]}


def test_a_prompt_that_ends_inside_of_reasoning_opens_it():
    assert parse("so\n</think>7", tools=False, reasoning=True, opened=True).reasoning == "so"
    assert parse("so\n</think>7", tools=False, reasoning=True, opened=True).content == "7"
    cut = parse("so on and", tools=True, reasoning=True, opened=True)
    assert (cut.reasoning, cut.content) == ("so on and", "")


@pytest.mark.parametrize("written", ["{", "[]", '{"name": 1}', '{"arguments": {}}'])
def test_what_is_no_call_stays_text(written):
    text = f"a <tool_call>{written}</tool_call> b"
    parsed = parse(text, tools=True, reasoning=False)
    assert (parsed.content, parsed.calls, parsed.reasoning) == (text, (), None)


def test_what_is_not_asked_for_is_not_parsed():
    text = f"<think>a</think>{CALL}"
    assert parse(text, tools=False, reasoning=False).content == text
