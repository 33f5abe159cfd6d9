"""Checkpoints on disk: MODEL/weights/NAME and MODEL/sampler_weights/NAME, each a folder with a JSON file beside it.

The folder holds only weights (and the optimizer's state), so equal weights have equal bytes; times, notes and the kind
of model are in the JSON. A checkpoint is complete or absent: it is written under a temporary name and renamed. One that
replaces another is complete and on the disk before the other goes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rlloop.errors import ConfigError
from rlloop.runs.durable import fsync, sync_folder
from rlloop.training.types import Checkpoint, CheckpointType, GetInfoResponse, LoraConfig

SCHEME = "tinker://"
FOLDERS: dict[CheckpointType, str] = {"training": "weights", "sampler": "sampler_weights"}
KINDS = {folder: kind for kind, folder in FOLDERS.items()}
Overwrite = bool | Literal["equal"]  # "equal": a checkpoint of the same bytes stays, and another one is an error
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def checked_name(what: str, name: str) -> str:
    """Raises `ConfigError` unless it can name a folder."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{what} is {name!r:.140}; it must be 1 to 128 letters, digits, dots, colons, dashes and underscores, the "
            "first a letter or digit"
        )
    return name


class CheckpointFolder:
    """The checkpoints under one root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        for ready in root.glob("*/.writing-*~"):
            with suppress(OSError):  # an old one that cannot be removed stays
                self._put(ready)
        for left in root.glob("*/.writing-*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def path(self, model_id: str, kind: CheckpointType, name: str) -> str:
        return f"{SCHEME}{model_id}/{FOLDERS[kind]}/{name}"

    def check_free(self, path: str) -> None:
        """Raises `ConfigError` if the checkpoint exists already."""
        if self._files(path)[1].exists():
            raise ConfigError(f"there is a checkpoint {path} already; save under another name, or with overwrite")

    def write(
        self, path: str, lora: LoraConfig | None, write: Callable[[Path], None],
        ttl_seconds: float | None, user_metadata: Mapping[str, str] | None, *, only_equal: bool = False,
    ) -> None:  # fmt: skip
        """Save a checkpoint, replacing one of the same path; `write` fills the folder that it is given. `only_equal`:
        one that is there stays, and must have the same bytes; raises `ConfigError` if it has not."""
        folder, facts = self._files(path)
        writing = folder.parent.parent / f".writing-{folder.parent.name}-{folder.name}"
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        now = time.time()
        text = json.dumps({
            "type": KINDS[folder.parent.name], "time": now,
            "expires_at": None if ttl_seconds is None else now + ttl_seconds,
            "lora": None if lora is None else asdict(lora),
            "user_metadata": None if user_metadata is None else dict(user_metadata),
        }, indent=1)  # fmt: skip
        ready = writing.with_name(writing.name + "~")  # a sign that no name has; once it is there, all is
        try:  # all that takes room comes before the old one goes
            write(writing)
            if only_equal and facts.exists():
                if _contents(writing) != _contents(folder):
                    self.check_free(path)
                shutil.rmtree(writing)
                return
            sync_folder(writing)
            folder.parent.mkdir(parents=True, exist_ok=True)
            _write_atomically(ready, text)
        except BaseException:
            shutil.rmtree(writing, ignore_errors=True)
            raise
        self._put(ready)

    def _put(self, ready: Path) -> None:
        """Put a checkpoint that is written in its place. A kill at any point leaves `ready`, from which this is done
        again: the old one goes when nothing of the new one can fail."""
        writing = ready.with_name(ready.name.removesuffix("~"))
        kind, _, name = writing.name.removeprefix(".writing-").partition("-")
        folder = ready.parent / kind / name
        if writing.is_dir():
            self._remove(folder)
            writing.rename(folder)
        ready.replace(_facts(folder))
        fsync(folder.parent)

    def get(self, path: str) -> tuple[Checkpoint, Path]:
        """A checkpoint and its folder. Raises `ConfigError` for an unknown path."""
        folder, facts = self._files(path)
        with suppress(FileNotFoundError):
            if folder.is_dir():
                return self._read(folder, facts), folder
        raise ConfigError(f"there is no checkpoint {path}; see the list of checkpoints, which may have expired")

    def list(self, model_id: str | None = None) -> list[Checkpoint]:
        checkpoints, models = list[Checkpoint](), "*" if model_id is None else checked_name("model_id", model_id)
        for facts in [facts for kind in FOLDERS.values() for facts in self.root.glob(f"{models}/{kind}/*.json")]:
            with suppress(FileNotFoundError):  # deleted since it was listed
                if facts.with_suffix("").is_dir():
                    checkpoints.append(self._read(facts.with_suffix(""), facts))
        return sorted(checkpoints, key=lambda each: (each.time, each.tinker_path))

    def delete(self, path: str, *, missing_ok: bool = False) -> None:
        folder, facts = self._files(path)
        if not missing_ok and not facts.is_file():
            raise ConfigError(f"there is no checkpoint {path}")
        self._remove(folder)

    def _remove(self, folder: Path) -> None:
        _facts(folder).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def set_ttl(self, path: str, ttl_seconds: float | None) -> None:
        _, facts = self.get(path)[1], self._files(path)[1]
        content = json.loads(facts.read_text())
        content["expires_at"] = None if ttl_seconds is None else time.time() + ttl_seconds
        _write_atomically(facts, json.dumps(content, indent=1))

    def _files(self, path: str) -> tuple[Path, Path]:
        segments = path.removeprefix(SCHEME).split("/") if isinstance(path, str) and path.startswith(SCHEME) else []
        if (
            len(segments) != 3
            or segments[1] not in FOLDERS.values()
            or not all(map(NAME.fullmatch, (segments[0], segments[2])))
        ):
            raise ConfigError(
                f"{path!r:.160} is no checkpoint's path; one is {SCHEME}MODEL/weights/NAME, or sampler_weights"
            )
        folder = self.root.joinpath(*segments)
        return folder, _facts(folder)

    def _read(self, folder: Path, facts: Path) -> Checkpoint:
        content: dict[str, Any] = json.loads(facts.read_text())
        lora = None if content["lora"] is None else LoraConfig(**content["lora"])
        checkpoint_id = f"{folder.parent.name}/{folder.name}"
        return Checkpoint(
            checkpoint_id, content["type"], content["time"], f"{SCHEME}{folder.parent.parent.name}/{checkpoint_id}",
            sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()), lora is not None, lora,
            content["user_metadata"], content["expires_at"],
        )  # fmt: skip


def _facts(folder: Path) -> Path:
    return folder.with_name(folder.name + ".json")


def _contents(folder: Path) -> dict[str, bytes]:
    """Digests of a folder's files, by name."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").digest()
    return found


def _write_atomically(file: Path, text: str) -> None:
    new = file.with_name(f".{file.name.removeprefix('.')}.new")
    try:
        new.write_text(text + "\n")
        fsync(new)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    new.replace(file)


def check_holds(checkpoint: Checkpoint, optimizer: bool) -> None:
    """Raises `ConfigError` where a checkpoint lacks the optimizer's state that is asked for."""
    if optimizer and checkpoint.checkpoint_type != "training":
        raise ConfigError(
            f"{checkpoint.tinker_path} is for sampling and has no optimizer state; load it with optimizer=False, or "
            "one that save_weights wrote"
        )


def check_same(checkpoint: Checkpoint, info: GetInfoResponse) -> None:
    """Raises `ConfigError` for a checkpoint whose adapter has another shape or scale than the model's."""

    def shape(lora: LoraConfig | None) -> str:
        if lora is None:
            return "full training"
        modules = [name for name in ("unembed", "mlp", "attn") if getattr(lora, f"train_{name}")]
        return f"an adapter of rank {lora.rank}, alpha {lora.alpha:g}, of {', '.join(modules)}"

    if shape(checkpoint.lora) != shape(info.lora):
        raise ConfigError(
            f"{checkpoint.tinker_path} is of {shape(checkpoint.lora)}, and model {info.model_id} of {shape(info.lora)}"
            "; make a model from the checkpoint (create_model_from)"
        )
