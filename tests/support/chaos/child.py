"""A process of the fleet, and what it does to itself when told: its clock jumps, its disk is slow, it dies in a write.

Its controller writes into a small file that both map. Only the process's own view changes, so that no privilege is
needed.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
from pathlib import Path

VARIABLE = "CHAOS_CONTROL"
FIELDS = {"clock": "<d", "slow": "<d", "writes": "<q", "tensors": "<q"}  # 8 bytes each
# seconds that the clock is off, seconds that a write takes, writes and written tensors until it dies (0: never)


class Control:
    """The mapped file."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(FIELDS)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * len(FIELDS))

    def __getitem__(self, field: str) -> float:
        return struct.unpack_from(FIELDS[field], self._map, 8 * list(FIELDS).index(field))[0]

    def __setitem__(self, field: str, value: float) -> None:
        struct.pack_into(FIELDS[field], self._map, 8 * list(FIELDS).index(field), value)

    def count_down(self, field: str) -> None:
        """Kills the process at 0."""
        left = int(self[field])
        if left > 0:
            self[field] = left - 1
            if left == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """`rlloop`, with the arguments in `sys.argv`."""
    from rlloop.cli import serve
    from rlloop.cli.main import main as rlloop
    from rlloop.sync.live import LiveTarget

    control = Control(Path(os.environ[VARIABLE]))
    clock, forced = time.time, (os.fsync, os.fdatasync)

    def disturbed(force):
        def write(descriptor: int) -> None:
            control.count_down("writes")
            time.sleep(control["slow"])
            force(descriptor)

        return write

    def dying(write):
        def written(*arguments):
            control.count_down("tensors")
            return write(*arguments)

        return written

    def undone() -> None:
        time.time, (os.fsync, os.fdatasync) = clock, forced

    time.time = lambda: clock() + control["clock"]
    os.fsync, os.fdatasync = map(disturbed, forced)
    os.register_at_fork(after_in_child=undone)  # the process of its training service
    for name in ("write", "patch"):  # of one tensor of a version
        if hasattr(LiveTarget, name):
            setattr(LiveTarget, name, dying(getattr(LiveTarget, name)))
    serve._Joining.EVERY = 0.3  # seconds: runs are short
    return rlloop()
