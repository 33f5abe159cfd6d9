"""`rlloop dashboard --demo`: recorded runs of countdown on a laptop CPU with two settings.

`recorded/demo.tar.zst` has each run's records as they were written, and its tokenizer, but no checkpoint. All runs but
one are written out whole; that one is replayed step by step, as if it were running.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import zstandard

from rlloop.runs.folder import write_whole

ARCHIVE = Path(__file__).parent / "recorded" / "demo.tar.zst"
LIVE = "int4-from-step-51"  # the run that is replayed
BEGIN = 40  # steps of it that are there from the start
PACE = 1.0  # seconds between steps
NOTE = "Demo: recorded runs; one of them is replayed, a step a second."
JOURNALS = ("metrics.jsonl", "parity.jsonl")


@contextmanager
def recorded_runs(pace: float = PACE) -> Iterator[tuple[Path, str]]:
    """(a temporary folder with the runs, a note about them)."""
    with tempfile.TemporaryDirectory(prefix="rlloop-demo-") as name:
        root, stop = Path(name), threading.Event()
        files = unpack()
        for path in (path for path in files if path.parts[0] != LIVE):
            _write(root, path, files[path])
        replay = Replay(root, {path: content for path, content in files.items() if path.parts[0] == LIVE})
        replay.advance(BEGIN)
        thread = threading.Thread(target=replay.run, args=(stop, pace), daemon=True)
        thread.start()
        try:
            yield root, NOTE
        finally:
            stop.set()
            thread.join()


def unpack() -> dict[PurePosixPath, bytes]:
    """The archive's files. Rollouts are not compressed in it, since they compress better all together."""
    with ARCHIVE.open("rb") as packed, zstandard.ZstdDecompressor().stream_reader(packed) as stream:
        content = io.BytesIO(stream.read())
    with tarfile.open(fileobj=content) as archive:
        members = [member for member in archive if member.isfile()]
        return {PurePosixPath(member.name): archive.extractfile(member).read() for member in members}  # pyright: ignore[reportOptionalMemberAccess]


def _write(root: Path, path: PurePosixPath, content: bytes) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl" and file.parent.name == "rollouts":
        write_whole(file.with_name(file.name + ".zst"), zstandard.compress(content, 3), durable=False)
    else:
        file.write_bytes(content)


class Replay:
    """Writes a run's records again, step by step, in the order in which the run wrote them."""

    def __init__(self, root: Path, files: dict[PurePosixPath, bytes]) -> None:
        self.root = root
        self.step = 0
        self._lines: dict[PurePosixPath, list[tuple[int, bytes]]] = {}
        self._rollouts: dict[int, tuple[PurePosixPath, bytes]] = {}
        self._last: list[tuple[PurePosixPath, bytes]] = []  # written when the run ends
        for path, content in files.items():
            if path.name in JOURNALS:
                self._lines[path] = [(json.loads(line)["step"], line) for line in content.splitlines(keepends=True)]
                _write(root, path, b"".join(line for step, line in self._lines[path] if step == 0))
            elif path.parent.name == "rollouts":
                self._rollouts[int(path.name[5:].partition(".")[0])] = path, content
            elif path.name == "summary.json":
                self._last.append((path, content))
            else:
                _write(root, path, content)

    @property
    def steps(self) -> int:
        return max(self._rollouts)

    def advance(self, to: int) -> None:
        """Write every record of the steps after `self.step`, up to `to`."""
        while self.step < min(to, self.steps):
            self.step += 1
            _write(self.root, *self._rollouts[self.step])
            for path, lines in self._lines.items():
                with (self.root / path).open("ab") as journal:
                    journal.write(b"".join(line for step, line in lines if step == self.step))
        if self.step == self.steps:
            for path, content in self._last:
                _write(self.root, path, content)

    def run(self, stop: threading.Event, pace: float) -> None:
        while self.step < self.steps and not stop.wait(pace):
            self.advance(self.step + 1)
