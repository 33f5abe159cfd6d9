"""Models that several tests of commands read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.image_models import add_processor, make_image_checkpoint


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of images with experts, in bfloat16, with its processor."""
    made = tmp_path_factory.mktemp("model")
    make_image_checkpoint(made, "qwen3_vl_moe", dtype=torch.bfloat16, text={"num_experts_per_tok": 4})
    add_processor(made)
    return made
