from __future__ import annotations

import platform

import pytest

from rlloop.numerics.kernels.cpu.memory import keep_freed


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such settings")
def test_glibc_takes_both_settings() -> None:
    assert keep_freed()
