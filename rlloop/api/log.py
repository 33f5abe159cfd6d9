"""Commands on disk: written and synced before they are acknowledged, executed in order, replayed after a crash.

A log is a folder. Each of its segments, `000120.log`, holds commands from number 120 on; `000120/` is the model's state
before them. Segment 0 needs no state. A segment is a sequence of frames, each one commit:

    4 bytes length | 4 bytes CRC32 | msgpack of a list of records

A frame that was being written when the machine stopped is dropped, since nothing in it was acknowledged. A frame whose
CRC fails before the end of the file is damage, and the log is refused.
"""

from __future__ import annotations

import os
import shutil
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec

from rlloop.errors import UNREADABLE, RunError
from rlloop.runs.durable import fsync
from rlloop.training.futures import promised

MAGIC = b"rlloop commands 1\n"
KEPT_BYTES = 1 << 30  # size of log segments before the newest state that are kept for `rlloop verify`
_HEAD = struct.Struct("<II")


class Command(msgspec.Struct, tag="command", array_like=True):
    """A request as it came. `seq_id` orders the commands of a model from 1; 0 creates it."""

    seq_id: int
    kind: str  # the route's name, such as optim_step
    key: str  # the client's idempotency key
    body: bytes  # JSON, or protobuf for forward_backward


class Result(msgspec.Struct, tag="result", array_like=True):
    """The final result of a command, which is not executed again."""

    seq_id: int
    body: bytes
    failed: bool = False
    raw: bytes = b""  # of a sample: logprobs at temperature 1 of its sequences, one after the other, float32


class Checked(msgspec.Struct, tag="checked", array_like=True):
    """A forward_backward succeeded whose datums named sampled sequences: those need not be there to replay it."""

    seq_id: int
    metrics: dict[str, float]


class Weights(msgspec.Struct, tag="weights", array_like=True):
    """Digest of the trained weights after a command."""

    seq_id: int
    digest: bytes  # blake3


Record = Command | Result | Checked | Weights


@dataclass
class Replay:
    """A segment as read."""

    first: int  # number of its first command
    state: Path | None  # the model's state before that command; None: it is created by command 0
    records: list[Record] = field(default_factory=list)
    dropped: int = 0  # bytes at the end that no commit completed

    @property
    def commands(self) -> list[Command]:
        """Commands in order of their numbers, without duplicates."""
        commands = {record.seq_id: record for record in self.records if isinstance(record, Command)}
        return [commands[seq_id] for seq_id in sorted(commands)]

    @property
    def results(self) -> dict[int, Result]:
        return {record.seq_id: record for record in self.records if isinstance(record, Result)}

    @property
    def checked(self) -> dict[int, dict[str, float]]:
        return {record.seq_id: record.metrics for record in self.records if isinstance(record, Checked)}

    @property
    def digests(self) -> dict[int, bytes]:
        return {record.seq_id: record.digest for record in self.records if isinstance(record, Weights)}


def read_segment(path: Path) -> Replay:
    """Raises `RunError` for a file that is no segment, or is damaged before its end."""
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise RunError(f"{path} does not begin as a log of commands")
    first = int(path.stem)
    state = path.with_suffix("")
    replay = Replay(first, state if state.is_dir() else None)
    at = len(MAGIC)
    while at < len(data):
        frame = _frame(data, at)
        if frame is None:
            if _frame_after(data, at):
                raise RunError(
                    f"{path} is damaged at byte {at}: its checksum fails, and valid records follow; restore the file, "
                    "or move the model's folder away to give the model up"
                )
            replay.dropped = len(data) - at
            break
        try:
            replay.records += msgspec.msgpack.decode(frame, type=list[Record])
        except UNREADABLE as error:
            raise RunError(f"{path} has a record at byte {at} that cannot be read: {error}") from None
        at += _HEAD.size + len(frame)
    return replay


def _frame(data: bytes, at: int) -> bytes | None:
    if at + _HEAD.size > len(data):
        return None
    length, crc = _HEAD.unpack_from(data, at)
    if not 0 < length <= len(data) - at - _HEAD.size:
        return None
    frame = data[at + _HEAD.size : at + _HEAD.size + length]
    return frame if zlib.crc32(frame) == crc else None


def _frame_after(data: bytes, at: int) -> bool:
    """True if a whole frame begins anywhere after the broken one at `at`, whose length may be what is damaged."""
    return any(_frame(data, start) for start in range(at + 1, len(data) - _HEAD.size))


def segments(folder: Path) -> list[Path]:
    """A log's segments, oldest first."""
    return sorted((path for path in folder.glob("*.log") if path.stem.isdecimal()), key=lambda path: int(path.stem))


class Committer:
    """The thread that writes logs. Records that arrive during a sync are written together, with one sync per file."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], object] | CommandLog, Record | None, Future[None]] | None] = (
            SimpleQueue()
        )
        self.commits = 0
        self.later = set[CommandLog]()  # with records that wait for their next commit
        self._thread = threading.Thread(target=self._run, name="command log", daemon=True)
        self._thread.start()

    def append(self, log: CommandLog, record: Record) -> Future[None]:
        """The future is done when the record is on disk; it has the `OSError` if it could not be written."""
        future: Future[None] = promised()
        self._queue.put((log, record, future))
        return future

    def between(self, work: Callable[[], object]) -> Future[None]:
        """Call `work` in the committer's thread, when all that was appended before is on disk."""
        future: Future[None] = promised()
        self._queue.put((work, None, future))
        return future

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        for log in self.later.copy():  # a service that still computes may add to it
            with suppress(OSError):
                log.flush()

    def _run(self) -> None:
        ends = False
        while not ends:
            items = [self._queue.get()]
            with suppress(Empty):
                while len(items) < 4096:
                    items.append(self._queue.get_nowait())
            batch: dict[CommandLog, list[tuple[Record, Future[None]]]] = {}
            for item in items:
                if item is None:
                    ends = True
                    continue
                target, record, future = item
                if record is not None:
                    assert isinstance(target, CommandLog)
                    batch.setdefault(target, []).append((record, future))
                else:
                    assert not isinstance(target, CommandLog)
                    self._write(batch)
                    _resolve(future, target)
            self._write(batch)

    def _write(self, batch: dict[CommandLog, list[tuple[Record, Future[None]]]]) -> None:
        for log, pairs in batch.items():
            error: BaseException | None = None
            self.later.discard(log)
            try:
                log.write([record for record, _ in pairs])
            except Exception as problem:
                error = problem
            self.commits += 1
            for _, future in pairs:
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
        batch.clear()


def _resolve(future: Future[None], work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(None)


class CommandLog:
    """The log in a folder, for appending. `replay` is its newest segment as it was opened."""

    def __init__(self, folder: Path, committer: Committer) -> None:
        """Opens the log, or begins one. Raises `RunError` for a damaged one."""
        self.folder, self._committer = folder, committer
        self._later = deque[Record]()
        folder.mkdir(parents=True, exist_ok=True)
        paths = segments(folder)
        if paths:
            self._path = paths[-1]
            self.replay = read_segment(self._path)
            if self.replay.dropped:
                os.truncate(self._path, self._path.stat().st_size - self.replay.dropped)
            self._file: int | None = os.open(self._path, os.O_WRONLY | os.O_APPEND)  # None: closed
        else:
            self._path, self.replay = folder / f"{0:06d}.log", Replay(0, None)
            self._file = self._begin(self._path, [])
        self._sweep()

    def append(self, record: Record) -> Future[None]:
        return self._committer.append(self, record)

    def append_later(self, record: Record) -> None:
        """Write a record with the next commit or at the end, without waiting; a crash before may lose it."""
        if self._file is not None:
            self._later.append(record)
            self._committer.later.add(self)

    def flush(self) -> None:
        """Called by the committer: write what waits for the next commit."""
        if self._later:
            self.write([])

    def write(self, records: Sequence[Record]) -> None:
        """Called by the committer. A frame that could not be written whole is taken back. Of a closed log, nothing."""
        if self._file is None:
            return
        later = [self._later.popleft() for _ in range(len(self._later))]
        frame = _framed([*later, *records])
        before = os.fstat(self._file).st_size
        try:
            written = 0
            while written < len(frame):
                written += os.write(self._file, memoryview(frame)[written:])
            os.fdatasync(self._file)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._file, before)
            raise

    def new_state(self, first: int) -> Path:
        """The folder to write the state before command `first` into; `rotate` makes it the log's."""
        folder = self.folder / f"{first:06d}.new"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def rotate(self, first: int, carried: Sequence[Record], keep_bytes: int = KEPT_BYTES) -> Future[None]:
        """Begin a segment at command `first`, whose state `new_state` has. `carried`: records that the new segment
        still needs, such as results that clients may ask for; those of commands from `first` on carry themselves."""
        return self._committer.between(lambda: self._rotate(first, carried, keep_bytes))

    def shrink(self, keep: Callable[[list[Record]], list[Record]]) -> Future[None]:
        """Begin a segment of the records that `keep` returns, and delete the one before. For logs without states."""

        def work() -> None:
            if self._file is None:
                return
            old = self._path
            path = self.folder / f"{int(old.stem) + 1:06d}.log"
            file = self._begin(path, keep(read_segment(old).records))
            os.close(self._file)
            self._path, self._file = path, file
            old.unlink()

        return self._committer.between(work)

    @property
    def nbytes(self) -> int:
        """Size of the newest segment; 0 for a closed log."""
        with suppress(OSError):  # the committer has begun another at this moment
            return 0 if self._file is None else self._path.stat().st_size
        return 0

    def _rotate(self, first: int, carried: Sequence[Record], keep_bytes: int) -> None:
        if self._file is None:
            return
        self.flush()  # what is of commands before the new segment
        state = self.folder / f"{first:06d}"
        new = state.with_suffix(".new")
        for path in new.rglob("*"):
            if path.is_file():
                fsync(path)
        new.rename(state)
        later = [record for record in read_segment(self._path).records if record.seq_id >= first]
        path = self.folder / f"{first:06d}.log"
        file = self._begin(path, [*carried, *later])
        os.close(self._file)
        self._path, self._file = path, file
        self._prune(keep_bytes)

    def _begin(self, path: Path, records: Sequence[Record]) -> int:
        new = path.with_suffix(".part")
        new.write_bytes(MAGIC + (_framed(records) if records else b""))
        file = os.open(new, os.O_WRONLY | os.O_APPEND)  # before it has its name, by which a restart finds it
        try:
            os.fsync(file)
            new.rename(path)
            fsync(self.folder)
        except BaseException:
            os.close(file)
            raise
        return file

    def _prune(self, keep_bytes: int) -> None:
        """Delete the oldest segments beyond `keep_bytes`, and states that no kept segment needs to be verified."""
        old = segments(self.folder)[:-1]
        size = 0
        for path in reversed(old):
            size += path.stat().st_size
            if size > keep_bytes:
                path.unlink()
        kept = segments(self.folder)
        needed = {kept[0].stem, kept[-1].stem}
        for state in self.folder.iterdir():
            if state.is_dir() and state.name.isdecimal() and state.name not in needed:
                shutil.rmtree(state)

    def _sweep(self) -> None:
        """Remove what a crash left of a rotation."""
        stems = {path.stem for path in segments(self.folder)}
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in stems:
                shutil.rmtree(path)
            elif path.suffix == ".part":
                path.unlink()

    def close(self) -> Future[None]:
        """Close the file after what was appended before; what is appended later is dropped."""

        def work() -> None:
            if self._file is not None:
                self.flush()
                os.close(self._file)
                self._file = None
            self._committer.later.discard(self)

        return self._committer.between(work)


def _framed(records: Sequence[Record]) -> bytes:
    body = msgspec.msgpack.encode(records)
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically and durably."""
    new = path.with_suffix(".part")
    new.write_bytes(content)
    fsync(new)
    new.replace(path)
    fsync(path.parent)
