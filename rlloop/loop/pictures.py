"""Pictures in the replies of environments: read by the model's own image processor, as those of prompts are.

A message's content then has parts: {"type": "image", "image": PICTURE}, beside {"type": "text", "text": "..."}. A
PICTURE is the bytes of a file, a `PIL.Image.Image`, or pixels [H, W, 3] uint8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlloop.chat import Message
from rlloop.errors import ConfigError
from rlloop.inputs import ModelInput

if TYPE_CHECKING:
    from rlloop.models.vision_processor import ImageProcessor  # imports torch

FORM = 'a picture is {"type": "image", "image": the bytes of a file, a PIL.Image.Image, or pixels [H, W, 3] uint8}'


def taken(messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """(the messages with {"type": "image"} alone for each picture, as chat templates read them; the pictures).

    Raises `ConfigError` for a part that is no picture.
    """
    bare, pictures = list[Message](), list[Any]()
    for message in messages:
        if not _has_pictures(message):
            bare.append(message)
            continue
        parts = list[Any]()
        for part in message["content"]:
            if not _is_picture(part):
                parts.append(part)
                continue
            if part.get("image") is None:
                raise ConfigError(f"a message has {part!r:.80}; {FORM}")
            pictures.append(part["image"])
            parts.append({"type": "image"})
        bare.append({**message, "content": parts})
    return bare, pictures


def as_recorded(messages: Sequence[Message], digests: Sequence[str]) -> list[Message]:
    """Messages for records: in place of parts their text, and as `images` the digests of the pictures read."""
    left, recorded = list(digests), list[Message]()
    for message in messages:
        if not _has_pictures(message):
            recorded.append(message)
            continue
        count = sum(map(_is_picture, message["content"]))
        text = "\n".join(str(part["text"]) for part in message["content"] if not _is_picture(part) and "text" in part)
        recorded.append({**message, "content": text, "images": left[:count]})
        left = left[count:]
    return recorded


def text_of(reply: ModelInput) -> set[int]:
    """The tokens that stand for no picture."""
    pictured = {at for span in reply.contents for at in range(span.start, span.end)}
    return {token for at, token in enumerate(reply.token_ids) if at not in pictured}


class ReplyReader:
    """Reads pictures for the model of `folder`, whose image processor is opened with the first of them."""

    def __init__(self, folder: Any) -> None:
        """`folder`: a function that returns the model's folder."""
        self._folder, self._processor = folder, None

    def read(self, token_ids: Sequence[int], pictures: Sequence[Any]) -> ModelInput:
        """The tokens between two turns, with one placeholder for each picture, as the model reads them.

        Raises `ConfigError` for what is no picture, broken or too large; for a model that reads text alone; and for a
        chat template that leaves pictures out.
        """
        processor = self._opened()
        return processor.prompt(token_ids, processor.images(pictures))

    def _opened(self) -> ImageProcessor:
        from rlloop.models.vision_processor import ImageProcessor

        if self._processor is None:
            self._processor = ImageProcessor.of_folder(self._folder())
        return self._processor


def _has_pictures(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, Sequence) and not isinstance(content, str) and any(map(_is_picture, content))


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"
