"""Pictures as files, and a tiny model that reads them with its image processor."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image as pillow

from rlloop.models.config import read_config
from rlloop.models.vision_processor import FILE, ImageProcessor
from tests.support.image_models import make_image_checkpoint


def make_reading_model(folder: Path, family: str = "qwen3_vl", most: int = 24 * 24) -> ImageProcessor:
    """A checkpoint whose processor keeps areas from 16 x 16 to `most` pixels; 64 pixels are a token."""
    make_image_checkpoint(folder, family)
    vision = read_config(folder).vision
    assert vision is not None
    processor = ImageProcessor(vision, 16 * 16, most)
    (folder / FILE).write_text(json.dumps(processor.to_config()))
    return processor


def picture(width: int = 24, height: int = 16, seed: int = 0, format: str = "png") -> bytes:
    """A file of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    pillow.fromarray(pixels).save(file, format)
    return file.getvalue()
