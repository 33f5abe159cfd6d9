"""Kernels compiled for processors without AVX-512 and AMX make the bits of those with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from llvmlite import binding

from tests.support.checkpoints import make_checkpoint
from tests.support.instruction_sets import computed, computed_with_avx2


@pytest.mark.skipif(not binding.get_host_cpu_features().get("avx512f"), reason="this processor has no AVX-512")
def test_a_whole_model_has_the_same_bits_with_avx2(tmp_path: Path) -> None:
    """Logprobs, gradients, samples and an update of a mixture of experts, in float32 and bfloat16."""
    make_checkpoint(tmp_path, "qwen3_moe", head_dim=64)  # of other widths PyTorch's table of the rope may differ
    here, older = computed(tmp_path), computed_with_avx2(tmp_path)
    assert older.pop("computed by") == "AMX False, 6 tiles, PyTorch AVX2"
    assert here.pop("computed by") != "AMX False, 6 tiles, PyTorch AVX2"
    assert [name for name in here if here[name] != older[name]] == []
    assert here.keys() == older.keys()
