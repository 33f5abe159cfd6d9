"""OpenAI's `POST /v1/chat/completions`: messages go through the chat template of the model's folder, text comes back.

A message's images are `image_url` parts with data URIs.

Fields and extras are those of `openai_api`; `chat_parsing` parses tool calls and reasoning. Continue a conversation
with `token_ids`, not with their text.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from rlloop.errors import ConfigError
from rlloop.models.vision_processor import file_of_uri
from rlloop.rollout.fleet.chat_parsing import OPENING, parse
from rlloop.rollout.fleet.generation import BadField, Generation, Piece, Served
from rlloop.rollout.fleet.openai_api import Fields, Name, beside, exact, generation, of_prompt, ours, read
from rlloop.rollout.fleet.text import HALF
from rlloop.types import Image, ModelInput

MOST_IMAGES = 64  # of one request


class ChatFields(Fields):
    """Fields of a body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None  # None: as many as there is room for
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
        request = read(body, ChatFields)
        ids, opened, prompt = _prompt(request, served)
        tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        if request.max_tokens not in (None, tokens):
            text = f"max_tokens is {request.max_tokens} and max_completion_tokens {tokens}; give one of the two"
            raise BadField("max_tokens", text)
        if request.echo:
            raise BadField("echo", "echo is True: chat answers with the assistant's message alone; leave it out")
        if request.top_logprobs and not request.logprobs:
            raise BadField("top_logprobs", f"top_logprobs is {request.top_logprobs}, which needs logprobs: true")
        if tokens == 0:
            raise BadField("max_tokens", "max_tokens is 0; it must be at least 1 (/v1/completions scores prompts)")
        parses_tools = bool(request.tools) and request.tool_choice != "none"
        if request.tool_choice not in ("auto", "none"):
            text = f"tool_choice is {request.tool_choice!r:.60}: this engine cannot force a call; give 'auto' or 'none'"
            raise BadField("tool_choice", text)
        if request.stream and (parses_tools or request.separate_reasoning):
            name = "tools" if parses_tools else "separate_reasoning"
            raise BadField("stream", f"stream is True, and {name} needs the whole text to be parsed; leave out either")
        tokens = max(1, served.longest - len(ids)) if tokens is None else tokens
        logprobs = request.top_logprobs or 0 if request.logprobs else None
        return generation(
            request, served, [ids], tokens, logprobs, "top_logprobs", prompt_field="messages",
            parses_tools=parses_tools, parses_reasoning=request.separate_reasoning, reasoning_opened=opened,
            image_prompt=prompt,
            skip_special_tokens=request.skip_special_tokens and not (parses_tools or request.separate_reasoning),
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
    """Move reasoning and tool calls out of a choice's text; with calls `finish_reason` is `tool_calls`, as OpenAI's."""
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


def _prompt(request: ChatFields, served: Served) -> tuple[list[int], bool, ModelInput | None]:
    """Ids of the prompt, whether it ends inside of reasoning, and itself where it has images."""
    tokenizer = served.tokenizer
    if tokenizer is None or not tokenizer.has_template:
        lacks = "tokenizer" if tokenizer is None else "chat template"
        text = f"messages need a chat template, and this engine's model folder has no {lacks}; use /v1/completions"
        raise BadField("messages", text, "no_chat_template")
    pictures: list[tuple[str, bytes]] = []
    messages = [_message(index, message, served, pictures) for index, message in enumerate(request.messages)]
    if not messages:
        raise BadField("messages", "messages is empty; it must have at least one")
    images = _images(pictures, served)
    try:
        text = tokenizer.render(messages, request.chat_template_kwargs or {}, request.tools)
    except ConfigError as error:
        raise BadField("messages", str(error)) from None
    ids, opened = tokenizer.encode(text, request.add_special_tokens), text.rstrip().endswith(OPENING)
    if served.images is None:
        return ids, opened, None
    try:  # also without images: a text must not contain placeholders
        prompt = served.images.prompt(ids, images)
    except ConfigError as error:
        raise BadField("messages", f"after its chat template, {error}") from None
    return prompt.token_ids, opened, prompt if images else None


def _message(index: int, message: dict[str, Any], served: Served, pictures: list[tuple[str, bytes]]) -> dict[str, Any]:
    """The message with its content as text, which templates concatenate; or as parts, where one of them is an image.

    `pictures` gets where each of these is, and its file.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadField("messages", f"messages[{index}] has the role {role!r:.40}; it must be text such as 'user'")
    parts = content if isinstance(content, list) else [{"type": "text", "text": "" if content is None else content}]
    read, before = list[dict[str, Any]](), len(pictures)
    for part in parts:
        fields = part if isinstance(part, dict) else {}
        kind, text = fields.get("type"), fields.get("text")
        if kind == "text" and isinstance(text, str):
            read.append({"type": "text", "text": text})
        elif kind == "image_url":
            where = f"messages[{index}]"
            pictures.append((where, _picture(where, fields.get("image_url"), served)))
            if len(pictures) > MOST_IMAGES:
                raise BadField("messages", f"messages has more than {MOST_IMAGES} images")
            read.append({"type": "image"})
        else:
            problem = f"messages[{index}] has the content {(part if isinstance(content, list) else content)!r:.60}"
            pictured = "" if served.images is None else ' and {"type": "image_url", ...}'
            known = f'{{"type": "text", "text": ...}}{pictured}'
            raise BadField("messages", f"{problem}; it must be text, or a list of {known}")
    if len(pictures) > before:
        return {**message, "content": read}
    return {**message, "content": "\n".join(part["text"] for part in read)}


def _picture(where: str, image_url: Any, served: Served) -> bytes:
    """The file in an `image_url` part. The URL must be a data URI; this server downloads nothing."""
    if served.images is None:
        problem = f"{where} has an image, and this engine takes text alone"
        raise BadField("messages", f"{problem}; models that read images take them behind `rlloop serve engine`")
    url = image_url.get("url") if isinstance(image_url, dict) else image_url
    try:
        return file_of_uri(url if isinstance(url, str) else repr(url))
    except ConfigError as error:
        raise BadField("messages", f"{where} has an image_url that cannot be read: {error}") from None


def _images(pictures: list[tuple[str, bytes]], served: Served) -> list[Image]:
    """All at a time; one after the other to say where a wrong one is."""
    if served.images is None:
        return []
    try:
        return served.images.images([content for _, content in pictures])
    except ConfigError:
        for where, content in pictures:
            try:
                served.images.image(content)
            except ConfigError as error:
                raise BadField("messages", f"{where}: {error}") from None
        raise


def _logprobs(ask: Generation, piece: Piece, name: Name) -> dict[str, Any] | None:
    if ask.logprobs is None:
        return None
    segment = piece.part
    values = exact(segment.raw_logprobs if ask.raw else segment.logprobs)

    def written(id: int, value: float | None) -> dict[str, Any]:
        text = name(id)
        return {"token": text, "logprob": value, "bytes": None if HALF in text else list(text.encode())}

    content = [
        {**written(id, value), "top_logprobs": [written(*each) for each in row[: ask.logprobs]]}
        for id, value, row in zip(
            segment.token_ids,
            values,
            beside(segment.token_ids, values, segment.alternatives, ask.logprobs, ask.raw),
            strict=True,
        )
    ]
    return {"content": content, "refusal": None}
