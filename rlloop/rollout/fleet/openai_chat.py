"""OpenAI's `POST /v1/chat/completions`: messages go through the chat template of the model's folder, text comes back.

Fields and extras are those of `openai_api`; `chat_parsing` parses tool calls and reasoning. What a conversation goes on
with is `token_ids`, not the text made of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from rlloop.errors import ConfigError
from rlloop.rollout.fleet.chat_parsing import OPENING, parse
from rlloop.rollout.fleet.generation import BadField, Generation, Piece, Served
from rlloop.rollout.fleet.openai_api import Fields, Name, beside, exact, generation, of_prompt, ours, read
from rlloop.rollout.fleet.text import HALF


class ChatFields(Fields):
    """Fields of a body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None  # None: what there is room for
    logprobs: bool = False
    top_logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = False  # besides what the template writes
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)  # calls come back as `tool_calls`
    tool_choice: str | dict[str, Any] = "auto"
    separate_reasoning: bool = False  # `reasoning_content` beside the content


class Chat:
    """`POST /v1/chat/completions`"""

    def parse(self, body: bytes, served: Served) -> Generation:
        given = read(body, ChatFields)
        ids, opened = _ids(given, served)
        tokens = given.max_tokens if given.max_completion_tokens is None else given.max_completion_tokens
        if given.max_tokens not in (None, tokens):
            text = f"max_tokens is {given.max_tokens} and max_completion_tokens {tokens}; give one of the two"
            raise BadField("max_tokens", text)
        if given.echo:
            raise BadField("echo", "echo is True: chat answers with the assistant's message alone; leave it out")
        if given.top_logprobs and not given.logprobs:
            raise BadField("top_logprobs", f"top_logprobs is {given.top_logprobs}, which needs logprobs: true")
        if tokens == 0:
            raise BadField("max_tokens", "max_tokens is 0; it must be at least 1 (/v1/completions scores prompts)")
        parses_tools = bool(given.tools) and given.tool_choice != "none"
        if given.tool_choice not in ("auto", "none"):
            text = f"tool_choice is {given.tool_choice!r:.60}: this engine cannot force a call; give 'auto' or 'none'"
            raise BadField("tool_choice", text)
        if given.stream and (parses_tools or given.separate_reasoning):
            name = "tools" if parses_tools else "separate_reasoning"
            raise BadField("stream", f"stream is True, and {name} needs the whole text to be parsed; leave out either")
        tokens = max(1, served.longest - len(ids)) if tokens is None else tokens
        logprobs = given.top_logprobs or 0 if given.logprobs else None
        return generation(
            given, served, [ids], tokens, logprobs, "top_logprobs", prompt_field="messages",
            parses_tools=parses_tools, parses_reasoning=given.separate_reasoning, reasoning_opened=opened,
            skip_special_tokens=given.skip_special_tokens and not (parses_tools or given.separate_reasoning),
        )  # fmt: skip

    def whole(self, id: str, ask: Generation, pieces: Sequence[Piece], name: Name) -> dict[str, Any]:
        content = self._content("chat.completion", id, ask, pieces, name)
        for choice, piece in zip(content["choices"], pieces, strict=True):
            choice["message"] = {"role": "assistant", "content": piece.text, "refusal": None}
            if ask.parses_tools or ask.parses_reasoning:
                _parse(choice, piece.text, ask)
        return content

    def chunk(self, id: str, ask: Generation, pieces: Sequence[Piece], name: Name) -> dict[str, Any]:
        content = self._content("chat.completion.chunk", id, ask, pieces, name)
        for choice, piece in zip(content["choices"], pieces, strict=True):
            role = {} if piece.prompt is None else {"role": "assistant"}
            choice["delta"] = {**role, "content": piece.text}
        return content

    def _content(self, kind: str, id: str, ask: Generation, pieces: Sequence[Piece], name: Name) -> dict[str, Any]:
        choices = [{"index": piece.index, "logprobs": _logprobs(ask, piece, name), **ours(piece)} for piece in pieces]
        before = of_prompt(ask, pieces[0], name) if pieces and pieces[0].index == 0 else {}  # all have the same
        head = {"id": f"chatcmpl-{id}", "object": kind, "created": int(time.time()), "model": ask.model}
        return {**head, "choices": choices, **before}


def _parse(choice: dict[str, Any], text: str, ask: Generation) -> None:
    """Takes reasoning and tool calls out of a choice's text; `finish_reason` is then `tool_calls`, as OpenAI has it."""
    parsed = parse(text, tools=ask.parses_tools, reasoning=ask.parses_reasoning, opened=ask.reasoning_opened)
    message = choice["message"]
    message["content"] = parsed.content
    if ask.parses_reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": asdict(call)}
            for call in parsed.calls
        ]
        choice["finish_reason"] = "tool_calls" if choice["finish_reason"] == "stop" else choice["finish_reason"]


def _ids(given: ChatFields, served: Served) -> tuple[list[int], bool]:
    """Ids of the prompt, and whether it ends inside of reasoning."""
    tokenizer = served.tokenizer
    if tokenizer is None or not tokenizer.has_template:
        lacks = "tokenizer" if tokenizer is None else "chat template"
        text = f"messages need a chat template, and this engine's model folder has no {lacks}; use /v1/completions"
        raise BadField("messages", text, "no_chat_template")
    messages = [_message(place, message) for place, message in enumerate(given.messages)]
    if not messages:
        raise BadField("messages", "messages is empty; it must have at least one")
    try:
        text = tokenizer.render(messages, given.chat_template_kwargs or {}, given.tools)
    except ConfigError as error:
        raise BadField("messages", str(error)) from None
    return tokenizer.encode(text, given.add_special_tokens), text.rstrip().endswith(OPENING)


def _message(place: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as text, which templates concatenate."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadField("messages", f"messages[{place}] has the role {role!r:.40}; it must be text such as 'user'")
    parts = content if isinstance(content, list) else [{"type": "text", "text": "" if content is None else content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    written = [text for text in texts if isinstance(text, str)]
    if len(written) < len(parts):
        given = f"messages[{place}] has the content {content!r:.60}"
        raise BadField("messages", f'{given}; it must be text, or a list of {{"type": "text", "text": ...}}')
    return {**message, "content": "\n".join(written)}


def _logprobs(ask: Generation, piece: Piece, name: Name) -> dict[str, Any] | None:
    if ask.logprobs is None:
        return None
    part = piece.part
    values = exact(part.raw_logprobs if ask.raw else part.logprobs)

    def written(id: int, value: float | None) -> dict[str, Any]:
        text = name(id)
        return {"token": text, "logprob": value, "bytes": None if HALF in text else list(text.encode())}

    content = [
        {**written(id, value), "top_logprobs": [written(*each) for each in row[: ask.logprobs]]}
        for id, value, row in zip(
            part.token_ids,
            values,
            beside(part.token_ids, values, part.alternatives, ask.logprobs, ask.raw),
            strict=True,
        )
    ]
    return {"content": content, "refusal": None}
