"""Choice of the sequences that `rlloop parity` compares: text, and prompts with images where both sides read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlloop.errors import ConfigError, ModelError
from rlloop.models.architecture import ModelConfig
from rlloop.models.config import read_config
from rlloop.models.vision_config import MARKS
from rlloop.models.vision_processor import ImageProcessor
from rlloop.parity_tool.recorded import is_run
from rlloop.parity_tool.sequences import Tokens, random_image_sequences, random_sequences, read_prompts
from rlloop.parity_tool.sides import model_folder

LENGTH = 64  # tokens of a random sequence
IMAGES = 4  # random sequences with a picture


@dataclass(frozen=True)
class Choice:
    sequences: list[Tokens]
    placeholder: int | None = None  # of a model that reads images: the token that stands for a part of one
    text_only: str = ""  # why no images are compared, where a side reads them


def choose(
    sides: Sequence[str], prompts: Path | None, count: int, length: int | None, images: int | None
) -> Choice:  # fmt: skip
    """Sequences of the file `prompts`, else `count` random ones, and `images` random ones with a picture.

    `length`: tokens of a random one, beside the picture's; None: 64, or as many as all models have positions for.
    `images`: None: 4 if both sides read images, else none; a number raises `ConfigError` where one does not. Raises
    `ConfigError` or `ModelError` for what a model cannot read.
    """
    models = {side: read_config(folder) for side in sides if (folder := model_folder(side)) is not None}
    readers = [(side, config.vision.image_token_id) for side, config in models.items() if config.vision is not None]
    placeholder = readers[0][1] if readers else None
    if prompts is not None:
        if images:
            raise ConfigError(f"--images is {images}, and the pictures of --prompts are its own; leave one of them out")
        texts = read_prompts(prompts, lambda: _processor(sides, models, readers))
        _refuse_beyond(texts, models)
        if placeholder is None or any(each.model_input is not None for each in texts):
            return Choice(texts, placeholder)
        return Choice(texts, placeholder, f"Text alone is compared: {prompts} has token ids and no images")
    texts = _texts(models, count, length)
    if placeholder is None:
        if images:
            raise ConfigError(f"--images is {images}, and neither side reads images; leave it out")
        return Choice(texts)
    try:
        if images == 0:
            return Choice(texts, placeholder)
        _refuse_text_only(sides, models)
        if any(is_run(Path(side)) for side in sides):  # compared are its own completions, with their images
            return Choice(texts, placeholder)
        return Choice(texts + _pictured(models, readers[0][0], images or IMAGES, length), placeholder)
    except (ConfigError, ModelError) as error:
        if images:
            raise
        return Choice(texts, placeholder, f"Text alone is compared: {error}")


def _processor(
    sides: Sequence[str], models: Mapping[str, ModelConfig], readers: Sequence[tuple[str, int]]
) -> ImageProcessor:  # fmt: skip
    """The processor of the first side that reads images. Raises `ConfigError` or `ModelError` where one takes none."""
    _refuse_text_only(sides, models)
    folder = model_folder(readers[0][0]) if readers else None
    if folder is None:
        raise ConfigError("the prompts have images, and no side is a model that reads them")
    return ImageProcessor.of_folder(folder)


def _refuse_text_only(sides: Sequence[str], models: Mapping[str, ModelConfig]) -> None:
    """Raises `ConfigError` by the name of a side that takes no images."""
    for side in sides:
        if side in models and models[side].vision is None:
            raise ConfigError(f"{side} is a {models[side].architecture}, which reads no images")
        if Path(side).is_file():
            raise ConfigError(f"{side} has token ids and no images, as logprobs of other programs (vLLM)")


def _texts(models: Mapping[str, ModelConfig], count: int, length: int | None) -> list[Tokens]:
    """Random texts within the vocabulary and the positions of every model; none without a model."""
    if not models:
        return []
    most = _most(models)
    if length is not None and length > most:
        raise ConfigError(f"--length is {length}, and the model has {most} positions; it must be at most {most}")
    return random_sequences(_vocabulary(models), count, length or LENGTH, most)


def _pictured(models: Mapping[str, ModelConfig], reader: str, count: int, length: int | None) -> list[Tokens]:
    folder, raw = model_folder(reader), models[reader].raw
    assert folder is not None
    marks = [raw[name] for name in ("vision_start_token_id", "vision_end_token_id") if isinstance(raw.get(name), int)]
    return random_image_sequences(
        ImageProcessor.of_folder(folder), _vocabulary(models), count, length or LENGTH, _most(models), marks=marks
    )


def _most(models: Mapping[str, ModelConfig]) -> int:
    return min(config.max_positions for config in models.values())


def _refuse_beyond(sequences: Sequence[Tokens], models: Mapping[str, ModelConfig]) -> None:
    """Raises `ConfigError` for ids that a model does not know, and for more tokens than it has positions."""
    for index, each in enumerate(sequences):
        for side, config in models.items():
            if (largest := max(each.ids)) >= config.vocab_size:
                raise ConfigError(
                    f"sequence {index} of --prompts has token {largest}; the ids of {side} are 0 to "
                    f"{config.vocab_size - 1}"
                )
            if len(each.ids) > config.max_positions:
                raise ConfigError(
                    f"sequence {index} of --prompts has {len(each.ids)} tokens; {side} has {config.max_positions} "
                    "positions"
                )


def _vocabulary(models: Mapping[str, ModelConfig]) -> list[int]:
    """Ids of every model, without the marks and placeholders of images, which mean nothing in a random text."""
    without = set()
    for config in models.values():
        if config.vision is not None:
            without |= {*config.vision.placeholders.values(), *(config.raw.get(name) for name in MARKS)}
    return [id for id in range(min(config.vocab_size for config in models.values())) if id not in without]
