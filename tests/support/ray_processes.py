"""Ray's processes of one run, found by a variable of their environment."""

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


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ranks_of(owner: str) -> list[int]:
    """The processes of a trainer's ranks."""
    return sorted(pid for pid, command in ray_processes(owner).items() if "ray::Colocated" in command)
