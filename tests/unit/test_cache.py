"""Where recipes' models and the dashboard's indices are kept."""

import pytest

from rlloop.cache import cache_root
from rlloop.cli import main
from rlloop.errors import ConfigError


def test_the_environment_names_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("RLLOOP_CACHE", raising=False)
    assert cache_root() == tmp_path / "xdg" / "rlloop"
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    assert (tmp_path / "own").is_dir()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match="RLLOOP_CACHE names another"):
        cache_root()
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path))
    monkeypatch.setattr("os.access", lambda *_: False)  # tests may run as root, whom no mode bits stop
    with pytest.raises(ConfigError, match="it is read-only"):
        cache_root()
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["dashboard", str(tmp_path), "--port", "0"]) == 2  # before it listens for browsers
    assert "it is read-only" in capsys.readouterr().err
