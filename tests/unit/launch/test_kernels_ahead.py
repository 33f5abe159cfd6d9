"""Kernels compiled ahead, and announced before the first run."""

from __future__ import annotations

import sys

import pytest

from rlloop.launch import kernels
from rlloop.numerics.kernels.cpu.compiled import jit


def test_an_empty_cache_is_filled_before_the_run_which_says_so(tmp_path, monkeypatch) -> None:
    said, compiled = list[str](), list[list[str]]()
    monkeypatch.setattr(jit, "CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "compile_kernels", lambda dtypes: compiled.append(dtypes) or 3.0)
    kernels.compile_if_new("bfloat16", said.append)
    assert compiled == [["bfloat16"]]
    assert "Compiling kernels for this machine, once" in said[0]
    assert "Compiled in 3 s; `rlloop doctor --compile`" in said[1]
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "linear.nbi").touch()  # numba makes a folder for each source folder
    kernels.compile_if_new("bfloat16", said.append)
    assert len(said) == 2


@pytest.mark.parametrize("part", kernels.PARTS)
def test_each_part_runs(part, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", part, "float32", str(tmp_path)])
    getattr(kernels, f"_{part}")("float32")
    assert (tmp_path / "config.json").is_file() == (part != "probe")
