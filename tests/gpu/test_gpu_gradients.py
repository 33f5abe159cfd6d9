"""Gradients of whole models in bfloat16: no further from float32's than transformers' own are, family by family."""

from pathlib import Path

import pytest

from tests.support.bfloat16_gradients import bfloat16_errors
from tests.support.checkpoints import EVERY

WORSE, WORSE_PART = 1.5, 2.0  # than transformers: all gradients together, and those of one part of a model


# transformers falls back to PyTorch in recurrent layers; a backward thread may turn to cuBLAS before anything else.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", EVERY)
def test_bfloat16_gradients_are_no_further_from_float32_than_transformers(tmp_path: Path, family: str) -> None:
    mine, theirs = bfloat16_errors(tmp_path, family, "cuda")
    print(f"{family}: " + ", ".join(f"{part} {mine[part]:.1e} (transformers {theirs[part]:.1e})" for part in mine))
    assert 0 < mine["all"] < WORSE * theirs["all"]
    assert all(error < WORSE_PART * theirs[part] for part, error in mine.items())
