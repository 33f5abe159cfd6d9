import json
from pathlib import Path

import pytest

from rlloop.errors import ConfigError, RunError
from rlloop.trainer.checkpoint import CheckpointStore, find_damage


def write(value: int):
    def writer(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(bytes([value]) * 1000)
        (folder / "sub").mkdir()
        (folder / "sub" / "state.json").write_text(json.dumps({"value": value}))

    return writer


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_newest_whole_checkpoint_comes_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest() is None
    for step in (9, 10):
        store.save(step, [write(step)])
    found = store.latest()
    assert found is not None
    assert (found.step, found.skipped) == (10, ())
    assert (found.path / "weights.bin").read_bytes() == bytes([10]) * 1000


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 30):
        store.save(step, [write(step)])
    assert names(tmp_path) == ["step_2", "step_30"]
    with pytest.raises(ConfigError, match=r"checkpoint\.keep is 0"):
        CheckpointStore(tmp_path, keep=0)


def test_a_kill_while_writing_leaves_no_step_folder(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, [write(1)])

    def killed(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(2, [write(2), killed])
    assert store.steps() == [1]
    assert not any(name.startswith("step_2") for name in names(tmp_path))
    store.save(2, [write(2)])
    assert names(tmp_path) == ["step_1", "step_2"]  # what the kill left has gone too


@pytest.mark.parametrize("call", ["write_text", "rename"])
def test_a_kill_at_the_seal_or_the_rename_leaves_no_step_folder(tmp_path: Path, monkeypatch, call: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, [write(1)])
    original = getattr(Path, call)

    def killed(self: Path, *args: object) -> object:
        if call == "rename" or self.name == "manifest.json":
            raise KeyboardInterrupt
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(2, [write(2)])
    latest = CheckpointStore(tmp_path).latest()
    assert latest is not None
    assert latest.step == 1


def test_a_kill_while_pruning_leaves_whole_folders(tmp_path: Path, monkeypatch) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, [write(1)])

    def killed(folder: Path) -> None:
        (folder / "weights.bin").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("rlloop.trainer.checkpoint.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(2, [write(2)])
    assert all(find_damage(tmp_path / f"step_{step}") is None for step in store.steps())
    assert store.steps() == [2]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda folder: (folder / "weights.bin").write_bytes(bytes([2]) * 999 + b"\x03"),
            "weights.bin is not what was",
        ),
        (lambda folder: (folder / "sub" / "state.json").unlink(), "sub/state.json is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is not readable"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 9}'), "has format 9"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, damage, says: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, [write(1)])
    store.save(2, [write(2)])
    damage(tmp_path / "step_2")
    found = store.latest()
    assert found is not None
    assert found.step == 1
    assert len(found.skipped) == 1
    assert says in found.skipped[0]


def test_all_damaged_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (store.save(1, [write(1)]) / "weights.bin").unlink()
    with pytest.raises(RunError, match=r"no checkpoint .* is whole .*weights\.bin is missing"):
        store.latest()


def test_what_was_skipped_does_not_outlive_the_history_that_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, [write(1)])
    (store.save(9, [write(9)]) / "weights.bin").unlink()
    store.save(2, [write(2)])  # the run went on from 1
    assert store.steps() == [1, 2]


def test_the_same_state_is_the_same_bytes(tmp_path: Path) -> None:
    first, second = (CheckpointStore(tmp_path / name).save(3, [write(3)]) for name in "ab")
    for path in first.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes()
