"""The sequences that `rlloop parity` compares: of a file, or drawn at random, as text and with pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from rlloop.errors import ConfigError
from rlloop.inputs import Image
from rlloop.models.vision_processor import MOST_BYTES, ImageProcessor, file_of_uri
from rlloop.parity.token_types import TYPES, of_image
from rlloop.types import ModelInput, SamplingParams

PROMPT, COMPLETION = "prompt", "completion"
FEATURES = 16  # of a random picture, at least
SHORTEST = 4  # tokens of text beside a picture


@dataclass(frozen=True)
class Tokens:
    """A sequence to compare. All tokens are scored, the prompt's too, but for the first, which nothing predicts."""

    ids: list[int]
    prompt: int  # number of the prompt's tokens
    types: list[str] = field(default_factory=list)  # a label for each token; empty: prompt and completion
    sampling: SamplingParams | None = None  # the distribution to score under; then only the completion is compared
    starts: list[int] = field(default_factory=list)  # positions at which turns begin; empty: the prompt's end
    model_input: ModelInput | None = None  # the prompt with its images; None: text

    @property
    def turn_offsets(self) -> np.ndarray:
        """[tokens - 1]: for each token but the first, the number of tokens of its turn before it."""
        at, starts = np.arange(1, len(self.ids)), np.array([0, *(self.starts or [self.prompt])])
        begun = np.searchsorted(starts, at, side="right") - 1
        return np.where(begun > 0, at - starts[begun], 0)

    @property
    def beginning(self) -> ModelInput | list[int]:
        """The prompt, as engines take it."""
        return self.ids[: self.prompt] if self.model_input is None else self.model_input.first(self.prompt)

    @property
    def read(self) -> ModelInput:
        """All tokens but the last, from which nothing is predicted."""
        if self.model_input is None:
            return ModelInput(self.ids[:-1], given=self.prompt)
        positions = self.model_input.positions_at(0, len(self.ids) - 1)
        return ModelInput(self.ids[:-1], positions, self.model_input.contents, given=self.prompt)

    def lacks_images(self, placeholder: int) -> bool:
        """True if the prompt has placeholders of images, and the images are not known."""
        return self.model_input is None and placeholder in self.ids[: self.prompt]

    @cached_property
    def labels(self) -> list[str]:
        """Each token's type. With images those of `parity/k3_text` and `parity/k3_image`."""
        if self.types:
            return self.types
        if self.model_input is None or not self.model_input.contents:
            return [PROMPT] * self.prompt + [COMPLETION] * (len(self.ids) - self.prompt)
        return [TYPES[0], *(TYPES[int(each)] for each in of_image(self.model_input, len(self.ids) - 1))]


@dataclass(frozen=True)
class Scored:
    """One side's scores of one sequence, by position. NaN: no logprob."""

    logprobs: np.ndarray  # [tokens] float32; [0] is NaN
    top: np.ndarray | None = None  # [tokens] int64: the most likely token at each position; [0] is −1
    experts: np.ndarray | None = None  # [tokens, layers, k]

    @classmethod
    def of_predictions(cls, logprobs: np.ndarray, top: np.ndarray, experts: np.ndarray | None) -> Scored:
        """Scores from the predictions for positions 1 and on."""
        first = np.array([np.nan], np.float32)
        return cls(np.concatenate([first, logprobs]).astype(np.float32), np.concatenate([[-1], top]), experts)


def read_prompts(path: Path, processor: Callable[[], ImageProcessor]) -> list[Tokens]:
    """Sequences to score or to continue, from lines of `prompt_ids` and optional `token_ids`, `token_types`, `images`.

    `images`: for each placeholder among the prompt's ids a picture, as a data URI or as a path from the file's folder.
    `processor`: of a side that reads images; called where a line has some. Raises `ConfigError` or `ModelError`.
    """
    sequences = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip():
            sequences.append(_prompt_of(line, path, number, processor))
    if not sequences:
        raise ConfigError(f"{path} has no sequences; give one JSON object a line")
    return sequences


def _prompt_of(line: str, path: Path, number: int, processor: Callable[[], ImageProcessor]) -> Tokens:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
        prompt, completion = list(row["prompt_ids"]), list(row.get("token_ids", []))
        types, pictures = list(row.get("token_types", [])), row.get("images", [])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {reason(error)}; give an object with prompt_ids") from None
    if any(not isinstance(id, int) or id < 0 for id in (*prompt, *completion)) or not prompt:
        raise ConfigError(f"{where}: prompt_ids and token_ids are lists of token ids, and a prompt has one at least")
    if not isinstance(pictures, list) or not all(isinstance(each, str) for each in pictures):
        raise ConfigError(f"{where}: images is {pictures!r:.60}; give a list of paths and data URIs")
    if not pictures:
        if types and len(types) != len(prompt) + len(completion):
            raise ConfigError(
                f"{where}: token_types has {len(types)} labels for {len(prompt) + len(completion)} tokens"
            )
        return Tokens(prompt + completion, len(prompt), types)
    if types:
        raise ConfigError(f"{where}: tokens beside images are of the types text and image; leave token_types out")
    reader = processor()
    try:
        images = [reader.image(_file(each, path.parent)) for each in pictures]
        read = reader.prompt(prompt, images)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if read.contents[-1].end == len(read) + len(completion):
        raise ConfigError(f"{where}: it ends with an image; give tokens that follow")
    return Tokens(read.token_ids + completion, len(read), model_input=read)


def _file(picture: str, folder: Path) -> bytes:
    if ":" in picture.partition("/")[0]:  # data:image/..., https://...
        return file_of_uri(picture)
    try:
        if (size := (folder / picture).stat().st_size) > MOST_BYTES:
            raise ConfigError(f"the picture {picture} has {size} bytes; at most {MOST_BYTES} are read")
        return (folder / picture).read_bytes()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture {picture!r:.80} cannot be read: {getattr(error, 'strerror', error)}") from None


def reason(error: Exception) -> str:
    return f"it has no {error.args[0]}" if isinstance(error, KeyError) else str(error)


def random_sequences(vocabulary: Sequence[int], count: int, length: int, most: int) -> list[Tokens]:
    """Uniformly random tokens, half prompt, half completion: for models without a tokenizer. `most`: tokens of the
    longest."""
    rng, ids = np.random.default_rng(0), np.array(vocabulary)
    lengths = [min(length + i, most) for i in range(count)]
    return [Tokens(ids[rng.integers(0, len(ids), size)].tolist(), size // 2 or 1) for size in lengths]


def random_image_sequences(
    processor: ImageProcessor, vocabulary: Sequence[int], count: int, length: int, most: int, seed: int = 0,
    marks: Sequence[int] = (),
) -> list[Tokens]:  # fmt: skip
    """Random tokens around a random picture, half of them prompt, half completion.

    `length`: tokens beside the picture's; `most`: of a sequence with them. `marks`: the tokens before and after a
    picture, where the model has some. Raises `ConfigError` where the processor's smallest picture leaves no room.
    """
    rng, ids, vision = np.random.default_rng(seed), np.array(vocabulary), processor.vision
    before, after = list(marks[:1]), list(marks[1:])
    sequences = []
    for index in range(count):
        image = _random_image(rng, processor, most - len(marks) - SHORTEST)
        room = most - len(marks) - image.shape[0] // vision.merge_size**2
        text = ids[rng.integers(0, len(ids), max(SHORTEST, min(length + index, room)))].tolist()
        half, quarter = len(text) // 2, len(text) // 4
        asked = [*text[:quarter], *before, vision.image_token_id, *after, *text[quarter:half]]
        prompt = processor.prompt(asked, [image])
        sequences.append(Tokens(prompt.token_ids + text[half:], len(prompt), model_input=prompt))
    return sequences


def _random_image(rng: np.random.Generator, processor: ImageProcessor, most: int) -> Image:
    """A drawn picture of random size, at most `most` features. Raises `ConfigError` if all sizes have more."""
    merge = processor.vision.merge_size
    side = processor.vision.patch_size * merge
    area, ratio = max(processor.least, FEATURES * side**2) * rng.uniform(1, 1.5), rng.uniform(0.5, 2)
    image = None
    for pixels, wide in ((area, ratio), (processor.least, 1.0)):  # the least where the first has too many
        width, height = (max(side, round((pixels * each) ** 0.5)) for each in (wide, 1 / wide))
        image = processor.image(draw(rng, width, height))
        if image.shape[0] // merge**2 <= most:
            return image
    raise ConfigError(f"its processor's smallest picture is {image}, which leaves no room for text in its positions")


def draw(rng: np.random.Generator, width: int, height: int) -> np.ndarray:
    """[height, width, 3] uint8: rectangles of random colours on a ground of another, with a little noise."""
    picture = np.empty((height, width, 3), np.int64)
    picture[:] = rng.integers(0, 256, 3)
    for _ in range(4):
        (top, bottom), (left, right) = (np.sort(rng.integers(0, side + 1, 2)) for side in (height, width))
        picture[top:bottom, left:right] = rng.integers(0, 256, 3)
    return (picture + rng.integers(-8, 9, picture.shape)).clip(0, 255).astype(np.uint8)
