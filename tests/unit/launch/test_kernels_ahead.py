"""Kernels compiled ahead, and announced before the first run."""

from __future__ import annotations

import fcntl
import sys
import threading
from pathlib import Path
from typing import Any

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
    (tmp_path / "linear-0").mkdir()
    (tmp_path / "linear-0" / "linear.nbi").touch()
    kernels.compile_if_new("bfloat16", said.append)
    assert len(said) == 2


@pytest.mark.parametrize("part", kernels.PARTS)
def test_each_part_runs(part, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", part, "float32", str(tmp_path)])
    getattr(kernels, f"_{part}")("float32")
    assert (tmp_path / "config.json").is_file() == (part != "probe")


def kernel_in(folder: Path, factor: int = 2) -> Any:
    """A kernel of a source in `folder`."""
    source, names = f"def times(x):\n    return {factor} * x\n", dict[str, Any]()
    folder.mkdir()
    (folder / "kernels.py").write_text(source)
    exec(compile(source, str(folder / "kernels.py"), "exec"), names)
    return jit.kernel(names["times"])


def test_checkouts_share_what_one_compiled_of_the_same_source(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(jit, "CACHE", str(tmp_path / "cache"))
    here, there = kernel_in(tmp_path / "here"), kernel_in(tmp_path / "there")
    other = kernel_in(tmp_path / "other", factor=3)
    assert (here(3), there(3), other(3), there(1.5)) == (6, 6, 9, 3.0)
    assert [sum(each.stats.cache_hits.values()) for each in (here, there, other)] == [0, 1, 0]
    assert len(list((tmp_path / "cache").glob("kernels-*"))) == 2


def test_a_process_saves_kernels_while_no_other_does(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(jit, "CACHE", str(tmp_path))
    twice = kernel_in(tmp_path / "source")
    compiles = threading.Thread(target=twice, args=(3,))
    twice._cache._impl.locator.ensure_cache_path()
    with Path(twice._cache.cache_path, "lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        compiles.start()
        compiles.join(0.5)
        assert compiles.is_alive()
        assert not list(tmp_path.rglob("*.nb?"))
    compiles.join()
    assert len(list(tmp_path.rglob("*.nb?"))) == 2
