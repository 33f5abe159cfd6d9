"""Append-only JSONL files of a run, and their older parts.

A journal that has grown is rotated: its file becomes a *segment*, `rotated/metrics_00012345.jsonl.zst`, named by the
last step in it, and a new file begins. `open_journal` gives segments and file as one, so rotation changes no byte of
what is read. Of rollouts, whose steps have files of their own, many become one ZIP: `rollouts/step_00012345.zip`.
"""

from __future__ import annotations

import errno
import io
import os
import threading
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, TypeVar, cast

import msgspec
import zstandard

from rlloop.errors import UNREADABLE, RunError

ROTATED = "rotated"  # folder beside the journals
BLOCK = 1 << 16  # bytes read at a time

T = TypeVar("T")


class Journal:
    """An append-only JSONL file with one writer. `append` returns once the operating system has the line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end: int | None = None  # offset at which the last line ends; None: none was written yet
        self._writing = threading.Lock()

    def append(self, record: Mapping[str, Any]) -> bytes:
        """Append a record and return its line. Numbers that are not finite become null, since JSON has none.

        Raises `RunError` if the file has another length than this process left it with, and `OSError`, with the file as
        it was, where the disk is full.
        """
        line = msgspec.json.encode(record) + b"\n"
        with self._writing, self.path.open("a+b", buffering=0) as file:
            end = whole_lines(file) if self._end is None else file.seek(0, os.SEEK_END)
            if self._end is not None and end != self._end:
                raise RunError(
                    f"{self.path} is {end} bytes long, and this process left it at {self._end}: another "
                    "process writes the same run, or the file was replaced. This one stops; resume with one alone"
                )
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            finally:
                if file.tell() != end + len(line):
                    file.truncate(end)  # the next line would continue this one
            self._end = end + len(line)
        return line

    def reopen(self) -> None:
        """Continue at the file's present end."""
        self._end = None

    def sync(self) -> None:
        """Force all lines to the disk: before a checkpoint that relies on them."""
        with self.path.open("ab") as file:
            os.fsync(file.fileno())

    def rotate(self, last: int) -> None:
        """Begin a new file. `last`: the number that names the segment, above those before. A kill at any point leaves
        every line in one place."""
        folder = self.path.parent / ROTATED
        with self._writing:
            folder.mkdir(exist_ok=True)
            last = max([last, *(last_of(segment) + 1 for segment in segments(self.path))])
            plain = folder / f"{self.path.stem}_{last:08d}.jsonl"
            self.path.rename(plain)
            self.path.touch()
            self._end = None
        compress(plain)


def whole_lines(file: io.FileIO) -> int:
    """Cut off what a kill or a full disk left of a last line. Returns the file's length."""
    size = at = file.seek(0, os.SEEK_END)
    end = 0
    while at > 0 and not end:
        at, before = max(0, at - BLOCK), at
        file.seek(at)
        end = at + 1 + newline if (newline := file.read(before - at).rfind(b"\n")) >= 0 else 0
    if end != size:
        file.truncate(end)
    return file.seek(0, os.SEEK_END)


def compress(plain: Path) -> None:
    """A segment, which may be gigabytes as a file: compressed, durable, and only then deleted."""
    packed = plain.with_name(plain.name + ".zst")
    content = zstandard.compress(plain.read_bytes(), 3)
    temporary = packed.with_name(packed.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(packed)
    plain.unlink()


def segments(file: Path) -> list[Path]:
    """The older parts of a journal, in order. One whose compression was interrupted is there once."""
    by_name = {each.name.removesuffix(".zst"): each for each in (file.parent / ROTATED).glob(f"{file.stem}_*.jsonl")}
    packed = (file.parent / ROTATED).glob(f"{file.stem}_*.jsonl.zst")
    by_name |= {each.name.removesuffix(".zst"): each for each in packed}
    return [by_name[name] for name in sorted(by_name, key=lambda name: (len(name), name))]


def last_of(segment: Path) -> int:
    """The number in a segment's name."""
    return int(segment.name.partition(".")[0].rpartition("_")[2])


def content_of(segment: Path) -> bytes:
    """Raises `RunError` for a damaged one."""
    try:
        if segment.suffix != ".zst":
            with suppress(FileNotFoundError):  # compressed meanwhile
                return segment.read_bytes()
        packed = segment if segment.suffix == ".zst" else segment.with_name(segment.name + ".zst")
        return zstandard.decompress(packed.read_bytes())
    except (zstandard.ZstdError, OSError) as error:
        raise RunError(f"{segment} is damaged: {error}; restore it from a copy") from error


def open_journal(file: Path) -> BinaryIO:
    """The whole journal for reading, as if it had never been rotated. Raises `FileNotFoundError` if there is none."""
    while True:
        try:
            live = file.open("rb")
        except FileNotFoundError:
            live = None
        rotated = segments(file)
        try:
            same = live is None or file.stat().st_ino == os.fstat(live.fileno()).st_ino
        except FileNotFoundError:
            same = False
        if same:
            break
        assert live is not None
        live.close()  # it was rotated at this moment
    if live is None and not rotated:
        raise FileNotFoundError(file)
    return live if live is not None and not rotated else cast(BinaryIO, io.BufferedReader(_Joined(rotated, live)))


class _Joined(io.RawIOBase):
    """Segments one after the other, and the file that grows. One segment at a time is in memory."""

    def __init__(self, rotated: Sequence[Path], live: BinaryIO | None) -> None:
        self._parts, self._live, self._at = rotated, live or io.BytesIO(), 0
        self._sizes = [_size(each) for each in rotated]
        self._held: tuple[int, bytes] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence)
        if base is None:
            base = sum(self._sizes) + self._live.seek(0, os.SEEK_END)
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        start = 0
        for index, size in enumerate(self._sizes):
            if self._at < start + size:
                chunk = self._content(index)[self._at - start :][: len(buffer)]
                break
            start += size
        else:
            self._live.seek(self._at - start)
            chunk = self._live.read(len(buffer))
        buffer[: len(chunk)] = chunk
        self._at += len(chunk)
        return len(chunk)

    def _content(self, index: int) -> bytes:
        if self._held is None or self._held[0] != index:
            self._held = index, content_of(self._parts[index])
        return self._held[1]

    def close(self) -> None:
        self._live.close()
        self._held = None
        super().close()


def _size(file: Path) -> int:
    """Bytes of a segment's content. Raises `RunError` for a damaged one."""
    if file.suffix == ".zst":
        with file.open("rb") as packed:
            head = packed.read(18)
        try:
            return zstandard.frame_content_size(head)
        except zstandard.ZstdError as error:
            raise RunError(f"{file} is damaged: {error}; restore it from a copy") from error
    try:
        return file.stat().st_size
    except FileNotFoundError:  # compressed meanwhile
        return _size(file.with_name(file.name + ".zst"))


# ------------------------------------------------------------------------------------------------ records


class _Step(msgspec.Struct):
    """The key of a record that tells its step."""

    step: int


def decoded(
    content: bytes, where: str | Path, kind: type[T], remedy: str = "restore it from a copy, or choose another folder"
) -> T:
    """Decode JSON that the run wrote. Raises `RunError` with `remedy`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except UNREADABLE as error:
        raise RunError(f"{where} is damaged: {error}; {remedy}") from None


def split_records(file: Path, content: bytes, keep: int) -> tuple[bytes, bytes]:
    """The lines up to step `keep`, and everything after."""
    end = 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n") or decoded(line, f"{file}, line {number},", _Step).step > keep:
            break
        end += len(line)
    return content[:end], content[end:]


# ------------------------------------------------------------------------------------------------ rollouts


class PackedFile:
    """A step's file in a ZIP, with what readers of rollouts use of `Path`."""

    def __init__(self, archive: Path, entry: zipfile.ZipInfo) -> None:
        self.archive, self._entry = archive, entry
        self.name, self.suffix, self.parents = entry.filename, ".zst", archive.parents

    def __str__(self) -> str:
        return f"{self.archive}/{self.name}"

    def exists(self) -> bool:
        return self.archive.exists()

    def read_bytes(self) -> bytes:
        with zipfile.ZipFile(self.archive) as archive:
            return archive.read(self._entry)

    def stat(self) -> SimpleNamespace:
        """Size, and time of change in ns, as before it was packed."""
        return SimpleNamespace(st_size=self._entry.file_size, st_mtime_ns=int(self._entry.comment or 0))


def pack(files: Sequence[Path], archive: Path) -> None:
    """Put files into a ZIP as they are, and delete them. A kill at any point leaves each in the ZIP or outside."""
    temporary = archive.with_name(archive.name + ".tmp")
    with temporary.open("wb") as handle:
        with zipfile.ZipFile(handle, "w", zipfile.ZIP_STORED) as packed:
            for file in files:
                entry = zipfile.ZipInfo(file.name)
                entry.comment = str(file.stat().st_mtime_ns).encode()
                packed.writestr(entry, file.read_bytes())
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(archive)
    for file in files:
        file.unlink()


def unpack(archive: Path) -> None:
    """The inverse of `pack`."""
    for file in packed_files(archive):
        target = archive.parent / file.name
        temporary = target.with_name(target.name + ".tmp")
        temporary.write_bytes(file.read_bytes())
        times = (file.stat().st_mtime_ns,) * 2
        os.utime(temporary, ns=times)
        temporary.replace(target)
    archive.unlink()


def packed_files(archive: Path) -> list[PackedFile]:
    """Raises `RunError` for a damaged one."""
    try:
        with zipfile.ZipFile(archive) as packed:
            return [PackedFile(archive, entry) for entry in packed.infolist()]
    except FileNotFoundError:  # a resume has unpacked it
        return []
    except (zipfile.BadZipFile, OSError) as error:
        raise RunError(f"{archive} is damaged: {error}; restore it from a copy") from error
