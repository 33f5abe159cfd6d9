import hashlib
import json
import shutil
from pathlib import Path

import pytest
from blake3 import blake3

from rlloop.errors import ConfigError, RunError
from rlloop.trainer.checkpoint import CheckpointStore, find_damage, folder_digest, manifest_digest


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
    for step in (1, 2):
        (store.save(step, [write(step)]) / "weights.bin").unlink()
    with pytest.raises(RunError, match=r"\(\S*/step_2: weights\.bin is missing; \S*/step_1: weights\.bin is missing\)"):
        store.latest()


def test_what_was_skipped_does_not_outlive_the_history_that_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(1, [write(1)])
    (store.save(9, [write(9)]) / "weights.bin").unlink()
    store.save(2, [write(2)])  # the run went on from 1
    assert store.steps() == [1, 2]


def test_a_step_saved_again_replaces_the_one_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "a" / "run")
    for step, value in ((1, 1), (2, 2), (3, 3), (3, 4)):
        store.save(step, [write(value)])
    assert store.steps() == [2, 3]  # two are kept where nothing else is said
    assert (store.root / "step_3" / "weights.bin").read_bytes() == bytes([4]) * 1000


def test_the_same_state_is_the_same_bytes(tmp_path: Path) -> None:
    first, second = (CheckpointStore(tmp_path / name).save(3, [write(3)]) for name in "ab")
    for path in first.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (second / path.relative_to(first)).read_bytes()


def test_the_manifest_lists_every_file_with_its_digest_and_size(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(3, [write(3)])
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"]) == (1, 3)
    assert list(manifest["files"]) == ["sub/state.json", "weights.bin"]
    assert manifest["files"]["weights.bin"] == {"blake3": blake3(bytes([3]) * 1000).hexdigest(), "bytes": 1000}


def test_digests_are_of_the_manifests_of_kept_steps_so_far(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    kept = {str(step): store.save(step, [write(step)]) / "manifest.json" for step in (1, 2, 3)}
    assert store.digests(2) == {step: hashlib.sha256(kept[step].read_bytes()).hexdigest() for step in ("1", "2")}
    kept["2"].unlink()
    assert store.digests(3).keys() == {"1", "3"}
    assert manifest_digest(tmp_path / "step_2") is None


def test_a_models_digest_is_of_its_tensors_and_settings_by_name(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (first / "model.safetensors").write_bytes(b"tensors")
    (first / "config.json").write_text("{}")
    shutil.copytree(first, second)
    (second / "README.md").write_text("not the model")
    assert folder_digest(first) == folder_digest(second)
    (second / "config.json").rename(second / "other.json")
    assert folder_digest(first) != folder_digest(second)
    digests = {name: blake3((first / name).read_bytes()).hexdigest() for name in ("config.json", "model.safetensors")}
    assert folder_digest(first) == blake3("".join(f"{n} {d}\n" for n, d in digests.items()).encode()).hexdigest()


def test_files_and_both_folders_are_forced_to_the_disk(tmp_path: Path, monkeypatch) -> None:
    """After the seal and before the rename, what is in the folder; after it, the folder's new name."""
    forced = []
    monkeypatch.setattr("rlloop.runs.durable.fsync", lambda path: forced.append(path.relative_to(tmp_path)))
    CheckpointStore(tmp_path).save(1, [write(1)])
    inside = [Path("tmp_1") / name for name in ("manifest.json", "weights.bin", "sub", "sub/state.json")]
    assert sorted(forced) == sorted([*inside, Path("tmp_1"), Path()])
    assert forced[-2:] == [Path("tmp_1"), Path()]
