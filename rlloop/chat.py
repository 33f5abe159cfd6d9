"""A model folder's tokenizer and chat template: converts messages to token ids without retokenising the policy's text.

The policy's turns keep their sampled ids. Rendering a whole conversation again would tokenise its text a second time,
perhaps differently, so only the part between two turns is rendered (`ChatTokenizer.between`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from rlloop.errors import ConfigError

Message = Mapping[str, Any]  # {"role": "tool", "content": "7"}, and other keys that the template reads
Template = Literal["auto", "chat", "raw"]

# With any of these, transformers loads the folder's own tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
KNOWN = 1024  # texts between two turns whose ids are kept
MARK = "\u2063policy\u2063"  # placeholder for the policy's text while the rest is rendered


class ChatTokenizer:
    """The tokenizer of a Hugging Face folder, with its chat template if it has one."""

    def __init__(
        self,
        folder: Path,
        *,
        template: Template = "auto",
        arguments: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`template`: chat (the folder's), raw (none), auto (chat if the folder has one). `arguments`: passed to it.

        Raises `ConfigError` for a folder without a tokenizer, or without the template asked for.
        """
        if template not in ("auto", "chat", "raw"):
            raise ConfigError(f"template is {template!r}; it must be auto, chat or raw")
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ConfigError(
                f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES[:3])}, ...); save the model's tokenizer in it"
            )
        from transformers import AutoTokenizer  # takes a second to import

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"transformers cannot load the tokenizer of {folder}: {error}") from error
        has_template = bool(self.tokenizer.chat_template)
        if template == "chat" and not has_template:
            raise ConfigError(
                f"template is chat, and {folder} has no chat template; save one with its tokenizer, or use raw"
            )
        self.is_chat = has_template and template != "raw"
        self._arguments = dict(arguments or {})
        self._eos = frozenset(eos_token_ids)
        self._between: dict[tuple[int | None, str], list[int]] = {}  # by the closing token and the messages

    def prompt(
        self, content: str | Sequence[Message], system: str | None = None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        """The policy's prompt as text and ids. Without a template, the contents, one a line, and no `tools`."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        if self.is_chat:
            text = self.render(messages, tools=tools)
            return text, self.ids(text)
        text = "\n".join(str(message["content"]) for message in messages)
        return text, list(self.tokenizer(text)["input_ids"])

    def between(self, messages: Sequence[Message], stop: int | None) -> list[int]:
        """Ids between two turns of the policy: the rest of its closing tokens, `messages`, its next turn's opening.

        `stop`: the token with which the policy closed its turn itself; None: it was cut off, so all closing tokens are
        included.
        """
        if not self.is_chat:
            return self.ids("\n" + "".join(f"{message['content']}\n" for message in messages))
        key = stop, repr(messages)
        if key not in self._between:  # environments often say the same, and a template takes a millisecond
            spoken = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}, *messages]
            rest = self.render(spoken).partition(MARK)[2]
            if stop is not None:
                rest = rest.removeprefix(self.tokenizer.decode([stop]))
            if len(self._between) == KNOWN:
                self._between.clear()
            self._between[key] = self.ids(rest)
        return list(self._between[key])

    def closing(self, eos_token_ids: Sequence[int]) -> int:
        """The token that ends the assistant's turn in the chat template; without one, the first end of sequence."""
        if self.is_chat and (rest := self.between([{"role": "user", "content": "."}], None)):
            return rest[0]
        return eos_token_ids[0]

    def ids(self, text: str) -> list[int]:
        """Ids of a text that is part of a longer one: without tokens for its beginning and end."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # a template has its own

    def decode(self, token_ids: Sequence[int]) -> str:
        """The policy's text, without a closing end-of-sequence token."""
        kept = token_ids[:-1] if token_ids and token_ids[-1] in self._eos else token_ids
        return self.tokenizer.decode(list(kept), skip_special_tokens=False)

    def render(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The template's text, up to the start of the assistant's turn. `arguments` override those of `__init__`;
        `tools` are JSON schemas of functions.

        Raises `ConfigError` for messages, arguments and tools that the template does not accept.
        """
        from jinja2 import TemplateError

        apply, more = self.tokenizer.apply_chat_template, arguments or {}
        if more and (taken := sorted(more.keys() & signature(apply).parameters.keys())):
            raise ConfigError(
                f"{', '.join(taken)} cannot be set for a chat template, only arguments that the template itself reads"
            )
        if tools:
            more = {**more, "tools": list(tools)}
        try:
            return apply(list(messages), tokenize=False, add_generation_prompt=True, **{**self._arguments, **more})
        except (TemplateError, TypeError) as error:  # templates refuse some roles, orders and contents
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(f"the chat template refuses messages of {roles}: {error}") from error
