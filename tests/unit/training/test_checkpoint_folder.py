"""Checkpoints on disk: whole or absent, also on a full disk and after a crash."""

import os
from pathlib import Path

import pytest

from rlloop.errors import ConfigError
from rlloop.training.checkpoints import CheckpointFolder

PATH = "tinker://model/weights/a"


def content(text):
    def write(folder):
        (folder / "weights").write_text(text)

    return write


def full(*_):
    raise OSError(28, "No space left on device")


def left(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("where", ["weights", "facts"])
def test_one_that_cannot_be_replaced_stays(tmp_path, monkeypatch, where):
    folder = CheckpointFolder(tmp_path)
    folder.write(PATH, None, content("old"), None, {"note": "old"})
    if where == "facts":
        monkeypatch.setattr("pathlib.Path.write_text", lambda self, _: full())
    write = full if where == "weights" else lambda folder: (folder / "weights").write_bytes(b"new")
    with pytest.raises(OSError, match="No space"):
        folder.write(PATH, None, write, None, None)
    monkeypatch.undo()
    checkpoint, files = folder.get(PATH)
    assert (checkpoint.user_metadata, (files / "weights").read_text()) == ({"note": "old"}, "old")
    assert left(tmp_path) == ["model/weights/a.json", "model/weights/a/weights"]


def test_one_that_is_deleted_while_it_is_read_is_not_there(tmp_path, monkeypatch):
    folder, is_dir = CheckpointFolder(tmp_path), Path.is_dir
    folder.write(PATH, None, content("x"), None, None)

    def deleted(path):
        there = is_dir(path)
        if path.name == "a":
            folder.delete(PATH, missing_ok=True)
        return there

    monkeypatch.setattr(Path, "is_dir", deleted)
    assert folder.list() == []
    folder.write(PATH, None, content("x"), None, None)
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        folder.get(PATH)


def test_what_a_crash_left_is_removed(tmp_path):
    (tmp_path / "model" / ".writing-weights-a").mkdir(parents=True)
    (tmp_path / "model" / ".writing-weights-a~.new").write_text("{")
    CheckpointFolder(tmp_path)
    assert left(tmp_path) == []


class Killed(BaseException):
    pass


@pytest.mark.parametrize("old", [True, False])
def test_a_kill_at_any_point_leaves_the_old_or_the_new_one(tmp_path, monkeypatch, old):
    found = []
    for point in range(100):
        root, calls = tmp_path / str(point), iter(range(100))
        folder = CheckpointFolder(root)
        if old:
            folder.write(PATH, None, content("old"), None, {"note": "old"})

        def killed(call, *arguments, point=point, calls=calls, **options):
            if next(calls) >= point:  # nor does anything happen after it
                raise Killed
            return call(*arguments, **options)

        with monkeypatch.context() as patch:
            for owner, name in (
                (Path, "rename"),
                (Path, "replace"),
                (Path, "unlink"),
                (Path, "write_text"),
                (os, "rmdir"),
            ):
                real = getattr(owner, name)
                patch.setattr(owner, name, lambda *args, real=real, **options: killed(real, *args, **options))
            try:
                folder.write(PATH, None, content("new"), None, {"note": "new"})
                ended = True
            except Killed:
                ended = False
        folder = CheckpointFolder(root)
        noted = [(each.user_metadata, (folder.get(PATH)[1] / "weights").read_text()) for each in folder.list()]
        found.append(noted[0][1] if noted else None)
        assert noted in ([({"note": "old"}, "old")] if old else [], [({"note": "new"}, "new")])
        assert left(root) == (["model/weights/a.json", "model/weights/a/weights"] if noted else [])
        if ended:
            break
    assert {*found} == {"old" if old else None, "new"}
    assert found[-1] == "new"


def test_one_of_the_same_bytes_stays_where_only_that_is_allowed(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.write(PATH, None, content("x"), None, {"note": "first"}, only_equal=True)
    folder.write(PATH, None, content("x"), None, {"note": "second"}, only_equal=True)
    assert folder.get(PATH)[0].user_metadata == {"note": "first"}
    with pytest.raises(ConfigError, match="already"):
        folder.write(PATH, None, content("y"), None, None, only_equal=True)
    assert left(tmp_path) == ["model/weights/a.json", "model/weights/a/weights"]
