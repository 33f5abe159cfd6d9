"""Model inputs as the wire has them, in either format: chunks of token ids and of pictures.

A picture is prepared by the model folder's own image processor, once for all inputs of a request, and stands in its
input as the placeholder tokens that it needs. The log keeps requests as they came, so a replay prepares the same files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlloop.errors import ConfigError
from rlloop.inputs import Image, ModelInput
from rlloop.models.config import read_config
from rlloop.models.vision_processor import ImageProcessor, file_size

BEGINS = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}  # a file of each format that the API names
MOST_PIXELS = 1 << 29  # of the distinct pictures of a request: small files may hold many


@dataclass(frozen=True)
class Picture:
    """A chunk with the file of an image."""

    data: bytes
    format: str
    expected_tokens: int | None = None  # the client's count, where it has one


Chunk = Picture | list[int]


@dataclass(frozen=True)
class Chunks:
    """An input of a request."""

    where: str  # names it in errors
    chunks: Sequence[Chunk]
    sampled: Sequence[range] = ()  # indices of tokens that a model drew, which may be any


class InputReader:
    """Makes inputs of one model."""

    def __init__(self, model: str, processor: ImageProcessor | None = None, positions: int = 0) -> None:
        """`model`: its name in errors; `processor`: None for a model that reads text only; `positions`: of the
        model, the most tokens of an input with pictures."""
        self._model, self._processor, self._positions = model, processor, positions

    @classmethod
    def of_folder(cls, folder: str | Path) -> InputReader:
        """The reader of a model's folder. Raises `ModelError` for one with a vision tower and no image processor."""
        config = read_config(folder)
        return cls(config.architecture, ImageProcessor.if_any(folder), config.max_positions)

    def read(self, inputs: Sequence[Chunks]) -> list[ModelInput]:
        """All inputs of a request. Sizes and counts of all are checked before any picture is decoded.

        Raises `ConfigError`, which names the input and the chunk.
        """
        lengths, pixels = dict[bytes, int](), 0  # placeholders by file
        for each in inputs:
            for where, picture in _pictures(each):
                _check_format(where, picture)
                if picture.data not in lengths:
                    lengths[picture.data], more = self._measured(where, picture)
                    pixels += more
                    if pixels > MOST_PIXELS:
                        raise ConfigError(
                            f"{where}: the request's pictures have more than {MOST_PIXELS} pixels together; send fewer "
                            "at a time"
                        )
                _check_count(where, picture, lengths[picture.data])
        for each in inputs:
            self._check_tokens(each, lengths)
        images = self._images(inputs, list(lengths))
        return [self._input(each, images) for each in inputs]

    def _measured(self, where: str, picture: Picture) -> tuple[int, int]:
        """Placeholders and pixels of a picture."""
        if self._processor is None:
            raise ConfigError(f"{where} is an image, and {self._model} reads text only; send token ids")
        try:
            width, height = file_size(picture.data)
            return self._processor.features(width, height), width * height
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def _check_tokens(self, each: Chunks, lengths: dict[bytes, int]) -> None:
        if self._processor is None:
            return
        token, at = self._processor.vision.image_token_id, 0
        for index, chunk in enumerate(each.chunks):
            if isinstance(chunk, Picture):
                at += lengths[chunk.data]
                continue
            for place in (at + place for place, id in enumerate(chunk) if id == token) if token in chunk else ():
                if not any(place in drawn for drawn in each.sampled):
                    raise ConfigError(
                        f"{each.where}, chunk {index}, has token {token} at index {place} of the input, the "
                        "placeholder of images; send an image chunk in its place. A sampled one can be trained on "
                        "where the datum's provenance names its sequence"
                    )
            at += len(chunk)
        if at > self._positions and any(isinstance(chunk, Picture) for chunk in each.chunks):
            raise ConfigError(
                f"{each.where} has {at} tokens with its images; the model has {self._positions} positions. Send "
                "smaller images, or fewer"
            )

    def _images(self, inputs: Sequence[Chunks], files: Sequence[bytes]) -> dict[bytes, Image]:
        """All at a time; one after the other to say where a broken one is."""
        if self._processor is None or not files:
            return {}
        try:
            return dict(zip(files, self._processor.images(files), strict=True))
        except ConfigError:
            for where, picture in (pair for each in inputs for pair in _pictures(each)):
                try:
                    self._processor.image(picture.data)
                except ConfigError as error:
                    raise ConfigError(f"{where}: {error}") from None
            raise

    def _input(self, each: Chunks, images: dict[bytes, Image]) -> ModelInput:
        ids, placeholders, own = list[int](), list[int](), list[Image]()
        for chunk in each.chunks:
            if not isinstance(chunk, Picture):
                ids += chunk
                continue
            assert self._processor is not None
            image, vision = images[chunk.data], self._processor.vision
            count = image.height * image.width // vision.merge_size**2
            placeholders += range(len(ids), len(ids) + count)
            ids += [vision.image_token_id] * count
            own.append(image)
        return ModelInput.with_images(ids, placeholders, own) if own else ModelInput.from_ids(ids)


TEXT_ONLY = InputReader("the model")


def _pictures(each: Chunks) -> Iterable[tuple[str, Picture]]:
    for index, chunk in enumerate(each.chunks):
        if isinstance(chunk, Picture):
            yield f"{each.where}, chunk {index}", chunk


def _check_format(where: str, picture: Picture) -> None:
    begins = BEGINS.get(picture.format)
    if begins is None or not picture.data.startswith(begins):
        problem = "which is no png or jpeg" if begins is None else "and its data are no such file"
        raise ConfigError(f"{where} is an image of format {picture.format!r:.40}, {problem}; send png or jpeg")


def _check_count(where: str, picture: Picture, tokens: int) -> None:
    if picture.expected_tokens is not None and picture.expected_tokens != tokens:
        raise ConfigError(
            f"{where} is an image with expected_tokens={picture.expected_tokens}, and this model's image processor "
            f"makes {tokens} tokens of it; count as the processor does, or leave expected_tokens out"
        )
