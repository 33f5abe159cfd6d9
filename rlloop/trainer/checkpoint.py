"""Checkpoints that are complete or absent: temporary folder, digests, fsync, one rename. Imports no torch.

    checkpoints/step_40/manifest.json      {"format": 1, "step": 40, "files": {name: {"blake3": ..., "bytes": ...}}}
    checkpoints/step_40/...                the writers' files
    checkpoints/tmp_...                    left by a killed process; the next save removes it

A kill at any moment leaves each `step_N` complete or absent; digests detect later damage to storage.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from rlloop.errors import ConfigError, RunError
from rlloop.runs import durable

MANIFEST = "manifest.json"
FORMAT = 1

Writer = Callable[[Path], None]


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint. `skipped` describes the damage of each newer one."""

    step: int
    path: Path
    skipped: tuple[str, ...] = ()


class CheckpointStore:
    """The `step_N` folders under `root`; the last `keep` are kept."""

    def __init__(self, root: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ConfigError(f"checkpoint.keep is {keep}; it must be at least 1")
        self.root = Path(root)
        self.keep = keep

    def save(self, step: int, writers: Iterable[Writer]) -> Path:
        """Have every writer write into a new folder, seal it, rename it to `step_N`, and delete old ones.

        Folders of this or a later step are deleted too: they are damaged, or of a history that this run does not
        continue.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.glob("tmp_*"):
            shutil.rmtree(leftover)
        folder = self.root / f"tmp_{step}"
        folder.mkdir()
        for write in writers:
            write(folder)
        _seal(folder, step)
        for abandoned in (other for other in self.steps() if other >= step):
            self._remove(self.root / f"step_{abandoned}")
        final = folder.rename(self.root / f"step_{step}")
        durable.fsync(self.root)
        for old in self.steps()[: -self.keep]:
            self._remove(self.root / f"step_{old}")
        return final

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending; digests are not checked."""
        matches = (re.fullmatch(r"step_(\d+)", path.name) for path in self.root.glob("step_*"))
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; None where none was saved.

        Raises `RunError` where all checkpoints are damaged: starting over must be a person's choice.
        """
        skipped: list[str] = []
        for step in reversed(self.steps()):
            path = self.root / f"step_{step}"
            damage = find_damage(path)
            if damage is None:
                return Checkpoint(step, path, tuple(skipped))
            skipped.append(f"{path}: {damage}")
        if skipped:
            raise RunError(
                f"no checkpoint under {self.root} is whole ({'; '.join(skipped)}); "
                "restore the files from a copy, or remove these folders to start over"
            )
        return None

    def digests(self, step: int) -> dict[str, str]:
        """Step -> digest of the manifest, which has the files' digests, of each kept checkpoint up to `step`."""
        kept = {str(each): manifest_digest(self.root / f"step_{each}") for each in self.steps() if each <= step}
        return {name: digest for name, digest in kept.items() if digest is not None}

    def _remove(self, folder: Path) -> None:
        """Delete under a temporary name, so that a kill leaves no partial `step_N`."""
        doomed = folder.rename(self.root / f"tmp_old_{folder.name}")
        durable.fsync(self.root)
        shutil.rmtree(doomed)


def find_damage(folder: Path) -> str | None:
    """The damage to a sealed folder, naming the file; None when every byte is as written."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}"
        expected = {name: entry["blake3"] for name, entry in manifest["files"].items()}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    for name, digest in expected.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _digest(folder / name) != digest:
            return f"{name} is not what was written (its digest differs)"
    return None


def manifest_digest(folder: Path) -> str | None:
    """SHA-256 of the folder's manifest; None without one."""
    file = folder / MANIFEST
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def folder_digest(folder: Path) -> str:
    """Digest of a model folder's tensors, configuration and tokenizer."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    return blake3("".join(f"{path.name} {_digest(path)}\n" for path in files).encode()).hexdigest()


def _seal(folder: Path, step: int) -> None:
    """Write the manifest, then fsync every file and folder."""
    manifest = folder / MANIFEST
    manifest.write_text(manifest_of(folder, step))
    durable.sync_folder(folder)


def manifest_of(folder: Path, step: int) -> str:
    """The manifest's text for the files in `folder`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    entries = {
        path.relative_to(folder).as_posix(): {"blake3": _digest(path), "bytes": path.stat().st_size} for path in files
    }
    return json.dumps({"format": FORMAT, "step": step, "files": entries}, indent=1) + "\n"


def _digest(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
