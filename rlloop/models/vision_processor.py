"""The image processor of a model's folder (`preprocessor_config.json`): from a picture to patches for the tower.

One definition, on Pillow and numpy, for prompts of training, engines and servers. Its arrays are those of transformers'
`Qwen2VLImageProcessorPil`; transformers' default processor resizes by torchvision, whose pixels differ.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.errors import ConfigError, ModelError
from rlloop.inputs import BytePatches, Image, ModelInput
from rlloop.models.architecture import ModelConfig, VisionConfig
from rlloop.models.config import read_config
from rlloop.models.config_reader import Keys, read_json

FILE = "preprocessor_config.json"
TYPES = ("Qwen2VLImageProcessorFast", "Qwen2VLImageProcessor", "Qwen2VLImageProcessorPil", "Qwen3VLImageProcessor")
BICUBIC = 3
MOST_BYTES, MOST_PIXELS = 32 << 20, 1 << 26  # of a picture that comes as a file
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SLIMMEST = 200  # longer side by the shorter one
INERT = (
    "processor_class", "image_processor_type", "feature_extractor_type", "return_tensors", "data_format", "device",
    "input_data_format", "disable_grouping", "default_to_square", "image_seq_length", "do_pad", "pad_size",
)  # fmt: skip


@dataclass(frozen=True)
class ImageProcessor:
    """Resizes, normalises and cuts pictures for a tower.

    Sides are rounded to multiples of a merged patch, and the area is kept from `least` to `most` pixels, at nearly the
    picture's aspect ratio.
    """

    vision: VisionConfig
    least: int = 56 * 56
    most: int = 28 * 28 * 1280
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    factor: float = 1 / 255  # of each byte, before it is normalised

    @classmethod
    def of_folder(cls, folder: str | Path) -> ImageProcessor:
        """The processor of a model's folder. Raises `ModelError` for a text-only model, and for a processor that is
        missing or another model's."""
        config = read_config(folder)
        if config.vision is None:
            raise ModelError(f"{folder} is a {config.architecture}, which reads text only")
        return _read_folder(folder, config.vision)

    @classmethod
    def if_any(cls, folder: str | Path) -> ImageProcessor | None:
        """None for a folder whose model reads text alone. Raises `ModelError` as `of_folder`."""
        vision = read_config(folder).vision
        return None if vision is None else _read_folder(folder, vision)

    def to_config(self) -> dict[str, Any]:
        """The content of a preprocessor_config.json."""
        return {
            "image_processor_type": TYPES[0], "processor_class": "Qwen3VLProcessor", "do_convert_rgb": True,
            "do_resize": True, "do_rescale": True, "do_normalize": True, "resample": BICUBIC,
            "rescale_factor": self.factor, "image_mean": list(self.mean), "image_std": list(self.std),
            "size": {"shortest_edge": self.least, "longest_edge": self.most}, "patch_size": self.vision.patch_size,
            "temporal_patch_size": self.vision.temporal_patch_size, "merge_size": self.vision.merge_size,
        }  # fmt: skip

    def image(self, picture: Any) -> Image:
        """An image of a picture: the bytes of a file, a `PIL.Image.Image`, or pixels [H, W, 3] uint8.

        Raises `ConfigError` for files that are no pictures, broken or too large, for very slim pictures, and for
        numbers that are no bytes.
        """
        from PIL import Image as pillow

        if isinstance(picture, bytes):
            picture = _opened(picture)
        elif isinstance(picture, np.ndarray):
            if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
                raise ConfigError(f"a picture is {picture.dtype} {list(picture.shape)}; pixels are uint8 [H, W, 3]")
            picture = pillow.fromarray(picture)
        elif not isinstance(picture, pillow.Image):
            raise ConfigError(
                f"a picture is {picture!r:.80}; give a file's bytes (Path(...).read_bytes()), a PIL.Image.Image, or "
                "pixels [H, W, 3] uint8"
            )
        if picture.mode[0] in "IF":  # 16 or 32 bits, which the conversion would cut at 255
            raise ConfigError(f"a picture has pixels of Pillow's mode {picture.mode}; give 8 bits a channel")
        picture = picture.convert("RGB")
        width, height = self.size(picture.width, picture.height)
        pixels = np.asarray(picture.resize((width, height), pillow.Resampling.BICUBIC))
        return self._cut(pixels)

    def images(self, pictures: Sequence[Any]) -> list[Image]:
        """`image` of each, with its digest, several at a time: Pillow, numpy and SHA-256 let other threads run.

        One object that comes several times is prepared once: Pillow may still be reading its file. Together, those
        that are prepared at a time have as many pixels as one picture may have, so that small files of large pictures
        cannot fill the memory. Raises as `image`, for the first that does.
        """

        def digested(picture: Any) -> Image:
            image = self.image(picture)
            _ = image.digest
            return image

        distinct = {id(picture): picture for picture in pictures}
        if len(distinct) < 2:
            made = map(digested, distinct.values())
        else:
            largest = max(map(_pixels, distinct.values()))
            with ThreadPoolExecutor(max(1, min((os.cpu_count() or 1) + 4, MOST_PIXELS // largest))) as threads:
                made = threads.map(digested, distinct.values())
        images = dict(zip(distinct, made, strict=True))
        return [images[id(picture)] for picture in pictures]

    def features(self, width: int, height: int) -> int:
        """Placeholder tokens of a picture of this size in pixels, in either orientation."""
        wide, tall = self.size(width, height)
        return wide * tall // (self.vision.patch_size * self.vision.merge_size) ** 2

    def size(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in pixels that a picture of this size is resized to."""
        if min(width, height) < 1 or max(width, height) > SLIMMEST * min(width, height):
            raise ConfigError(
                f"a picture is {width} x {height} pixels; the longer side may be at most {SLIMMEST} times the other"
            )
        side = self.vision.patch_size * self.vision.merge_size
        tall, wide = round(height / side) * side, round(width / side) * side
        if tall * wide > self.most:
            shrink = math.sqrt(height * width / self.most)
            tall, wide = (max(side, math.floor(each / shrink / side) * side) for each in (height, width))
        elif tall * wide < self.least:
            grow = math.sqrt(self.least / (height * width))
            tall, wide = (math.ceil(each * grow / side) * side for each in (height, width))
        return wide, tall

    def _cut(self, pixels: np.ndarray) -> Image:
        """[H, W, 3] uint8 -> patches in the tower's order: squares of merged ones, row by row."""
        size, merge, channels = self.vision.patch_size, self.vision.merge_size, pixels.shape[2]
        rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
        squares = pixels.reshape(rows // merge, merge, size, columns // merge, merge, size, channels)
        patches = squares.transpose(0, 3, 1, 4, 6, 2, 5)  # squares, patches of one, channel, pixels
        codes = patches.reshape(rows * columns, channels, size * size)
        return Image(BytePatches(codes, self.numbers, self.vision.temporal_patch_size), rows, columns, pixels)

    @cached_property
    def numbers(self) -> np.ndarray:
        """[3, 256] float32: each byte of each channel, normalised."""
        scaled = (np.arange(256, dtype=np.float64) * self.factor).astype(np.float32)
        return (scaled - np.array(self.mean, np.float32)[:, None]) / np.array(self.std, np.float32)[:, None]

    def prompt(self, token_ids: Sequence[int], images: Sequence[Image]) -> ModelInput:
        """A prompt in which one placeholder token stands for each image, in order, with as many as it needs.

        Raises `ConfigError` where placeholders and images do not match.
        """
        token = self.vision.image_token_id
        if (count := list(token_ids).count(token)) != len(images):
            raise ConfigError(
                f"the prompt has {count} placeholders (token {token}) and {len(images)} images; give one for each"
            )
        ids, positions, left = list[int](), list[int](), iter(images)
        for each in token_ids:
            if each != token:
                ids.append(each)
                continue
            image = next(left)
            features = image.height * image.width // self.vision.merge_size**2
            positions += range(len(ids), len(ids) + features)
            ids += [token] * features
        return ModelInput.with_images(ids, positions, images) if images else ModelInput(ids)


def with_numbers(config: ModelConfig, folder: str | Path) -> ModelConfig:
    """`config` with the numbers of the folder's processor, by which images of another one are refused; as it is where
    the folder has no processor that rlloop reads."""
    if config.vision is None:
        return config
    try:
        numbers = _read_folder(folder, config.vision).numbers
    except ModelError:
        return config
    return replace(config, vision=replace(config.vision, numbers=numbers))


def file_of_uri(uri: str) -> bytes:
    """The file in a data URI, `data:image/png;base64,...`. Raises `ConfigError` for other URIs and wrong or too long
    base64."""
    head, _, data = uri.partition(",")
    if not re.fullmatch(r"data:image/\w+;base64", head):
        raise ConfigError(
            f"{uri!r:.60} is no data URI of an image; it must be data:image/png;base64,... (or jpeg, webp, gif, bmp): "
            "nothing is fetched"
        )
    if len(data) * 3 // 4 > MOST_BYTES + 2:
        raise ConfigError(f"a data URI has a picture of some {len(data) * 3 // 4} bytes; at most {MOST_BYTES} are read")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: characters beyond ASCII
        raise ConfigError(f"a data URI of an image is no base64: {error}") from None


def file_size(content: bytes) -> tuple[int, int]:
    """(width, height) in pixels that a picture's file says it has; nothing is decoded. Raises `ConfigError` for files
    that are no pictures or too large."""
    picture = _opened(content, decode=False)
    return picture.width, picture.height


def _pixels(picture: Any) -> int:
    """Pixels of a picture that `ImageProcessor.image` takes, without decoding it; 1 for what it refuses."""
    if isinstance(picture, bytes):
        try:
            return math.prod(file_size(picture))
        except ConfigError:
            return 1
    size = picture.shape[:2] if isinstance(picture, np.ndarray) else getattr(picture, "size", ())
    return max(1, math.prod(size))


def _opened(content: bytes, *, decode: bool = True) -> Any:
    """A picture from a file's bytes. Its size is checked before its pixels are decoded."""
    from PIL import Image as pillow
    from PIL import ImageOps, UnidentifiedImageError

    if len(content) > MOST_BYTES:
        raise ConfigError(f"a picture has {len(content)} bytes; at most {MOST_BYTES} are read")
    try:
        # Pillow warns of pictures that are larger still; warnings are not to be changed while other threads run.
        picture = pillow.open(io.BytesIO(content), formats=FORMATS)
        if picture.width * picture.height > MOST_PIXELS:
            raise ConfigError(
                f"a picture has {picture.width} x {picture.height} pixels; at most {MOST_PIXELS} are decoded"
            )
        if not decode:
            return picture
        picture.load()
        return ImageOps.exif_transpose(picture)
    except UnidentifiedImageError as error:
        raise ConfigError(f"a picture of {len(content)} bytes is not one of {', '.join(FORMATS)}") from error
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise ConfigError(f"a picture is too large to decode: at most {MOST_PIXELS} pixels are") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"a picture of {len(content)} bytes is broken: {error}") from error


def _read_folder(folder: str | Path, vision: VisionConfig) -> ImageProcessor:
    file = Path(folder) / FILE
    if file.is_file():
        return _read(Keys(read_json(file), file=file.name), vision, file)
    whole = file.with_name("processor_config.json")  # transformers 5 saves all of a processor in one file
    section = read_json(whole).get("image_processor") if whole.is_file() else None
    if not isinstance(section, dict):
        raise ModelError(f"{folder} has no {FILE}, which says how its images are cut; copy the released one")
    return _read(Keys(section, file=whole.name), vision, whole)


def _read(keys: Keys, vision: VisionConfig, file: Path) -> ImageProcessor:
    kind = keys.copy().take("image_processor_type", TYPES[0])
    if kind not in TYPES:
        raise ModelError(f"{file}: image_processor_type is {kind!r}; rlloop has that of {', '.join(TYPES)}")
    for name in INERT:
        keys.take(name)
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        keys.fixed(name, True)
    for name in ("do_center_crop", "crop_size"):
        keys.fixed(name, None, False)
    keys.fixed("resample", BICUBIC)
    for name, wanted in (
        ("patch_size", vision.patch_size), ("temporal_patch_size", vision.temporal_patch_size),
        ("merge_size", vision.merge_size),
    ):  # fmt: skip
        value = keys.count(name, {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}[name])
        if value != wanted:
            raise ModelError(f"{file}: {name} is {value}, and the model's tower has {wanted}; it is another model's")
    size = keys.take("size", {})
    if not isinstance(size, dict):
        keys.refuse("size", size, "an object")
    for older, name in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if keys.has(older):
            size = {name: keys.count(older, most=1 << 40), **size}
        keys.take(older)
    edges = Keys(size, "size.", file.name)
    least, most = (edges.count(name, default, most=1 << 40) for name, default in (
        ("shortest_edge", 56 * 56), ("longest_edge", 28 * 28 * 1280)
    ))  # fmt: skip
    edges.refuse_the_rest()
    if least > most:
        keys.refuse("size", size, "shortest_edge (pixels of the least area) up to longest_edge (of the largest)")
    mean, std = (_three(keys, name, default) for name, default in (
        ("image_mean", (0.48145466, 0.4578275, 0.40821073)), ("image_std", (0.26862954, 0.26130258, 0.27577711))
    ))  # fmt: skip
    processor = ImageProcessor(vision, least, most, mean, std, keys.number("rescale_factor", 1 / 255))
    keys.refuse_the_rest()
    return processor


def _three(keys: Keys, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    values = keys.take(name, list(default))
    if not isinstance(values, list) or len(values) != 3 or not all(isinstance(x, int | float) for x in values):
        keys.refuse(name, values, "three numbers")
    if name == "image_std" and min(values) <= 0:
        keys.refuse(name, values, "three positive numbers")
    return tuple(map(float, values))
