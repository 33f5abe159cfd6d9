"""Cache folders of kernels, recipes' models and the dashboard's indices, and their permissions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlloop.cache import cache_root, made_once
from rlloop.cli.main import main
from rlloop.errors import ConfigError
from rlloop.numerics.folders import kernel_folder, private


def test_the_environment_names_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("RLLOOP_CACHE", raising=False)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    assert cache_root() == tmp_path / "xdg" / "rlloop"
    assert kernel_folder("k") == tmp_path / "xdg" / "rlloop" / "kernels" / "k"
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    assert kernel_folder("k") == tmp_path / "own" / "kernels" / "k"
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    assert kernel_folder("k") == tmp_path / "numba" / "k"


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="set the environment variable RLLOOP_CACHE"):
        cache_root()
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)  # tests may run as root, whom no mode bits stop
    with pytest.raises(ConfigError, match="it is read-only"):
        cache_root()
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["dashboard", str(tmp_path), "--port", "0"]) == 2  # before it listens for browsers
    assert "it is read-only" in capsys.readouterr().err


def test_what_takes_long_says_so_once_and_two_processes_may_make_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path / "cache"))
    made = []

    def make(folder: Path) -> None:
        if not made:
            made.append("first")
            made_once("model", make)  # as another process that is faster
        folder.mkdir()
        (folder / "file").touch()

    for _ in range(2):
        assert (made_once("model", make, "a minute") / "file").exists()
    assert capsys.readouterr().err == "a minute\n"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["model"]


def test_of_a_machine_s_ranks_one_says_what_takes_long(tmp_path, monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for rank in "01":
        monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path / rank))
        monkeypatch.setenv("RANK", str(2 + int(rank)))  # of the second machine
        monkeypatch.setenv("LOCAL_RANK", rank)
        made_once("model", Path.mkdir, f"a minute, says {rank}")
    assert capsys.readouterr().err == "a minute, says 0\n"


def somebody_elses(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4711)


def a_link(folder: Path, monkeypatch) -> None:
    """Of somebody else's, into what is ours."""
    folder.rmdir()
    (folder.parent / "ours").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "ours")
    if os.getuid() == 0:
        os.lchown(folder, 4711, 4711)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 4711)


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (somebody_elses, "it belongs to user"),
        (a_link, "it belongs to user"),
        (lambda folder, _: folder.chmod(0o777), "others may write into it: chmod go-w"),
        (lambda folder, _: folder.chmod(0o720), "others may write into it: chmod go-w"),
        (lambda folder, _: folder.parent.chmod(0o777), "everybody may write into"),
    ],
    ids=["somebody else's", "a link", "everybody's", "a group's", "replaceable"],
)
def test_a_folder_that_others_may_write_into_is_refused(tmp_path, monkeypatch, caplog, plant, why):
    folder = tmp_path / "above" / "cache"
    folder.mkdir(parents=True)
    (tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("RLLOOP_CACHE", str(folder))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    assert private(folder) == folder
    plant(folder, monkeypatch)
    with pytest.raises(ConfigError, match=why):
        cache_root()
    found = kernel_folder("k")
    assert f"compiled kernels are not kept in {folder}: {why}" in caplog.text
    assert (tmp_path / "tmp") in found.parents
    assert found.stat().st_mode & 0o077 == 0


def test_what_is_made_is_nobody_elses_whatever_the_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path / "a" / "b"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    before = os.umask(0)
    try:
        folder = kernel_folder("k")
    finally:
        os.umask(before)
    for made in (folder, *folder.parents[:4]):
        assert made.stat().st_mode & 0o777 == 0o700, made


def test_what_somebody_planted_among_the_temporary_files_is_never_loaded(tmp_path):
    """A home that cannot be written, and a folder that waits under the name that this user's would have."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    planted = tmp_path / "tmp" / f"rlloop-{os.getuid()}"
    (planted / "kernels").mkdir(parents=True)
    planted.chmod(0o777)
    (tmp_path / "home").touch()  # a file, under which nothing can be made, not even by root
    environment = {key: value for key, value in os.environ.items() if "CACHE" not in key}
    code = "from rlloop.numerics.kernels.cpu.compiled.jit import CACHE; print(CACHE)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        text=True,
        check=True,
    )
    used = Path(done.stdout.strip())
    assert planted not in used.parents
    assert used.parent == tmp_path / "tmp"
    assert not used.exists()  # it ended with the process
    assert f"not kept in {tmp_path / 'home' / '.cache' / 'rlloop'}: Not a directory" in done.stderr
    assert f"not kept in {planted}: others may write into it" in done.stderr
