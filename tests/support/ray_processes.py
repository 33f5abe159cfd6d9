"""Ray's processes of one run, found by a variable of their environment."""

import time
from pathlib import Path


def ray_processes(owner: str) -> dict[int, str]:
    """pid -> command line, of those started with RLLOOP_TEST_RUN=owner."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it ended while we looked
            if f"RLLOOP_TEST_RUN={owner}\0".encode() in environment and "ray" in command:
                found[int(entry.name)] = command
    return found


def left_behind(owner: str, seconds: float = 60.0) -> dict[int, str]:
    """Those that are still there so long after the run's end: Ray does not wait for all of its own."""
    deadline = time.monotonic() + seconds
    while (left := ray_processes(owner)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ranks_of(owner: str) -> list[int]:
    """The processes of a trainer's ranks."""
    return sorted(pid for pid, command in ray_processes(owner).items() if "ray::Colocated" in command)
