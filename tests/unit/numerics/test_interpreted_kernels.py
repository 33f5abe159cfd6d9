"""Kernels for GPUs in Triton's interpreter, on machines that have Triton: the tests of the CPU's hold for them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

CASES = {
    "one adapter": ["tests/support/emulated_launches.py"],
    "draws": ["tests/support/emulated_draws.py"],
    "logits": ["tests/support/emulated_logits.py"],
    "several operations": ["tests/support/emulated_fused.py"],
    "prompts": ["tests/support/emulated_prompts.py"],
    "decoding": ["tests/support/emulated_decode.py"],
    "gradients by warpgroups": ["tests/support/emulated_gradients.py"],
    "adapters": ["tests/unit/numerics/test_adapted_products.py"],
    "ranks without tokens": ["tests/support/emulated_ranks.py"],
    "packed weights": ["tests/unit/numerics/test_packed_products.py"],
    "operations": ["tests/unit/numerics/test_vision_operations.py"],
    "gradients of attention": ["tests/unit/numerics/test_attention_gradients.py"],
    "shared prefixes": ["tests/unit/numerics/test_shared_prefixes.py", "-k", "added_up or latents"],
    "recurrent layers": ["tests/unit/numerics/test_recurrent.py", "-k", "delta or mamba"],
    "gradients of the recurrence": ["tests/unit/numerics/test_scan_gradients.py"],
    "shared states": [
        "tests/unit/numerics/test_shared_recurrences.py",
        "-k",
        "small or heads or added_up and not conv",
    ],
    "gradients": ["tests/contract/test_images.py::test_logprobs_and_gradients_are_transformers[qwen3_vl]"],
    "bits": ["tests/contract/test_images.py::test_the_trainer_recomputes_the_engines_bits[qwen3_vl-float32]"],
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
@pytest.mark.parametrize("name", CASES)
def test_what_holds_on_a_cpu_holds_for_kernels_of_gpus(name: str) -> None:
    plugins = ["-p", "no:cacheprovider", "-p", "tests.support.interpreted_kernels"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins]
    done = subprocess.run([*command, *CASES[name]], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
