"""A model folder's own tokenizer and chat template: messages in, token ids out, and never a token written twice.

What the policy wrote stays as the ids that it sampled. Another turn is therefore not the whole conversation rendered
anew, which would tokenise the policy's words a second time and perhaps otherwise: only what the template puts between
two turns of the policy is rendered (`ChatTokenizer.between`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from rlloop.errors import ConfigError

Message = Mapping[str, Any]  # {"role": "tool", "content": "7"}, and what else the template reads
Template = Literal["auto", "chat", "raw"]

# Any one of these lets transformers load a tokenizer that is the folder's own.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
MARK = "\u2063policy\u2063"  # stands for what the policy wrote while the rest is rendered


class ChatTokenizer:
    """The tokenizer of a Hugging Face folder, with its chat template where it has one."""

    def __init__(
        self,
        folder: Path,
        *,
        template: Template = "auto",
        arguments: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """`template`: chat (the folder's), raw (none), auto (chat where the folder has one). `arguments` go to it.

        Raises `ConfigError` for a folder without a tokenizer, or without the template asked for.
        """
        if template not in ("auto", "chat", "raw"):
            raise ConfigError(f"template is {template!r}; it must be auto, chat or raw")
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ConfigError(
                f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES[:3])}, ...); save the model's tokenizer in it"
            )
        from transformers import AutoTokenizer  # a second of imports that reading a configuration should not take

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

    def prompt(self, content: str | Sequence[Message], system: str | None = None) -> tuple[str, list[int]]:
        """What the policy is to answer, as text and ids. Without a template: the contents, a line each."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        if self.is_chat:
            text = self.render(messages)
            return text, self._ids(text)
        text = "\n".join(str(message["content"]) for message in messages)
        return text, list(self.tokenizer(text)["input_ids"])

    def between(self, messages: Sequence[Message], stop: int | None) -> list[int]:
        """What stands between two turns of the policy: the rest of its closing, `messages`, the opening of its next.

        `stop` is the token by which the policy closed its turn itself; None: it was cut off, so the closing is whole.
        """
        if not self.is_chat:
            return self._ids("\n" + "".join(f"{message['content']}\n" for message in messages))
        spoken = [{"role": "user", "content": "."}, {"role": "assistant", "content": MARK}, *messages]
        rest = self.render(spoken).partition(MARK)[2]
        if stop is not None:
            rest = rest.removeprefix(self.tokenizer.decode([stop]))
        return self._ids(rest)

    def decode(self, token_ids: Sequence[int]) -> str:
        """What the policy wrote, as it wrote it; only a closing end-of-sequence token is left out."""
        kept = token_ids[:-1] if token_ids and token_ids[-1] in self._eos else token_ids
        return self.tokenizer.decode(list(kept), skip_special_tokens=False)

    def render(self, messages: Sequence[Message], arguments: Mapping[str, Any] | None = None) -> str:
        """The template's text, up to where the assistant begins. `arguments` go to it, over those of `__init__`.

        Raises `ConfigError` for messages and arguments that the template has no place for.
        """
        from jinja2 import TemplateError

        apply, more = self.tokenizer.apply_chat_template, arguments or {}
        if taken := sorted(more.keys() & signature(apply).parameters.keys()):
            raise ConfigError(
                f"{', '.join(taken)} cannot be set for a chat template, only what the template itself reads"
            )
        try:
            return apply(list(messages), tokenize=False, add_generation_prompt=True, **{**self._arguments, **more})
        except (TemplateError, TypeError) as error:  # templates refuse roles, orders and contents that they cannot put
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(f"the chat template refuses messages of {roles}: {error}") from error

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # a template writes its own
