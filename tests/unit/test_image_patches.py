"""Patches of pictures: kept as bytes, with the bits, and the digests, of the arithmetic in numbers."""

from __future__ import annotations

import io
import pickle
import time
from hashlib import sha256
from threading import Barrier, Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as pillow

from rlloop.errors import ConfigError
from rlloop.inputs import BytePatches, Image, ModelInput
from rlloop.models import vision, vision_processor
from rlloop.models.vision import looked_up, patches_on
from rlloop.models.vision_processor import ImageProcessor

FACTORS = {"halves": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), "photos": ((0.481, 0.457, 0.408), (0.268, 0.261, 0.275))}


def processor(mean: Any, std: Any, size: int = 16, merge: int = 2, frames: int = 2) -> ImageProcessor:
    vision: Any = SimpleNamespace(patch_size=size, merge_size=merge, temporal_patch_size=frames)
    return ImageProcessor(vision, 1024, 1 << 18, mean, std)


def pictures(count: int = 4) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in rng.integers(30, 300, (count, 2)).tolist()]


def cut(pixels: np.ndarray, made_by: ImageProcessor) -> np.ndarray:
    """What transformers' processor does: every number by itself, and then the cut."""
    scaled = (pixels.astype(np.float64) * made_by.factor).astype(np.float32)
    normal = (scaled - np.array(made_by.mean, np.float32)) / np.array(made_by.std, np.float32)
    size, merge = made_by.vision.patch_size, made_by.vision.merge_size
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    squares = normal.reshape(rows // merge, merge, size, columns // merge, merge, size, 3)
    patches = squares.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    return np.repeat(patches, made_by.vision.temporal_patch_size, axis=5).reshape(rows * columns, -1)


@pytest.mark.parametrize("shape", [(16, 2, 2), (14, 2, 2), (8, 3, 1)])
@pytest.mark.parametrize("factors", FACTORS)
def test_patches_and_digests_are_those_of_the_arithmetic_in_numbers(factors, shape):
    made_by = processor(*FACTORS[factors], *shape)
    for image, alone in zip(made_by.images(pictures()), map(made_by.image, pictures()), strict=True):
        assert image.picture is not None
        wanted = cut(image.picture, made_by)
        assert image.digest == alone.digest == Image(wanted, image.height, image.width).digest
        assert image.digest == sha256(b"%d %d " % (image.height, image.width) + wanted.tobytes()).hexdigest()
        assert image.shape == wanted.shape == image.patches.shape
        assert image.patches.tobytes() == alone.patches.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_a_device_looks_up_are_the_hosts(dtype):
    for image in processor(*FACTORS["photos"]).images(pictures()):
        assert image.bytes is not None
        wanted = torch.from_numpy(image.patches).to(dtype)
        cpu = torch.device("cpu")
        for made in (looked_up([image.bytes], cpu, dtype), patches_on([image], cpu, dtype)):
            assert made.dtype == dtype
            assert made.is_contiguous()
            assert torch.equal(made, wanted)


def test_a_device_looks_up_the_numbers_of_all_pictures_in_a_row_of_one_processor_at_once(monkeypatch):
    """PyTorch's meta device stands for a GPU."""
    photos = processor(*FACTORS["photos"]).images(pictures())
    halves = processor(*FACTORS["halves"]).images(pictures(2))
    numbers = Image(photos[0].patches, photos[0].height, photos[0].width)
    meta, runs = torch.device("meta"), []

    def counted(patches: Any, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        runs.append(len(patches))
        wanted = torch.cat([torch.from_numpy(each.decoded()) for each in patches]).to(dtype)
        assert torch.equal(looked_up(patches, torch.device("cpu"), dtype), wanted)
        return looked_up(patches, device, dtype)

    monkeypatch.setattr(vision, "looked_up", counted)
    monkeypatch.setattr(vision, "on_device", lambda array, device: torch.from_numpy(array).to(device))
    order = [*photos, numbers, *halves, photos[0]]
    assert patches_on(order, meta, torch.bfloat16).shape == (sum(each.shape[0] for each in order), photos[0].shape[1])
    assert runs == [4, 2, 1]


def test_a_prompt_of_pictures_makes_no_numbers(monkeypatch):
    made_by = processor(*FACTORS["halves"])
    image = made_by.image(pictures()[0])
    count = image.shape[0] // 4
    _ = image.digest
    monkeypatch.setattr(BytePatches, "decoded", lambda *_: pytest.fail("patches were decoded"))
    prompt = ModelInput.with_images([1, *[7] * count, 2], range(1, 1 + count), [image])
    assert len(prompt.token_ids) == count + 2


def test_what_an_image_needs_is_small_and_travels():
    image = processor(*FACTORS["halves"]).image(pictures()[0])
    written = pickle.dumps(image)
    assert len(written) < image.shape[0] * image.shape[1] * 2  # bytes, and the picture; not the numbers
    assert pickle.loads(written).digest == image.digest


def test_of_several_pictures_the_first_wrong_one_is_refused():
    made_by, slim = processor(*FACTORS["halves"]), np.zeros((2, 900, 3), np.uint8)
    with pytest.raises(ConfigError, match="900 x 2 pixels"):
        made_by.images([*pictures(2), slim, b"no picture"])
    assert made_by.images([]) == []


def test_a_picture_that_comes_twice_is_prepared_once(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    one, other = pictures(2)
    pillow.fromarray(one).save(tmp_path / "one.png")
    made_by = processor(*FACTORS["halves"])
    with pillow.open(tmp_path / "one.png") as read_late:
        images = made_by.images([read_late, other, read_late])
    assert images[0] is images[2]
    assert [each.digest for each in images[:2]] == [made_by.image(each).digest for each in (one, other)]


def test_wrong_patches_are_refused():
    numbers, codes = np.zeros((3, 256), np.float32), np.zeros((6, 3, 4), np.uint8)
    assert Image(BytePatches(codes, numbers, 2), 2, 3).shape == (6, 24)
    with pytest.raises(ConfigError, match="one row a patch"):
        Image(BytePatches(codes, numbers, 2), 2, 2)
    numbers[1, 7] = np.nan
    with pytest.raises(ConfigError, match="NaN"):
        Image(BytePatches(codes, numbers, 2), 2, 3)


def test_small_files_of_large_pictures_are_decoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by, running, most = processor(*FACTORS["halves"]), 0, 0
    lock, pair, image = Lock(), Barrier(2, timeout=60), ImageProcessor.image

    def counted(self: ImageProcessor, picture: Any) -> Image:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        pair.wait()
        time.sleep(0.02)
        made = image(self, picture)
        with lock:
            running -= 1
        return made

    monkeypatch.setattr(ImageProcessor, "image", counted)
    monkeypatch.setattr(vision_processor, "MOST_PIXELS", 2 * 64 * 64)
    files = [encoded(pillow.new("L", (64, 64), shade)) for shade in range(8)]
    for pictures in (files, [np.full((64, 64, 3), shade, np.uint8) for shade in range(8)]):
        running = most = 0
        assert len({each.digest for each in made_by.images(pictures)}) == 8
        assert most == 2
    assert made_by.images([]) == []


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_pixels_of_more_than_8_bits_are_refused(mode: str) -> None:
    made_by, picture = processor(*FACTORS["halves"]), pillow.new(mode, (40, 40))
    given = [picture, encoded(picture)] if mode == "I;16" else [picture]
    for each in given:
        with pytest.raises(ConfigError, match="give 8 bits a channel"):
            made_by.image(each)


def encoded(picture: pillow.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
