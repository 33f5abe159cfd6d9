"""Attention's layouts on GPUs that are not here, as Triton compiles them: a row's sums are one warp's."""

from __future__ import annotations

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels are compiled")


class Driver:
    """Of a GPU that is not here."""

    def __init__(self, capability: int) -> None:
        self._target = triton.backends.compiler.GPUTarget("cuda", capability, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # what was compiled for another is kept by this number

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """A function that calls attention without a launch, and returns the intermediate form of its kernels."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from rlloop.numerics.kernels.triton import attention

    plain = JITFunction.run
    found: list[str] = []

    def run(self, *args, **named):
        found.append(plain(self, *args, **named | {"warmup": True}).asm["ttgir"])

    def of(capability: int, tokens: int, keys: int, width: int) -> list[str]:
        driver.set_active(Driver(capability))
        monkeypatch.setattr(attention, "generation", lambda device: capability // 10)
        monkeypatch.setattr(attention, "hopper", lambda device: capability >= 90)
        q, k = (torch.zeros(n, heads, width, dtype=torch.bfloat16) for n, heads in ((tokens, 8), (keys, 2)))
        pages = torch.zeros(1, keys // 16, dtype=torch.int64)
        attention.attention(q, k, k.clone(), torch.tensor([0, tokens]), torch.tensor([0]), pages, 16, 0.1)
        return found

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(driver, "_active", None)  # a machine without a GPU has none
    return of


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "keys"), [(512, 512), (2048, 2048), (1, 512)])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_a_rows_scores_are_one_warps(compiled, capability, width, tokens, keys) -> None:
    text = compiled(capability, tokens, keys, width)[0]
    sums = re.findall(r"tensor<\d+x64xf32, (#\w+)>\) -> tensor<\d+xf32", text)
    layouts = {re.search(rf"^{name} = (.*)$", text, re.MULTILINE)[1] for name in sums}
    assert layouts
    for layout in layouts:
        assert re.search(r"nvidia_mma<.* warpsPerCTA = \[\d+, 1\]", layout), layout
