"""Incremental text of token ids: never half a character, and never past a stop string."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlloop.chat import TOKENIZER_FILES, ChatTokenizer, Message

HALF = "\ufffd"  # written by tokenizers for bytes that are not, or not yet, a character
PATIENCE = 16  # tokens after which such bytes are accepted as they are
Decode = Callable[[list[int]], str]


class Tokenizer(Protocol):
    """A model folder's tokenizer, as a server needs it. Thread-safe."""

    @property
    def has_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str: ...

    def render(
        self, messages: Sequence[Message], arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The chat template's text, up to where the assistant begins. Raises `ConfigError`."""
        ...


class FolderTokenizer:
    """A folder's tokenizer. `encode` reconfigures its tokenizer, which is locked; `decode` uses a second one."""

    def __init__(self, folder: Path) -> None:
        self._chat = ChatTokenizer(folder)
        self._tokenizer, self._lock = self._chat.tokenizer, threading.Lock()
        self._decode = _decode_of(copy.deepcopy(self._tokenizer))
        self.has_template = self._chat.is_chat

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        with self._lock:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render(
        self, messages: Sequence[Message], arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        with self._lock:
            return self._chat.render(messages, arguments, tools)


def _decode_of(tokenizer: Any) -> Callable[..., str]:
    """`tokenizer.decode`; where transformers would only pass it on, the decode of the tokenizer inside: faster,
    and streams decode twice a token."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    passes_on = kind.decode is PreTrainedTokenizerBase.decode and kind._decode is PreTrainedTokenizerFast._decode
    if passes_on and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode
    return tokenizer.decode


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """A model folder's tokenizer; None if it has none."""
    return FolderTokenizer(folder) if any((folder / name).is_file() for name in TOKENIZER_FILES) else None


class Detokenizer:
    """Incremental detokenizer: each token's addition to the text; all additions together are `decode` of all ids.

    A window of the last tokens is decoded, since a token's text depends on its neighbours. `context`: preceding tokens,
    whose text is not repeated.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context)  # what was written last, then what is not written yet
        self._old = len(self._window)  # how many tokens of it are written

    def feed(self, token_ids: Sequence[int]) -> str:
        text, written = self._decode([*self._window, *token_ids]), self._written()
        if text == written:
            return ""  # special tokens that are skipped
        self._window += token_ids
        if text.endswith(HALF) and len(self._window) - self._old < PATIENCE:
            return ""
        return self._move(text, written)

    def end(self) -> str:
        """The rest of the text, once no token follows."""
        return self._move(self._decode(self._window), self._written()) if len(self._window) > self._old else ""

    def _written(self) -> str:
        return self._decode(self._window[: self._old]) if self._old else ""

    def _move(self, text: str, written: str) -> str:
        self._window = self._window[self._old :]
        self._old = len(self._window)
        return text[len(written) :]


class Writer:
    """The final text of one choice so far: stop strings, and text that may become one, are held back.

    A stop string ends the choice with the token that completes it, even inside the token, so tokens and text end
    together; of two, the one completed first counts. `least`: tokens before which stops are ignored.
    """

    def __init__(
        self, decode: Decode, stops: Sequence[str] = (), *, keep_stop: bool = False, least: int = 0,
        context: Sequence[int] = (), by_token: bool = False,
    ) -> None:  # fmt: skip
        """`keep_stop`: the text ends with the stop, not before it. `by_token`: fill `offsets`."""
        self._stops, self._keep_stop, self._least = stops, keep_stop, least
        self._by_token = by_token or bool(stops)
        self._detokenizer = Detokenizer(decode, context)
        self._held = ""
        self.length = 0  # characters, with those that are held back
        self.count = 0  # tokens taken
        self.stop: str | None = None  # that ended it
        self.offsets: list[int] = []  # [count] where in the text each token begins

    def write(self, token_ids: Sequence[int]) -> str:
        if not self._by_token:
            self.count += len(token_ids)
            return self._detokenizer.feed(token_ids)
        pieces = []
        for id in token_ids:
            if self.stop is not None:
                break
            self.count += 1
            self.offsets.append(self.length)
            pieces.append(self._release(self._detokenizer.feed([id])))
        return "".join(pieces)

    def end(self) -> str:
        """The text that was held back."""
        if self.stop is not None:
            return ""
        rest, self._held = self._held + self._detokenizer.end(), ""
        return rest

    def _release(self, piece: str) -> str:
        self.length += len(piece)
        if not self._stops:
            return piece
        text, old = self._held + piece, len(self._held)
        ends = []
        for stop in self._stops if self.count >= self._least else ():
            if (at := text.find(stop, max(0, old - len(stop) + 1))) >= 0:
                ends.append((at + len(stop), at, stop))
        if ends:
            end, at, self.stop = min(ends)
            return text[: end if self._keep_stop else at]
        most = min(len(text), max(map(len, self._stops)) - 1)
        held = next((n for n in range(most, 0, -1) if any(s.startswith(text[-n:]) for s in self._stops)), 0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
