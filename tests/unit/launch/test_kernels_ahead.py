"""Kernels compiled ahead, and announced before the first run."""

from __future__ import annotations

import fcntl
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlloop.config.fleet import FleetConfig, FleetKind
from rlloop.config.run import Launch
from rlloop.launch import kernels
from rlloop.numerics.kernels.cpu.compiled import jit
from rlloop.sync import codec
from tests.support.fake_run import CONFIG


@pytest.fixture
def compiled(tmp_path, monkeypatch) -> list[tuple[list[str], list[str]]]:
    """(types, parts) of each compilation, which fills nothing."""
    made = list[tuple[list[str], list[str]]]()
    monkeypatch.setattr(jit, "CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "compile_kernels", lambda *asked: made.append(asked) or 3.0)
    return made


def fill(folder: Path, module: str) -> None:
    (folder / f"{module}-0").mkdir()
    (folder / f"{module}-0" / f"{module}.nbi").touch()


def test_an_empty_cache_is_filled_before_the_run_which_says_so(tmp_path, compiled) -> None:
    said, config = list[str](), replace(CONFIG, device="cpu", model=replace(CONFIG.model, dtype="bfloat16"))
    kernels.compile_if_new(config, said.append)
    assert compiled == [(["bfloat16"], ["sample", "train", "probe"])]
    assert "Compiling kernels for this machine, once" in said[0]
    assert "Compiled in 3 s; `rlloop doctor --compile`" in said[1]
    fill(tmp_path, "linear")
    kernels.compile_if_new(config, said.append)
    assert len(said) == 2


@pytest.mark.parametrize("elsewhere", [{"fleet": FleetConfig(kind=FleetKind.regions)}, {"launch": Launch.ray}])
def test_runs_that_publish_compile_the_codec_too(elsewhere, tmp_path, compiled) -> None:
    config = replace(CONFIG, device="cpu", **elsewhere)
    fill(tmp_path, "linear")
    kernels.compile_if_new(config, print)
    assert [parts for _, parts in compiled] == [["sync"]]
    fill(tmp_path, "steps_fast")
    kernels.compile_if_new(config, print)
    assert len(compiled) == 1


@pytest.mark.parametrize("part", [*kernels.PARTS, kernels.SYNC])
def test_each_part_runs(part, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", part, "float32", str(tmp_path)])
    getattr(kernels, f"_{part}")("float32")
    assert (tmp_path / "config.json").is_file() == (part in ("sample", "train"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_codec_s_part_encodes_in_each_of_its_ways(dtype, monkeypatch) -> None:
    made, encode = list[str](), codec.encode
    monkeypatch.setattr(codec, "encode", lambda *args: made.append((encoded := encode(*args)).codec) or encoded)
    kernels._sync(dtype)
    assert made == (["changes"] * 2 if dtype == "float32" else ["adaptive", "changes"])


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
