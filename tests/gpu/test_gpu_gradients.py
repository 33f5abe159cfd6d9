"""Gradients of whole models in bfloat16: no further from float32's than transformers' own are, family by family."""

import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from tests.support.bfloat16_gradients import bfloat16_errors
from tests.support.checkpoints import EVERY

# Before that transformers read MiniMax M2's rotary_dim and computed gpt-oss otherwise (5.17 did, on a CPU too).
OLD, COMPUTED_OTHERWISE = Version("5.23"), ("minimax_m2", "gpt_oss")
WORSE, WORSE_PART = 1.5, 2.0  # than transformers: all gradients together, and those of one part of a model


@pytest.fixture(autouse=True)
def _without_flash_linear_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which transformers would compute recurrent layers: its backward refuses some releases of Triton."""
    monkeypatch.setitem(sys.modules, "fla", None)


# transformers says that recurrent layers are PyTorch's; a backward thread may turn to cuBLAS before anything else.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", EVERY)
def test_bfloat16_gradients_are_no_further_from_float32_than_transformers(tmp_path: Path, family: str) -> None:
    if family in COMPUTED_OTHERWISE and Version(transformers.__version__) < OLD:
        pytest.skip(f"transformers {transformers.__version__} computes {family} otherwise than {OLD} and rlloop do")
    mine, theirs = bfloat16_errors(tmp_path, family, "cuda")
    print(f"{family}: " + ", ".join(f"{part} {mine[part]:.1e} (transformers {theirs[part]:.1e})" for part in mine))
    assert 0 < mine["all"] < WORSE * theirs["all"]
    assert all(error < WORSE_PART * theirs[part] for part, error in mine.items())
